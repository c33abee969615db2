"""The commands of `python -m model_store`, for the page of help of `dubito`."""

import argparse

SECTIONS = {
    "Store": {
        "store": "list | show | verify | alias | keep | delete | keygen | sign | mlflow: look "
        "after versions"
    }
}


def parser(command: str) -> argparse.ArgumentParser:
    from model_store.__main__ import parser_of

    return parser_of(f"dubito {command}")


def run(command: str, arguments: list[str]) -> int:
    from model_store.__main__ import main

    return main(arguments, f"dubito {command}")
