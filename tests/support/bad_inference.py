"""Bad requests of the Open Inference Protocol and of MLflow's, from a seeded generator; some are
good by chance."""

import gzip
import json
import struct
import zlib

import numpy as np

from integrations.open_inference.tensors import DATATYPES, NUMPY
from tests.support.bad_requests import BadRequests, Case
from tests.support.odd_values import CANARY, LIKELY, METHODS, NAMES, ODD, VALID, VERSIONS
from tests.support.raw import JSON, request

HEADER = "Inference-Header-Content-Length"
MODELS = ("digits", "digits", "people", "rents", "pictures", "texts", "groups")
OPTIONS = {
    name: LIKELY[name]
    for name in ("num_samples", "seed", "fpr", "fdr", "coverage", "risk", "deadline_s")
} | {
    "timeout": (b"1", b"0", b"-1", b"1e6", b"60000000", b'"60000000"', b"86400000001"),
    "settle": (b"0.1", b'"null"', b"null", b"0", b"5e-324", b'"x"'),
    "confidence": (b"0.9", b"1", b"0", b'"0.5"'),
    "priors": (b'"{\\"0\\": 1}"', b"{}", b'"[]"', b'"{"', b"3"),
    "return_samples": (b"true", b'"true"', b"1"),
    "binary_data_output": (b"true", b"false", b"1", b'"true"'),
    "sequence_id": (b"1", b'"a"', b"{}"),
    "triton_x": (b"[]",),
}
OUTPUTS = (
    "label",
    "probabilities",
    "mean",
    "interval",
    "samples",
    "samples.mean",
    "classes",
    "abstain",
    "x",
    "",
    CANARY,
)


