"""Ray: the service as replicas of a Ray Serve application, and data sets in shards on Ray.

Ray itself is imported in this folder alone.
"""

from service.commands import add_command
from service.integrations import Commands, Integration


def _add_commands(commands: Commands) -> None:
    about = "serve by replicas on Ray, on this machine or on a cluster"
    parser = add_command(commands, "cluster", "integrations.ray.command:run", about)
    add = parser.add_argument
    help = "replicas, at least (%(default)s)"
    add("--replicas", type=int, default=2, metavar="N", help=help)
    help = "replicas, at most: as many as there is work for (--replicas)"
    add("--most", type=int, metavar="N", help=help)
    help = "listen on the head node alone, and not on each with a replica"
    add("--one-proxy", action="store_true", help=help)
    help = "a cluster that is there, as HOST:PORT or auto; else one here"
    add("--ray", metavar="ADDRESS", help=help)
    help = "send requests by their header serve_multiplexed_model_id; slower"
    add("--by-model", action="store_true", help=help)
    help = "port to listen on, in place of DUBITO_PORT (8000)"
    add("--port", type=int, metavar="N", help=help)


integration = Integration(
    add_commands=_add_commands, run_shards="integrations.ray.batch:run_on_ray"
)
