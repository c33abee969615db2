"""MLServer with adaptive batching and the Open Inference Protocol."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.posterior import load_predictor


class Classifier(MLModel):
    async def load(self) -> bool:
        self.model = load_predictor()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        probabilities = np.array(self.model(rows.tolist()), dtype=np.float32)
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output("probabilities", probabilities)]
        )
