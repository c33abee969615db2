"""Validate the Kubernetes manifests with `kubectl`."""

import shutil
import subprocess

import pytest
import yaml

from tests.test_kubernetes import FOLDER, RESOURCES, SHARED

pytestmark = pytest.mark.real


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="not installed: kubectl")
def test_kubectl_builds_all_resources():
    completed = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    created = {
        (item["kind"], item["metadata"]["name"]): item
        for item in yaml.safe_load_all(completed.stdout)
    }
    (settings,) = [item for (kind, _), item in created.items() if kind == "ConfigMap"]
    assert settings["data"] == SHARED
    assert created.keys() - {("ConfigMap", settings["metadata"]["name"])} == RESOURCES.keys()
    for item in created.values():
        assert item["kind"] == "Namespace" or item["metadata"]["namespace"] == "dubito"
        if item["kind"] in ("Deployment", "StatefulSet"):
            (container,) = item["spec"]["template"]["spec"]["containers"]
            assert container["envFrom"][0] == {
                "configMapRef": {"name": settings["metadata"]["name"]}
            }
            assert container["image"] == "dubito-service:latest"
