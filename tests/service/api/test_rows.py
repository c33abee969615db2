import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.support.environment import working_in
from tests.support.images import png_file
from tests.support.recipes import write_recipe
from tests.support.serving import open_client
from training.__main__ import main

PEOPLE = [
    {"age": 20, "city": "Rome", "vip": True, "income": 30.5},
    {"age": 71.5, "city": "Oslo", "vip": False, "income": None},
    {"age": 40, "city": "Paris", "vip": None, "income": -3},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory, fits):
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    lines = ["age,city,vip,income,label"]
    for i in range(400):
        income = "" if i % 7 == 0 else f"{rng.normal(30, 5):.2f}"
        age, city = rng.integers(18, 80), ["Rome", "Oslo"][rng.integers(2)]
        vip = i % 3 == 0 if i % 11 else ""
        lines.append(f"{age},{city},{vip},{income},{'old' if age > 50 else 'young'}")
    (folder / "people.csv").write_text("\n".join(lines) + "\n")
    for k, name in enumerate(("dark", "light")):
        (folder / "pictures" / "train" / name).mkdir(parents=True)
        for i in range(120):
            (folder / "pictures" / "train" / name / f"{i}.png").write_bytes(
                picture(100 * k, seed=i)
            )
    schedule = {"epochs": 15, "learning_rate": 1e-2, "batch_rows": 16}
    settings = {
        "method": "dropout",
        "training": schedule,
        "serving": {"draws": 10},
    }
    people = {"source": "csv:people.csv", "target": "label"}
    with working_in(folder):
        for name, source in (("people", people), ("pictures", {"source": "images:pictures"})):
            data = {**source, "validation": 20, "reference": 20, "ranking": 40}
            recipe = write_recipe(folder, name=name, data=data, **settings)
            assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 0
    limits = {"MAX_IMAGE_PIXELS": 1000}
    with open_client(folder / "models", limits=limits, DUBITO_MAX_ROWS="30") as client:
        yield client


