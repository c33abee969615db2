"""Rows with extreme numbers."""

import numpy as np

from service.api.predictions import PredictAnswer


def assert_extremes_are_answered_or_refused(client, model, size):
    generator, answered, refused = np.random.default_rng(0), 0, 0
    for magnitude in 10.0 ** np.arange(0.0, 38.5, 1.0):
        signs = generator.choice([-1.0, 1.0], size)
        rows = [np.full(size, magnitude), signs * magnitude, np.eye(1, size)[0] * magnitude]
        for n, row in enumerate(rows):
            fields = {"num_samples": 1 + n, "return_samples": n != 1, "seed": 7}
            request = {"model": model, "inputs": [row.tolist()], **fields}
            answer = client.post("/predict", json=request)
            if answer.status_code == 200:
                PredictAnswer.model_validate_json(
                    answer.content, strict=True
                )  # strict mode rejects null
                answered += 1
            else:
                assert answer.status_code == 422, answer.text
                assert answer.json()["detail"].startswith(
                    "inputs.0: expected numbers that the model can compute"
                )
                refused += 1
    assert answered > 0