class BadInference(BadRequests):
    """Cases of one seed, one after the other."""

    def __init__(self, seed, admin_key):
        super().__init__(seed, admin_key)
        self.kinds = {
            self.infer: 50,
            self.infer_bytes: 15,
            self.compressed: 8,
            self.invocation: 20,
            self.protocol_route: 7,
        }

    def model(self):
        """A model and a good request to it: names, datatypes, shapes and values of its tensors."""
        model = self.pick(MODELS)
        rows = self.pick((1, 1, 2, 5))
        numbers = [self.random.randrange(17) for _ in range(64 * rows)]
        if model == "digits":
            tensors = [["inputs", "FP32", [rows, 64], numbers]]
        elif model == "groups":
            tensors = [
                ["inputs", "FP64", [rows, 3], numbers[: 3 * rows]],
                ["groups", "BYTES", [rows], ["red"] * rows],
            ]
        elif model in ("people", "rents"):
            ages = [self.pick((31.5, None, 1e300)) if self.chance(0.2) else 40 for _ in range(rows)]
            cities = [self.pick(("Rome", "", None, "Oslo")) for _ in range(rows)]
            tensors = [["age", "FP64", [rows], ages], ["city", "BYTES", [rows, 1], cities]]
        elif model == "pictures":
            tensors = [["x", "UINT8", [rows, 3, 1, 1], numbers[: 3 * rows]]]
            if self.chance(0.4):
                tensors = [
                    ["x", "BYTES", [rows], [self.pick(("iVBORw0KGgo=", "", "x", "AAAA"))] * rows]
                ]
        else:
            tensors = [["x", "BYTES", [rows], [self.pick(("good film", "", "\u00fc" * 50))] * rows]]
        return model, tensors

    def spoil(self, tensor):
        """Change a tensor a little."""
        place = self.random.randrange(4)
        tensor[place] = (
            self.pick(("", CANARY, "x" * 2000, 3, None, "age")),
            self.pick((*DATATYPES, "BF16", 3, None)),
            self.pick(
                (
                    [],
                    [0],
                    [-1],
                    [1, 63],
                    [64],
                    [1 << 62, 1 << 62],
                    [1] * 40,
                    "x",
                    [1.5],
                    [True],
                    None,
                )
            ),
            self.pick(
                (
                    None,
                    [],
                    [[]],
                    "x",
                    {},
                    [None],
                    ["a"],
                    [True],
                    [[1, [2]]],
                    [1e308] * 64,
                    [CANARY] * 64,
                )
            ),
        )[place]

    def encoded(self, tensor):
        """A tensor's values as bytes, right where they can be."""
        _, datatype, _, data = tensor
        if datatype == "BYTES" and isinstance(data, list):
            values = [str(value or "").encode() for value in data]
            content = b"".join(struct.pack("<I", len(value)) + value for value in values)
        elif datatype in NUMPY and isinstance(data, list):
            with np.errstate(all="ignore"):
                numbers = [value if isinstance(value, int | float) else 0 for value in data]
                content = np.array(numbers, dtype=np.float64).astype(NUMPY[datatype]).tobytes()
        else:
            content = self.random.randbytes(self.pick((0, 1, 7, 256)))
        if self.chance(0.1):
            content = self.pick(
                (
                    content[:-1],
                    content + b"\x00",
                    b"\xff" * 8 + content[8:],
                    self.random.randbytes(20),
                )
            )
        return content

    def content(self):
        """A request's model, its JSON, and what follows it."""
        model, tensors = self.model()
        if self.chance(0.4):
            self.spoil(self.pick(tensors))
        if self.chance(0.05):
            tensors += [self.pick(tensors)] if self.chance(0.5) else [["more", "FP32", [1], [1.0]]]
        after, items = b"", []
        for tensor in tensors:
            item = dict(zip(("name", "datatype", "shape", "data"), tensor, strict=True))
            if self.chance(0.35):
                content = self.encoded(tensor)
                del item["data"]
                item["parameters"] = {"binary_data_size": len(content)}
                after += content
            if self.chance(0.06):
                odd = self.pick((0, -1, 1 << 62, "4", None, 3.5, True))
                item["parameters"] = self.pick(
                    ({"binary_data_size": odd}, {"content_type": odd}, {"x": 1}, [], 3)
                )
            if self.chance(0.03):
                item.pop(self.pick(list(item)))
            items.append(item)
        whole = {self.pick(("inputs",) * 15 + ("outputs", "Inputs")): items}
        if self.chance(0.2):
            wanted = [{"name": self.pick(OUTPUTS)} for _ in range(self.pick((1, 1, 2)))]
            if self.chance(0.5):
                wanted[0]["parameters"] = self.pick(
                    ({"binary_data": True}, {"binary_data": 1}, {"classification": 1})
                )
            whole.setdefault("outputs", self.pick((wanted, wanted, wanted, "x", [3], {}, [])))
        if self.chance(0.2):
            whole["id"] = self.pick(("a", "", None, 3, CANARY, "\u00fc" * 600, "x" * 5000))
        text = json.dumps(whole).encode()
        if self.chance(0.5):
            names = self.random.sample(list(OPTIONS), self.pick((1, 1, 2)))
            pairs = [b'"%s": %s' % (name.encode(), self.option(name)) for name in names]
            text = text[:-1] + b', "parameters": {' + b", ".join(pairs) + b"}}"
        elif self.chance(0.05):
            text = (
                text[:-1]
                + b', "'
                + self.pick((b"parameters", b"model_name", b"more"))
                + b'": '
                + self.pick(VALID)
                + b"}"
            )
        return model, text, after

    def option(self, name):
        """A value for a parameter: at its edges, or anything."""
        return self.pick(OPTIONS[name]) if self.chance(0.8) else self.pick(VALID)

    def infer_case(self, kind, model, text, after, encode=None, headers=()):
        """A case of an inference."""
        headers = list(headers)
        if after or self.chance(0.05):
            length = (
                len(text)
                if self.chance(0.95)
                else self.pick((0, -1, len(text) + 1, 1 << 70, "x", "", len(text) - 1))
            )
            headers.append((HEADER, str(length)))
        path = (
            f"/v2/models/{model}/infer"
            if self.chance(0.8)
            else f"/v2/models/{model}/versions/1/infer"
        )
        content_type = self.pick((JSON, "application/octet-stream", "text/plain", ""))
        body = text + after
        return Case(
            kind, request("POST", path, encode(body) if encode else body, headers, content_type)
        )

    def infer(self):
        """Requests whose fields, tensors or parameters are wrong."""
        return self.infer_case("infer", *self.content())

    def infer_bytes(self):
        """Requests some of whose bytes are others."""
        model, text, after = self.content()
        body = bytearray(text)
        for _ in range(self.pick((1, 1, 3))):
            place, cut = self.random.randrange(len(body) + 1), self.pick((0, 1, 1, 4, 50))
            body[place : place + cut] = self.pick(
                (*ODD, self.random.randbytes(3), b'"', b"\x00", b"NaN")
            )
        if self.chance(0.02):
            body = bytearray(
                self.pick((b"[", b'{"inputs":', b'{"inputs":[{"data":[', b'"', b"\x00")) * 100_000
            )
        return self.infer_case("infer bytes", model, bytes(body), after)

    def compressed(self):
        """Bodies that are compressed, or say so."""
        model, text, after = self.content()
        encode = self.pick((gzip.compress, gzip.compress, zlib.compress, bytes))
        coding = self.pick(("gzip", "gzip", "deflate", "br", "identity", "GZIP", ""))
        if self.chance(0.1):
            text = b" " * 20_000_000 + text
        if self.chance(0.2):
            place = self.random.randrange(20)
            whole, junk = encode, self.random.randbytes(2)
            return self.infer_case(
                "compressed",
                model,
                text,
                after,
                lambda body: whole(body)[:-place] + junk,
                [("Content-Encoding", coding)],
            )
        return self.infer_case(
            "compressed", model, text, after, encode, [("Content-Encoding", coding)]
        )

    def invocation(self):
        """MLflow's requests, right or not."""
        rows = [[self.random.randrange(17) for _ in range(64)] for _ in range(self.pick((1, 1, 3)))]
        frame = {"columns": list(range(64)), "data": rows}
        table = {"columns": ["age", "city"], "data": [[31, "Rome"], [None, "x"]]}
        form, content, model = self.pick(
            (
                ("inputs", rows, "digits"),
                ("instances", rows, "digits"),
                ("dataframe_split", frame, "digits"),
                ("dataframe_split", table, "people"),
                ("dataframe_records", [{"age": 3, "city": None}] * 2, "rents"),
                ("inputs", {"age": [3.5], "city": ["Rome"]}, "people"),
                ("instances", ["good film"], "texts"),
                ("instances", ["AAAA"], "pictures"),
            )
        )
        if self.chance(0.3):
            changes = (
                3,
                [],
                {},
                None,
                "x",
                [3],
                [{}],
                {"a": 1},
                [[]],
                [[None]],
                {"columns": [], "data": []},
            )
            if isinstance(content, dict) and self.chance(0.6):
                content = {**content, self.pick(list(content)): self.pick(changes)}
            else:
                content = self.pick(changes)
        text = json.dumps(
            {self.pick((form,) * 12 + ("dataframe_split", "inputs", "x")): content}
        ).encode()
        pairs = [b'"model": "%s"' % model.encode()] if self.chance(0.9) else []
        pairs += [
            b'"%s": %s' % (n.encode(), self.option(n))
            for n in self.random.sample(list(OPTIONS), self.pick((0, 0, 1)))
        ]
        text = text[:-1] + b', "params": {' + b", ".join(pairs) + b"}}"
        if self.chance(0.25):
            body = bytearray(text)
            place, cut = self.random.randrange(len(body) + 1), self.pick((0, 1, 4, 50))
            body[place : place + cut] = self.pick((*ODD, b"NaN", b'"NaN', b'\\"NaN"', b"NaN" * 50))
            text = bytes(body)
        media_type = (
            JSON
            if self.chance(0.92)
            else self.pick(("text/csv", "text/plain", "", "application/x-npy"))
        )
        if media_type == "text/csv" and self.chance(0.7):
            text = self.pick(
                (
                    b"text\ngood film\n",
                    b"age,city\n3,Rome\n",
                    b"\xff\xfe",
                    b"a,b\n1\n",
                    b'"',
                    b"\n",
                    b"",
                )
            )
        query = b"" if self.chance(0.98) else b"?seed=3"
        return Case("invocation", request("POST", b"/invocations" + query, text, (), media_type))

    def protocol_route(self):
        """Any route of the protocols by any method."""
        name, version = self.pick((*NAMES, b"digits", b"people")), self.pick((*VERSIONS, b"1"))
        of_model = b"/v2/models/" + name
        of_version = of_model + b"/versions/" + version
        path = self.pick(
            (
                b"/v2",
                b"/v2/",
                b"/v2/models",
                b"/v2/health/live",
                b"/v2/health/ready",
                b"/ping",
                b"/version",
            )
        )
        path = self.pick((path, of_model, of_version))
        path += self.pick(
            (b"", b"", b"/ready", b"/config", b"/stats", b"/infer", b"/nothing", b"?a=b")
        )
        if self.chance(0.2):
            path = self.pick(
                (
                    b"/v2/repository/index",
                    b"/v2/repository/models/digits/load",
                    b"/v2/models/stats",
                    b"/invocations",
                )
            )
        method = self.pick((b"GET", b"GET", b"POST", self.pick(METHODS)))
        body = (
            self.pick((None, b"", b"{}", b'{"ready": true}', b'{"ready": 1}', b"[]", b"x"))
            if method == b"POST"
            else None
        )
        return Case("protocol route", request(method, path, body), head=method == b"HEAD")
