import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.support.images import png_file
from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.data import load


def files(train=6, test=2, shape=(4, 5, 3), suffix="png", seed=0):
    rng = np.random.default_rng(seed)
    content, arrays = {}, {}
    for part, count in (("train", train), ("test", test)):
        for name in ("cat", "dog"):
            for i in range(count):
                array = rng.integers(0, 256, shape).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(array).save(file, "JPEG" if suffix == "jpg" else "PNG")
                content[f"{part}/{name}/{i}.{suffix}"] = file.getvalue()
                arrays[f"{part}/{name}/{i}.{suffix}"] = array
    return content, arrays


def write(path, content, is_zip):
    if is_zip:
        with zipfile.ZipFile(path, "w") as file:
            for name, data in content.items():
                file.writestr(name, data)
    else:
        for name, data in content.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


def loader(tmp_path, content, is_zip=False):
    write(tmp_path / "pictures", content, is_zip)
    return lambda **data: load(get_recipe("images:pictures", **data), tmp_path)


@pytest.mark.parametrize("is_zip", [False, True])
def test_colour_images_are_channels_first_uint8_with_folders_as_labels(tmp_path, is_zip):
    content, arrays = files()
    data = loader(
        tmp_path,
        {**content, "train/README.txt": b"", "train/cat/.hidden.png": b"", "train/cat/a.txt": b""},
        is_zip,
    )()
    assert (data.shape, data.classes, data.image.mode) == ((3, 4, 5), ("cat", "dog"), "RGB")
    assert data.train.x.dtype == np.uint8
    assert data.train.ids.tolist() == sorted(name for name in arrays if name.startswith("train"))
    for rows, part in ((data.train, "train"), (data.test, "test")):
        names = sorted(name for name in arrays if name.startswith(part))
        assert np.array_equal(
            rows.x, [arrays[name].transpose(2, 0, 1).reshape(-1) for name in names]
        )
        assert [data.classes[c] for c in rows.y] == [name.split("/")[1] for name in names]


def test_skipped_files_are_counted_by_suffix(tmp_path, caplog):
    extra = dict.fromkeys(("a.gif", "b.GIF", "notes.txt", "LICENSE", ".hidden"), b"")
    content = {**files()[0], **{f"train/cat/{name}": data for name, data in extra.items()}}
    with caplog.at_level("INFO", "dubito.training"):
        assert len(loader(tmp_path, content)().train) == 12
    assert caplog.messages == [
        "skipping 4 files other than images (.png|.jpg|.jpeg|.webp|.bmp|.tif|.tiff): "
        "2 of .gif, 1 of no suffix, 1 of .txt"
    ]


def test_grey_images_have_no_channel_axis_unless_any_image_has_colour(tmp_path):
    grey, _ = files(shape=(4, 5))
    assert loader(tmp_path, grey, is_zip=True)().shape == (4, 5)
    mixed = {**grey, "test/cat/9.png": files()[0]["test/cat/0.png"]}
    (tmp_path / "other").mkdir()
    assert loader(tmp_path / "other", mixed, is_zip=True)().shape == (3, 4, 5)


def test_fixed_share_is_held_out_if_there_are_no_test_images(tmp_path):
    content, arrays = files(train=10, test=0)
    read = loader(tmp_path, content)
    data = read(test_fraction=0.3)
    assert (len(data.train), len(data.test)) == (14, 6)
    all_rows = np.concatenate([data.train.x, data.test.x])
    expected = np.array([array.transpose(2, 0, 1).reshape(-1) for array in arrays.values()])
    assert sorted(all_rows.tolist()) == sorted(expected.tolist())
    assert read(test_fraction=0.3).digest() == data.digest() != read(test_fraction=0.2).digest()


def test_images_of_different_sizes_are_resized_only_if_configured(tmp_path):
    content, _ = files()
    content |= {
        f"train/cat/9{i}.png": data for i, data in enumerate(files(shape=(9, 7, 3))[0].values())
    }
    read = loader(tmp_path, content)
    assert_invalid(
        read,
        "'train/cat/90.png'",
        "an image of 5 x 4 pixels like train/cat/0.png",
        "`image_size`",
        "got 7 x 9",
    )
    data = read(image_size=[6, 8])
    assert (data.shape, data.image.resize) == ((3, 6, 8), True)
    crop = read(image_size=[4, 4], image_resize=4, image_interpolation="bicubic")
    assert (crop.shape, crop.image.shorter, crop.image.interpolation) == ((3, 4, 4), 4, "bicubic")
    dogs = [
        array for name, array in files()[1].items() if name.startswith("train/dog")
    ]  # one pixel wider than the crop
    assert np.array_equal(
        crop.train.x[-len(dogs) :], [a[:, :4].transpose(2, 0, 1).reshape(-1) for a in dogs]
    )
    assert read(image_size=[4, 4]).digest() != crop.digest()


