import numpy as np
import pytest
import torch

from tests.support.recipes import recipe_with
from tests.support.refusals import assert_invalid
from training.data.arrays import digits
from training.data.rows import split, split_sizes
from training.fitting import steps as training_steps
from training.fitting.run import Run
from training.fitting.steps import augment, check_augmentation
from training.recipe import AugmentationSection

SHAPE = (3, 6, 5)
IMAGES = torch.randint(0, 256, (200, 90), generator=torch.Generator().manual_seed(0)).float()


def augment_images(seed=1, **settings):
    return augment(IMAGES, SHAPE, AugmentationSection(**settings), seed).reshape(-1, *SHAPE)


@pytest.mark.parametrize(("flip", "axis"), [("horizontal", -1), ("vertical", -2)])
def test_flip_mirrors_about_half_of_the_images(flip, axis):
    before, after = IMAGES.reshape(-1, *SHAPE), augment_images(flip=[flip])
    is_same = (after - before).abs().amax((1, 2, 3)) < 0.01
    is_flipped = (after - before.flip(axis)).abs().amax((1, 2, 3)) < 0.01
    assert (is_same ^ is_flipped).all()
    assert 60 < int(is_flipped.sum()) < 140


def test_shift_moves_images_by_full_pixels_and_repeats_edges():
    before, after = IMAGES.reshape(-1, *SHAPE), augment_images(shift=2)
    shifts = set()
    padded = torch.nn.functional.pad(before, (2, 2, 2, 2), mode="replicate")
    for n in range(len(before)):
        for row in range(5):
            for column in range(5):
                window = padded[n, :, row : row + 6, column : column + 5]
                if (window - after[n]).abs().max() < 0.01:
                    shifts.add((row - 2, column - 2))
                    break
            else:
                continue
            break
        else:
            pytest.fail(f"image {n} is not a shift of the original")
    assert len(shifts) == 25


def test_crop_enlarges_a_part_of_the_image_to_full_size():
    ramp = torch.linspace(0, 255, 64).expand(100, 64, 64).reshape(100, -1)  # left to right
    after = augment(ramp, (64, 64), AugmentationSection(crop=0.4), 3).reshape(100, 64, 64)
    rise = after[:, 0, 60] - after[:, 0, 3]
    full = 255 * 57 / 63
    assert rise.min() >= 0.6 * full - 1
    assert rise.max() <= full + 1
    assert rise.std() > 0.05 * full
    assert (after.min() >= 0) & (after.max() <= 255.001)


def test_augmentation_depends_on_seed_and_differs_between_rows():
    settings = {"flip": ["horizontal", "vertical"], "shift": 1, "crop": 0.3}
    assert torch.equal(augment_images(**settings), augment_images(**settings))
    assert not torch.equal(augment_images(**settings), augment_images(seed=2, **settings))
    copies = augment(IMAGES[:1].expand(50, -1), SHAPE, AugmentationSection(**settings), 1)
    assert len(torch.unique(copies, dim=0)) > 40
    assert (
        torch.equal(augment_images(), IMAGES.reshape(-1, *SHAPE))
        or (augment_images() - IMAGES.reshape(-1, *SHAPE)).abs().max() < 0.01
    )


def test_augmentation_changes_only_step_rows_and_is_reproducible(tmp_path, monkeypatch):
    recipe = recipe_with(augmentation={"shift": 1}, training={"epochs": 1, "batch_rows": 200})
    data = digits()
    splits = split(data, split_sizes(recipe))
    calls = []

    def record_call(x, shape, section, seed):
        calls.append((len(x), seed))
        return augment(x, shape, section, seed)

    monkeypatch.setattr(training_steps, "augment", record_call)
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
    assert calls[:steps] == calls[steps:]
    assert {rows for rows, _ in calls} == {200}
    assert len({seed for _, seed in calls}) == steps
    for name, tensor in models[0].items():
        np.testing.assert_array_equal(tensor.numpy(), models[1][name].numpy())


def test_non_images_and_large_shifts_are_rejected():
    check_augmentation(None, (5,))
    check_augmentation(AugmentationSection(shift=2), (3, 6, 5))
    assert_invalid(
        lambda: check_augmentation(AugmentationSection(), (5,)), "augmentation: expected none"
    )
    assert_invalid(
        lambda: check_augmentation(AugmentationSection(shift=5), (6, 5)),
        "augmentation.shift: expected less than 5",
    )
