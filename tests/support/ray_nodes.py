"""Start several local Ray nodes: `ray_nodes.py CPUS...`.

Prints the cluster's address, then reads commands: `kill N` ends a node, `add CPUS` starts one.
"""

import sys

import ray
from ray.cluster_utils import Cluster

TIMEOUT_S = 120


def main() -> None:
    cluster = Cluster()
    nodes = [cluster.add_node(num_cpus=int(cpus), include_dashboard=False) for cpus in sys.argv[1:]]
    ray.init(address=cluster.address, log_to_driver=False)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        kind, number = line.split()
        if kind == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(wait=False, num_cpus=int(number)))
            cluster.wait_for_nodes(TIMEOUT_S)
        print("done", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
