"""A step of a fit: what has faded of Adam's means is dropped, and changes no parameter."""

import torch
from torch import nn

from training.fitting.steps import FADES_OVER, take_step

STEPS = 1500  # .9 to that power is denormal from about the 830th on


def fitted(fades_over: int, monkeypatch: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters whose gradients are zero from the third step on, but for the last's, and their
    mean gradients."""
    monkeypatch.setattr("training.fitting.steps.FADES_OVER", fades_over)
    weights = nn.Parameter(torch.linspace(-1.0, 1.0, 9))
    optimizer = torch.optim.Adam([weights], lr=1e-2, fused=True)
    for step in range(STEPS):
        on = torch.ones(9) if step < 3 else torch.eye(9)[-1]
        take_step(optimizer, [weights], (on * weights).sum(), 10.0, step)
    return weights.detach(), optimizer.state[weights]["exp_avg"]


def test_faded_means_are_dropped(monkeypatch: object) -> None:
    """None is denormal in the end, and the parameters are to the last bit what they would have
    been."""
    kept, faded = fitted(10 * STEPS, monkeypatch)
    dropped, means = fitted(FADES_OVER, monkeypatch)
    tiny = torch.finfo(torch.float32).tiny
    assert ((faded != 0) & (faded.abs() < tiny)).any()
    assert not ((means != 0) & (means.abs() < tiny)).any()
    assert means[-1] != 0
    assert torch.equal(kept, dropped)
