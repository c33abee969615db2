import numpy as np
import pytest
import torch

from tests.support.recipes import recipe_with
from tests.support.refusals import refused
from training.data.arrays import digits
from training.data.rows import split, split_sizes
from training.fitting import steps as steps_of_fits
from training.fitting.run import Run
from training.fitting.steps import augment, check_augmentation
from training.recipe import AugmentationSection

SHAPE = (3, 6, 5)
IMAGES = torch.randint(0, 256, (200, 90), generator=torch.Generator().manual_seed(0)).float()


def changed(seed=1, **settings):
    return augment(IMAGES, SHAPE, AugmentationSection(**settings), seed).reshape(-1, *SHAPE)


@pytest.mark.parametrize(("flip", "axis"), [("horizontal", -1), ("vertical", -2)])
def test_about_half_of_the_images_are_flipped_and_the_others_are_as_they_were(flip, axis):
    before, after = IMAGES.reshape(-1, *SHAPE), changed(flip=[flip])
    same = (after - before).abs().amax((1, 2, 3)) < 0.01
    turned = (after - before.flip(axis)).abs().amax((1, 2, 3)) < 0.01
    assert (same ^ turned).all()
    assert 60 < int(turned.sum()) < 140


def test_images_are_shifted_by_whole_pixels_and_the_edge_is_repeated():
    before, after = IMAGES.reshape(-1, *SHAPE), changed(shift=2)
    actual = set()
    padded = torch.nn.functional.pad(before, (2, 2, 2, 2), mode="replicate")
    for n in range(len(before)):
        for down in range(5):
            for across in range(5):
                window = padded[n, :, down : down + 6, across : across + 5]
                if (window - after[n]).abs().max() < 0.01:
                    actual.add((down - 2, across - 2))
                    break
            else:
                continue
            break
        else:
            pytest.fail(f"image {n} is no shift of itself")
    assert len(actual) == 25


def test_a_crop_is_a_part_of_the_image_of_its_size():
    ramp = torch.linspace(0, 255, 64).expand(100, 64, 64).reshape(100, -1)  # rises across
    after = augment(ramp, (64, 64), AugmentationSection(crop=0.4), 3).reshape(100, 64, 64)
    rise = after[:, 0, 60] - after[:, 0, 3]
    full = 255 * 57 / 63
    assert rise.min() >= 0.6 * full - 1
    assert rise.max() <= full + 1
    assert rise.std() > 0.05 * full
    assert (after.min() >= 0) & (after.max() <= 255.001)


def test_the_seed_decides_and_every_row_has_its_own():
    settings = {"flip": ["horizontal", "vertical"], "shift": 1, "crop": 0.3}
    assert torch.equal(changed(**settings), changed(**settings))
    assert not torch.equal(changed(**settings), changed(seed=2, **settings))
    same = augment(IMAGES[:1].expand(50, -1), SHAPE, AugmentationSection(**settings), 1)
    assert len(torch.unique(same, dim=0)) > 40
    assert (
        torch.equal(changed(), IMAGES.reshape(-1, *SHAPE))
        or (changed() - IMAGES.reshape(-1, *SHAPE)).abs().max() < 0.01
    )


def test_only_rows_of_a_step_are_changed_and_a_run_is_repeated_bit_for_bit(tmp_path, monkeypatch):
    recipe = recipe_with(augmentation={"shift": 1}, training={"epochs": 1, "batch_rows": 200})
    data = digits()
    splits = split(data, split_sizes(recipe))
    observed = []

    def noted(x, shape, section, seed):
        observed.append((len(x), seed))
        return augment(x, shape, section, seed)

    monkeypatch.setattr(steps_of_fits, "augment", noted)
    models = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run = Run(recipe, splits, data.shape, 10, tmp_path / name, torch.device("cpu"))
        before = [tensor.clone() for tensor in (*run.train, *run.validation)]
        models.append(run.fit(quiet=True).state_dict())
        assert all(
            torch.equal(a, b) for a, b in zip(before, (*run.train, *run.validation), strict=True)
        )
    steps = len(splits.train) // 200
    assert observed[:steps] == observed[steps:]
    assert {rows for rows, _ in observed} == {200}
    assert len({seed for _, seed in observed}) == steps
    for name, tensor in models[0].items():
        np.testing.assert_array_equal(tensor.numpy(), models[1][name].numpy())


def test_rows_that_are_no_images_are_refused():
    check_augmentation(None, (5,))
    check_augmentation(AugmentationSection(shift=2), (3, 6, 5))
    refused(lambda: check_augmentation(AugmentationSection(), (5,)), "augmentation: expected none")
    refused(
        lambda: check_augmentation(AugmentationSection(shift=5), (6, 5)),
        "augmentation.shift: expected less than 5",
    )
