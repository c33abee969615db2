"""How many replicas there should be: by work that waits or is done, in rows x draws, and not by
requests.

A request may be one row of one draw or a pool of 100,000 rows. Ray Serve asks each replica for its
work (`Replica.record_autoscaling_stats`), and takes the mean over `look_back_period_s`.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

WORK = "queued_row_draws"  # what replicas tell: `service.integrations.ray.app`


class ByWork:
    """A policy: so many replicas that each has about `target_row_draws` of work, within `slack` of
    it."""

    def __init__(self, target_row_draws: float = 3200.0, slack: float = 0.2) -> None:
        """Begin; the target is by default half a micro-batch: a replica that is at work half of the
        time, about."""
        self.target_row_draws = target_row_draws
        self.slack = slack

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that there should be, and no state."""
        work = [*(context.aggregated_metrics or {}).get(WORK, {}).values()]
        now = context.current_num_replicas
        wanted = (
            now
            if not work
            else wanted_replicas(sum(work) / len(work), now, self.target_row_draws, self.slack)
        )
        return max(
            context.capacity_adjusted_min_replicas,
            min(context.capacity_adjusted_max_replicas, wanted),
        ), {}


def wanted_replicas(work: float, now: int, target: float, slack: float) -> int:
    """Return how many replicas would have the target's work each, now that each has `work`; as many
    within slack."""
    ratio = work / target
    return now if abs(ratio - 1.0) <= slack else max(1, math.ceil(now * ratio))
