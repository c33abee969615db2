"""The main job: a fitted model answers over HTTP."""


def test_a_row_is_predicted_with_its_doubt(client, digits_rows):
    answer = client.post("/predict", json={"inputs": digits_rows[:3].tolist(), "seed": 7})
    assert answer.status_code == 200
    prediction = answer.json()["predictions"][0]
    assert 0 <= prediction["bald"] <= prediction["entropy"]
    assert prediction["label"] in prediction["prediction_set"]
