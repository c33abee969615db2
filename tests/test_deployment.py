"""The deployment's files: images without training, containers without rights, and settings that
reach them."""

import json
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

from integrations.open_inference import routes as open_inference
from service.settings import OF_TRAINING, Settings

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
MONITORED = yaml.safe_load(
    (ROOT / "docker" / "monitoring" / "prometheus" / "prometheus.yml").read_text()
)
BUCKET = yaml.safe_load(
    (ROOT / "docker-compose.bucket.yml").read_text().replace("!reset null", "null")
)
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
BUILT = [name for name, service in COMPOSE["services"].items() if "build" in service]
OURS = [name for name in COMPOSE["services"] if name != "label-studio"]
COMPUTING = {"service", "training", "learn"}
IMAGES = {
    name: (ROOT / COMPOSE["services"][name]["build"]["dockerfile"]).read_text() for name in BUILT
}
INSTALL = (ROOT / "docker" / "install.sh").read_text()
EXTRAS = {
    name: extras.split() for name, extras in re.findall(r'^(\w+)\) extras="(.*)" ;;', INSTALL, re.M)
}
PURPOSES = [(purpose, runtime) for purpose in EXTRAS for runtime in ("cpu", "gpu")]
OF_TRAINING_ALONE = {"torch", "onnxscript", "scikit-learn", "matplotlib", "tqdm"}


@pytest.mark.parametrize("name", OURS)
def test_every_container_is_hardened(name):
    service = COMPOSE["services"][name]
    assert service["init"] is True
    assert service["read_only"] is True
    assert any(mount.startswith("/tmp:size=") for mount in service["tmpfs"])
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")
    assert service["mem_limit"] and service["pids_limit"] > 0
    assert service["cpus"] == f"${{{name.upper().replace('-', '_')}_CPUS:-2}}"
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])


