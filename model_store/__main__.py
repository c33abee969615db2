"""Look after a model store: `dubito store list | show | verify | alias | keep | delete | keygen |
sign | mlflow`."""

import argparse
import sys
from pathlib import Path

from model_store.artifacts.place import store_of_environment
from model_store.artifacts.signature import read_private_key, read_public_key, write_key_pair
from model_store.artifacts.storage import is_version
from model_store.artifacts.store import LATEST, ModelStore
from model_store.artifacts.summary import summary
from model_store.errors import DubitoError, InvalidInput, StoreError
from model_store.inference.preflight_process import check_version


def main(arguments: list[str] | None = None, prog: str = "python -m model_store") -> int:
    """Run a command; return the exit code: 0 done, 1 a version is broken, 2 a wrong call."""
    options = parser_of(prog).parse_args(arguments)
    try:
        store = store_of_environment(options.store)
        match options.command:
            case "list":
                for name in store.names():
                    aliases = ", ".join(
                        f"{a} -> {v}" for a, v in sorted(store.aliases(name).items())
                    )
                    print(f"{name}: versions {', '.join(store.versions(name))} ({aliases})")
            case "show":
                if options.key is not None:
                    store.trusted = read_public_key(options.key, "--key")
                print("\n".join(summary(store, *_version(store, options.version))))
            case "verify":
                if options.key is not None:
                    store.trusted = read_public_key(options.key, "--key")
                return _verify(store)
            case "alias":
                if options.remove != (options.version is None):
                    raise InvalidInput(
                        "alias", "a version or --remove", "both" if options.remove else "neither"
                    )
                if options.remove:
                    store.remove_alias(options.name, options.alias)
                else:
                    if not options.anyway:
                        check_version(store, options.name, options.version)
                    store.set_alias(options.name, options.alias, options.version)
            case "keep":
                print("deleted:", ", ".join(store.keep(options.name, options.newest)) or "nothing")
            case "delete":
                _delete(store, options.version, options.force)
            case "keygen":
                print(f"private key: {options.file}, public key: {write_key_pair(options.file)}")
            case "sign":
                name, number = _version(store, options.version)
                store.sign(name, number, read_private_key(options.key, "--key"))
                print(f"signed: {name} version {number}")
            case "mlflow":
                from integrations.mlflow.pyfunc import export  # loads onnxruntime and pyarrow

                export(store, *_version(store, options.version), options.folder)
                print(f"written: {options.folder}; mlflow models serve -m {options.folder}")
    except DubitoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser_of(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "--store", metavar="PLACE", help="a folder or s3://bucket/prefix, in place of DUBITO_STORE"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every model, its versions and aliases")
    show = commands.add_parser("show", help="what a version is")
    _add_version(show)
    show.add_argument(
        "--key", type=Path, metavar="FILE", help="check its signature against this public key"
    )
    verify = commands.add_parser(
        "verify", help="read every version and check every file against its manifest"
    )
    verify.add_argument(
        "--key", type=Path, metavar="FILE", help="and every signature against this public key"
    )
    alias = commands.add_parser(
        "alias",
        help="point an alias at a version that can be served, or remove it; `latest` rolls back",
    )
    alias.add_argument("name")
    alias.add_argument("alias")
    alias.add_argument("version", nargs="?", help="a number or another alias")
    alias.add_argument("--remove", action="store_true", help="remove the alias; its version stays")
    alias.add_argument(
        "--anyway", action="store_true", help="without trying whether it can be served"
    )
    keep = commands.add_parser(
        "keep", help="delete all versions but the newest N and those with an alias"
    )
    keep.add_argument("name")
    keep.add_argument("newest", type=int)
    delete = commands.add_parser(
        "delete", help="delete a version, or a model with all of its versions"
    )
    delete.add_argument(
        "version", metavar="NAME[:VERSION]", help="VERSION is a number; all where none is given"
    )
    delete.add_argument(
        "--force", action="store_true", help="also what an alias names; `latest` moves to another"
    )
    keygen = commands.add_parser(
        "keygen", help="make a private key to sign with, FILE, and its public one, FILE.pub"
    )
    keygen.add_argument("file", type=Path, metavar="FILE")
    sign = commands.add_parser("sign", help="sign a version that is whole")
    _add_version(sign)
    sign.add_argument("--key", type=Path, metavar="FILE", required=True, help="the private key")
    mlflow = commands.add_parser("mlflow", help="write a version as a model of MLflow's, FOLDER")
    _add_version(mlflow)
    mlflow.add_argument("folder", type=Path, metavar="FOLDER", help="that is not there yet")
    return parser


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version", metavar="NAME[:VERSION]", help="a number or an alias; latest where none is given"
    )


def _version(store: ModelStore, text: str) -> tuple[str, str]:
    name, _, version = text.partition(":")
    return name, store.resolve(name, version or LATEST)


def _delete(store: ModelStore, text: str, force: bool) -> None:
    name, colon, version = text.partition(":")
    if colon and not is_version(version):
        raise InvalidInput("version", "NAME, or NAME:VERSION with a number", repr(text[:80]))
    before = store.aliases(name)
    print(f"deleted: {name} version {', '.join(store.delete(name, version or None, force))}")
    after = store.aliases(name)
    for alias in sorted(before.keys() | after.keys()):
        if before.get(alias) != after.get(alias):
            print(f"{alias}: {f'moved to version {after[alias]}' if alias in after else 'removed'}")


def _verify(store: ModelStore) -> int:
    broken = 0
    for name in store.names():
        for version in store.versions(name):
            try:
                store.open(name, version, wanted=())
                print(
                    f"{name} version {version}: whole{'' if store.trusted is None else ', signed'}"
                )
            except StoreError as error:
                print(f"error: {error}")
                broken += 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
