"""What people should know about the behaviour in force, with the workers that there are, in sentences."""

from __future__ import annotations

from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.shard import Shard

_COUNTS_DIFFER = (
    "some workers push gradients without a count of examples and some with one: a round with both is averaged with"
    " equal shares; give `examples` with every push, or choose weighting=equal"
)

_NO_EXAMPLES = (
    "no worker tells how many examples stand behind its gradients (optimizer.step(examples=...), count_examples), so"
    " {} does not move"
)

# By then a worker that counts its examples has pushed.
UPDATES_BEFORE_DOUBT = 100


class Caveats:
    """Remembers what a warning needs. May be used from any thread."""

    def __init__(self) -> None:
        # Whether gradients came with a count of their examples, and whether some came without.
        self._counted = set[bool]()

    def heard(self, gradient: Gradient) -> None:
        """Notes a gradient that came."""
        self._counted.add(gradient.example_count > 0)

    def sentences(self, behaviour: Behaviour, shard: Shard | None, *, num_workers: int) -> tuple[str, ...]:
        """The warnings with so many workers, judging by one shard where there is one."""
        warnings = behaviour.aggregation.warnings(num_workers) if num_workers else ()
        if behaviour.aggregation.weighs_examples and len(self._counted) == 2:
            warnings += (_COUNTS_DIFFER,)
        if behaviour.counts_epochs and shard and shard.version >= UPDATES_BEFORE_DOUBT and not shard.examples:
            what = "the growth of the minibatch" if behaviour.batch_growth else "the schedule by epochs"
            warnings += (_NO_EXAMPLES.format(what),)
        return warnings
