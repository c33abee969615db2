"""Values, names and paths that are odd, wrong or at the edge, as bytes of JSON or of paths."""

import orjson

CANARY = "canary-3f9a"  # no answer may repeat it


def _is_json(value):
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return False
    return True


NUMBERS = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"-1e400",
        b"1e39",
        b"-1e39",
        b"1e-400",
        b"5e-324",
        b"-0.0",
        b"-0",
    ),
    *(
        b"9" * 400,
        b"0." + b"1" * 400,
        b"18446744073709551616",
        b"-9223372036854775809",
        b"9007199254740993",
        b"01",
    ),
    *(
        b"1.",
        b".5",
        b"+1",
        b"0x1",
        b"1e",
        b"1_000",
        b"--1",
        b"1e5",
        b"4294967296",
        b"1.5",
        b"16",
        b"17",
        b"-1",
    ),
)
STRINGS = (
    *(
        b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'"\\ud800\\u0041"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\\u0000"',
        b'"\x00"',
    ),
    *(
        b'"1.5"',
        b'""',
        b"'a'",
        b'"latest"',
        b'"1"',
        b'"digits"',
        b'"' + b"a" * 3000 + b'"',
        b'"\xf0\x9f\x92\xa9"',
    ),
    *(
        b'"../../etc/passwd"',
        b'"http://127.0.0.1:1/"',
        b'"' + CANARY.encode() + b'"',
        b'"\\x41"',
        b'"\\',
    ),
)
OTHERS = (
    *(
        b"null",
        b"true",
        b"false",
        b"nul",
        b"[]",
        b"{}",
        b"[[]]",
        b"[{}]",
        b"[null]",
        b'{"a":1}',
        b'{"":{}}',
        b"[[[[1]]]]",
    ),
    *(
        b"",
        b",",
        b"]",
        b"[1,]",
        b'{"a":}',
        b"/**/1",
        b"[" * 3000,
        b"[" * 200 + b"]" * 200,
        b'{"a":' * 300 + b"1" + b"}" * 300,
    ),
)
ODD = (*NUMBERS, *STRINGS, *OTHERS)
VALID = tuple(value for value in ODD if _is_json(value))
FIELDS = {
    "predict": (
        "model",
        "version",
        "num_samples",
        "deadline_s",
        "seed",
        "fpr",
        "fdr",
        "coverage",
        "risk",
        "return_samples",
    ),
    "acquire": (
        "model",
        "version",
        "num_samples",
        "deadline_s",
        "seed",
        "ids",
        "k",
        "acquisition",
        "race",
    ),
}
LIKELY = {  # values at the edges of what each field may be
    "model": (b'"digits"', b'"Digits"', b'"digits/1"', b'"."', b'"other"'),
    "version": (
        b'"latest"',
        b'"1"',
        b'"2"',
        b'"0"',
        b'"-1"',
        b'"01"',
        b'"9999999999"',
        b"1",
        b'"broken"',
    ),
    "num_samples": (
        b"1",
        b"2",
        b"100",
        b"0",
        b"-1",
        b"1001",
        b"1000000000",
        b"1.0",
        b'"5"',
        b"true",
    ),
    "deadline_s": (b"1e-9", b"0", b"-1", b"86400", b"86401", b"10", b"1e-320"),
    "seed": (b"0", b"7", b"9007199254740991", b"9007199254740992", b"-1", b"7.0", b"1e3"),
    "fpr": (b"0.05", b"0", b"1", b"1e-300", b"0.9999999999999999", b"5e-324", b"0.00001"),
    "fdr": (b"0.1", b"0", b"1", b"1e-300", b"0.9999999999999999"),
    "coverage": (b"0.95", b"0", b"1", b"1e-300", b"0.9999999999999999"),
    "risk": (b"0.05", b"0", b"1", b"1e-300", b"0.9999999999999999"),
    "return_samples": (b"true", b"false", b"1", b'"true"'),
    "ids": (
        b'["a","b"]',
        b'["a"]',
        b'["a","a"]',
        b'["\\ud800"]',
        b'[""]',
        b"[1]",
        b"[]",
        b'["' + b"i" * 2000 + b'"]',
    ),
    "k": (b"1", b"0", b"-1", b"10", b"1000000000000000000", b"1.5"),
    "race": (b"0.01", b"0", b"1", b"1e-6", b"5e-324", b"0.9999999999999999"),
    "acquisition": (
        b'"bald"',
        b'"batchbald"',
        b'"power_bald"',
        b'"max_det"',
        b'"entropy"',
        b'"random"',
        b'"variance"',
        b'"mean_std"',
        b'"BALD"',
        b'""',
    ),
}
NAMES = (
    *(
        b"digits",
        b"Digits",
        b"other",
        b"..",
        b"%2e%2e",
        b"..%2f..%2fetc%2fpasswd",
        b"%00",
        b"%ED%A0%80",
        b"%FF",
        b"%",
    ),
    *(
        b"a" * 70,
        b"a" * 5000,
        b"-",
        b".hidden",
        b"a%20b",
        b"%0d%0aX-Evil:%201",
        b"\xc3\xa4",
        b"digits%2f1",
        b"%25",
        b"~",
    ),
    CANARY.encode(),
)
VERSIONS = (
    b"1",
    b"2",
    b"latest",
    b"broken",
    b"0",
    b"-1",
    b"01",
    b"1e1",
    b"99999999999999999999",
    b"..",
    b"%2e%2e",
    b"%00",
)
FILES = (
    b"evidence.json",
    b"evidence.md",
    b"roc.png",
    b"manifest.json",
    b"..%2fmanifest.json",
    b"%00",
    b"a.png",
    b"\xff",
)
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"PATCH",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"HEAD",
    b"PROPFIND",
    b"SEARCH",
)
OPEN = (
    b"/health/live",
    b"/health/ready",
    b"/metrics",
    b"/models",
    b"/docs",
    b"/openapi.json",
    b"/docs/oauth2-redirect",
)
