import numpy as np
import pytest
import torch

from model_store.artifacts.store import ModelStore
from model_store.conformal.label_shift import SHARES
from model_store.inference.model import Model
from tests.support.environment import working_in
from tests.support.recipes import write_recipe
from tests.support.refusals import assert_invalid
from training.__main__ import main
from training.bayes.likelihoods import Categorical
from training.data.rows import class_shares, class_weights
from training.versions import open_parent

Y = np.array([0] * 6 + [1] * 3 + [2])
CLASSES = ("a", "b", "c")


def test_class_weights_have_mean_1_and_can_balance_classes():
    balanced = class_weights("balanced", CLASSES, Y)
    assert balanced[Y].mean() == pytest.approx(1.0)
    np.testing.assert_allclose(balanced * class_shares(Y, 3), 1 / 3)
    weights = class_weights({"c": 4.0}, CLASSES, Y)
    assert weights[Y].mean() == pytest.approx(1.0)
    np.testing.assert_allclose(weights / weights[0], [1.0, 1.0, 4.0])
    assert_invalid(
        lambda: class_weights({"d": 2.0}, CLASSES, Y), "data.class_weights: expected some of", "'d'"
    )


@pytest.mark.parametrize("weights", ["balanced", {"a": 0.2, "c": 30.0}])
def test_weighted_fit_predicts_unweighted_class_shares(weights):
    likelihood = Categorical(3, is_weighted=True).double()
    log_weights = torch.from_numpy(np.log(class_weights(weights, CLASSES, Y)))
    likelihood.log_weights.copy_(log_weights)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    y = torch.from_numpy(Y)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-14
    )

    def loss():
        optimizer.zero_grad()
        value = -likelihood.weighted_log_likelihood(
            likelihood(logits.expand(1, len(y), 3)), y
        ).mean()
        value.backward()
        return value

    optimizer.step(loss)
    np.testing.assert_allclose(
        likelihood(logits[None, None]).exp()[0, 0].detach(), [0.6, 0.3, 0.1], atol=1e-6
    )
    weighted = torch.softmax(logits, 0).detach() / torch.from_numpy(
        class_weights(weights, CLASSES, Y) * [6, 3, 1]
    )
    np.testing.assert_allclose(weighted / weighted[0], 1.0, atol=1e-5)


def test_row_with_weight_w_counts_as_w_rows():
    likelihood = Categorical(2, is_weighted=True)
    likelihood.log_weights.copy_(torch.tensor([1.0, 3.0]).log())
    outputs = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 1, 0, 1])
    actual = likelihood.weighted_log_likelihood(likelihood(outputs), y)
    plain = torch.log_softmax(outputs, -1).gather(2, y.expand(4, 5)[..., None])[..., 0]
    torch.testing.assert_close(actual, plain * torch.tensor([1.0, 3.0, 3.0, 1.0, 3.0]))
    assert Categorical(2).state_dict().keys() == {"temperature"}


def test_weighted_version_is_published_with_class_shares_of_the_data(tmp_path, fits, capsys):
    data = {"class_weights": {"3": 5.0}, "reference": 60, "ranking": 60}
    path = write_recipe(tmp_path, data=data, serving={"combined": ["entropy"]})
    with working_in(tmp_path):
        assert main(["fit", str(path), "--quiet", "--device", "cpu"]) == 0
        store = ModelStore(tmp_path / "models")
        model, parent = Model.load(store.open("small", "1")), open_parent(store, "small", "model")
        weights = parent.model().likelihood.log_weights.exp()
        assert weights[3] / weights[0] == pytest.approx(5.0, rel=1e-5)
        assert sum(model.manifest.priors) == pytest.approx(1.0)
        assert model.label_shift.labels.shape == (60,)
        np.testing.assert_allclose(model.label_shift.shares, model.manifest.priors, atol=0.02)
        assert SHARES in model.label_shift.tensors()
        invalid_recipe = write_recipe(tmp_path, data={"class_weights": {"ten": 5.0}})
        capsys.readouterr()
        assert main(["fit", str(invalid_recipe), "--quiet"]) == 2
        assert "data.class_weights: expected some of" in capsys.readouterr().err
