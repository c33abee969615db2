"""Scale replicas by load and route requests to them.

The number of replicas follows the queued and running row-draws, because requests differ: one may
have one row and another a pool of 100,000. Ray Serve polls the row-draws of each replica
(`Replica.record_autoscaling_stats`) and averages them over `look_back_period_s`.

Ray Serve draws two of the replicas that have a request's model in memory and picks the less busy
one. The proxy does not read bodies, so the header `serve_multiplexed_model_id` names the model as
`NAME` or `NAME/VERSION`. Without it any replica may get the request.
"""

import math
import random
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

WORK = "queued_row_draws"  # key of a replica's statistics
MODELS = "models"


class ByWork:
    """An autoscaling policy that targets `target_row_draws` of work per replica.

    The default is half a micro-batch, which keeps a replica busy for about half of the time. A
    relative deviation of up to `slack` changes nothing.
    """

    def __init__(self, target_row_draws: float = 3200.0, slack: float = 0.2) -> None:
        self.target_row_draws = target_row_draws
        self.slack = slack

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        work = [*(context.aggregated_metrics or {}).get(WORK, {}).values()]
        count = context.current_num_replicas
        if work:
            ratio = sum(work) / len(work) / self.target_row_draws
            if abs(ratio - 1.0) > self.slack:
                count = max(1, math.ceil(count * ratio))
        min_replicas = context.capacity_adjusted_min_replicas
        return max(min_replicas, min(context.capacity_adjusted_max_replicas, count)), {}


class ByModel(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """A router that prefers replicas that have loaded the model.

    It proposes two random replicas of this kind first, and then two others.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        model = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        ready = [
            replica
            for replica in candidate_replicas
            if model and model in replica.routing_stats.get(MODELS, ())
        ]
        unready = [replica for replica in candidate_replicas if replica not in ready]
        return [random.sample(group, min(2, len(group))) for group in (ready, unready) if group]
