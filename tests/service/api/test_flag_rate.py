import pytest
from scipy import stats


@pytest.fixture(scope="module")
def p_values(service_url, digits_rows):
    import httpx

    with httpx.Client(base_url=service_url, timeout=60) as client:
        answers = [
            client.post("/predict", json={"inputs": [row.tolist()]}).json() for row in digits_rows
        ]
    return [answer["predictions"][0]["p_value"] for answer in answers]


@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.2])
def test_flags_on_fresh_rows_are_beta_binomial(p_values, fpr):
    ranking_rows = 220
    k = int(fpr * (ranking_rows + 1))
    law = stats.betabinom(len(p_values), k, ranking_rows + 1 - k)
    flagged = sum(p_value <= fpr for p_value in p_values)
    # Two tails of 5e-7 each: a right rate falls outside once in a million splits.
    assert law.ppf(5e-7) <= flagged <= law.ppf(1 - 5e-7)
