"""Ray Serve with `serve.batch` and one replica on all processors."""

import os
import signal

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.peers.posterior import load_predictor


@serve.deployment(num_replicas=1, max_ongoing_requests=1024, ray_actor_options={"num_cpus": 1})
class Classifier:
    def __init__(self) -> None:
        self.model = load_predictor()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002)
    async def predict(self, rows: list[list[float]]) -> list[list[float]]:
        return self.model(rows)

    async def __call__(self, request: Request) -> dict[str, list[list[float]]]:
        return {"probabilities": [await self.predict((await request.json())["inputs"][0])]}


if __name__ == "__main__":
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PEER_", "PYTHONPATH"))
    }
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": settings},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PEER_PORT"])})
    serve.run(Classifier.bind(), route_prefix="/predict")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
