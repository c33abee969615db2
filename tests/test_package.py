"""Test the wheel in new environments."""

import csv
import os
import shutil
import subprocess
import sys

import httpx
import numpy as np
import pytest

from model_store.version import VERSION
from tests.support.environment import ROOT
from tests.support.ports import free_port
from tests.support.serving import is_responding, wait_until


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", source], check=True)
    build = [sys.executable, "-m", "uv", "build", "--quiet", "--no-build-isolation", source]
    subprocess.run([*build, "--out-dir", folder], check=True)  # builds the wheel from the sdist
    return folder / f"dubito-{VERSION}-py3-none-any.whl"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_wheel_fits_and_serves_without_checkout(wheel, tmp_path, version):
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"Python {version} is not installed")
    port = str(free_port())
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DUBITO_PORT": port}
    environment |= {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}

    def run(*command):
        completed = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return completed.returncode, completed.stdout + completed.stderr

    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / "bin"
    pip, dubito = [binaries / "python", "-m", "pip", "install", "--quiet"], binaries / "dubito"
    assert run(*pip, wheel)[0] == 0
    assert run(dubito, "--version") == (0, f"dubito {VERSION}\n")
    assert "pip install 'dubito[cpu]'" in run(dubito, "serve")[1]
    status, output = run(*pip, "dubito[cpu]")  # the installed package
    assert status == 0, output
    assert "pip install 'dubito[training]'" in run(dubito, "fit", "recipes/digits.toml")[1]
    status, output = run(*pip, "dubito[training]")
    assert status == 0, output

    x = np.random.default_rng(0).normal(size=(600, 2))
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["a", "b", "left"], *((*row, "yes" if row[0] > 0 else "no") for row in x)]
        )
    status, output = run(dubito, "fit", "--data", "csv:table.csv", "--target", "left", "--quiet")
    assert status == 0, output

    service = subprocess.Popen([dubito, "serve"], cwd=tmp_path, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: service.poll() is not None or is_responding(f"{url}/health/ready"))
        assert httpx.get(f"{url}/version").text == VERSION
        assert "<html" in httpx.get(url).text
        response = httpx.post(f"{url}/predict", json={"inputs": [{"a": 2.0, "b": 0.0}]}).json()
        assert response["predictions"][0]["label"] == "yes"
    finally:
        service.terminate()
        service.wait(timeout=30)
