"""Label Studio support: a machine learning backend and the commands to push and sync tasks."""

import os
from importlib.util import find_spec
from pathlib import Path

from model_store.commands import Commands, add_command
from service.integrations import Integration


def _add_commands(commands: Commands) -> None:
    summary = "create labelling tasks, and synchronise a Label Studio project with a model"
    parser = commands.add_parser("label-studio", help=summary, description=summary)
    group = parser.add_subparsers(metavar="COMMAND", required=True)
    summary = "send labels to the service, and predictions to Label Studio"
    sync = add_command(group, "sync", "integrations.label_studio.sync:run", summary)
    add = sync.add_argument
    add("model", metavar="NAME", help="a published model")
    add("--project", type=int, required=True, metavar="N", help="number of the project")
    url = f"http://127.0.0.1:{os.environ.get('DUBITO_PORT', '8000')}"
    add("--service", default=url, metavar="URL", help="URL of the service (%(default)s)")
    help = "file with an API key that has the scopes read, predict and label"
    add("--key-file", type=Path, metavar="FILE", help=help)
    add("--watch", action="store_true", help="repeat until interrupted")
    if find_spec("dubito") is not None:  # Images of the service lack the client.
        _add_push(group)


def _add_push(commands: Commands) -> None:
    from dubito.command import add_acquire_options, add_call, add_rows

    summary = "create tasks for the rows to label next"
    push = add_call(commands, "push", "integrations.label_studio.push:push", summary)
    add_rows(push)
    add_acquire_options(push)
    push.add_argument(
        "--project", type=int, required=True, metavar="N", help="number of the project"
    )
    help = "URL of Label Studio (default: DUBITO_LABEL_STUDIO_URL)"
    push.add_argument("--studio", metavar="URL", help=help)


integration = Integration(
    router="integrations.label_studio.routes:router",
    add_commands=_add_commands,
    variables=("DUBITO_LABEL_STUDIO_URL", "DUBITO_LABEL_STUDIO_TOKEN"),
)
