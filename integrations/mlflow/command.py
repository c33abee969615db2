"""The `dubito mlflow` command, which exports a version as an MLflow model."""

import argparse

from integrations.mlflow.pyfunc import export
from model_store.artifacts.store import LATEST, store_from_environment


def run(options: argparse.Namespace) -> None:
    store = store_from_environment(options.store)
    name, _, version = options.version.partition(":")
    export(store, name, store.resolve(name, version or LATEST), options.folder)
    print(f"exported to {options.folder}; serve it: mlflow models serve -m {options.folder}")
