import numpy as np
import torch

from benchmarks.peers.posterior import DRAWS, Posterior
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model


def test_both_ways_of_the_peers_give_the_published_models_probabilities(digits_store, digits_rows):
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
    each = posterior.probabilities(torch.from_numpy(rows), torch.from_numpy(eps)).numpy()
    assert np.abs(each - np.exp(log_probs)).max() < 1e-3
    textbook = posterior.textbook(torch.from_numpy(rows), torch.from_numpy(eps)).numpy()
    assert np.abs(textbook - np.exp(log_probs).mean(0)).max() < 1e-3
    assert np.exp(log_probs).std(0).max() > 1e-2  # draws differ, so a sampler that is wrong shows


def test_draws_of_the_peers_are_fresh(digits_store, digits_rows):
    artifact = ModelStore(digits_store).open("digits", "1", files=("weights.safetensors",))
    posterior, row = (
        Posterior(artifact.files["weights.safetensors"]),
        torch.from_numpy(digits_rows[:1]),
    )
    for way in (posterior.textbook, posterior.batched):
        assert not torch.equal(way(row), way(row))
