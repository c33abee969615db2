from tests.support.serving import open_client


def test_only_requests_that_need_state_are_refused_without_a_state_folder(digits_store):
    rows = [[0.0] * 64, [1.0] * 64]
    with open_client(digits_store, DUBITO_STATE="") as client:
        answers = [
            client.post("/predict/jobs", json={"inputs": rows}),
            client.post("/acquire/jobs", json={"pool": rows, "k": 1}),
            client.get("/jobs"),
            client.post(
                "/labels",
                json={"model": "digits", "labels": [{"id": "a", "label": "1", "input": rows[0]}]},
            ),
            client.get("/models/digits/labels"),
            client.get("/labels"),
            client.post("/labels/delete", json={"ids": ["a"]}),
            client.post("/acquire", json={"pool": rows, "ids": ["a", "b"], "k": 1, "keep": True}),
        ]
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert answer.json()["detail"].startswith(
                "DUBITO_STATE is empty, so this service has no jobs and labels"
            )
        assert client.post("/predict", json={"inputs": rows}).status_code == 200
        request = {"pool": rows, "ids": ["a", "b"], "k": 1}
        assert client.post("/acquire", json=request).json()["excluded"] is None
        assert (
            client.post("/acquire", json=request | {"exclude_labelled": False}).json()["excluded"]
            == 0
        )
        assert client.post("/acquire", json={"pool": rows, "k": 1}).json()["excluded"] == 0
        assert client.get("/health/ready").status_code == 200
        assert "dubito_state_usable 1.0" in client.get("/metrics").text
