"""Test the service with Schemathesis. Requires `make test-real`."""

import json
import shutil
import subprocess

import httpx
import pytest

from tests.support.environment import ROOT
from tests.support.serving import serving

INSTALLED = ROOT / ".venv-schemathesis" / "bin" / "schemathesis"
SCHEMATHESIS = str(INSTALLED) if INSTALLED.exists() else shutil.which("schemathesis")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(SCHEMATHESIS is None, reason="Schemathesis is not installed"),
]

KEY = "the-key-of-the-administrator"
SEEDS = (1, 2, 3, 4, 5)
# The document cannot express three facts. The service returns 503 and 504 by design. The model
# decides which rows, rates and draw counts are valid, so a request can match the document and fail.
# Almost all bodies are valid in a preview, because they are files.
CHECKS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "503", "504"]
[[operations]]
include-path-regex = "/(predict|acquire|labels|setup|webhook)"
checks.positive_data_acceptance.expected-statuses = ["2xx", "401", "404", "413", "422", "429", "503", "504"]
[[operations]]
include-path = "/acquire/preview"
generation.mode = "positive"
"""
DIGITS_PARAMETERS = """
[parameters]
"path.name" = "digits"
"path.version" = "1"
"""
ROW = {"type": "array", "items": {"type": "number"}, "minItems": 64, "maxItems": 64}


@pytest.fixture(scope="module")
def url(evaluated_store):
    with serving(evaluated_store, DUBITO_ADMIN_KEY=KEY) as (url, _):
        yield url


@pytest.fixture(scope="module")
def document(url, tmp_path_factory):
    document = httpx.get(f"{url}/openapi.json").json()
    for name, field in (("predict", "inputs"), ("acquire", "pool")):
        del document["paths"][f"/{name}"]["post"]["parameters"]  # only files use query parameters
        document["components"]["schemas"][f"{name.title()}Request"]["properties"] |= {
            field: {"type": "array", "items": ROW, "minItems": 1},
            "model": {"enum": ["digits", None]},
            "version": {"enum": ["latest", "1"]},
        }
    file = tmp_path_factory.mktemp("schema") / "openapi.json"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize("seed", SEEDS)
def test_schemathesis_checks_pass(url, document, tmp_path, seed):
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CHECKS + (DIGITS_PARAMETERS if seed % 2 else ""))
    run = [SCHEMATHESIS, "--config-file", str(configuration), "run", str(document), "--url", url]
    options = [
        "--checks",
        "all",
        "--seed",
        str(seed),
        "--max-examples",
        "50",
        "--continue-on-failure",
        "--suppress-health-check",
        "filter_too_much,too_slow",
        "--no-color",
    ]
    key = ["--header", f"Authorization: Bearer {KEY}"]
    completed = subprocess.run(
        [*run, *options, *key], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert completed.returncode == 0, completed.stdout[-8000:]
    operations = sum(map(len, json.loads(document.read_text())["paths"].values()))
    assert f" {operations} passed" in completed.stdout