def picture(base=0, seed=0, size=(6, 8), mode="RGB", form="PNG"):
    """Return an image file with noise from base to base + 99. `size` is (height, width)."""
    noise = np.random.default_rng(seed).integers(base, base + 100, (*size, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, form)
    return file.getvalue()


def get_array(content):
    """Decode an image file into a row of the model's shape."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)


def predict(client, inputs, model="people", **fields):
    return client.post("/predict", json={"model": model, "seed": 7, "inputs": inputs, **fields})


def get_arrays(client, inputs, model="people", **fields):
    request = {"model": model, "seed": 7, "inputs": inputs, **fields}
    answer = client.post("/predict", json=request, headers={"Accept": "application/x-npz"})
    assert answer.status_code == 200, answer.text
    return np.load(io.BytesIO(answer.content), allow_pickle=False)


def upload(client, files, path="/predict", field="inputs", **fields):
    return client.post(
        path,
        files=[(field, ("x", content)) for content in files],
        data={"model": "pictures", **fields},
    )


def b64(content):
    return base64.b64encode(content).decode()


def assert_refused(answer, detail, status=422):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"].startswith(detail), answer.text


# Objects


def test_objects_are_accepted_and_unknown_categories_are_counted(client):
    items = {model["name"]: model["columns"] for model in client.get("/models").json()["models"]}
    assert items["pictures"] == []
    assert items["people"] == [
        {"name": "age", "kind": "numeric"},
        {"name": "city", "kind": "categorical", "categories": ["Oslo", "Rome"]},
        {"name": "vip", "kind": "categorical", "categories": ["false", "true"]},
        {"name": "income", "kind": "numeric"},
    ]
    answer = predict(client, PEOPLE)
    assert answer.status_code == 200, answer.text
    assert answer.json()["unknown_categories"] == {"city": 1}
    assert predict(client, PEOPLE[:2]).json()["unknown_categories"] == {}
    for explain in (False, True):
        arrays = get_arrays(client, PEOPLE, explain=explain)
        assert arrays["unknown_categories"].tolist() == [0, 1, 0, 0]  # age, city, vip, income
    assert "unknown_categories" not in get_arrays(
        client, [get_array(picture()).tolist()], model="pictures"
    )
    assert [p["label"] for p in answer.json()["predictions"][:2]] == ["young", "old"]


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"age": "31"}, "inputs.1.age: expected a number, or null, got a string"),
        ({"age": False}, "inputs.1.age: expected a number, or null, got a boolean"),
        ({"age": 10**60}, "inputs.1.age: expected a number closer"),
        ({"city": ["Rome"]}, "inputs.1.city: expected a string, number or boolean, or null, got"),
        ({"income": "31"}, "inputs.1.income: expected a number, or null, got a string"),
        ({"height": 1}, "inputs.1.height: expected only the columns"),
    ],
    ids=str,
)
def test_error_names_row_and_column_of_invalid_cell(client, changes, detail):
    assert_refused(predict(client, [PEOPLE[0], PEOPLE[0] | changes]), detail)


def test_unexpected_missing_value_is_imputed_flagged_and_listed(client):
    columns = client.get("/models/people").json()["manifest"]["input"]["columns"]
    rows = [PEOPLE[0], PEOPLE[0] | {"age": None}, PEOPLE[0] | {"age": columns[0]["usual"]}]
    answers = predict(client, rows).json()["predictions"]
    assert [answer["missing"] for answer in answers] == [[], ["age"], []]
    assert answers[1]["flag"]
    assert {**answers[1], "missing": [], "flag": answers[2]["flag"]} == answers[2]
    arrays = get_arrays(client, rows)
    assert arrays["columns"][arrays["missing"][1]].tolist() == ["age"]
    detail = "inputs.1.age: expected a value, because all training rows have one"
    assert_refused(predict(client, rows, missing="reject"), detail)
    pool = {"model": "people", "pool": rows, "k": 3, "seed": 1}
    assert client.post("/acquire", json=pool).status_code == 200
    assert_refused(client.post("/acquire", json={**pool, "missing": "reject"}), "pool.1.age: exp")


def test_absent_columns_and_mixed_rows_are_refused(client):
    absent = {name: value for name, value in PEOPLE[0].items() if name != "vip"}
    assert_refused(
        predict(client, [absent]), "inputs.0.vip: expected a value, or null if it is missing"
    )
    assert_refused(predict(client, [PEOPLE[0], [0.0] * 9]), "inputs.1: expected an object")
    assert_refused(
        predict(client, [[0.0] * 9, PEOPLE[0]]), "inputs: expected rows as objects keyed by column"
    )
    answer = client.post("/acquire", json={"model": "people", "pool": [absent]})
    assert_refused(answer, "pool.0.vip: expected a value")
    for value in ("NaN", '"\\ud800"', "1e400"):
        body = json.dumps({"model": "people", "inputs": [PEOPLE[0]]}).replace("20", value)
        answer = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
        assert_refused(answer, "body: expected JSON")


# Images


def test_image_files_base64_and_arrays_get_the_same_answer(client):
    images = [picture(seed=900), picture(100, seed=901), picture(50, seed=902, form="JPEG")]
    by_form = upload(client, images, seed="7")
    assert by_form.status_code == 200, by_form.text
    assert [p["label"] for p in by_form.json()["predictions"][:2]] == ["dark", "light"]
    assert predict(client, [b64(image) for image in images], "pictures").content == by_form.content
    assert (
        predict(client, [get_array(image).tolist() for image in images], "pictures").content
        == by_form.content
    )


def test_options_can_be_form_fields_or_query_parameters(client):
    image = picture(seed=900)
    in_form = upload(client, [image], seed="7", num_samples="5", fpr="0.2", return_samples="true")
    query = "?model=pictures&seed=7&num_samples=5&fpr=0.2&return_samples=true"
    in_query = client.post(f"/predict{query}", files=[("inputs", ("x.png", image, "image/png"))])
    assert in_form.status_code == 200, in_form.text
    assert in_query.content == in_form.content
    assert len(in_form.json()["predictions"][0]["samples"]) == 5


def test_grey_and_transparent_images_are_converted(client):
    for mode in ("L", "1", "P", "RGBA", "LA"):
        image = picture(seed=3, mode=mode)
        answer = predict(client, [b64(image)], "pictures")
        assert answer.status_code == 200, answer.text
        assert answer.content == predict(client, [get_array(image).tolist()], "pictures").content


def test_pools_of_images_and_of_arrays_are_ranked_alike(client):
    images = [picture(seed=i) for i in range(4)]
    by_form = upload(
        client, images, "/acquire", "pool", seed="3", k="2", ids='["a", "b", "c", "d"]'
    )
    assert by_form.status_code == 200, by_form.text
    request = {"model": "pictures", "seed": 3, "k": 2, "ids": ["a", "b", "c", "d"]}
    for pool in ([b64(i) for i in images], [get_array(i).tolist() for i in images]):
        assert client.post("/acquire", json={**request, "pool": pool}).content == by_form.content


SHORT = png_file((8, 6, 8, 2, 0, 0, 0), 5 * (b"\0" + bytes(24)))


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"", "inputs.2: expected a PNG, JPEG, WEBP or BMP file, got something else"),
        (b"no image", "inputs.2: expected a PNG, JPEG, WEBP or BMP file, got something else"),
        (picture(form="GIF"), "inputs.2: expected a PNG, JPEG, WEBP or BMP file, got something"),
        (picture()[:-60], "inputs.2: expected a whole PNG image, got missing or broken pixels"),
        (SHORT, "inputs.2: expected a whole PNG image, got missing or broken pixels"),
        (picture(form="JPEG")[:300], "inputs.2: expected"),
        (picture(size=(8, 6)), "inputs.2: expected an image of 8 x 6 pixels (width x"),
    ],
    ids=["empty", "text", "gif", "truncated png", "short png", "truncated jpeg", "wrong size"],
)
def test_error_names_row_of_invalid_image(client, content, detail):
    good = picture()
    assert_refused(upload(client, [good, good, content]), detail)
    assert_refused(predict(client, [b64(good), b64(good), b64(content)], "pictures"), detail)
    pool = client.post(
        "/acquire", json={"model": "pictures", "pool": [b64(good), b64(good), b64(content)]}
    )
    assert_refused(pool, detail.replace("inputs", "pool"))


def test_limits_on_images_are_enforced(client):
    assert_refused(
        upload(client, [picture()] * 25),
        "inputs: expected images of at most 1000 pixels in total",
        413,
    )
    assert_refused(
        upload(client, [picture()] * 31), "inputs: expected at most 30 rows, got 31", 413
    )
    assert_refused(
        upload(client, [b""] * 60), "body: expected a form of at most 46 parts, got more", 413
    )


@pytest.mark.parametrize("value", ["", "%%%", "é", "data:image/png;base64,AAAA"])
def test_strings_other_than_base64_images_are_refused(client, value):
    assert_refused(predict(client, [b64(picture()), value], "pictures"), "inputs.1: expected ")


@pytest.mark.parametrize("value", [None, 5, [0.0] * 144, {"a": 1}])
def test_images_mixed_with_other_rows_are_refused(client, value):
    assert_refused(
        predict(client, [b64(picture()), value], "pictures"),
        "inputs.1: expected base64 of an image file",
    )


def test_rows_for_another_kind_of_model_are_refused(client):
    detail = "inputs: expected rows as objects keyed by column"
    assert_refused(predict(client, [b64(picture())]), detail)
    answer = client.post("/predict", files=[("inputs", ("x", picture()))], data={"model": "people"})
    assert_refused(answer, detail)
    assert "bytes; send a file of many rows as the body" in answer.json()["detail"]
    assert_refused(
        predict(client, [{"a": 1}], "pictures"),
        "inputs.0: expected an array of 144 (rows have shape (3, 6, 8)",
    )


@pytest.mark.parametrize(
    ("content_type", "body", "detail"),
    [
        ("multipart/form-data", b"", "Content-Type: expected multipart/form-data with a boundary"),
        ("multipart/form-data; boundary=", b"", "Content-Type: expected multipart/form-data"),
        ("multipart/form-data; boundary=x", b"", "body: expected "),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "inputs: expected at least one row"),
        ("multipart/form-data; boundary=x", b"nonsense", "body: expected multipart/form-data"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--\r\n", "body: expected"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="inputs"\r\n\r\ncut',
            "body: expected a complete form",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n1\r\n--x--\r\n',
            "",
        ),
        ("multipart/form-data; boundary=" + "x" * 5000, b"--x", "body: expected"),
    ],
    ids=[
        "no boundary",
        "empty boundary",
        "empty body",
        "no parts",
        "nonsense",
        "unnamed part",
        "truncated",
        "invalid name",
        "long boundary",
    ],
)
def test_invalid_forms_are_refused(client, content_type, body, detail):
    assert_refused(
        client.post("/predict", content=body, headers={"Content-Type": content_type}), detail
    )


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"seed": "x"}, "form: seed: expected a JSON value"),
        ({"seed": "1.5"}, "seed: expected a valid integer"),
        ({"sead": "1"}, "sead: expected one of"),
        ({"seed": ["1", "2"]}, "form: seed: expected one value"),
    ],
    ids=str,
)
def test_error_names_invalid_form_field(client, fields, detail):
    assert_refused(upload(client, [picture()], **fields), detail)
