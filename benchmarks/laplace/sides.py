"""One side of one case, in a process of its own: `python -m benchmarks.laplace.sides OURS INDEX
FILE PRECISION`."""

import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.laplace.cases import CASES, Case, problem

BATCH_ROWS = 512
DRAWS = 1000  # that probabilities are means of
TIMED_DRAWS = 100
Timed = dict[str, float]


class AppendOne(nn.Module):
    """Makes a bias one more input, as it is of ours: theirs is a layer of its own."""

    def forward(self, h: Tensor) -> Tensor:
        """Return rows with a 1 at their end."""
        return torch.cat([h, h.new_ones(len(h), 1)], 1)


def peak_mb() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def warm_up() -> None:
    """Use what both sides use, so that the loading of libraries is nobody's time or memory."""
    x = torch.randn(BATCH_ROWS, 50)
    torch.linalg.eigh(x.double().T @ x.double())
    torch.linalg.cholesky(x.T @ x)
    torch.linalg.eigh(x.T @ x)


def timed(times: Timed, name: str, work: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    made = work()
    times[name] = time.perf_counter() - begun
    return made


def ours(
    case: Case, made: nn.Sequential, rows: tuple[Tensor, Tensor], judged: Tensor, _: float
) -> dict[str, Any]:
    """Return evidence, the precision that is chosen, draws, times and memory of Dubito."""
    from training.fitting.curvature import curvature
    from training.fitting.laplace import (
        best_precision,
        fit_laplace,
        log_marginal_likelihood,
        predicted,
    )
    from training.networks.model import build, initialise
    from training.posteriors import noise
    from training.recipe import Recipe

    factory = "without_biases" if case.of_all else "with_biases"
    folder = Path(tempfile.mkdtemp())
    save_file(made.state_dict(), folder / "w.safetensors")
    hidden = [layer.out_features for layer in made if isinstance(layer, nn.Linear)][:-1]
    network: dict[str, Any] = (
        {"hidden": hidden} if case.of_mnist else {"factory": f"benchmarks.laplace.cases:{factory}"}
    )
    recipe = Recipe.model_validate(
        {
            "name": "beside",
            "method": "laplace",
            "task": "regression" if case.outputs == 1 else "classification",
            "data": {"source": "digits"},
            "network": network
            | {
                "weights": str(folder / "w.safetensors"),
                **({"bayesian": ["*"]} if case.of_all else {}),
            },
            "posterior": {"structure": case.structure},
            "training": {"epochs": 0},
        }
    )
    outputs = 0 if case.outputs == 1 else case.outputs
    model = build(recipe, rows[0].shape[1:], outputs, rows[0][:100]).eval()
    initialise(model, rows[0][:100], standardise=False)
    model.likelihood.start(rows[1])
    times: Timed = {}
    warm_up()
    before = peak_mb()
    is_regression = case.outputs == 1
    facts = timed(
        times,
        "fit",
        lambda: fit_laplace(model, recipe.posterior, rows, rows, 0, 20, 1.0, is_regression),
    )
    eps = noise(model.posterior, TIMED_DRAWS, 1)
    timed(times, "predict", lambda: predicted(model, judged, eps))
    times["memory"] = peak_mb() - before
    found = curvature(model, *rows, 0)
    square = model.posterior.centre().double().square().sum().item()
    eigens = list(found.eigens)
    best = best_precision(eigens, square)
    served = predicted(model, judged, noise(model.posterior, DRAWS, 2))
    draws = served[..., 0] if is_regression else served.exp()
    return times | {
        "best": best,
        "chosen": facts["prior_std"] ** -2,
        "evidence": log_marginal_likelihood(found.log_likelihood, eigens, square, best),
        "evidence_at_1": log_marginal_likelihood(found.log_likelihood, eigens, square, 1.0),
        "draws": draws.numpy(),
    }


def theirs(
    case: Case, made: nn.Sequential, rows: tuple[Tensor, Tensor], judged: Tensor, precision: float
) -> dict[str, Any]:
    """Return the same of laplace-torch; evidence and draws under the precision of ours."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    names = {"full": "full", "kronecker": "kron", "diagonal": "diag"}
    if case.structure == "kronecker" and not case.of_all:
        *body, last = made
        assert isinstance(last, nn.Linear)
        whole = nn.Linear(last.in_features + 1, last.out_features, bias=False)
        with torch.no_grad():
            whole.weight.copy_(torch.cat([last.weight, last.bias[:, None]], 1))
        made = nn.Sequential(*body, AppendOne(), whole)
    is_regression = case.outputs == 1
    x, y = rows
    with torch.no_grad():
        error = torch.cat([made(part) for part in x.split(BATCH_ROWS)])[:, 0] - y
    sigma = error.square().mean().sqrt().item() if is_regression else 1.0
    loader = DataLoader(TensorDataset(x, y[:, None] if is_regression else y), batch_size=BATCH_ROWS)
    times: Timed = {}
    warm_up()
    before = peak_mb()

    def fit() -> Any:
        fitted = Laplace(
            made,
            "regression" if is_regression else "classification",
            subset_of_weights="all" if case.of_all else "last_layer",
            hessian_structure=names[case.structure],
            sigma_noise=sigma,
            backend=BackPackGGN,
        )
        fitted.fit(loader)
        fitted.optimize_prior_precision(pred_type="nn", method="marglik", prior_structure="scalar")
        return fitted

    fitted = timed(times, "fit", fit)
    chosen = fitted.prior_precision.item()
    timed(
        times,
        "predict",
        lambda: fitted.predictive_samples(judged, pred_type="nn", n_samples=TIMED_DRAWS),
    )
    times["memory"] = peak_mb() - before
    fitted.prior_precision = precision
    draws = fitted.predictive_samples(judged, pred_type="nn", n_samples=DRAWS)
    draws = draws[..., 0] if is_regression else draws
    exact = Laplace(  # in float64: in float32 thousands of nats are rounded
        made.double(),
        fitted.likelihood,
        subset_of_weights="all" if case.of_all else "last_layer",
        hessian_structure=names[case.structure],
        sigma_noise=sigma,
        prior_precision=1.0,
        backend=BackPackGGN,
    )
    exact.fit(
        DataLoader(
            TensorDataset(x.double(), y.double()[:, None] if is_regression else y),
            batch_size=BATCH_ROWS,
        )
    )
    evidence, at_1 = (
        exact.log_marginal_likelihood(torch.tensor(p, dtype=torch.float64)).item()
        for p in (precision, 1.0)
    )
    found = {
        "chosen": chosen,
        "evidence": evidence,
        "evidence_at_1": at_1,
        "draws": draws.detach().numpy(),
    }
    return times | found


def main() -> None:
    """Measure one side and keep it in a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    side, index, file, precision = sys.argv[1:]
    made = problem(CASES[int(index)])
    torch.manual_seed(1)
    found = (ours if side == "ours" else theirs)(CASES[int(index)], *made, float(precision))
    draws = found.pop("draws").astype(np.float64)
    np.savez(file, mean=draws.mean(0), variance=draws.var(0, ddof=1) / len(draws), **found)


if __name__ == "__main__":
    main()
