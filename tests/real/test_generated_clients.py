"""Test clients generated from the OpenAPI document. Requires `make test-real`."""

import json
import shutil
import subprocess

import httpx
import numpy as np
import pytest

from tests.support.environment import ROOT

HOME = ROOT / ".venv-generated"
GENERATOR = HOME / "bin" / "openapi-python-client"
PROGRAMS = HOME / "node_modules" / ".bin"
CLIENTS = ROOT / "tests" / "real" / "clients"
GUIDE = (ROOT / "docs" / "api.md").read_text()
pytestmark = pytest.mark.real


def run(*command, cwd):
    completed = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.fixture
def folder(client, tmp_path):
    (tmp_path / "openapi.json").write_bytes(client.get("/openapi.json").content)
    return tmp_path


def assert_matches_service(summary, url):
    row = {"inputs": [[8.0] * 64], "seed": 7}
    expected = httpx.post(f"{url}/predict", json=row).json()["predictions"][0]
    assert (summary["label"], summary["entropy"]) == (expected["label"], expected["entropy"])
    assert (summary["ranked"], summary["missing"], summary["jobs"]) == (0, 404, [])
    assert summary["classes"] == [str(digit) for digit in range(10)]


@pytest.mark.skipif(not GENERATOR.exists(), reason="openapi-python-client is not installed")
def test_client_from_openapi_python_client_works(folder, service_url):
    settings = GUIDE.partition("```yaml\n# openapi-python-client")[2].partition("```")[0]
    (folder / "settings.yml").write_text(f"#{settings}post_hooks: []\n")
    options = ["--config", "settings.yml", "--meta", "none", "--output-path", "generated"]
    run(GENERATOR, "generate", "--path", "openapi.json", *options, "--fail-on-warning", cwd=folder)
    np.save(folder / "rows.npy", np.full((1, 64), 8.0))
    script = shutil.copy(CLIENTS / "generated.py", folder / "ask.py")
    python = HOME / "bin" / "python"
    summary = json.loads(run(python, script, service_url, folder / "rows.npy", cwd=folder))
    assert_matches_service(summary, service_url)
    assert summary["refused"].startswith("inputs.0: expected an array of 64")
    assert summary["query"] == {"seed": 7}


@pytest.mark.skipif(
    not (PROGRAMS / "openapi-typescript").exists(), reason="openapi-typescript is not installed"
)
def test_client_with_types_from_openapi_typescript_works(folder, service_url):
    options = ["--default-non-nullable", "false", "--output", "api.d.ts"]
    run(PROGRAMS / "openapi-typescript", "openapi.json", *options, cwd=folder)
    shutil.copy(CLIENTS / "generated.mts", folder / "ask.mts")
    (folder / "node_modules").symlink_to(HOME / "node_modules")
    options = ["--strict", "--target", "es2022", "--module", "nodenext"]
    run(PROGRAMS / "tsc", *options, "--lib", "es2022,dom", "--outDir", ".", "ask.mts", cwd=folder)
    summary = json.loads(run("node", "ask.mjs", service_url, cwd=folder))
    assert_matches_service(summary, service_url)
    assert summary["refused"].startswith("seed: expected a valid integer")
