"""The part of KubeRay's `RayService` (ray.io/v1) that our manifest uses, as a JSON schema.

Written after KubeRay's API reference, since the resource's own schema is in no Python package. Pod
templates are checked by themselves, against Kubernetes' schema. Keys that are deprecated there are
left out on purpose.
"""

from typing import Any


def record(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with no other keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


COUNT = {"type": "integer", "minimum": 0}
STRINGS = {
    "type": "object",
    "additionalProperties": {"type": "string"},
}  # of what `ray start` is given
POD_TEMPLATE = {"type": "object"}

AUTOSCALER = record(
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    idleTimeoutSeconds=COUNT,
    securityContext={"type": "object"},
    resources={"type": "object"},
)
WORKERS = record(
    "groupName rayStartParams template",
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    idleTimeoutSeconds=COUNT,
    numOfHosts=COUNT,
    rayStartParams=STRINGS,
    template=POD_TEMPLATE,
)
CLUSTER = record(
    "headGroupSpec",
    rayVersion={"type": "string"},
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=AUTOSCALER,
    headGroupSpec=record("rayStartParams template", rayStartParams=STRINGS, template=POD_TEMPLATE),
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_SERVICE = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object"},
    spec=record(
        "serveConfigV2 rayClusterConfig",
        upgradeStrategy=record("type", type={"enum": ["NewCluster", "None"]}),
        excludeHeadPodFromServeSvc={"type": "boolean"},
        serveConfigV2={"type": "string"},
        rayClusterConfig=CLUSTER,
    ),
)
