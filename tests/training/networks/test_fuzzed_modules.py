import math
import random

import pytest
import torch

from model_store.errors import InvalidInput
from tests.support.modules import CLASSES, random_module
from tests.support.recipes import content_with
from training import model as models
from training.bayes.posterior import noise
from training.export.graphs import check_exports
from training.model import build, initialise
from training.recipe import Recipe

pytestmark = pytest.mark.usefixtures("fits")
METHODS = ("bhn-realnvp", "bbb-gaussian", "dropout", "mle")
POSTERIORS = {"bhn-realnvp": {"couplings": 1, "hidden": 4}}


def check_module(seed, monkeypatch):
    module, shape = random_module(seed)
    method = random.Random(seed + 1).choice(METHODS)
    content = content_with(method=method, network={"factory": "a.users:module"})
    recipe = Recipe.model_validate({**content, "posterior": POSTERIORS.get(method, {})})
    monkeypatch.setattr(models, "call_factory", lambda *_: module)
    monkeypatch.setattr(models, "channels_first", tuple)
    try:
        model = build(recipe, shape, CLASSES)
        x = torch.randn(12, math.prod(shape), generator=torch.Generator().manual_seed(seed))
        initialise(model, x)
        check_exports(model)
    except InvalidInput as error:
        message = str(error)
        assert message.startswith(("network: expected ", "network.factory: expected "))
        assert "\n" not in message
        assert message.isprintable()
        assert len(message) < 600
        return message
    model.train()
    outputs, kl = model.sample(x, noise(model.posterior, model.posterior.max_draws or 2, seed, 0))
    (
        -model.likelihood.log_likelihood(outputs, torch.zeros(12, dtype=torch.long)).mean()
        + kl.mean()
    ).backward()
    return "served"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_module_is_supported_or_rejected_in_one_line(seed, monkeypatch):
    assert check_module(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 300))
def test_many_random_modules_are_supported_or_rejected_in_one_line(seed, monkeypatch):
    assert check_module(seed, monkeypatch)
