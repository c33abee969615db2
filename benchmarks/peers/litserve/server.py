"""LitServe with batching, its fast queue and one model worker."""

import os
from typing import Any

import litserve as ls

from benchmarks.peers.posterior import load_predictor


class Classifier(ls.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002
        self.model = load_predictor()

    def decode_request(self, request: dict[str, Any]) -> list[float]:
        return request["inputs"][0]

    def batch(self, inputs: list[list[float]]) -> list[list[float]]:
        return inputs

    def predict(self, rows: list[list[float]]) -> list[list[float]]:
        return self.model(rows)

    def unbatch(self, output: list[list[float]]) -> list[list[float]]:
        return output

    def encode_response(self, output: list[float]) -> dict[str, list[list[float]]]:
        return {"probabilities": [output]}


if __name__ == "__main__":
    api = Classifier(max_batch_size=64, batch_timeout=0.002)
    server = ls.LitServer(
        api, accelerator="cpu", devices=1, workers_per_device=1, timeout=120, fast_queue=True
    )
    server.run(
        host="127.0.0.1",
        port=int(os.environ["PEER_PORT"]),
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
    )
