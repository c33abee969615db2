"""The commands of `python -m training`, for the page of help of `dubito`."""

import argparse
import sys
from pathlib import Path

COMMANDS = {
    "inspect": "say what data are taken for, before anything is fitted",
    "fit": "fit a recipe on its data and publish the model",
    "evaluate": "measure a published version, and keep the evidence with it",
    "compare": "compare two published versions on the same test rows",
    "calibrate": "publish a model again, calibrated on other data",
    "prune": "publish a Bayes by Backprop model without its least certain weights",
    "candidate": "fit a candidate on labels that came to the service, and promote it if it is no "
    "worse",
    "active": "simulate active learning on labelled data: how many labels are needed, and how many "
    "are saved",
}
SECTIONS = {"Fit": COMMANDS}


def parser(_: str) -> argparse.ArgumentParser:
    from training.__main__ import parser_of

    return parser_of("dubito")


def run(command: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a recipe may name a module there
    from training.__main__ import main

    return main([command, *arguments], "dubito")
