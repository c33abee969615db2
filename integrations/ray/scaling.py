"""How many replicas there are, and which of them gets a request.

Their number follows the work that waits or is done, in rows x draws, and not the requests: one may
be one row of one draw or a pool of 100,000 rows. Ray Serve asks each replica for its work
(`Replica.record_autoscaling_stats`), and takes the mean over `look_back_period_s`.

A request goes to the less busy of two replicas at random, of those that have its model in memory.
The proxy reads no bodies, so a request says by the header `serve_multiplexed_model_id` which model
it is for, as `NAME` or `NAME/VERSION`. One that says nothing goes anywhere; where a replica must
load a version first, its own bound on memory decides what goes.
"""

import math
import random
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

WORK = "queued_row_draws"  # in the statistics of replicas
MODELS = "models"


class ByWork:
    """A policy: each replica has about `target_row_draws` of work, within `slack` of it."""

    def __init__(self, target_row_draws: float = 3200.0, slack: float = 0.2) -> None:
        """Prepare; by default the target is half a micro-batch, so a replica is busy half of the
        time, about."""
        self.target_row_draws = target_row_draws
        self.slack = slack

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        work = [*(context.aggregated_metrics or {}).get(WORK, {}).values()]
        wanted = context.current_num_replicas
        if work:
            mean = sum(work) / len(work)
            wanted = count_replicas(mean, wanted, self.target_row_draws, self.slack)
        least = context.capacity_adjusted_min_replicas
        return max(least, min(context.capacity_adjusted_max_replicas, wanted)), {}


def count_replicas(work: float, now: int, target: float, slack: float) -> int:
    ratio = work / target
    return now if abs(ratio - 1.0) <= slack else max(1, math.ceil(now * ratio))


class ByModel(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Power of two choices, of the replicas that have the model first."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        wanted = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        ready = [
            replica
            for replica in candidate_replicas
            if wanted and wanted in replica.routing_stats.get(MODELS, ())
        ]
        others = [replica for replica in candidate_replicas if replica not in ready]
        return [random.sample(some, min(2, len(some))) for some in (ready, others) if some]
