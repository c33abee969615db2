"""The manifests of Kubernetes: they fit its schemas, the image, the service's settings, routes and
metrics.

`tests/real/test_kubernetes.py` has `kubectl` put them together, and Ray read its part.
"""

import re
import tomllib

import jsonschema
import kubernetes_validate
import pytest
import yaml

from service.app import create_app
from service.settings import Settings
from tests.support.environment import ROOT
from tests.support.kuberay import RAY_SERVICE

pytestmark = pytest.mark.slow

FOLDER = ROOT / "docker" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OF_OTHERS = {
    "kustomization.yaml",
    "prometheus-adapter.yaml",
    "ray-service.yaml",
}  # no resources of Kubernetes itself
FILES = {
    path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(FOLDER.glob("*.yaml"))
}
RESOURCES = {
    (one["kind"], one["metadata"]["name"]): one
    for name in sorted(FILES.keys() - OF_OTHERS)
    for one in FILES[name]
}
(ADAPTER,) = FILES["prometheus-adapter.yaml"]
(RAY,) = FILES["ray-service.yaml"]
CLUSTER = RAY["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
SERVE = yaml.safe_load(RAY["spec"]["serveConfigV2"])
REPLICA, STATE = RESOURCES["Deployment", "dubito"], RESOURCES["StatefulSet", "dubito-state"]
SERVICE = {"replica": REPLICA["spec"]["template"], "state": STATE["spec"]["template"]}
PODS = SERVICE | {
    "ray head": CLUSTER["headGroupSpec"]["template"],
    "ray worker": WORKERS["template"],
}
SHARED = dict(
    line.split("=", 1)
    for line in (FOLDER / "settings.env").read_text().splitlines()
    if line[0] != "#"
)
VERSIONS = ("1.29", kubernetes_validate.latest_version())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["service"]
IMAGE = (ROOT / "docker" / "service.Dockerfile").read_text()
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def quantity(text):
    """What a quantity of Kubernetes is, in processors or bytes."""
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()
    return float(number) * UNITS[unit]


def container_of(pod):
    (container,) = pod["spec"]["containers"]
    return container


def environment(name):
    """The variables that a pod of the service gets by its manifest, those of secrets aside."""
    of_image = dict(re.findall(r"(DUBITO_\w+)=(\S+)", IMAGE))
    container = container_of(SERVICE[name])
    limits = container["resources"]["limits"]
    own = {
        one["name"]: one["value"]
        if "value" in one
        else limits[one["valueFrom"]["resourceFieldRef"]["resource"][7:]]
        for one in container["env"]
    }
    return of_image | SHARED | own


def settings(name):
    """The settings that a pod of the service has."""
    given = {
        n.removeprefix("DUBITO_").lower(): v
        for n, v in environment(name).items()
        if n.startswith("DUBITO_")
    }
    return Settings(**given)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The application, for its routes and metrics; with administration."""
    return create_app(
        Settings(
            store=tmp_path_factory.mktemp("store"),
            state=tmp_path_factory.mktemp("state"),
            admin_key="k" * 16,
        )
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "resource", RESOURCES.values(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_every_resource_fits_the_schema_of_kubernetes(resource, version):
    kubernetes_validate.validate(resource, version, strict=True)


def test_the_schema_is_strict():
    wrong = {**RESOURCES["Service", "dubito"], "spec": {"selectors": {"app": "dubito"}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[1], strict=True)


def test_the_ray_service_fits_kuberay_s_reference_and_its_pods_kubernetes_schema():
    jsonschema.validate(RAY, RAY_SERVICE)
    for name in ("ray head", "ray worker"):
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "x"},
            "template": PODS[name],
        }
        kubernetes_validate.validate(template, VERSIONS[1], strict=True)
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (version,) = [package["version"] for package in locked if package["name"] == "ray"]
    assert CLUSTER["rayVersion"] == version


def test_every_file_is_put_together_or_named_in_the_guide():
    assert set(KUSTOMIZATION["resources"]) == FILES.keys() - OF_OTHERS
    (settings_file,) = KUSTOMIZATION["configMapGenerator"]
    assert settings_file == {"name": "dubito-settings", "envs": ["settings.env"]}
    namespace = RESOURCES["Namespace", KUSTOMIZATION["namespace"]]
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    for path in FOLDER.iterdir():
        assert f"`{path.name}`" in GUIDE, path.name


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_confined_as_the_compose_file_confines_the_container(name):
    pod, container = PODS[name]["spec"], container_of(PODS[name])
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {
        "type": "RuntimeDefault"
    }
    uid, gid = (pod["securityContext"][key] for key in ("runAsUser", "runAsGroup"))
    assert f"USER {uid}:{gid}\n" in IMAGE
    confined = container["securityContext"]
    assert confined == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": COMPOSE["read_only"],
        "capabilities": {"drop": COMPOSE["cap_drop"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not any("hostPath" in volume for volume in pod["volumes"])
    if name != "ray head":  # which asks Kubernetes for workers
        assert pod["automountServiceAccountToken"] is False
        assert ("ServiceAccount", pod["serviceAccountName"]) in RESOURCES


@pytest.mark.parametrize("name", PODS)
def test_services_of_the_namespace_are_no_settings_of_a_pod(name):
    """A Service `dubito` gives pods a variable DUBITO_PORT=tcp://..., with which the service does
    not start."""
    assert PODS[name]["spec"]["enableServiceLinks"] is False
    kserve = yaml.safe_load((ROOT / "docs" / "kserve.yaml").read_text())
    assert kserve["spec"]["predictor"]["enableServiceLinks"] is False


def test_no_manifest_holds_a_secret():
    assert not any(kind == "Secret" for kind, _ in RESOURCES)
    assert not any(
        re.search("KEY|SECRET|TOKEN", name) for name in SHARED if not name.endswith("_FILE")
    )
    for pod in PODS.values():
        assert not any("SECRET" in one["name"] for one in container_of(pod).get("env", []))
    assert "kubectl -n dubito create secret generic dubito-keys" in GUIDE
    assert "kubectl -n dubito create secret generic dubito-bucket" in GUIDE


@pytest.mark.parametrize("name", SERVICE)
def test_every_variable_is_a_setting_with_a_value_that_it_may_have(name):
    known = {f"DUBITO_{setting.upper()}" for setting in Settings.model_fields}
    assert {variable for variable in environment(name) if variable.startswith("DUBITO_")} <= known
    has = settings(name)
    assert (
        str(has.store).startswith("s3://")
        and has.port == container_of(SERVICE[name])["ports"][0]["containerPort"]
    )
    assert has.threads == quantity(container_of(SERVICE[name])["resources"]["limits"]["cpu"])
    assert (has.state is None) == (name != "state")


def test_ray_s_arguments_are_settings():
    (application,) = SERVE["applications"]
    assert (
        application["import_path"] == "integrations.ray.app:build"
        and application["route_prefix"] == "/"
    )
    given = Settings(**application["args"])
    assert (
        str(given.store) == SHARED["DUBITO_STORE"]
        and str(given.keys_file) == SHARED["DUBITO_KEYS_FILE"]
    )
    (deployment,) = application["deployments"]
    workers = container_of(PODS["ray worker"])["resources"]["limits"]
    assert deployment["ray_actor_options"]["num_cpus"] == quantity(workers["cpu"])
    numbers = {
        name: deployment["autoscaling_config"][name] for name in ("min_replicas", "max_replicas")
    }
    assert numbers == {
        "min_replicas": WORKERS["minReplicas"],
        "max_replicas": WORKERS["maxReplicas"],
    }
    assert (
        SERVE["http_options"]["port"]
        == container_of(PODS["ray worker"])["ports"][0]["containerPort"]
    )


@pytest.mark.parametrize("name", SERVICE)
def test_a_pod_may_end_in_order(name):
    has = settings(name)
    assert SERVICE[name]["spec"]["terminationGracePeriodSeconds"] > has.notice_s + has.drain_s
    readiness = container_of(SERVICE[name])["readinessProbe"]
    noticed = readiness["periodSeconds"] * readiness["failureThreshold"]
    assert noticed < has.notice_s  # the balancer has heard of it before the pod stops listening


@pytest.mark.parametrize("name", SERVICE)
def test_probes_ask_routes_that_exist_and_need_no_key(name, app):
    paths = {route.path for route in app.state.routes if "GET" in route.methods}
    container = container_of(SERVICE[name])
    asked = {
        probe: container[probe]["httpGet"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert {probe: get["path"] for probe, get in asked.items()} == {
        "startupProbe": "/health/live",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }
    (port,) = container["ports"]
    for get in asked.values():
        assert get["path"] in paths and get["port"] == port["name"]


@pytest.mark.parametrize("name", PODS)
def test_requests_fit_limits_and_volumes_fit_both(name):
    resources = container_of(PODS[name])["resources"]
    assert resources["requests"].keys() == resources["limits"].keys()
    for kind, asked in resources["requests"].items():
        assert quantity(asked) <= quantity(resources["limits"][kind])
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    volumes = {volume["name"]: volume for volume in PODS[name]["spec"]["volumes"]}
    mounts = {
        mount["name"]: mount["mountPath"] for mount in container_of(PODS[name])["volumeMounts"]
    }
    claimed = {
        claim["metadata"]["name"]
        for claim in STATE["spec"]["volumeClaimTemplates"]
        if name == "state"
    }
    assert mounts.keys() == volumes.keys() | claimed
    folders = [volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume]
    assert all("sizeLimit" in folder for folder in folders)
    on_disk = sum(quantity(folder["sizeLimit"]) for folder in folders if "medium" not in folder)
    if "ephemeral-storage" in resources["limits"]:
        assert on_disk < quantity(resources["limits"]["ephemeral-storage"])
    if name in SERVICE:
        assert settings(name).cache_bytes < quantity(volumes["cache"]["emptyDir"]["sizeLimit"])
        assert mounts["cache"] == str(settings(name).cache) and mounts["tmp"] == "/tmp"
        assert settings(name).max_model_bytes < quantity(resources["limits"]["memory"])


def test_the_pod_with_state_is_a_replica_with_a_volume_and_jobs():
    """So a change of one is made in the other."""
    replica, state = (
        yaml.safe_load(yaml.safe_dump(SERVICE[name])) for name in ("replica", "state")
    )
    assert replica["metadata"]["labels"].pop("role") == "replica"
    assert state["metadata"]["labels"].pop("role") == "state"
    del replica["spec"]["topologySpreadConstraints"]
    assert state["spec"]["securityContext"].pop("fsGroupChangePolicy") == "OnRootMismatch"
    first, second = container_of(replica), container_of(state)
    assert first["env"].pop() == {"name": "DUBITO_STATE", "value": ""}
    assert second["volumeMounts"].pop() == {
        "name": "state",
        "mountPath": str(settings("state").state),
    }
    for container in (first, second):
        assert all(held.pop("memory") for held in container["resources"].values())
    assert replica == state
    assert STATE["spec"]["replicas"] == 1 and "replicas" not in REPLICA["spec"]


def test_a_replica_has_no_place_for_jobs_and_labels():
    assert settings("replica").state is None
    assert container_of(SERVICE["replica"])["securityContext"]["readOnlyRootFilesystem"]


def test_selectors_select_the_pods_that_they_are_for():
    for workload in (REPLICA, STATE):
        assert (
            workload["spec"]["selector"]["matchLabels"]
            == workload["spec"]["template"]["metadata"]["labels"]
        )
    for name, pod in (("dubito", "replica"), ("dubito-state", "state")):
        service = RESOURCES["Service", name]
        (port,), (listens,) = service["spec"]["ports"], container_of(SERVICE[pod])["ports"]
        assert service["spec"]["selector"] == SERVICE[pod]["metadata"]["labels"]
        assert port["targetPort"] == listens["name"]
    assert STATE["spec"]["serviceName"] == "dubito-state"
    labels = SERVICE["replica"]["metadata"]["labels"]
    assert RESOURCES["PodDisruptionBudget", "dubito"]["spec"]["selector"]["matchLabels"] == labels
    for spread in SERVICE["replica"]["spec"]["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"] == labels
    policy = RESOURCES["NetworkPolicy", "dubito"]["spec"]
    for pod in SERVICE.values():
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [one["port"] for one in policy["ingress"][0]["ports"]] == [listens["name"]]
    (worker,) = PODS["ray worker"]["spec"]["topologySpreadConstraints"]
    assert worker["labelSelector"]["matchLabels"] == PODS["ray worker"]["metadata"]["labels"]


def test_the_guide_s_service_monitor_finds_both_services():
    monitoring = (ROOT / "docs" / "monitoring.md").read_text()
    (monitor,) = [
        found
        for block in re.findall(r"```yaml\n(.*?)```", monitoring, re.DOTALL)
        if (found := yaml.safe_load(block)).get("kind") == "ServiceMonitor"
    ]
    for name in ("dubito", "dubito-state"):
        service = RESOURCES["Service", name]
        assert (
            monitor["spec"]["selector"]["matchLabels"].items()
            <= service["metadata"]["labels"].items()
        )
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "dubito"
        assert service["spec"]["ports"][0]["name"] == monitor["spec"]["endpoints"][0]["port"]
    key = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    (keys,) = [
        volume["secret"] for volume in SERVICE["replica"]["spec"]["volumes"] if "secret" in volume
    ]
    assert key["name"] == keys["secretName"]
    assert [item["key"] for item in keys["items"]] == ["keys.toml"]  # and not Prometheus' own key


def test_the_autoscaler_asks_for_a_metric_that_there_is_at_a_length_that_a_queue_reaches(app):
    autoscaler = RESOURCES["HorizontalPodAutoscaler", "dubito"]["spec"]
    target = autoscaler["scaleTargetRef"]
    assert RESOURCES[target["kind"], target["name"]]["apiVersion"] == target["apiVersion"]
    (pods,) = [metric["pods"] for metric in autoscaler["metrics"]]
    name = pods["metric"]["name"]
    assert f"\n# TYPE {name} gauge\n" in app.state.context.metrics_page().decode()
    (rule,) = ADAPTER["rules"]["custom"]
    assert rule["name"] == {"matches": name} and rule["seriesQuery"].startswith(f"{name}{{")
    assert rule["resources"]["overrides"] == {
        kind: {"resource": kind} for kind in ("namespace", "pod")
    }
    has = settings("replica")
    # Under lasting overload no more than `overload_row_draws` wait: an autoscaler that waits for
    # more never sees it.
    assert (
        quantity(pods["target"]["averageValue"])
        <= has.overload_row_draws / 4
        <= has.max_queued_row_draws
    )
    assert (
        autoscaler["minReplicas"]
        > RESOURCES["PodDisruptionBudget", "dubito"]["spec"]["maxUnavailable"]
    )
    assert autoscaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 300


def backend(path):
    """The Service that the ingress takes a path to: that of the longest prefix, in whole
    elements."""
    (rule,) = RESOURCES["Ingress", "dubito"]["spec"]["rules"]
    found = {entry["path"]: entry["backend"]["service"]["name"] for entry in rule["http"]["paths"]}
    return found[
        max((p for p in found if p == "/" or path == p or path.startswith(f"{p}/")), key=len)
    ]


def test_what_reads_or_writes_jobs_and_labels_goes_to_the_pod_that_has_them(app):
    rooms = {"acquire", "jobs", "label_studio", "labels"}
    to_state = {
        route.path
        for route in app.state.routes
        if rooms & set(route.endpoint.__module__.split("."))
    }
    assert len(to_state) > 10
    for path in to_state:
        assert backend(path) == "dubito-state", path
    for path in (
        "/",
        "/predict",
        "/invocations",
        "/v2/models/{name}/infer",
        "/health/ready",
        "/version",
    ):
        assert backend(path) == "dubito", path
    (tls,) = RESOURCES["Ingress", "dubito"]["spec"]["tls"]
    assert tls["hosts"] == [RESOURCES["Ingress", "dubito"]["spec"]["rules"][0]["host"]]
