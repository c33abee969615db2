"""Options for the commands that the service adds to `dubito`.

A command's module is imported when the command runs, so that help and completion are fast.
"""

import argparse
import sys
from collections.abc import Callable, Mapping

from model_store.commands import Commands, add_command
from service.integrations import installed_integrations

SCOPES = "read, predict, acquire, label, metrics and admin"

Options = Mapping[str, tuple[Callable[[str], object], str]]  # type and help text

DATA_SET_OPTIONS: Options = {
    "model": (str, "a published model; optional if there is only one"),
    "version": (str, "a number or an alias (latest)"),
    "num_samples": (int, "posterior draws; by default the model's own number"),
    "seed": (int, "seed of the draws; by default random, and stored in the output"),
    "priors": (str, "shares of all classes, a JSON object keyed by class"),
    "workers": (int, "processes, one thread each; by default one for each processor"),
    "ray": (str, "run on Ray: `local` starts it here, `auto` or host:port join a cluster"),
    "max_rejects": (float, "maximum share of unreadable rows (0.01)"),
    "shard_rows": (int, "maximum rows per shard; by default 32768, fewer for wide rows"),
}
SCORE_OPTIONS: Options = {
    "fpr": (float, "false-positive rate of the flag (0.05)"),
    "missing": (str, "reject: refuse missing values in columns that were complete in training"),
    "coverage": (float, "of prediction sets and intervals (0.95)"),
    "confidence": (float, "probability that the coverage holds; by default it holds on average"),
    "risk": (float, "abstain if a label is wrong with a larger probability"),
}
RANK_OPTIONS: Options = {
    "acquisition": (str, "score that ranks rows, as in /acquire (bald)"),
    "beta": (float, "for power_bald: rows are drawn at random, weighted by BALD^beta (1)"),
}


def add_commands(commands: Commands) -> None:
    serve = add_command(commands, "serve", "service.serve:serve", "serve the models of the store")
    help = "port to listen on, instead of DUBITO_PORT (8000)"
    serve.add_argument("--port", type=int, metavar="N", help=help)
    summary = "predict a whole data set of Parquet files, without a service"
    _add_data_set(commands, "score", summary, SCORE_OPTIONS)
    summary = "rank a whole data set of Parquet files, without a service"
    rank = _add_data_set(commands, "rank", summary, RANK_OPTIONS)
    rank.add_argument("-k", "--k", type=int, default=1000, help="how many rows to rank (1000)")
    summary = "make a key for DUBITO_KEYS_FILE"
    key = add_command(commands, "key", "service.auth.keys:print_new_key", summary)
    key.add_argument("name", metavar="NAME", help="name of the key in the log")
    help = f"scopes, separated by commas, from {SCOPES}"
    key.add_argument("--scopes", required=True, help=help)
    help = "days until it expires; never by default"
    key.add_argument("--days", type=float, metavar="N", help=help)
    summary = "write the state, jobs and labels, to standard output, as a tar file"
    add_command(commands, "backup", "service.commands:backup", summary)
    summary = "restore the state from a backup on standard input"
    add_command(commands, "restore", "service.commands:restore", summary)
    for integration in installed_integrations().values():
        integration.add_commands(commands)


def backup(_: argparse.Namespace) -> None:
    from model_store.state.backup import back_up
    from service.settings import read_settings

    back_up(read_settings().state, sys.stdout.buffer)


def restore(_: argparse.Namespace) -> None:
    from model_store.state.backup import restore
    from service.settings import read_settings

    restore(read_settings().state, sys.stdin.buffer)


def _add_data_set(
    commands: Commands, kind: str, summary: str, options: Options
) -> argparse.ArgumentParser:
    parser = add_command(commands, kind, "service.batch.command:run", summary)
    parser.description = f"{summary}. It resumes if interrupted: docs/data-sets.md."
    help = "a .parquet file, a folder of them, or s3://, gs:// or az://bucket/prefix"
    parser.add_argument("source", metavar="SRC", help=help)
    help = "a folder or a bucket's URL, empty or of this job"
    parser.add_argument("--out", metavar="DST", help=help, required=kind == "score")
    for name, (convert, meaning) in {**DATA_SET_OPTIONS, **options}.items():
        metavar = None if convert is str else "N"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=convert, metavar=metavar, help=meaning)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(kind=kind, version="latest", max_rejects=0.01)
    return parser