@pytest.mark.parametrize(
    "keys",
    [
        {"image_resize": 8},
        {"image_interpolation": "bicubic"},
        {"image_size": [4, 8], "image_resize": 7},
    ],
)
def test_conflicting_image_keys_are_rejected(keys):
    with pytest.raises(ValueError, match=r"no value without image_size|at least the longer side"):
        get_recipe("images:pictures", **keys)


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("parent", ["", "photos/"])
def test_class_folders_without_splits_are_training_images(tmp_path, is_zip, parent):
    content, arrays = files(train=10, test=0)
    members = {parent + name.removeprefix("train/"): data for name, data in content.items()}
    data = loader(tmp_path, members, is_zip)(test_fraction=0.3)
    assert (len(data.train), len(data.test), data.classes) == (14, 6, ("cat", "dog"))
    all_rows = np.concatenate([data.train.x, data.test.x])
    expected = np.array([array.transpose(2, 0, 1).reshape(-1) for array in arrays.values()])
    assert sorted(all_rows.tolist()) == sorted(expected.tolist())


def test_class_folder_without_images_is_rejected(tmp_path):
    content, _ = files()
    (tmp_path / "pictures" / "train" / "cow").mkdir(parents=True)
    assert_invalid(
        loader(tmp_path, content), "data.source: folder 'cow': expected images (.png|.jpg|"
    )


def test_zip_members_with_unsafe_paths_are_ignored(tmp_path):
    content, _ = files()
    unsafe_files = {
        "../evil.png": b"x",
        "/train/cat/evil.png": b"x",
        "train/../../evil.png": b"x",
        "train/cat/../../a.png": b"x",
    }
    data = loader(tmp_path, {**content, **unsafe_files}, is_zip=True)()
    assert len(data.train) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"pictures"}


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/dog/3.png", lambda b: b[:50]),
        ("test/cat/1.png", lambda b: b"no image"),
        ("test/dog/0.png", lambda b: b""),
        (
            "test/cat/0.png",
            lambda _: png_file((5, 4, 8, 2, 0, 0, 0), 3 * (b"\0" + bytes(15))),
        ),  # one pixel row short
    ],
)
def test_broken_image_is_rejected_by_name(tmp_path, is_zip, name, damage):
    content, _ = files()
    content[name] = damage(content[name])
    assert_invalid(loader(tmp_path, content, is_zip), f"data.source: '{name}'", "PNG")


def test_damaged_zip_is_rejected_with_the_member_name(tmp_path):
    content, _ = files()
    read = loader(tmp_path, content, is_zip=True)
    archive = (tmp_path / "pictures").read_bytes()
    offset = archive.index(content["train/dog/3.png"])
    (tmp_path / "pictures").write_bytes(
        archive[: offset + 20] + bytes([archive[offset + 20] ^ 255]) + archive[offset + 21 :]
    )
    assert_invalid(read, "'train/dog/3.png'", "CRC")
    (tmp_path / "pictures").write_bytes(archive[:-30])
    assert_invalid(read, "data.source", "a folder or zip file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "images train/CLASS/"),
        ({"cat/0.png": b""}, "a PNG, JPEG, WEBP, BMP or TIFF file"),
        ({"train/0.png": b""}, "images train/CLASS/"),
        ({f"test/{name}/0.png": b"" for name in ("cat", "dog")}, "images train/CLASS/"),
        (
            {name: b for name, b in files()[0].items() if "dog" not in name},
            "labels of 2 to 1000 classes, got 1",
        ),
    ],
    ids=["empty", "no split", "no class", "only test", "one class"],
)
def test_invalid_folder_structures_are_rejected(tmp_path, content, message):
    assert_invalid(loader(tmp_path, content, is_zip=True), "data.source", message)


def test_missing_folder_is_rejected(tmp_path):
    assert_invalid(
        lambda: load(get_recipe("images:absent"), tmp_path),
        "data.source",
        "'absent', which is neither in",
    )
