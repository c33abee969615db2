"""Bad requests without end, from a seeded generator: wrong fields, wrong bytes, wrong routes, wrong
framing.

Some are good by chance.
"""

import io
import json
import random
from dataclasses import dataclass

import numpy as np

from tests.support.odd_values import (
    CANARY,
    FIELDS,
    FILES,
    LIKELY,
    METHODS,
    NAMES,
    NUMBERS,
    ODD,
    OPEN,
    VALID,
    VERSIONS,
)
from tests.support.raw import JSON, raw, request

NPY = "application/x-npy"
NPZ = "application/x-npz"
FORM = "multipart/form-data; boundary=b"
LIVE = request("GET", "/health/live")
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MAX_HEAD = 64 << 10  # bytes of a request's line and headers that are read

# How a case ends: each request is answered and the connection goes on; the server refuses and ends
# the connection; or
# nobody can say, and only the end is certain.
ANSWERED, REFUSED, ANYTHING = "answered", "refused", "anything"


@dataclass(frozen=True)
class Case:
    """Bytes to send, and what must come of them."""

    kind: str
    content: bytes
    ends: str = ANSWERED
    statuses: tuple[int, ...] = ()  # of answers in order, where they are known
    head: bool = False


class BadRequests:
    """Cases of one seed, one after the other; `admin_key` opens the administrative routes."""

    def __init__(self, seed, admin_key):
        self.random = random.Random(seed)
        self.admin_key = admin_key
        self.kinds = {
            self.fields: 44,
            self.json_bytes: 8,
            self.npy: 10,
            self.form: 5,
            self.route: 12,
            self.admin: 3,
            self.headers: 6,
            self.pipeline: 3,
            self.framing: 6,
            self.refused: 3,
        }

    def __iter__(self):
        kinds, weights = list(self.kinds), list(self.kinds.values())
        while True:
            yield self.random.choices(kinds, weights)[0]()

    def pick(self, values):
        """One of some values."""
        return values[int(self.random.random() * len(values))]

    def chance(self, probability):
        """True with a probability."""
        return self.random.random() < probability

    # Bodies

    def row(self):
        """A row of digits as JSON, flat or as an image, right or not."""
        values = [
            b"%d" % self.random.randrange(17)
            for _ in range(self.pick((64, 64, 64, 64, 64, 63, 65, 0, 1)))
        ]
        if self.chance(0.4) and values:
            values[self.random.randrange(len(values))] = self.pick(
                VALID if self.chance(0.85) else NUMBERS
            )
        if self.chance(0.2):
            return (
                b"["
                + b",".join(
                    b"[" + b",".join(values[i : i + 8]) + b"]" for i in range(0, len(values), 8)
                )
                + b"]"
            )
        return b"[" + b",".join(values) + b"]"

    def rows(self):
        """Rows as JSON."""
        if self.chance(0.01):
            return b"[" + b",".join([b"[]"] * 5000) + b"]"
        rows = [self.row() for _ in range(self.pick((1, 1, 1, 2, 3)))]
        if self.chance(0.1):
            rows.insert(self.random.randrange(len(rows) + 1), self.pick(VALID))
        return b"[" + b",".join(rows) + b"]" if self.chance(0.95) else self.pick(VALID)

    def value(self, field):
        """A value for a field of the envelope: at its edges, or anything."""
        return self.pick(LIKELY[field]) if self.chance(0.7) else self.pick(VALID)

    def object(self, route):
        """A request's JSON, of right and wrong fields."""
        field = "inputs" if route == "predict" else "pool"
        pairs = [
            (
                field if self.chance(0.97) else self.pick(("inputs", "pool", "Inputs", "")),
                self.rows(),
            )
        ]
        pairs += [
            (name, self.value(name))
            for name in self.random.sample(FIELDS[route], self.pick((0, 1, 1, 2, 3)))
        ]
        if self.chance(0.05):
            pairs.append((self.pick(("extra", "inputs", "k", "fpr", "x" * 500)), self.pick(VALID)))
        self.random.shuffle(pairs)
        return b"{" + b",".join(b'"' + raw(name) + b'":' + value for name, value in pairs) + b"}"

    def post(self, kind, route, body, content_type=JSON, query=b"", headers=()):
        """A case of a POST request."""
        return Case(kind, request("POST", b"/" + raw(route) + query, body, headers, content_type))

    def fields(self):
        """JSON whose fields, types, shapes and numbers are wrong."""
        route = self.pick(("predict", "predict", "acquire"))
        headers = [("Accept", NPZ)] if self.chance(0.05) else []
        return self.post("fields", route, self.object(route), headers=headers)

    def json_bytes(self):
        """What is hardly JSON any more."""
        route = self.pick(("predict", "acquire"))
        body = bytearray(self.object(route))
        for _ in range(self.pick((1, 1, 2, 5))):
            place, cut = self.random.randrange(len(body) + 1), self.pick((0, 1, 1, 4, 50))
            body[place : place + cut] = self.pick(
                (*ODD, self.random.randbytes(3), b"\\ud800", b'"', b"\x00", b"\xef\xbb\xbf")
            )
        if self.chance(0.01):
            body = bytearray(self.pick((b"[", b'{"a":', b'[{"":', b'"', b"\x00")) * 100_000)
        return self.post("json bytes", route, bytes(body))

    def query(self, route):
        """A query of right and wrong parameters."""
        names = self.random.sample(FIELDS[route], self.pick((0, 0, 1, 2)))
        pairs = [raw(name) + b"=" + _percent(self.value(name)) for name in names]
        if self.chance(0.1):
            pairs.append(
                self.pick(
                    (
                        b"inputs=1",
                        b"seed=1&seed=2",
                        b"%ff=%ff",
                        b"=",
                        b"&&",
                        b"seed=%ED%A0%80",
                        b"a=" + b"b" * 4000,
                    )
                )
            )
        return b"?" + b"&".join(pairs) if pairs else b""

    def npy(self):
        """Arrays whose header, numbers or bytes are wrong."""
        route = self.pick(("predict", "acquire"))
        dtype = self.pick(
            (
                b"|u1",
                b"<f4",
                b"<f8",
                b"<i8",
                b"<f2",
                b">f4",
                b"<u8",
                b"<c8",
                b"|O",
                b"|S5",
                b"<U3",
                b"|b1",
                b"<M8[s]",
                b"<f16",
            )
        )
        shape = self.pick(
            (
                b"(1, 64)",
                b"(1, 64)",
                b"(2, 64)",
                b"(1, 8, 8)",
                b"(64,)",
                b"()",
                b"(0, 64)",
                b"(1000000000, 64)",
                b"(-1, 64)",
                b"(9223372036854775807, 64)",
                b"(1, 63)",
                b"(True, 64)",
                b"(1.0, 64)",
                b"(1, 64" + b", 1" * 40 + b")",
                b"1",
                b"((1,),)",
            )
        )
        order = self.pick((b"False", b"False", b"True", b"None", b"1"))
        head = (
            b"{'descr': '"
            + dtype
            + b"', 'fortran_order': "
            + order
            + b", 'shape': "
            + shape
            + b", }"
        )
        if self.chance(0.15):
            head = self.pick(
                (
                    b"",
                    b"{",
                    b"()",
                    b"__import__('os')",
                    b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (64,), }",
                    head[:-2],
                    head * 40,
                    b"[" * 500,
                    b"\xff" * 50,
                    head + b"\x00",
                    b"{'descr': '<f4'}",
                )
            )
        head += b" " * (-(len(head) + 11) % 64) + b"\n"
        length = len(head) if self.chance(0.95) else self.pick((0, 1, 65535, len(head) + 1))
        version = (
            b"\x01\x00"
            if self.chance(0.9)
            else self.pick((b"\x02\x00", b"\x03\x00", b"\x00\x00", b"\xff\xff"))
        )
        size = (
            self.pick((64, 128)) * self.pick((1, 2, 4, 8))
            if self.chance(0.3)
            else _bytes(dtype, shape)
        )
        data = self.pick(
            (bytes(size), self.random.randbytes(size), np.full(size // 4, np.nan, "<f4").tobytes())
        )
        body = b"\x93NUMPY" + version + length.to_bytes(2, "little") + head + data
        if self.chance(0.1):
            body = body[: self.random.randrange(len(body))]
        elif self.chance(0.05):
            body += b"\x00"
        return self.post(
            "npy",
            route,
            body,
            NPY,
            self.query(route),
            [("Accept", NPZ)] if self.chance(0.2) else [],
        )

    def form(self):
        """Forms whose parts, names or boundaries are wrong."""
        route = self.pick(("predict", "acquire"))
        field = b"inputs" if route == "predict" else b"pool"
        parts = [
            (
                field,
                self.pick(
                    (
                        b"\x89PNG\r\n\x1a\n",
                        b"",
                        b"\xff\xd8\xff\xe0",
                        self.random.randbytes(40),
                        b"[[0]]",
                    )
                ),
            )
        ]
        parts += [
            (raw(name), self.value(name))
            for name in self.random.sample(FIELDS[route], self.pick((0, 1, 2)))
        ]
        if self.chance(0.1):
            parts.append((self.pick((b"", b"extra", b"\xff", b"a" * 5000, field)), b"x"))
        if self.chance(0.01):
            parts = parts * 3000
        body = (
            b"".join(
                b'--b\r\nContent-Disposition: form-data; name="'
                + name
                + b'"\r\n\r\n'
                + value
                + b"\r\n"
                for name, value in parts
            )
            + b"--b--\r\n"
        )
        if self.chance(0.3):
            place = self.random.randrange(len(body))
            body = self.pick(
                (
                    body[:place],
                    body[:place] + self.random.randbytes(3) + body[place:],
                    body.replace(b"\r\n", b"\n", 3),
                    body.replace(b"form-data", b"form-data; " + b"a=b; " * 500, 1),
                    body[place:],
                )
            )
        content_type = (
            FORM
            if self.chance(0.9)
            else self.pick(
                (
                    "multipart/form-data",
                    "multipart/form-data; boundary=",
                    "multipart/form-data; boundary=" + "b" * 300,
                    'multipart/form-data; boundary="b',
                    "multipart/form-data; boundary=c",
                    "multipart/mixed; boundary=b",
                )
            )
        )
        return self.post("form", route, body, content_type, self.query(route))

    # Routes and headers

    def path(self):
        """A path of a known or unknown route."""
        name, version, file = self.pick(NAMES), self.pick(VERSIONS), self.pick(FILES)
        versions = b"/models/" + name + b"/versions/" + version
        path = self.pick(
            (
                *OPEN,
                b"/models/" + name,
                b"/models/" + name,
                versions + b"/evidence",
                versions + b"/evidence/" + file,
                versions,
                b"/predict",
                b"/acquire",
                b"/" + name,
                b"/" + name + b"/" + file,
                b"//",
                b"/predict/",
                b"/static-offline-docs/" + file,
                b"/static-offline-docs/../../" + file,
                b"/v2",
            )
        )
        return path + (
            self.pick((b"?", b"?a=b", b"?%", b"?" + b"a" * 3000, b"?\xff", b"?a=%ED%A0%80&a"))
            if self.chance(0.2)
            else b""
        )

    def route(self):
        """Any route by any method."""
        method = self.pick(METHODS) if self.chance(0.5) else b"GET"
        body = (
            self.pick((None, b"", b"{}", b"x" * 100))
            if method not in (b"GET", b"HEAD", b"TRACE")
            else None
        )
        return Case("route", request(method, self.path(), body), head=method == b"HEAD")

    def admin(self):
        """Administration, with the key, another or none."""
        path = self.pick(
            (
                b"/admin/refresh",
                b"/admin/",
                b"/admin/models/",
                b"/admin/x",
                b"/admin/refresh/",
                b"/admin/../models",
            )
        )
        if self.chance(0.6):
            path = (
                b"/admin/models/"
                + self.pick(NAMES)
                + b"/versions/"
                + self.pick(VERSIONS)
                + b"/unload"
            )
        key = self.pick(
            (
                self.admin_key,
                self.admin_key,
                self.admin_key[:-1],
                self.admin_key + "x",
                "",
                "\xff" * 20,
                CANARY,
                "k" * 5000,
            )
        )
        headers = self.pick(
            (
                [],
                [("X-API-Key", key)],
                [("Authorization", "Bearer " + key)],
                [("Authorization", key)],
            )
        )
        return Case(
            "admin", request(self.pick((b"POST", b"POST", b"GET", b"PUT")), path, b"", headers)
        )

    def headers(self):
        """Headers that are odd, many or long, around a body that may be right."""
        odd = (
            ("Content-Encoding", "gzip"),
            ("Content-Encoding", CANARY),
            ("Accept", NPZ),
            ("Accept", "\xff" * 50),
            ("Expect", "100-continue"),
            ("Expect", "\xff"),
            ("X-Request-ID", CANARY + "\xff"),
            ("X-Request-ID", "a" * 65),
            ("Authorization", "Bearer \xff"),
            ("X-API-Key", "\xff"),
            ("Cookie", "a=b; " * 1000),
            ("Range", "bytes=0-1"),
            ("If-Match", "*"),
            ("traceparent", "00-" + "f" * 32 + "-" + "f" * 16 + "-01"),
            ("traceparent", "\xff" * 55),
            ("Forwarded", "for=127.0.0.1"),
            ("Upgrade", "h2c"),
            ("Origin", "null"),
            ("Host", ""),
            ("Host", "a" * 3000),
            ("Inference-Header-Content-Length", "99999999"),
            ("Keep-Alive", "timeout=1"),
            ("Connection", "keep-alive"),
            ("TE", "trailers"),
        )
        headers = [self.pick(odd) for _ in range(self.pick((1, 2, 5)))]
        if self.chance(0.1):
            headers += [(f"X-{i}", "v") for i in range(self.pick((100, 1000)))]
        if self.chance(0.05):
            headers.append(("X-Long", "v" * 30_000))
        content_type = self.pick(
            (
                JSON,
                JSON,
                "",
                "application/JSON; charset=utf-16",
                "text/plain",
                NPY,
                "\xff/\xff",
                "multipart/form-data",
                ";",
                "a" * 3000,
            )
        )
        return self.post(
            "headers",
            self.pick(("predict", "acquire")),
            self.object("predict"),
            content_type,
            headers=headers,
        )

    # Framing

    def pipeline(self):
        """Several requests in one piece, each with its answer in order."""
        body = b'{"inputs": [[1]]}'
        known = (
            (LIVE, 200),
            (request("GET", "/nowhere"), 404),
            (request("DELETE", "/models"), 405),
            (request("POST", "/predict", body), 422),
            (request("POST", "/predict", b"{"), 422),
            (request("POST", "/predict", b"", content_type="text/plain"), 415),
            (
                POST
                + b'Transfer-Encoding: chunked\r\n\r\n4\r\n{"in\r\n1;a=b\r\n \r\n0\r\nX-T: 1\r\n\r\n',
                422,
            ),
        )
        chosen = [self.pick(known) for _ in range(self.pick((2, 3, 10, 40)))]
        return Case(
            "pipeline",
            b"".join(content for content, _ in chosen),
            statuses=tuple(status for _, status in chosen),
        )

    def framing(self):
        """Messages of which parsers differ, or that never end; a good request follows."""
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        body = self.object("predict")
        whole = request("POST", "/predict", body)
        cut = self.random.randrange(1, len(whole))
        content = self.pick(
            (
                whole[:cut],
                whole[: len(whole) - 1],
                POST,
                POST + b"Content-Length: 5\r\n\r\n" + b"{",
                POST + b"Content-Length: 999999999999\r\n\r\n{}",
                POST + b"Content-Length: 0\r\n\r\n" + body,
                POST + b"\r\n" + body,
                chunked + b"5\r\n{}\r\n0\r\n\r\n",
                chunked + b"ffffffffffffffff\r\n{}",
                chunked + b"2;" + b"e" * 3000 + b"\r\n{}\r\n0\r\n\r\n",
                chunked + b"2\r\n{}\r\n",
                chunked + b"2\r\n{}\r\n0\r\n" + b"X-Trailer: 1\r\n" * 100 + b"\r\n",
                chunked + b"0\r\n\r\n",
                b"\r\n\r\n" + LIVE,
                b"GET http://other/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
                b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /health/live HTTP/1.0\r\n\r\n",
                b"GET /health/live HTTP/1.1\r\n\r\n",
                b"GET /health/live HTTP/1.1\r\nConnection: close\r\n\r\n" + LIVE,
                b"GET  / HTTP/1.1\r\n\r\n",
                b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + LIVE,
                b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
                + b"\x81\x05hello",
                GET
                + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
                self.random.randbytes(self.random.randrange(1, 300)),
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.random.randbytes(200),
                b"",
                b"\r\n" * 50,
                LIVE[: self.random.randrange(1, len(LIVE))],
                whole + self.random.randbytes(20),
                POST + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
            )
        )
        return Case("framing", content + (LIVE if self.chance(0.3) else b""), ANYTHING)

    def refused(self):
        """What is no HTTP, and what has no end: refused at once."""
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        bad = [
            b"-5",
            b"+5",
            b"abc",
            b"5, 5",
            b"5,6",
            b"0x10",
            b"1e3",
            b"99999999999999999999999999",
            b"5 5",
            b"\xb2",
        ]
        content = self.pick(
            (
                POST + b"Content-Length: " + self.pick(bad) + b"\r\n\r\n{}",
                POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
                POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
                POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n{}",
                chunked
                + self.pick(
                    (
                        b"xyz\r\n",
                        b"-1\r\n{}",
                        b"fffffffffffffffff\r\n",
                        b"2\r\n{}}\r\n",
                        b" 2\r\n{}\r\n",
                        b"2\n\r\n",
                    )
                ),
                b"GET /\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"FOO / HTTP/1.1\r\n\r\n",
                b"get / HTTP/1.1\r\n\r\n",
                b"GET / HTTP/1.1\r\nA B: c\r\n\r\n",
                b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
                b"GET / HTTP/1.1\r\n: c\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
                b"GET /\x00 HTTP/1.1\r\n\r\n",
                b"\x00" * 20 + LIVE,
                b"GET / HTTP/1.1\r\nA: b\rc\r\n\r\n",
            )
        )
        if self.chance(0.02):
            content = self.pick(
                (
                    GET + b"X: y\r\n" * (MAX_HEAD // 2),
                    GET + b"X: " + b"y" * (4 * MAX_HEAD),
                    b"GET /" + b"a" * (4 * MAX_HEAD),
                    chunked + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * MAX_HEAD,
                )
            )
        return Case("refused", content, REFUSED)


def _percent(value):
    return b"".join(b"%%%02X" % byte for byte in value[:1000])


def _bytes(dtype, shape):
    """How many bytes an array of a header would take, if few."""
    try:
        size = int(
            np.prod(json.loads(shape.replace(b"(", b"[").replace(b",)", b"]").replace(b")", b"]")))
        )
        return min(max(size * np.dtype(dtype.decode()).itemsize, 0), 4096)
    except (ValueError, TypeError):
        return io.DEFAULT_BUFFER_SIZE
