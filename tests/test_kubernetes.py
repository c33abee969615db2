import re

import kubernetes_validate
import pytest
import yaml

from integrations.open_inference import routes as open_inference
from service import limits
from service.app import create_app
from service.settings import Settings
from tests.support.environment import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "docker" / "kubernetes"
OTHER_KINDS = {"kustomization.yaml", "prometheus-adapter.yaml"}
FILES = {path.name: [*yaml.safe_load_all(path.read_text())] for path in FOLDER.glob("*.yaml")}
RESOURCES = {
    (resource["kind"], resource["metadata"]["name"]): resource
    for name in sorted(FILES.keys() - OTHER_KINDS)
    for resource in FILES[name]
}
(ADAPTER,) = FILES["prometheus-adapter.yaml"]
INGRESS = RESOURCES["Ingress", "dubito"]
SERVICE = {
    "replica": RESOURCES["Deployment", "dubito"]["spec"]["template"],
    "state": RESOURCES["StatefulSet", "dubito-state"]["spec"]["template"],
}
KSERVE = yaml.safe_load((ROOT / "docs" / "kserve.yaml").read_text())["spec"]["predictor"]
KSERVE_FIELDS = {"minReplicas", "maxReplicas"}
PODS = SERVICE | {"kserve": {"spec": KSERVE}}
SHARED = dict(
    line.split("=", 1)
    for line in (FOLDER / "settings.env").read_text().splitlines()
    if line[0] != "#"
)
VERSIONS = ("1.29", kubernetes_validate.latest_version())
IMAGE = (ROOT / "docker" / "service.Dockerfile").read_text()
UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_quantity(text):
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", str(text)).groups()
    return float(number) * UNITS[unit]


def get_container(pod):
    (container,) = pod["spec"]["containers"]
    return container


def get_settings(name):
    container = get_container(PODS[name])
    limits = container["resources"]["limits"]
    variables = dict(re.findall(r"(DUBITO_\w+)=(\S+)", IMAGE))
    variables |= SHARED if name in SERVICE else {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {}).get("resourceFieldRef", {}).get("resource", "")
        variables[variable["name"]] = variable.get("value", limits.get(source[7:]))
    options = {key: value for key, value in variables.items() if key.startswith("DUBITO_")}
    assert {*options} <= {f"DUBITO_{field.upper()}" for field in Settings.model_fields}
    return Settings(
        **{key.removeprefix("DUBITO_").lower(): value for key, value in options.items()}
    )


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("store", "state")}
    return create_app(Settings(**folders, admin_key="k" * 16))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_matches_kubernetes_schema(version):
    for resource in RESOURCES.values():
        kubernetes_validate.validate(resource, version, strict=True)
    for template in PODS.values():
        spec = {key: value for key, value in template["spec"].items() if key not in KSERVE_FIELDS}
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        kubernetes_validate.validate(
            {**pod, "template": {**template, "spec": spec}}, version, strict=True
        )


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_confined(name):
    pod, container = PODS[name]["spec"], get_container(PODS[name])
    assert pod["securityContext"]["runAsNonRoot"]
    uid, gid = (pod["securityContext"][key] for key in ("runAsUser", "runAsGroup"))
    assert f"USER {uid}:{gid}\n" in IMAGE
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not any("hostPath" in volume for volume in pod["volumes"])
    # A Service named `dubito` would set DUBITO_PORT=tcp://..., and the service would not start.
    assert pod["enableServiceLinks"] is False


def test_no_manifest_contains_secrets():
    assert not any(kind == "Secret" for kind, _ in RESOURCES)
    names = [name for name in SHARED if not name.endswith("_FILE")]
    names += [v["name"] for pod in PODS.values() for v in get_container(pod).get("env", [])]
    assert not any(re.search("KEY|SECRET|TOKEN", name) for name in names)


