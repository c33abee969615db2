import numpy as np
import pytest
import torch

from model_store.errors import InvalidInput
from tests.support.models import scale_model
from training.bayes.flows import realnvp
from training.detectors import FOR_ANY_SHAPE, KINDS
from training.detectors.neighbours import (
    BANK_ROWS,
    DIRECTIONS,
    EMBEDDING_NEIGHBOUR,
    EMBEDDING_ROWS,
    NEIGHBOUR,
    SOFTENING,
    CosineNeighbours,
    Neighbours,
)
from training.detectors.roughness import Roughness
from training.detectors.spectrum import (
    EXPLAINED,
    FLOOR,
    MAX_LENGTH,
    Fold,
    Mahalanobis,
    Residual,
    Spectrum,
    principal_components,
)
from training.export.served import served_network


def data(rows=300, seed=0):
    """Draw rows of 8 numbers, off the origin, with very different variances by direction."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    return (rng.normal(size=(rows, 8)) * [10, 8, 5, 2, 1, 0.5, 0.2, 0.1]) @ rotation + 20


def generator():
    return torch.Generator().manual_seed(0)


def score(detector, x):
    return detector(torch.from_numpy(np.float32(x))).numpy()


def fit_detector(kind, x):
    """Fit a spectrum on rows, followed by a detector of that spectrum."""
    x = torch.from_numpy(np.float32(x))
    spectrum = Spectrum.fit(x, generator())
    return torch.nn.Sequential(spectrum, kind.fit(spectrum(x), generator()))


def test_residual_matches_numpy_svd():
    x, new = data(), data(seed=0)[:50] + np.random.default_rng(1).normal(size=(50, 8))
    detector = fit_detector(Residual, x)
    _, singular, directions = np.linalg.svd(x - x.mean(0), full_matrices=False)
    share = np.cumsum(singular**2) / np.sum(singular**2)
    rank = 1 + int(np.sum(share < EXPLAINED))
    assert detector[1].num_components == rank
    rest = (new - x.mean(0)) @ directions[rank:].T
    assert np.allclose(score(detector, new), np.square(rest).sum(1), rtol=1e-3)


def test_residual_is_squared_distance_from_the_span_of_components():
    detector = fit_detector(Residual, data())
    spectrum, rank = detector[0], detector[1].num_components
    components, mean = spectrum.components.numpy(), spectrum.mean.numpy()
    inside = mean + np.random.default_rng(2).normal(size=(20, rank)) @ components[:, :rank].T
    assert np.all(score(detector, inside) <= 1e-8 * np.square(inside - mean).sum(axis=1))
    assert np.allclose(score(detector, inside + 3 * components[:, -1]), 9, rtol=1e-4)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_residual_leaves_at_least_one_direction(columns):
    x = np.random.default_rng(0).normal(size=(50, columns)) * np.array([100.0, 0.1, 0.1])[:columns]
    detector = fit_detector(Residual, x)
    assert detector[1].num_components < columns
    assert np.any(score(detector, x) > 0)


def test_constant_data_score_zero_and_other_rows_score_above_zero():
    x = np.full((10, 4), 7.0)
    other_rows = x + np.random.default_rng(0).normal(size=(10, 4))
    for kind in (Residual, Mahalanobis):
        detector = fit_detector(kind, x)
        assert np.array_equal(score(detector, x), np.zeros(10))
        assert np.all(score(detector, other_rows) > 0)


def test_principal_components_are_accurate_even_if_lapack_fails(monkeypatch):
    rng = generator()
    active = torch.rand(1, 800, generator=rng) * (torch.rand(1, 800, generator=rng) < 0.02)
    rows = active * (1 + 1e-3 * torch.randn(5000, 1, generator=rng))
    rows += 1e-6 * torch.randn(5000, 800, generator=rng) * (active > 0)
    rows = rows.relu() / (1.1 * rows.relu().norm(dim=1, keepdim=True))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        _, variances, directions = principal_components(rows, Fold(torch.ones(800)))
    finally:
        torch.set_num_threads(threads)
    expected = np.linalg.eigvalsh(np.cov(rows.double().T.numpy(), bias=True))[::-1]
    np.testing.assert_allclose(variances[:20], expected[:20], rtol=1e-6)

    def fail(_):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    _, fallback_variances, fallback_directions = principal_components(rows, Fold(torch.ones(800)))
    torch.testing.assert_close(fallback_variances[:20], variances[:20], rtol=1e-6, atol=0.0)
    torch.testing.assert_close((fallback_directions[:, 0] @ directions[:, 0]).abs().item(), 1.0)


def test_error_names_the_detector_that_cannot_be_fitted():
    x = torch.from_numpy(np.float32(data()))
    model = scale_model(realnvp, 8, 6, 3)
    model.network.std.fill_(float("nan"))
    with pytest.raises(InvalidInput, match=r"serving\.combined: .*other than feature_neighbours"):
        served_network(model, x, 0, names=("input_neighbours", "feature_neighbours"))


def test_mahalanobis_distance_matches_numpy_covariance_with_a_floor():
    x, new = data(), data(seed=3)
    detector = fit_detector(Mahalanobis, x)
    covariance = np.cov(x.T, bias=True)
    covariance += FLOOR * np.trace(covariance) / 8 * np.eye(8)
    centred = new - x.mean(0)
    expected = np.einsum("ni,ij,nj->n", centred, np.linalg.inv(covariance), centred)
    assert np.allclose(score(detector, new), expected, rtol=1e-2)


@pytest.mark.parametrize("neighbour", [EMBEDDING_NEIGHBOUR, NEIGHBOUR])
def test_neighbours_match_brute_force(neighbour):
    x, new = data(200) - 20, data(30, seed=3) - 20
    # With 8 directions there is no projection.
    detector = Neighbours.fit(torch.from_numpy(np.float32(x)), generator(), neighbour=neighbour)
    softening = SOFTENING * np.linalg.norm(x, axis=1).mean()

    def normalise(rows):
        return rows / (np.linalg.norm(rows, axis=1, keepdims=True) + softening)

    distances = np.square(normalise(new)[:, None] - normalise(x)[None]).sum(-1)
    expected = np.sort(distances, axis=1)[:, neighbour - 1]
    assert np.allclose(score(detector, new), expected, rtol=1e-2, atol=1e-5)


def test_distances_within_tight_distant_clusters_are_exact_in_float32():
    noise = np.random.default_rng(5)
    x = np.repeat([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], 100, axis=0) + 0.004 * noise.normal(
        size=(200, 4)
    )
    detector = Neighbours.fit(torch.from_numpy(np.float32(x)), generator(), neighbour=NEIGHBOUR)
    points, bank = (
        detector.project(torch.from_numpy(np.float32(x))).double(),
        detector.bank.double(),
    )
    exact = (points[:, None] - bank.T[None]).square().sum(-1).sort(dim=1).values[:, NEIGHBOUR - 1]
    exact = exact.clamp(min=1e-6).numpy()
    assert exact.mean() < 1e-4
    assert np.allclose(score(detector, x), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_neighbours_are_finite_for_few_training_rows(rows):
    x = torch.randn(rows, 4, generator=generator())
    assert torch.isfinite(Neighbours.fit(x, generator())(x)).all()


def test_bank_rows_and_directions_are_bounded():
    x = torch.randn(BANK_ROWS + 100, DIRECTIONS + 6, generator=generator())
    assert Neighbours.fit(x, generator()).bank.shape == (DIRECTIONS, BANK_ROWS)
    assert Neighbours.fit(x, generator(), EMBEDDING_ROWS, EMBEDDING_NEIGHBOUR).bank.shape == (
        DIRECTIONS,
        EMBEDDING_ROWS,
    )


def test_folds_keep_short_rows_and_mean_inner_products_of_long_rows():
    short = torch.randn(2, 5, generator=generator())
    assert torch.equal(Fold.fit(5, generator())(short), short)
    length = 2 * MAX_LENGTH + 7
    x = torch.randn(2, length, generator=generator())
    folded = torch.stack(
        [Fold.fit(length, torch.Generator().manual_seed(seed))(x) for seed in range(100)]
    )
    assert folded.shape == (100, 2, MAX_LENGTH)
    products = (folded[:, 0] * folded[:, 1]).sum(-1)
    assert abs(products.mean() - x[0] @ x[1]) < 6 * products.std() / 10


def test_spectrum_of_long_rows_equals_spectrum_of_their_folds():
    x = torch.randn(30, MAX_LENGTH + 100, generator=generator())
    fold = Fold.fit(x.shape[1], generator())
    mean = torch.zeros(MAX_LENGTH)
    components = torch.linalg.qr(torch.randn(MAX_LENGTH, 3, generator=generator()))[0]
    folded_spectrum = Spectrum(Fold.fit(MAX_LENGTH, generator()), mean, components)
    assert torch.equal(Spectrum(fold, mean, components)(x), folded_spectrum(fold(x)))


def test_served_network_returns_network_outputs_and_densities():
    x = torch.from_numpy(np.float32(data()))
    model = scale_model(realnvp, 8, 5, 3)
    module = served_network(model, x, seed=0)
    theta = torch.ones(2, 1, 8)
    log_probs, density = module(x, theta)
    assert torch.equal(log_probs, torch.log_softmax(model.network(x, theta), -1))
    assert tuple(module.density) == FOR_ANY_SHAPE
    assert module.two_sided == ("residual", "mahalanobis")
    spaces = {
        "input": x,
        "spectrum": module.spectrum(x),
        "embedding": model.network.embed(x, module.centre),
    }
    for m, name in enumerate(FOR_ANY_SHAPE):
        assert torch.equal(density[:, m], module.density[name](spaces[KINDS[name].space])), name


def test_served_network_returns_only_named_detectors_in_order():
    x = torch.from_numpy(np.float32(data()))
    model = scale_model(realnvp, 8, 5, 3)
    full_module = served_network(model, x, seed=0)
    theta = torch.ones(2, 1, 8)
    density = dict(zip(FOR_ANY_SHAPE, full_module(x, theta)[1].T, strict=True))
    module = served_network(model, x, seed=0, names=["mahalanobis", "residual"])
    assert torch.equal(
        module(x, theta)[1], torch.stack([density["mahalanobis"], density["residual"]], dim=1)
    )
    assert served_network(model, x, seed=0, names=[])(x, theta)[1].shape == (len(x), 0)


def test_embedding_is_the_input_of_the_last_layer():
    x = torch.from_numpy(np.float32(data()))
    network = scale_model(realnvp, 8, 5, 3).network
    theta = torch.rand(1, 1, 8, generator=generator())
    last = network.module[-1]
    h = network.embed(x, theta)
    assert h.shape == (300, 5)
    values = (h @ last.direction.T) * theta[0, 0, 5:] / last.direction.norm(dim=1) + last.bias
    assert torch.allclose(values, network(x, theta)[0], atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (3, 5, 4), (3, 1, 1)])
def test_roughness_is_von_neumann_ratio_along_both_axes(shape):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(40, *shape)).cumsum(-1) * 50
    detector = Roughness.fit(torch.from_numpy(np.float32(x.reshape(40, -1))), generator(), shape)
    images = x.reshape(40, -1, *shape[-2:])
    floor = 1e-4 * images.var(axis=(2, 3)).mean() or 1.0
    means = [
        np.square(np.diff(images, axis=a)).mean(axis=(1, 2, 3))
        for a in (2, 3)
        if images.shape[a] > 1
    ]
    expected = (
        sum(means, np.zeros(40))
        / max(len(means), 1)
        / (2 * images.var(axis=(2, 3)).mean(axis=1) + floor)
    )
    assert np.allclose(score(detector, x.reshape(40, -1)), np.maximum(expected, 1e-6), rtol=1e-3)


def test_roughness_is_1_for_any_white_noise_and_near_0_for_smooth_images():
    rng = np.random.default_rng(6)
    x = rng.uniform(0, 255, (20, 3 * 64 * 64))
    detector = Roughness.fit(torch.from_numpy(np.float32(x)), generator(), (3, 64, 64))
    pixels = 3 * 64 * 64
    for noise in (x, rng.normal(120, 3, x.shape), 255 * (rng.random(x.shape) < 0.1)):
        assert np.allclose(score(detector, noise), 1.0, atol=6 * 2 / np.sqrt(pixels) * 2)
    ramp = np.broadcast_to(np.linspace(0, 255, 64), (1, 3, 64, 64)).reshape(1, -1)
    assert score(detector, ramp)[0] < 0.01
    assert score(detector, np.full((1, pixels), 200.0))[0] < 1e-3


def test_cosine_neighbours_match_brute_force_for_any_norm():
    x = np.float32(data())
    detector = CosineNeighbours.fit(torch.from_numpy(x), generator())
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = np.sort(unit @ unit.T, axis=1)[:, -5]
    assert np.allclose(score(detector, x), np.maximum(1 - cosines, 1e-6), atol=1e-5)
    assert np.allclose(score(detector, 7 * x), score(detector, x), atol=1e-5)
    assert np.isfinite(score(detector, 0 * x)).all()


def test_small_angles_are_exact_in_float32():
    x = np.float32(1 + 0.01 * np.random.default_rng(6).normal(size=(200, 384)))
    detector = CosineNeighbours.fit(torch.from_numpy(x), generator())
    unit = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    exact = 1 - np.sort(unit @ unit.T, axis=1)[:, -5]
    assert 1e-5 < exact.mean() < 1e-4
    assert np.allclose(score(detector, x), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [Residual, Mahalanobis])
def test_squared_norm_of_deviation_equals_score(kind):
    x, new = data(), torch.from_numpy(np.float32(data(seed=3)))
    detector = fit_detector(kind, x)
    spectrum = detector[0](new)
    deviation = detector[1].deviation(spectrum)
    assert torch.allclose(deviation.square().sum(1), detector(new), rtol=1e-4)
    assert torch.allclose(detector[0].invert(deviation).square().sum(1), detector(new), rtol=1e-4)


def test_mahalanobis_deviation_is_symmetric_whitening():
    x, new = data(), data(seed=3)
    spectrum, detector = fit_detector(Mahalanobis, x)
    covariance = np.cov(x.T, bias=True)
    covariance += FLOOR * np.trace(covariance) / 8 * np.eye(8)
    variances, directions = np.linalg.eigh(covariance)
    expected = (new - x.mean(0)) @ (directions / np.sqrt(variances)) @ directions.T
    actual = spectrum.invert(
        detector.deviation(spectrum(torch.from_numpy(np.float32(new))))
    ).numpy()
    assert np.allclose(actual, expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("columns", [8, DIRECTIONS + 6])
def test_squared_norm_of_neighbour_deviation_equals_score(columns):
    x, new = (torch.randn(rows, columns, generator=generator()) for rows in (100, 20))
    detector = Neighbours.fit(x, generator())
    deviation = detector.deviation(new)
    assert deviation.shape == (20, columns)
    assert torch.allclose(deviation.square().sum(1), detector(new), rtol=1e-3, atol=1e-6)


def test_terms_sum_to_the_densities():
    x = torch.from_numpy(np.float32(data()))
    module = served_network(scale_model(realnvp, 8, 5, 3), x, seed=0)
    assert module.attributed == ("residual", "mahalanobis", "input_neighbours")
    terms = module.terms(x)
    assert terms.shape == (300, 3, 8)
    assert (terms >= 0).all()
    assert torch.allclose(
        terms.sum(2), module(x, torch.ones(2, 1, 8))[1][:, :3], rtol=1e-3, atol=1e-5
    )


def test_spread_divides_terms_among_numbers_folded_together():
    length = 2 * MAX_LENGTH + 7
    fold, terms = Fold.fit(length, generator()), torch.rand(3, MAX_LENGTH, generator=generator())
    spread = fold.spread(terms)
    assert spread.shape == (3, length)
    assert torch.allclose(spread.sum(1), terms.sum(1), rtol=1e-5)
    bucket = fold(torch.eye(length)[MAX_LENGTH + 5 : MAX_LENGTH + 6])[0].abs().argmax()
    assert torch.allclose(spread[0][[5, MAX_LENGTH + 5, 2 * MAX_LENGTH + 5]], terms[0, bucket] / 3)
    short = Fold.fit(8, generator())
    assert torch.equal(short.spread(terms[:, :8]), terms[:, :8])
