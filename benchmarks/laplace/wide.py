"""A last layer of 128 to 3,100 units with a diagonal posterior: the pass, and draws by the
service's runtime.

The service takes up to 1,000 classes, so graphs are run by its runtime alone, in a process of its
own.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

UNITS, CLASSES, ROWS = 128, 3100, 15_500
DRAWS, REQUESTS = 100, 10


def peak_mb() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def fitted(folder: Path) -> dict[str, Any]:
    """Make a network of fresh weights Bayesian, write its graphs, and return what the pass took."""
    import torch

    from training.export.graphs import export
    from training.export.served import served_network
    from training.fitting.laplace import fit_laplace
    from training.networks.model import build, initialise
    from training.recipe import Recipe

    content = {
        "name": "wide",
        "method": "laplace",
        "data": {"source": "digits"},
        "network": {"hidden": [UNITS]},
        "posterior": {"structure": "diagonal"},
        "training": {"epochs": 1},
    }
    recipe = Recipe.model_validate(content)
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, UNITS), torch.arange(ROWS) % CLASSES
    model = build(recipe, (UNITS,), CLASSES).eval()
    initialise(model, x)
    before = peak_mb()
    facts = fit_laplace(model, recipe.posterior, (x, y), (x[:100], y[:100]), 0, 20)
    memory = peak_mb() - before
    for name, content_of in export(model, served_network(model, x[:1000], 0, names=[])).items():
        (folder / name).write_bytes(content_of)
    return {
        "rows": ROWS,
        "pass_s": facts["seconds"],
        "pass_mb": memory,
        "weights": facts["weights"],
    }


def served(folder: Path) -> dict[str, float]:
    """Return what rows take, one at a time, each with draws of its own."""
    from model_store.inference.runtime import Runtime

    graphs = ((folder / name).read_bytes() for name in ("sampler.onnx", "network.onnx"))
    runtime = Runtime(*graphs, noise_dimension=(UNITS + 1) * CLASSES, threads=1, paired=False)
    x = np.random.default_rng(0).normal(size=(1, UNITS)).astype(np.float32)
    loaded, seconds = peak_mb(), []
    for seed in range(REQUESTS):
        begun = time.perf_counter()
        log_probs, _ = runtime.run_set(x, runtime.draw_set(seed, DRAWS))
        assert np.allclose(np.exp(log_probs.astype(np.float64)).sum(-1), 1.0, atol=1e-4)
        seconds.append(time.perf_counter() - begun)
    return {"loaded_mb": loaded, "peak_mb": peak_mb(), "row_s": statistics.median(seconds)}


def measure() -> dict[str, Any]:
    """Return what the pass and a row take, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for part in ("fitted", "served"):
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.laplace.wide",
                part,
                folder,
            ]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found |= json.loads(told.splitlines()[-1])
        return found


if __name__ == "__main__":
    print(json.dumps((fitted if sys.argv[1] == "fitted" else served)(Path(sys.argv[2]))))
