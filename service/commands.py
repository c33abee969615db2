"""Options for the commands that the service adds to `dubito`.

A command's module is imported when the command runs, so that help and completion are fast.
"""

import argparse
import sys
from pathlib import Path

from model_store.commands import Commands, add_command
from service.integrations import installed_integrations

SCOPES = "read, predict, acquire, label, metrics and admin"
MAX_REJECTS = 0.01
OUT = "a folder or a bucket's URL, empty or of this job"


def add_commands(commands: Commands) -> None:
    serve = add_command(commands, "serve", "service.serve:serve", "serve the models of the store")
    help = "port to listen on, instead of DUBITO_PORT (8000)"
    serve.add_argument("--port", type=int, metavar="N", help=help)
    about = "predict a whole data set of Parquet files, without a service"
    score = add_command(commands, "score", "service.batch.command:run", about)
    _add_data_set(score, kind="score")
    score.add_argument("--out", metavar="DST", help=OUT, required=True)
    _add_score_options(score)
    about = "rank a whole data set of Parquet files, without a service"
    rank = add_command(commands, "rank", "service.batch.command:run", about)
    _add_data_set(rank, kind="rank")
    rank.add_argument("--out", metavar="DST", help=OUT)
    _add_rank_options(rank)
    _add_key(commands)
    about = "write the state, jobs and labels, to standard output, as a tar file"
    add_command(commands, "backup", "service.commands:backup", about)
    about = "restore the state from a backup on standard input"
    add_command(commands, "restore", "service.commands:restore", about)
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


def _add_key(commands: Commands) -> None:
    about = "make a key for DUBITO_KEYS_FILE"
    parser = add_command(commands, "key", "service.auth.keys:print_new_key", about)
    parser.add_argument("name", metavar="NAME", help="name of the key in the log")
    help = f"scopes, separated by commas, from {SCOPES}"
    parser.add_argument("--scopes", required=True, help=help)
    help = "time until it expires, such as 90d or 12h; never by default"
    parser.add_argument("--expires", metavar="SPAN", help=help)


def _add_data_set(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.set_defaults(kind=kind)
    parser.description = f"{parser.description}. It resumes if interrupted: docs/data-sets.md."
    add = parser.add_argument
    help = "a .parquet file, a folder of them, or s3://, gs:// or az://bucket/prefix"
    add("source", metavar="SRC", help=help)
    add("--model", metavar="NAME", help="a published model; optional if there is only one")
    add("--version", metavar="V", help="a number or an alias (latest)", default="latest")
    help = "posterior draws; by default the model's own number"
    add("--num-samples", metavar="N", help=help, type=int)
    help = "seed of the draws; by default random, and stored in DST"
    add("--seed", metavar="S", help=help, type=int)
    add("--priors", metavar="JSON", help="shares of all classes, an object keyed by class")
    help = "processes, one thread each; by default one for each processor"
    add("--workers", metavar="N", help=help, type=int)
    help = "run on Ray: `local` starts it here, `auto` or host:port join a cluster"
    add("--ray", metavar="ADDRESS", help=help)
    help = "maximum share of unreadable rows"
    add("--max-rejects", metavar="SHARE", help=help, type=float, default=MAX_REJECTS)
    help = "maximum rows per shard; by default 32768, fewer for wide rows"
    add("--shard-rows", metavar="N", help=help, type=int)
    add("--quiet", action="store_true", help="show no progress")


def _add_score_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--fpr", metavar="P", help="false-positive rate of the flag (0.05)", type=float)
    help = "reject: refuse missing values in columns that were complete in training"
    add("--missing", choices=("flag", "reject"), help=help)
    add("--coverage", metavar="P", help="of prediction sets and intervals (0.95)", type=float)
    help = "probability that the coverage holds; by default it holds on average"
    add("--confidence", metavar="P", help=help, type=float)
    help = "abstain if a label is wrong with a larger probability"
    add("--risk", metavar="P", help=help, type=float)


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-k", "--k", type=int, default=1000, metavar="N", help="how many rows to rank (1000)")
    add("--acquisition", metavar="NAME", help="score that ranks rows, as in /acquire (bald)")
    help = "for power_bald: rows are drawn at random, weighted by BALD^B (1)"
    add("--beta", metavar="B", help=help, type=float)
    add("--exclude", metavar="FILE", help="ids to leave out, one per line", type=Path)
