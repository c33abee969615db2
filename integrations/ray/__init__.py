"""Ray support: service replicas on Ray Serve and batch scoring on Ray Data.

No other folder imports Ray.
"""

from model_store.commands import Commands, add_command
from service.integrations import Integration


def _add_commands(commands: Commands) -> None:
    summary = "serve with replicas on Ray, on this machine or a cluster"
    parser = add_command(commands, "cluster", "integrations.ray.command:run", summary)
    add = parser.add_argument
    help = "minimum number of replicas (%(default)s)"
    add("--replicas", type=int, default=2, metavar="N", help=help)
    help = "maximum number of replicas, scaled with the work (--replicas)"
    add("--max-replicas", type=int, metavar="N", help=help)
    help = "listen on the head node only, not on each node with a replica"
    add("--one-proxy", action="store_true", help=help)
    help = "an existing cluster: HOST:PORT or auto (default: start one here)"
    add("--ray", metavar="ADDRESS", help=help)
    help = "route requests by their header serve_multiplexed_model_id; slower"
    add("--by-model", action="store_true", help=help)
    help = "port to listen on instead of DUBITO_PORT (8000)"
    add("--port", type=int, metavar="N", help=help)


integration = Integration(
    add_commands=_add_commands, run_shards="integrations.ray.batch:run_on_ray"
)
