"""The commands of `python -m service`, for the page of help of `dubito`."""

import argparse

SECTIONS = {
    "Serve": {
        "serve": "serve the models of the store",
        "cluster": "serve by replicas on Ray",
        "key": "make a key for DUBITO_KEYS_FILE",
        "label-studio": "bring a project of Label Studio and a model together",
        "score": "predict a whole data set of Parquet files",
        "rank": "rank a whole data set of Parquet files",
    },
    "Store": {
        "backup": "copy the state, jobs and labels: dubito backup > FILE",
        "restore": "bring a copy of the state back: dubito restore < FILE",
    },
}


def parser(command: str) -> argparse.ArgumentParser:
    from service.__main__ import parser_of

    return parser_of(command, f"dubito {command}")


def run(command: str, arguments: list[str]) -> int:
    from service.__main__ import main

    return main([command, *arguments], f"dubito {command}")
