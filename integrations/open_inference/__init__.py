"""The Open Inference Protocol (V2) over REST, as used by Triton, KServe and MLServer clients."""

from service.integrations import Integration

integration = Integration(
    router="integrations.open_inference.routes:router",
    short_paths=(
        "/v2/models/{name}/infer",
        "/v2/models/{name}/versions/{version}/infer",
    ),
    health_paths=("/v2/health/live", "/v2/health/ready"),
)
