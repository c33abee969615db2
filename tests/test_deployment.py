import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from service.integrations import integration_variables
from service.settings import Settings

ROOT = Path(__file__).parent.parent


def load_compose(name):
    return yaml.safe_load((ROOT / name).read_text().replace("!reset null", "null"))


COMPOSE, BUCKET = load_compose("docker-compose.yml"), load_compose("docker-compose.bucket.yml")
SERVICES = {**COMPOSE["services"], "bucket": BUCKET["services"]["bucket"]}
BUILT = [name for name, service in SERVICES.items() if "build" in service]
IMAGES = {name: (ROOT / SERVICES[name]["build"]["dockerfile"]).read_text() for name in BUILT}
INSTALL = (ROOT / "docker" / "install.sh").read_text()
EXTRAS = {
    name: extras.split() for name, extras in re.findall(r'^(\w+)\) extras="(.*)" ;;', INSTALL, re.M)
}
PURPOSES = [(purpose, runtime) for purpose in EXTRAS for runtime in ("cpu", "gpu")]
TRAINING_ONLY = {"torch", "onnxscript", "scikit-learn", "matplotlib", "tqdm"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")
    assert service["mem_limit"] and service["pids_limit"] and service["cpus"]
    assert name == "label-studio" or service["read_only"] is True
    for port in service.get("ports", []):
        assert port.startswith(("127.0.0.1:", "${DUBITO_HOST:-127.0.0.1}:"))


def test_only_training_can_write_models():
    assert "models:/models:ro" in SERVICES["service"]["volumes"]
    assert "models:/models" in SERVICES["training"]["volumes"]
    assert not any("models" in volume for volume in SERVICES["label-studio"]["volumes"])
    for name in ("training", "learn"):
        assert SERVICES[name]["network_mode"] == "none"
    assert "--no-promote" in SERVICES["learn"]["command"][-1], "a person must approve candidates"


def test_secrets_come_from_environment_or_files():
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert SERVICES["bucket"]["environment"][name].startswith(f"${{{name}:?")
    grafana = SERVICES["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD__FILE"].startswith("/run/secrets/")
    assert grafana["GF_AUTH_ANONYMOUS_ENABLED"] == grafana["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_containers_are_killed_only_after_drain():
    grace = re.fullmatch(r"(\d+)s", SERVICES["service"]["stop_grace_period"])
    notice = Settings.model_fields["shutdown_grace_s"].default
    assert (
        int(grace[1])
        >= notice + SERVICES["service"]["environment"]["DUBITO_SHUTDOWN_TIMEOUT_S"] + 5
    )


def test_every_setting_reaches_service():
    environment = SERVICES["service"]["environment"]
    in_image = {*re.findall(r"(DUBITO_\w+)=", IMAGES["service"])}
    settings = {f"DUBITO_{name.upper()}" for name in Settings.model_fields}
    assert settings <= {*environment} | in_image
    assert {*environment} <= settings | integration_variables()


@pytest.mark.parametrize("name", BUILT)
def test_every_image_runs_as_unprivileged_user_that_owns_its_volumes(name):
    assert re.findall(r"^USER (.*)$", IMAGES[name], re.M) == ["10001:10001"]
    owned = re.search(r"--group dubito (.*)$", IMAGES[name], re.M)[1].split()
    assert {volume.split(":")[1] for volume in SERVICES[name]["volumes"]} <= {*owned}


@pytest.mark.parametrize("name", BUILT)
def test_images_copy_only_files_in_build_context(name):
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules
    assert _get_copied_paths(IMAGES[name]) <= allowed
    assert not {".venv", ".git", "models", "runs", "data", ".env", "build"} & allowed


def test_service_image_contains_no_training():
    assert "training" not in _get_copied_paths(IMAGES["service"])
    for runtime in ("cpu", "gpu"):
        assert not TRAINING_ONLY & export_lock("service", runtime).keys()


@pytest.mark.parametrize("name", BUILT)
def test_every_installation_checks_hashes(name):
    installs = re.findall(r"\bpip3?\b.* install\b.*", IMAGES[name])
    assert all(
        "--no-deps --no-build-isolation" in install for install in installs
    )  # our package only
    for command in re.findall(r"\bpip .*(?:install|sync) .*", INSTALL):
        assert "--require-hashes" in command


def test_uv_uses_pip_indexes(tmp_path):
    (tmp_path / "uv").write_text(f"#!/bin/sh\nenv > {tmp_path}/variables\n")
    (tmp_path / "uv").chmod(0o755)
    index, extra, wheels = "https://example.org/simple", "https://example.org/more", "/wheels"
    environment = {"PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": extra, "PIP_FIND_LINKS": wheels}
    subprocess.run(
        ["sh", ROOT / "docker" / "install.sh", tmp_path, "service", "cpu"],
        env={**os.environ, **environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    variables = (tmp_path / "variables").read_text().splitlines()
    assert {f"UV_DEFAULT_INDEX={index}", f"UV_INDEX={extra}"} < {*variables}
    assert f"UV_FIND_LINKS={wheels}" in variables


def test_actions_are_pinned_by_commit():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    actions = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


def test_lock_matches_project():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (project,) = (package for package in lock["package"] if package["name"] == "dubito")
    locked = {
        (canonicalize_name(line["name"]), line.get("specifier", ""))
        for line in project["metadata"]["requires-dist"]
        if line["name"] != "dubito"
    }
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for extra in declared["optional-dependencies"].values() for line in extra]
    requirements = [Requirement(line) for line in [*declared["dependencies"], *optional]]
    assert locked == {
        (canonicalize_name(requirement.name), _specifier(requirement))
        for requirement in requirements
        if requirement.name != "dubito"
    }


def _specifier(requirement):
    return ",".join(sorted(str(requirement.specifier).split(","), reverse=True))


@pytest.mark.parametrize(("purpose", "runtime"), PURPOSES)
def test_every_purpose_has_one_runtime_and_no_download_packages(purpose, runtime):
    locked = export_lock(purpose, runtime)
    runtimes = {"onnxruntime", "onnxruntime-gpu"} & locked.keys()
    assert runtimes == {"onnxruntime" if runtime == "cpu" else "onnxruntime-gpu"}
    assert "tokenizers" in locked and not {"huggingface-hub", "hf-xet"} & locked.keys()


def test_torch_builds_have_same_version():
    cpu = (ROOT / "docker" / "torch-cpu.txt").read_text()
    version = export_lock("training", "cpu")["torch"]
    assert re.findall(r"^torch==(\S+)", cpu, re.M) == [f"{version}+cpu"]


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in include} - {"dubito", "recipes"}
    assert packages == {"integrations", "model_store", "service", "training"}
    folders = {path.parent for package in packages for path in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@cache
def export_lock(purpose, runtime):
    extras = [option for extra in (runtime, *EXTRAS[purpose]) for option in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "export", "--frozen", "--quiet", "--no-emit-project"]
    text = subprocess.run(
        [*command, *extras], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    packages = re.findall(r"^([a-z0-9.-]+)==([^ ;]+)(.*(?:\n .*)*)", text, re.M)
    assert packages and all("--hash=sha256:" in hashes for _, _, hashes in packages)
    return {name: version for name, version, _ in packages}


def _get_copied_paths(dockerfile):
    lines = re.findall(r"^COPY (?!--from)(.*)$", dockerfile.rpartition("\nFROM ")[2], re.M)
    return {source for line in lines for source in line.split()[:-1]}