@pytest.mark.parametrize("name", [*SERVICE, "kserve"])
def test_pod_settings_are_valid_and_fit_its_resources(name, app):
    values, pod, container = get_settings(name), PODS[name]["spec"], get_container(PODS[name])
    limits = container["resources"]["limits"]
    shutdown_s = values.shutdown_grace_s + values.shutdown_timeout_s
    assert pod["terminationGracePeriodSeconds"] > shutdown_s
    assert values.port == container["ports"][0]["containerPort"]
    assert values.max_model_bytes < parse_quantity(limits["memory"])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(values.state) in mounts or name == "replica"
    paths = {route.path for route in [*app.state.routes, *open_inference.router.routes]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    if name in SERVICE:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert values.cache_bytes < parse_quantity(volumes["cache"]["emptyDir"]["sizeLimit"])
        readiness = container["readinessProbe"]
        detection_s = readiness["periodSeconds"] * readiness["failureThreshold"]
        assert (
            detection_s < values.shutdown_grace_s
        )  # The balancer stops sending before the pod stops.


def test_only_state_pod_stores_jobs_and_labels():
    assert get_settings("replica").state is None
    assert get_settings("state").state is not None
    assert RESOURCES["StatefulSet", "dubito-state"]["spec"]["replicas"] == 1


@pytest.mark.parametrize("name", PODS)
def test_requests_do_not_exceed_limits(name):
    resources = get_container(PODS[name])["resources"]
    for kind, amount in resources["requests"].items():
        assert parse_quantity(amount) <= parse_quantity(resources["limits"][kind])


def test_selectors_match_pods():
    for kind, name, pod in (
        ("Deployment", "dubito", "replica"),
        ("StatefulSet", "dubito-state", "state"),
        ("Service", "dubito", "replica"),
        ("Service", "dubito-state", "state"),
        ("PodDisruptionBudget", "dubito", "replica"),
    ):
        selector = RESOURCES[kind, name]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == SERVICE[pod]["metadata"]["labels"]
    policy = RESOURCES["NetworkPolicy", "dubito"]["spec"]["podSelector"]["matchLabels"]
    for pod in SERVICE.values():
        assert policy.items() <= pod["metadata"]["labels"].items()


def test_autoscaler_metric_exists_and_target_is_reachable(app):
    autoscaler = RESOURCES["HorizontalPodAutoscaler", "dubito"]["spec"]
    (metric,) = [metric["pods"] for metric in autoscaler["metrics"]]
    name = metric["metric"]["name"]
    assert f"\n# TYPE {name} gauge\n" in app.state.context.metrics_page().decode()
    (rule,) = ADAPTER["rules"]["custom"]
    assert rule["seriesQuery"].startswith(f"{name}{{")
    # Up to OVERLOAD_ROW_DRAWS wait under overload, so a larger target is never reached.
    assert parse_quantity(metric["target"]["averageValue"]) <= limits.OVERLOAD_ROW_DRAWS / 4


def find_backend(path):
    """Return the Service of the ingress rule with the longest matching prefix."""
    (rule,) = INGRESS["spec"]["rules"]
    backends = {
        entry["path"]: entry["backend"]["service"]["name"] for entry in rule["http"]["paths"]
    }
    prefixes = [p for p in backends if p == "/" or path == p or path.startswith(f"{p}/")]
    return backends[max(prefixes, key=len)]


def test_job_and_label_routes_lead_to_state_pod(app):
    packages = {"acquire", "admin", "jobs", "label_studio", "labels"}
    for route in app.state.routes:
        if packages & {*route.endpoint.__module__.split(".")}:
            for path in (route.path, f"/v1{route.path}"):
                assert find_backend(path) == "dubito-state", path
    for path in ("/", "/predict", "/invocations", "/v2/models/{name}/infer", "/health/ready"):
        assert find_backend(path) == "dubito", path


def test_ingress_accepts_maximum_body_and_deadline():
    annotations = INGRESS["metadata"]["annotations"]
    size = annotations["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert parse_quantity(size.replace("m", "Mi")) > get_settings("replica").max_body_bytes
    timeout_s = annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]
    assert float(timeout_s) > get_settings("replica").deadline_s
