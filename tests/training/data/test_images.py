import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.support.images import png_file
from tests.support.recipes import get_recipe
from tests.support.refusals import refused
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


def write(path, content, zipped):
    if zipped:
        with zipfile.ZipFile(path, "w") as file:
            for name, data in content.items():
                file.writestr(name, data)
    else:
        for name, data in content.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


def make_data(tmp_path, content, zipped=False):
    write(tmp_path / "pictures", content, zipped)
    return lambda **data: load(get_recipe("images:pictures", **data), tmp_path)


@pytest.mark.parametrize("zipped", [False, True])
def test_colour_images_are_bytes_with_channels_first_and_folders_are_labels(tmp_path, zipped):
    content, arrays = files()
    data = make_data(
        tmp_path,
        {**content, "train/README.txt": b"", "train/cat/.hidden.png": b"", "train/cat/a.txt": b""},
        zipped,
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


def test_files_of_other_kinds_are_counted_by_their_endings(tmp_path, caplog):
    rest = dict.fromkeys(("a.gif", "b.GIF", "notes.txt", "LICENSE", ".hidden"), b"")
    content = {**files()[0], **{f"train/cat/{name}": data for name, data in rest.items()}}
    with caplog.at_level("INFO", "dubito.training"):
        assert len(make_data(tmp_path, content)().train) == 12
    assert caplog.messages == [
        "skipping 4 files other than images (.png|.jpg|.jpeg|.webp|.bmp|.tif|.tiff): "
        "2 of .gif, 1 of no suffix, 1 of .txt"
    ]


def test_grey_images_have_no_channel_and_one_of_colour_makes_all_colour(tmp_path):
    grey, _ = files(shape=(4, 5))
    assert make_data(tmp_path, grey, zipped=True)().shape == (4, 5)
    mixed = {**grey, "test/cat/9.png": files()[0]["test/cat/0.png"]}
    (tmp_path / "other").mkdir()
    assert make_data(tmp_path / "other", mixed, zipped=True)().shape == (3, 4, 5)


def test_without_test_images_a_share_is_held_out_always_the_same(tmp_path):
    content, arrays = files(train=10, test=0)
    read = make_data(tmp_path, content)
    data = read(test_fraction=0.3)
    assert (len(data.train), len(data.test)) == (14, 6)
    together = np.concatenate([data.train.x, data.test.x])
    expected = np.array([array.transpose(2, 0, 1).reshape(-1) for array in arrays.values()])
    assert sorted(together.tolist()) == sorted(expected.tolist())
    assert read(test_fraction=0.3).digest() == data.digest() != read(test_fraction=0.2).digest()


def test_images_of_any_size_are_resized_where_the_recipe_says_so(tmp_path):
    content, _ = files()
    content |= {
        f"train/cat/9{i}.png": data for i, data in enumerate(files(shape=(9, 7, 3))[0].values())
    }
    read = make_data(tmp_path, content)
    refused(
        read,
        "'train/cat/90.png'",
        "an image of 5 x 4 pixels like train/cat/0.png",
        "`image_size`",
        "got 7 x 9",
    )
    data = read(image_size=[6, 8])
    assert (data.shape, data.image.resize) == ((3, 6, 8), True)
    cut = read(image_size=[4, 4], image_resize=4, image_interpolation="bicubic")
    assert (cut.shape, cut.image.shorter, cut.image.interpolation) == ((3, 4, 4), 4, "bicubic")
    of_rest = [
        array for name, array in files()[1].items() if name.startswith("train/dog")
    ]  # one pixel wider
    assert np.array_equal(
        cut.train.x[-len(of_rest) :], [a[:, :4].transpose(2, 0, 1).reshape(-1) for a in of_rest]
    )
    assert read(image_size=[4, 4]).digest() != cut.digest()


@pytest.mark.parametrize(
    "keys",
    [
        {"image_resize": 8},
        {"image_interpolation": "bicubic"},
        {"image_size": [4, 8], "image_resize": 7},
    ],
)
def test_keys_of_images_that_do_not_go_together_are_refused(keys):
    with pytest.raises(ValueError, match=r"no value without image_size|at least the longer side"):
        get_recipe("images:pictures", **keys)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("outer", ["", "photos/"])
def test_folders_of_classes_alone_are_training_images(tmp_path, zipped, outer):
    content, arrays = files(train=10, test=0)
    plain = {outer + name.removeprefix("train/"): data for name, data in content.items()}
    data = make_data(tmp_path, plain, zipped)(test_fraction=0.3)
    assert (len(data.train), len(data.test), data.classes) == (14, 6, ("cat", "dog"))
    together = np.concatenate([data.train.x, data.test.x])
    expected = np.array([array.transpose(2, 0, 1).reshape(-1) for array in arrays.values()])
    assert sorted(together.tolist()) == sorted(expected.tolist())


def test_a_class_s_folder_without_an_image_stops_the_fit(tmp_path):
    content, _ = files()
    (tmp_path / "pictures" / "train" / "cow").mkdir(parents=True)
    refused(make_data(tmp_path, content), "data.source: folder 'cow': expected images (.png|.jpg|")


def test_a_zip_s_names_lead_nowhere(tmp_path):
    content, _ = files()
    evil = {
        "../evil.png": b"x",
        "/train/cat/evil.png": b"x",
        "train/../../evil.png": b"x",
        "train/cat/../../a.png": b"x",
    }
    data = make_data(tmp_path, {**content, **evil}, zipped=True)()
    assert len(data.train) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"pictures"}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/dog/3.png", lambda b: b[:50]),
        ("test/cat/1.png", lambda b: b"no image"),
        ("test/dog/0.png", lambda b: b""),
        (
            "test/cat/0.png",
            lambda _: png_file((5, 4, 8, 2, 0, 0, 0), 3 * (b"\0" + bytes(15))),
        ),  # a row too few
    ],
)
def test_a_broken_image_is_refused_by_its_name(tmp_path, zipped, name, damage):
    content, _ = files()
    content[name] = damage(content[name])
    refused(make_data(tmp_path, content, zipped), f"data.source: '{name}'", "PNG")


def test_a_damaged_zip_is_refused_by_the_member(tmp_path):
    content, _ = files()
    read = make_data(tmp_path, content, zipped=True)
    full = (tmp_path / "pictures").read_bytes()
    place = full.index(content["train/dog/3.png"])
    (tmp_path / "pictures").write_bytes(
        full[: place + 20] + bytes([full[place + 20] ^ 255]) + full[place + 21 :]
    )
    refused(read, "'train/dog/3.png'", "CRC")
    (tmp_path / "pictures").write_bytes(full[:-30])
    refused(read, "data.source", "a folder or zip file")


@pytest.mark.parametrize(
    ("content", "says"),
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
    ids=["nothing", "no split", "no class", "only test", "one class"],
)
def test_folders_that_are_not_as_they_should_be_are_refused(tmp_path, content, says):
    refused(make_data(tmp_path, content, zipped=True), "data.source", says)


def test_what_is_not_there_is_refused(tmp_path):
    refused(
        lambda: load(get_recipe("images:absent"), tmp_path), "data.source", "absent", "No such file"
    )
