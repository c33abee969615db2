import numpy as np
import torch

from benchmarks.peers.posterior import DRAWS, Posterior
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model


def test_peer_posterior_matches_published_model(digits_store, digits_rows):
    artifact = ModelStore(digits_store).open("digits", "1", files=(*NEEDED, "weights.safetensors"))
    runtime, posterior = (
        Model.load(artifact).runtime,
        Posterior(artifact.files["weights.safetensors"]),
    )
    eps = np.random.default_rng().standard_normal(
        (DRAWS, runtime.noise_dimension), dtype=np.float32
    )
    rows = digits_rows[:20]
    log_probs, _ = runtime.run(rows, runtime.sample(eps)[:, None])
    probabilities = posterior.probabilities(torch.from_numpy(rows), torch.from_numpy(eps)).numpy()
    assert np.abs(probabilities - np.exp(log_probs)).max() < 1e-3
    textbook = posterior.textbook(torch.from_numpy(rows), torch.from_numpy(eps)).numpy()
    assert np.abs(textbook - np.exp(log_probs).mean(0)).max() < 1e-3
    assert np.exp(log_probs).std(0).max() > 1e-2  # The draws differ.


def test_peer_predictions_use_fresh_draws(digits_store, digits_rows):
    artifact = ModelStore(digits_store).open("digits", "1", files=("weights.safetensors",))
    posterior, row = (
        Posterior(artifact.files["weights.safetensors"]),
        torch.from_numpy(digits_rows[:1]),
    )
    for predict in (posterior.textbook, posterior.batched):
        assert not torch.equal(predict(row), predict(row))
