import random

import h11
import pytest

from service.server.http1 import BadRequest, StrictBuffer, new_parser, read_head

PIECES = (
    b"GET |POST |get |CONNECT |/ |/a?b |http://h/a |* |/#x |/\xff |"
    b"HTTP/1.1\r\n|HTTP/1.0\r\n|HTTP/1.1\n|Host: x\r\n|host:y\r\n|Host : z\r\n| folded\r\n|"
    b"Content-Length: 5\r\n|Content-Length: 5, 5\r\n|Content-Length: +5\r\n|"
    b"content-length:\t3 \r\n|Transfer-Encoding: chunked\r\n|Transfer-Encoding: Chunked\r\n|"
    b"Transfer-Encoding: gzip, chunked\r\n|X: a\x00b\r\n|X: \xe9\r\n|X:\r\n|A-b_c.d: e\tf\r\n|"
    b": x\r\n|\x0bX: y\r\n|X: a\rb\r\n|Connection: close\r\n|"
    b"Connection: Upgrade\r\nUpgrade: foo\r\n|Expect: 100-continue\r\n|\r\n|\n|5\r\nhello\r\n|"
    b"2;x=y\r\nhi\r\n|0\r\n\r\n|0\r\nT: u\r\n\r\n|05\r\nhello\r\n|5 \r\nhello\r\n|hello|hi|"
    b"5\nhello\r\n|0x5\r\nhello\r\n|5\r\nhello|-1\r\n|\x00"
).split(b"|")
GOOD = (b"POST ", b"/a?b ", b"HTTP/1.1\r\n", b"Host: x\r\n")
BODIES = (
    (b"Content-Length: 5\r\n", b"\r\n", b"hello"),
    (b"content-length:\t3 \r\n", b"\r\n", b"abc"),
    (
        b"Transfer-Encoding: chunked\r\n",
        b"\r\n",
        b"5\r\nhello\r\n",
        b"2;x=y\r\nhi\r\n",
        b"0\r\n\r\n",
    ),
    (b"Transfer-Encoding: Chunked\r\n", b"\r\n", b"05\r\nhello\r\n", b"0\r\nT: u\r\n\r\n"),
    (b"\r\n",),
)


def parse_strictly(content, cuts=()):
    buffer, parser, head, body = StrictBuffer(), None, None, b""
    for begin, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
        buffer += content[begin:end]
        parser = parser or new_parser(buffer)
        while (event := parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                head, _ = read_head(event)
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                method, headers = head["method"].encode(), head["headers"]
                return method, headers, body, bytes(buffer) + content[end:]
    return None


def parse_with_h11(content):
    while content.startswith(b"\r\n"):  # h11 does not skip empty lines before a request
        content = content[2:]
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(content)
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            return None
        if isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return request.method, list(request.headers), body, connection.trailing_data[0]


def random_request(generator):
    """Return a random request, usually malformed."""
    pieces = [*GOOD, *generator.choice(BODIES)]
    for _ in range(generator.choice((0, 1, 1, 2, 3))):
        index = generator.randrange(len(pieces) + 1)
        pieces[index : index + generator.choice((0, 0, 1))] = [generator.choice(PIECES)]
    return b"".join(pieces)


def get_outcome(parse, *arguments):
    try:
        return parse(*arguments)
    except (BadRequest, h11.RemoteProtocolError):
        return "refused"


def test_accepted_requests_parse_as_with_plain_h11():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    generator, accepted, refused = random.Random(seed), 0, 0
    for _ in range(20_000):
        content = random_request(generator)
        outcome = get_outcome(parse_strictly, content)
        refused += outcome == "refused"
        if outcome == "refused" or outcome is None:
            continue
        accepted += 1
        assert get_outcome(parse_with_h11, content) == outcome, content
    assert min(accepted, refused) > 2000


def test_parsing_does_not_depend_on_chunk_boundaries():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(3000):
        content = random_request(generator)
        cuts = sorted(generator.sample(range(len(content)), min(5, len(content))))
        full, cut = get_outcome(parse_strictly, content), get_outcome(parse_strictly, content, cuts)
        assert full == cut or {full, cut} <= {"refused", None}, (
            content,
            cuts,
        )  # one may refuse earlier


def test_installed_h11_uses_our_buffer():
    buffer = StrictBuffer()
    parser = new_parser(buffer)
    parser.receive_data(b"GET / HTTP/1.1\nHost: x\n\n")
    assert len(buffer) > 0, h11.__version__
    with pytest.raises(BadRequest):
        parser.next_event()


@pytest.mark.parametrize(
    "rest",
    [
        b"2 \r\n{}\r\n",
        b"2;\ra\r\n{}\r\n",
        b"0\r\n\n",
        b"0\r\nX: y\n\r\n",
        b"0\r\nX: y\n\n",
        b"0\r\nX: a\r\n b\r\n\r\n",
    ],
)
def test_malformed_chunks_that_h11_tolerates_are_refused(rest):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    full = rest if rest.startswith(b"0") else rest + b"0\r\n\r\n"
    assert parse_with_h11(head + full)[0] == b"POST"
    with pytest.raises(BadRequest):
        parse_strictly(head + full)
