"""Call the service with MLflow's scoring client: `python mlflow_client.py HOST PORT FOLDER`.

Prints JSON. FOLDER contains `digits.npy` and `picture.png`.
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pandas
from mlflow.pyfunc.scoring_server.client import ScoringServerClient

host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
DIGITS = np.load(folder / "digits.npy")
client = ScoringServerClient(host, port)
client.wait_server_ready(timeout=10)


def invoke(data, model=None):
    """Return the predictions of one request by column."""
    params = {"seed": 7} | ({} if model is None else {"model": model})
    frame = client.invoke(data, params=params).get_predictions()
    return {name: frame[name].tolist() for name in frame}


def get_error(*arguments):
    try:
        invoke(*arguments)
    except Exception as error:  # the client raises only this type
        return str(error)


picture = base64.b64encode((folder / "picture.png").read_bytes()).decode()
table = pandas.DataFrame(
    {"age": [31.0, np.nan], "city": pandas.Series(["Rome", None], dtype=object), "other": [1, 2]}
)
answers = {
    "version": client.get_version(),
    "digits": invoke(DIGITS),
    "digits_list": invoke(DIGITS.tolist()),
    "digits_frame": invoke(pandas.DataFrame(DIGITS)),
    "pictures": invoke(pandas.DataFrame({"picture": [picture] * 2}), "pictures"),
    "texts": invoke(pandas.DataFrame({"text": ["good film", "bad day"]}), "texts"),
    "people": invoke(table, "people"),
    "rents": invoke(table, "rents"),
    "people_json": invoke(
        json.dumps({"instances": [{"age": 31, "city": "Rome"}], "params": {"model": "people"}})
    ),
    "unknown_model": get_error(DIGITS, "nothing"),
    "wrong_shape": get_error(DIGITS[:, :63]),
}
print(json.dumps(answers))
