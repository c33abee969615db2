"""BentoML with adaptive batching, batches of up to 64 rows and no latency limit."""

import bentoml

from benchmarks.peers.posterior import load_predictor


@bentoml.service(workers=1, threads=1, traffic={"timeout": 120, "max_concurrency": 1024})
class Classifier:
    def __init__(self) -> None:
        self.model = load_predictor()

    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=60_000)
    def predict(self, inputs: list[list[float]]) -> list[list[float]]:
        return self.model(inputs)
