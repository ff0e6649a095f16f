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


def require_plan_fits(plan: Plan, *, num_parameters: int, bytes_max: int, pairs_there: int = 0) -> int:
    """Returns the bytes that the plan comes to on a server with so many parameters.

    `pairs_there`: the history that an earlier coordinator left, of which what is too much goes with the first commit.
    Raises LimitExceeded where it goes beyond bytes_max, naming settings that do not.
    """
    for name in ("history_pairs", "vectors_float32", "vectors_float64", "stages", "num_portions"):
        value = getattr(plan, name)
        if not 0 <= value <= _COUNT_MAX:
            raise BadRequest(f"the plan has {name} {value}; expected 0 to {_COUNT_MAX}")
    left = ""
    if pairs_there > plan.history_pairs:
        left = f" (which an earlier coordinator left; {plan.history_pairs} are kept once an iteration is done)"
        plan = replace(plan, history_pairs=pairs_there)
    num_bytes = plan.bytes_per_parameter * num_parameters
    if num_bytes > bytes_max:
        further, ways = (
            plan.vectors_float32 + plan.vectors_float64,
            _ways_out(plan, num_parameters, bytes_max, pairs_there),
        )
        raise LimitExceeded(
            f"{plan.history_pairs} pairs of history{left}, {further} further vectors and {plan.stages} staged sums of "
            f"gradients take {num_bytes} bytes for the {num_parameters} parameters of this server, which keeps "
            f"{bytes_max} at the most: {ways}"
        )
    return num_bytes


def _ways_out(plan: Plan, num_parameters: int, bytes_max: int, pairs_there: int) -> str:
    def history_that_fits(of: Plan) -> int:
        spare = bytes_max // num_parameters - replace(of, history_pairs=0).bytes_per_parameter
        return min(spare // (2 * _FLOAT32_BYTES), plan.history_pairs)

    def stages_that_fit(of: Plan) -> int:
        spare = bytes_max // num_parameters - replace(of, stages=0).bytes_per_parameter
        return min(spare // _FLOAT32_BYTES, plan.stages)

    ways = []
    history, stages = history_that_fits(plan), stages_that_fit(plan)
    shortest = max(1, pairs_there)
    if history >= shortest:
        ways.append(f"--history {history}")
    if stages >= 1:
        ways.append(_fewer_stages(plan, stages))
    if not ways:
        # Neither alone is enough: the shortest history, and as many stages as then fit.
        stages = stages_that_fit(replace(plan, history_pairs=shortest))
        if stages >= 1:
            ways.append(f"--history {shortest} with {_fewer_stages(plan, stages)}")
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
