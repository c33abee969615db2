"""MLflow support: the scoring protocol and the export of versions as MLflow models."""

from pathlib import Path

from model_store.commands import Commands, add_command
from service.integrations import Integration


def _add_commands(commands: Commands) -> None:
    summary = "write a version as an MLflow model"
    parser = add_command(commands, "mlflow", "integrations.mlflow.command:run", summary)
    help = "a folder or s3://bucket/prefix instead of DUBITO_STORE"
    parser.add_argument("--store", metavar="PLACE", help=help)
    help = "a model, and the number or alias of a version (default: latest)"
    parser.add_argument("version", metavar="NAME[:VERSION]", help=help)
    help = "output folder, which must not exist yet"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=help)


integration = Integration(
    router="integrations.mlflow.scoring:router", health_paths=("/ping",), add_commands=_add_commands
)
