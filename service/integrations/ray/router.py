"""Which replica a request goes to: of two at random the less busy one, of those that have its model
in memory.

The proxy reads no bodies, so a request says by the header `serve_multiplexed_model_id` which model
it is for, as `NAME` or `NAME/VERSION`. One that says nothing goes anywhere; where a replica must
load a version first, its own bound on memory decides what goes.
"""

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

MODELS = "models"  # in what replicas say of themselves: `service.integrations.ray.app`


class ByModel(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Power of two choices, of the replicas that have the model first."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return two replicas of those that have the model in memory, and two of the others."""
        wanted = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        has = [
            replica
            for replica in candidate_replicas
            if wanted and wanted in replica.routing_stats.get(MODELS, ())
        ]
        others = (
            [replica for replica in candidate_replicas if replica not in has]
            if has
            else candidate_replicas
        )
        return [two for two in (_two(has), _two(others)) if two]


def _two(replicas: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(replicas, min(2, len(replicas)))