def test_the_bucket_is_hardened_and_has_a_secret_that_no_file_here_knows():
    service, bucket = COMPOSE["services"]["service"], BUCKET["services"]["bucket"]
    for key in ("init", "read_only", "tmpfs", "cap_drop", "security_opt", "logging"):
        assert bucket[key] == service[key]
    assert bucket["mem_limit"] and bucket["pids_limit"] and bucket["cpus"] == "${BUCKET_CPUS:-2}"
    assert re.fullmatch(r"[\w/]+:\d+\.\d+", bucket["image"])
    assert bucket["ports"] == ["127.0.0.1:${BUCKET_PORT:-8333}:8333"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert bucket["environment"][name].startswith(f"${{{name}:?")
        assert not any(name in part or "SECRET" in part for part in bucket["command"])


def test_with_the_bucket_everything_that_has_models_uses_it_over_a_network_of_its_own():
    reached = {
        name for name, service in BUCKET["services"].items() if "bucket" in service["networks"]
    }
    assert reached == {"service", "training", "learn", "bucket"}
    for name in COMPUTING:
        service = BUCKET["services"][name]
        assert service["environment"]["DUBITO_STORE"] == "${DUBITO_BUCKET_URL:-s3://models/dubito}"
        assert service["environment"]["AWS_SECRET_ACCESS_KEY"] is None  # handed on
        assert service["volumes"] == ["cache:/cache"]
        assert service.get("network_mode") is None
    for image in IMAGES.values():
        assert "DUBITO_CACHE=/cache" in image
        assert "/cache" in re.search(r"--group dubito (.*)$", image, re.M)[1].split()


@pytest.mark.parametrize("name", BUILT)
def test_every_image_runs_as_one_fixed_user_that_owns_its_volumes(name):
    assert re.findall(r"^USER (.*)$", IMAGES[name], re.M) == ["10001:10001"]
    made = re.search(
        r"install --directory --owner dubito --group dubito (.*)$", IMAGES[name], re.M
    )[1].split()
    mounted = {volume.split(":")[1] for volume in COMPOSE["services"][name]["volumes"]}
    assert mounted <= set(made)


def test_only_training_writes_models():
    services = COMPOSE["services"]
    assert "models:/models:ro" in services["service"]["volumes"]
    assert "models:/models" in services["training"]["volumes"]


def test_label_studio_has_no_more_rights_than_it_needs_and_is_for_this_machine_alone():
    studio, sync = COMPOSE["services"]["label-studio"], COMPOSE["services"]["studio-sync"]
    assert studio["cap_drop"] == ["ALL"] and "no-new-privileges:true" in studio["security_opt"]
    assert studio["mem_limit"] and studio["pids_limit"] and studio["cpus"]
    assert studio["volumes"] == ["label-studio:/label-studio/data"]  # nothing of ours
    assert studio["ports"] == ["127.0.0.1:${LABEL_STUDIO_PORT:-8080}:8080"]
    assert sync["image"] == COMPOSE["services"]["service"]["image"] and "volumes" not in sync
    assert studio["profiles"] == sync["profiles"] == ["label-studio"]


def test_monitoring_is_for_this_machine_alone_and_sees_nothing_but_its_own_files_and_metrics():
    services = COMPOSE["services"]
    for name, port in (("prometheus", 9090), ("grafana", 3000)):
        service = services[name]
        assert service["profiles"] == ["monitoring"]
        assert service["ports"] == [f"127.0.0.1:${{{name.upper()}_PORT:-{port}}}:{port}"]
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        *mounted, data = service["volumes"]
        assert all(volume.endswith(":ro") for volume in mounted)
        assert data.split(":")[0] == name and not data.endswith(":ro")
        ours = [volume for volume in mounted if not volume.startswith("${PROMETHEUS_KEY_FILE")]
        assert all(volume.startswith("./docker/monitoring/") for volume in ours)
    key = "${PROMETHEUS_KEY_FILE:-/dev/null}:/run/keys/metrics:ro"
    assert key in services["prometheus"]["volumes"]
    (scraped,) = MONITORED["scrape_configs"]
    assert scraped["authorization"] == {"credentials_file": "/run/keys/metrics"}
    assert scraped["static_configs"] == [{"targets": ["service:8000"]}]


def test_grafana_has_a_password_and_lets_in_nobody_without():
    grafana = COMPOSE["services"]["grafana"]
    (secret,) = grafana["secrets"]
    environment = grafana["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{secret}"
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment
    assert (
        environment["GF_AUTH_ANONYMOUS_ENABLED"] == environment["GF_USERS_ALLOW_SIGN_UP"] == "false"
    )
    file = COMPOSE["secrets"][secret]["file"]
    assert file == "${GRAFANA_PASSWORD_FILE:-./secrets/grafana-password}"
    assert (
        "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    )  # and no image holds it: those rules let in


def test_learning_runs_in_training_s_image_with_training_s_rights_and_the_state():
    learn, training = COMPOSE["services"]["learn"], COMPOSE["services"]["training"]
    assert (learn["image"], learn["network_mode"], learn["profiles"]) == (
        training["image"],
        "none",
        ["learn"],
    )
    assert {*learn["volumes"]} == {*training["volumes"], "state:/state"}
    assert "state:/state" in COMPOSE["services"]["service"]["volumes"]
    assert learn["command"][:4] == ["python", "-m", "training", "candidate"]
    assert "/state" in re.search(r"--group dubito (.*)$", IMAGES["training"], re.M)[1].split()
    assert "DUBITO_STATE=/state" in IMAGES["training"]


def test_training_is_a_job_that_up_does_not_start():
    training = COMPOSE["services"]["training"]
    assert training["profiles"] == ["train"]
    assert training["restart"] == "no"
    assert training["network_mode"] == "none"


def test_service_is_published_to_this_machine_alone_unless_told_otherwise():
    assert COMPOSE["services"]["service"]["ports"] == [
        "${DUBITO_HOST:-127.0.0.1}:${DUBITO_PORT:-8000}:8000"
    ]


def test_containers_are_killed_only_after_the_drain():
    service = COMPOSE["services"]["service"]
    grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    notice = Settings.model_fields["notice_s"].default
    assert int(grace[1]) >= notice + service["environment"]["DUBITO_DRAIN_S"] + 5


def test_every_setting_reaches_the_service():
    environment = COMPOSE["services"]["service"]["environment"]
    in_image = {
        "DUBITO_STORE",
        "DUBITO_CACHE",
        "DUBITO_STATE",
        "DUBITO_POOLS",
        "DUBITO_HOST",
        "DUBITO_PORT",
    }
    assert all(f"{name}=" in IMAGES["service"] for name in in_image)
    assert (
        set(environment) == {f"DUBITO_{name.upper()}" for name in Settings.model_fields} - in_image
    )
    fixed = {name: value for name, value in environment.items() if value is not None}
    # published on the machine's loopback, so it is guarded as a service that listens there
    assert fixed == {"DUBITO_DRAIN_S": 20, "DUBITO_HOSTS": "${DUBITO_HOSTS-localhost}"}


def test_training_image_sets_where_it_reads_and_writes():
    for name in {"DUBITO_STORE", *OF_TRAINING} - {"DUBITO_GRAPHS"}:  # which are kept in /tmp
        folder = re.search(rf"{name}=(\S+)", IMAGES["training"])[1]
        assert folder in re.search(r"--group dubito (.*)$", IMAGES["training"], re.M)[1].split()


def test_service_image_knows_nothing_of_training():
    assert not re.search(r"training|torch", IMAGES["service"])
    assert _copied("service", of_final_stage=True) == {"integrations", "model_store", "service"}
    for runtime in ("cpu", "gpu"):
        assert not OF_TRAINING_ALONE & export_lock("service", runtime).keys()


def test_the_lock_is_that_of_the_project():
    """Fails where pyproject.toml has changed, until `make lock` is run."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (project,) = (package for package in lock["package"] if package["name"] == "dubito")
    asked = {
        (canonicalize_name(line["name"]), line.get("specifier", ""))
        for line in project["metadata"]["requires-dist"]
        if line["name"] != "dubito"
    }
    wanted = [Requirement(line) for line in _requirements(*_optional())]
    assert asked == {
        (canonicalize_name(one.name), _specifier(one)) for one in wanted if one.name != "dubito"
    }


@pytest.mark.parametrize(("purpose", "runtime"), PURPOSES)
def test_every_purpose_has_its_runtime_and_nothing_that_downloads(purpose, runtime):
    locked = export_lock(purpose, runtime)
    runtimes = {"onnxruntime", "onnxruntime-gpu"} & locked.keys()
    assert runtimes == {"onnxruntime" if runtime == "cpu" else "onnxruntime-gpu"}
    assert "tokenizers" in locked and not {"huggingface-hub", "hf-xet"} & locked.keys()
    assert "--no-deps" in INSTALL


def test_both_builds_of_torch_have_one_version():
    version = export_lock("training", "cpu")["torch"]
    cpu = (ROOT / "docker" / "torch-cpu.txt").read_text()
    assert re.findall(r"^torch==(\S+)", cpu, re.M) == [f"{version}+cpu"]


@pytest.mark.parametrize("name", BUILT)
def test_every_installation_is_by_hash(name):
    (command,) = re.findall(r"sh docker/install\.sh .*", IMAGES[name])
    purpose = '"$KIND"' if name == "service" else name
    assert command == f'sh docker/install.sh /opt/venv {purpose} "$RUNTIME"'
    assert not re.search(r"\bpip3?\b.* install\b", IMAGES[name])
    for pip in re.findall(r"\bpip .*install .*", INSTALL):
        assert "--require-hashes" in pip
    assert "sh docker/install.sh .venv dev $(RUNTIME)" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", BUILT)
def test_every_stage_is_of_one_base_image_named_in_one_line(name):
    """The line that a digest is written to."""
    (image,) = re.findall(r"^ARG PYTHON=(.*)$", IMAGES[name], re.M)
    assert re.fullmatch(r"python:3\.11-slim(@sha256:[0-9a-f]{64})?", image)
    assert {line.split()[1] for line in re.findall(r"^FROM .*$", IMAGES[name], re.M)} == {
        "${PYTHON}"
    }
    assert len({re.search(r"^ARG PYTHON=.*$", text, re.M)[0] for text in IMAGES.values()}) == 1


def test_actions_are_named_by_commit():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


def test_a_bill_of_what_is_locked_names_every_package_by_its_hashes():
    """As CI keeps it."""
    steps = (ROOT / ".github/workflows/ci.yml").read_text()
    (step,) = re.findall(r"- run: uv (export .*cyclonedx.*) --output-file", steps)
    command = [sys.executable, "-m", "uv", *step.split(), "--quiet"]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    bill = json.loads(said)
    packages = {part["name"]: part for part in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert export_lock("service", "cpu").keys() <= packages.keys()
    for part in packages.values():
        files = part["externalReferences"]
        assert part["purl"].startswith("pkg:pypi/")
        assert files and all(file["hashes"][0]["alg"] == "SHA-256" for file in files)


@pytest.mark.parametrize("name", BUILT)
def test_dependencies_are_installed_before_any_code_is_copied(name):
    before, _, final = IMAGES[name].rpartition("\nFROM ")
    assert "install.sh" in before and "install.sh" not in final
    assert not re.search(r"^COPY (integrations|model_store|service|training|recipes)", before, re.M)


@pytest.mark.parametrize("name", BUILT)
def test_images_are_made_of_what_the_build_context_holds(name):
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(rule for rule in rules if not rule.startswith("#")) == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert _copied(name) <= let_in
    assert all((ROOT / path).exists() for path in let_in)
    kept_out = {".venv", ".git", "models", "runs", "data", ".env", "docker", "build"}
    assert not kept_out & let_in


def test_service_image_says_when_it_is_unwell_without_curl():
    test = re.search(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", IMAGES["service"], re.M)[1]
    interpreter, flag, code = yaml.safe_load(test)
    assert (interpreter, flag) == ("python", "-c")
    compile(code, "healthcheck", "exec")
    assert "/health/live" in code


@pytest.mark.parametrize("name", BUILT)
def test_images_start_a_module_without_a_shell(name):
    command = re.findall(r"^CMD (.*)$", IMAGES[name], re.M)
    assert [yaml.safe_load(line)[:3] for line in command] == [["python", "-m", name]]


def test_kserve_s_manifest_fits_the_image_and_the_service():
    manifest = yaml.safe_load((ROOT / "docs" / "kserve.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == (
        "serving.kserve.io/v1beta1",
        "InferenceService",
    )
    predictor = manifest["spec"]["predictor"]
    (container,) = predictor["containers"]
    assert (
        container["image"].partition(":")[0]
        == COMPOSE["services"]["service"]["image"].partition(":")[0]
    )
    image = IMAGES["service"]
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in image
    paths = {route.path for route in open_inference.router.routes}
    for name, path in (
        ("readinessProbe", "/v2/health/ready"),
        ("livenessProbe", "/v2/health/live"),
    ):
        assert container[name]["httpGet"] == {"path": path, "port": port["containerPort"]}
        assert path in paths
    settings = {f"DUBITO_{name.upper()}" for name in Settings.model_fields}
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert set(env) - settings == {"PROTOCOL"}
    own = {
        name.removeprefix("DUBITO_").lower(): value
        for name, value in env.items()
        if name in settings
    }
    served = Settings(**own)
    assert predictor["terminationGracePeriodSeconds"] > served.drain_s + served.notice_s
    assert (
        f"USER {predictor['securityContext']['runAsUser']}:{predictor['securityContext']['runAsGroup']}\n"
        in image
    )
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert (
        mounts["/models"]["readOnly"]
        and "DUBITO_STORE=/models" in image
        and "DUBITO_STATE=/state" in image
    )
    assert set(mounts) == {"/models", "/state", "/tmp"}
    assert {mount["name"] for mount in mounts.values()} == {
        volume["name"] for volume in predictor["volumes"]
    }
    confined = container["securityContext"]
    assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
    assert (
        confined["capabilities"] == {"drop": ["ALL"]}
        and predictor["securityContext"]["runAsNonRoot"]
    )


def test_gpu_file_changes_the_runtime_and_reserves_a_device():
    assert GPU["services"].keys() == COMPUTING
    for name, service in GPU["services"].items():
        assert name not in BUILT or service["build"]["args"]["RUNTIME"] == "gpu"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_gpu_images_have_names_of_their_own():
    images = [file["services"][name]["image"] for file in (COMPOSE, GPU) for name in BUILT]
    assert len(set(images)) == len(images)
    assert GPU["services"]["learn"]["image"] == GPU["services"]["training"]["image"]


def test_ci_runs_the_suite_and_what_pre_commit_does():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert all(repository["repo"] == "local" for repository in hooks)
    assert {".ci/run", "make check"} <= commands
    _, _, check = (ROOT / "Makefile").read_text().partition("\ncheck: ")
    done = check.partition("\n\n")[0].replace("$(BIN)", ".venv/bin")
    entries = [hook["entry"] for repository in hooks for hook in repository["hooks"]]
    assert entries and all(entry in done for entry in entries)


def test_guide_names_every_command_that_it_needs():
    guide = (ROOT / "docs/deployment.md").read_text()
    for command in (
        "docker compose run --rm training",
        "docker compose up",
        "-f docker-compose.yml -f docker-compose.gpu.yml",
        "python -m model_store alias",
    ):
        assert command in guide


def _requirements(*extras):
    """What pyproject.toml asks for, with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]


def _optional():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


def _specifier(requirement):
    return ",".join(sorted(str(requirement.specifier).split(","), reverse=True))


@cache
def export_lock(purpose, runtime):
    """Versions in uv.lock of what docker/install.sh installs."""
    extras = [option for extra in (runtime, *EXTRAS[purpose]) for option in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "export", "--frozen", "--quiet", "--no-emit-project"]
    text = subprocess.run(
        [*command, *extras], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    packages = re.findall(r"^([a-z0-9.-]+)==([^ ;]+)(.*(?:\n .*)*)", text, re.M)
    assert packages and all("--hash=sha256:" in hashes for _, _, hashes in packages)
    return {name: version for name, version, _ in packages}


def _copied(name, of_final_stage=False):
    """What a Dockerfile copies from the build context."""
    text = IMAGES[name].rpartition("\nFROM ")[2] if of_final_stage else IMAGES[name]
    lines = re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
    return {source for line in lines for source in line.split()[:-1]}


def test_every_package_is_installed():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"][
        "find"
    ]
    tops = ("integrations", "model_store", "service", "training")
    assert sorted(found["include"]) == sorted(
        pattern for top in tops for pattern in (top, f"{top}.*")
    )
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
