"""What a coordinator's vectors and staged gradients take at most, and what would fit where that is too much."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyps_wire.errors import BadRequest, LimitExceeded

_FLOAT32_BYTES, _FLOAT64_BYTES = 4, 8
# What a plan may name at most: enough for anybody, and no product overflows.
_COUNT_MAX = 2**32 - 1


@dataclass(frozen=True)
class Plan:
    """What a coordinator will need at most."""

    history_pairs: int
    # Further vectors.
    vectors_float32: int
    vectors_float64: int
    # Staged sums of gradients at once.
    stages: int
    # Portions of a pass, of which `stages` was made, and the workers: each may leave a stage of fewer portions.
    num_portions: int = 0
    num_workers: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes that all of it takes for one parameter."""
        float32s = 2 * self.history_pairs + self.vectors_float32 + self.stages
        return _FLOAT32_BYTES * float32s + _FLOAT64_BYTES * self.vectors_float64


def require_plan_fits(plan: Plan, *, num_parameters: int, bytes_max: int) -> int:
    """Returns the bytes that the plan comes to on a server with so many parameters.

    Raises LimitExceeded where it goes beyond bytes_max, naming settings that do not.
    """
    for name in ("history_pairs", "vectors_float32", "vectors_float64", "stages", "num_portions"):
        value = getattr(plan, name)
        if not 0 <= value <= _COUNT_MAX:
            raise BadRequest(f"the plan has {name} {value}; expected 0 to {_COUNT_MAX}")
    num_bytes = plan.bytes_per_parameter * num_parameters
    if num_bytes > bytes_max:
        raise LimitExceeded(
            f"{plan.history_pairs} pairs of history, {plan.vectors_float32 + plan.vectors_float64} further vectors and "
            f"{plan.stages} staged sums of gradients take {num_bytes} bytes for the {num_parameters} parameters of "
            f"this server, which keeps {bytes_max} at the most: {_ways_out(plan, num_parameters, bytes_max)}"
        )
    return num_bytes


def _ways_out(plan: Plan, num_parameters: int, bytes_max: int) -> str:
    def history_that_fits(of: Plan) -> int:
        spare = bytes_max // num_parameters - replace(of, history_pairs=0).bytes_per_parameter
        return min(spare // (2 * _FLOAT32_BYTES), plan.history_pairs)

    def stages_that_fit(of: Plan) -> int:
        spare = bytes_max // num_parameters - replace(of, stages=0).bytes_per_parameter
        return min(spare // _FLOAT32_BYTES, plan.stages)

    ways = []
    history, stages = history_that_fits(plan), stages_that_fit(plan)
    if history >= 1:
        ways.append(f"--history {history}")
    if stages >= 1:
        ways.append(_fewer_stages(plan, stages))
    if not ways:
        # Neither alone is enough: the shortest history, and as many stages as then fit.
        stages = stages_that_fit(replace(plan, history_pairs=1))
        if stages >= 1:
            ways.append(f"--history 1 with {_fewer_stages(plan, stages)}")
    ways.append(f"more servers, or servers started with --max-vector-bytes {plan.bytes_per_parameter * num_parameters}")
    return "this would fit: " + "; or ".join(ways)


def _fewer_stages(plan: Plan, stages: int) -> str:
    """Settings of the coordinator that come to no more than so many stages at once."""
    if not plan.num_portions:
        return f"{stages} staged sums at once"
    ways = [f"--portions {stages}"] if stages < plan.num_portions else []
    if stages > plan.num_workers:
        ways.append(f"--fold group:k={math.ceil(plan.num_portions / (stages - plan.num_workers))}")
    return f"{' or '.join(ways)} ({stages} staged sums at once)"
