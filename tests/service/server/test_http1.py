"""The parser of requests: what it accepts an independent one (h11) reads in the same way, however
it is cut."""

import random

import h11

from service.server.http1 import BadRequest, ChunkedBody, LengthBody, find_head, parse_head

PIECES = [
    *(
        b"GET ",
        b"POST ",
        b"get ",
        b"CONNECT ",
        b"/ ",
        b"/a?b ",
        b"http://h/a ",
        b"* ",
        b"/#x ",
        b"/\xff ",
    ),
    *(
        b"HTTP/1.1\r\n",
        b"HTTP/1.0\r\n",
        b"HTTP/1.1\n",
        b"Host: x\r\n",
        b"host:y\r\n",
        b"Host : z\r\n",
        b" folded\r\n",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"content-length:\t3 \r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: Chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
    ),
    *(
        b"X: a\x00b\r\n",
        b"X: \xe9\r\n",
        b"X:\r\n",
        b"A-b_c.d: e\tf\r\n",
        b": x\r\n",
        b"\x0bX: y\r\n",
        b"X: a\rb\r\n",
    ),
    *(
        b"Connection: close\r\n",
        b"Connection: Upgrade\r\nUpgrade: foo\r\n",
        b"Expect: 100-continue\r\n",
        b"\r\n",
        b"\n",
    ),
    *(
        b"5\r\nhello\r\n",
        b"2;x=y\r\nhi\r\n",
        b"0\r\n\r\n",
        b"0\r\nT: u\r\n\r\n",
        b"05\r\nhello\r\n",
        b"5 \r\nhello\r\n",
    ),
    *(b"hello", b"hi", b"5\nhello\r\n", b"0x5\r\nhello\r\n", b"5\r\nhello", b"-1\r\n", b"\x00"),
]
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


def ours(content, cuts=()):
    """What a request means to us: method, target, headers, body and what is left; None if it is not
    whole."""
    buffer, searched, head, body, reader = bytearray(), 0, None, b"", None
    for begin, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
        buffer += content[begin:end]
        if head is None:
            found = find_head(buffer, searched)
            if found is None:
                searched = len(buffer)
                continue
            head = parse_head(bytes(buffer[found[0] : found[1]]))
            del buffer[: found[1] + 4]
            reader = ChunkedBody() if head.chunked else LengthBody(head.length)
        if not reader.ended:
            body += reader.take(buffer)
    if head is None or not reader.ended:
        return None
    headers = [
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in head.headers
    ]
    return head.method.encode(), headers, body, bytes(buffer)


def theirs(content):
    """The same by h11; None if it is not whole."""
    while content.startswith(
        b"\r\n"
    ):  # empty lines before a request, which it does not pass over as it may
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


def mutated(generator):
    """A request, seldom a right one."""
    pieces = [*GOOD, *generator.choice(BODIES)]
    for _ in range(generator.choice((0, 1, 1, 2, 3))):
        place = generator.randrange(len(pieces) + 1)
        pieces[place : place + generator.choice((0, 0, 1))] = [generator.choice(PIECES)]
    return b"".join(pieces)


def meaning(read, *arguments):
    try:
        return read(*arguments)
    except (BadRequest, h11.RemoteProtocolError):
        return "refused"


def test_what_is_accepted_has_the_meaning_that_another_parser_sees():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    generator, accepted, refused = random.Random(seed), 0, 0
    for _ in range(20_000):
        content = mutated(generator)
        what = meaning(ours, content)
        refused += what == "refused"
        if what == "refused" or what is None:
            continue
        accepted += 1
        assert meaning(theirs, content) == what, content
    assert min(accepted, refused) > 2000


def test_a_request_means_the_same_however_it_is_cut():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(3000):
        content = mutated(generator)
        cuts = sorted(generator.sample(range(len(content)), min(5, len(content))))
        whole, cut = meaning(ours, content), meaning(ours, content, cuts)
        assert whole == cut or {whole, cut} <= {"refused", None}, (
            content,
            cuts,
        )  # refused sooner or later
