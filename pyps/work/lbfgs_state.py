"""What the coordinator knows beyond the vectors on the servers: numbers only, written down with each commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pyps.core.instructions import Instruction
from pyps_wire.errors import BadRequest

_FORMAT = 1


@dataclass(frozen=True)
class Pair:
    """Two differences that lie in the servers' history: s of two points, y of their gradients."""

    number: int
    sy: float  # s.y = 1 / rho
    yy: float  # y.y

    @property
    def s(self) -> str:
        """The name of s on the servers."""
        return f"s{self.number}"

    @property
    def y(self) -> str:
        """The name of y on the servers."""
        return f"y{self.number}"


@dataclass(frozen=True)
class LbfgsState:
    """The accepted point after an iteration. With the vectors x, g and the history, all that it takes to go on."""

    iteration: int = 0
    # False where the loss and the gradient at the point have yet to be computed: before the first iteration, and where
    # the coordinator found servers that could not go on together.
    evaluated: bool = False
    loss: float = 0.0
    gradient_norm: float = 0.0  # the largest element of g
    decrease: float = 0.0  # by which the last iteration lowered the loss
    steepest: bool = False  # whether it went along -g
    moved: bool = True  # whether it changed any parameter
    # Pairs that directions are made of, oldest first.
    pairs: tuple[Pair, ...] = ()
    # All that lie on the servers, of which the oldest may be of no use any more; and the number of the newest, from 1.
    held: int = 0
    newest: int = 0
    # Since the beginning: passes over the data set, pairs that were not kept, histories thrown away.
    passes: int = 0
    skipped: int = 0
    restarts: int = 0
    # What the commit executed, so that servers that have not done so can.
    commit: tuple[Instruction, ...] = ()

    def to_text(self) -> str:
        """Returns JSON; every float comes back with the same bits."""
        plain = asdict(replace(self, commit=()))
        plain["pairs"] = [[pair.number, pair.sy, pair.yy] for pair in self.pairs]
        plain["commit"] = [instruction.to_plain() for instruction in self.commit]
        return json.dumps({"format": _FORMAT, **plain}, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> LbfgsState:
        """The reverse of `to_text`. Raises BadRequest for a text that no coordinator of this version wrote."""
        try:
            plain = json.loads(text)
            found = plain.pop("format")
            if found == _FORMAT:
                pairs: Sequence[Sequence[float]] = plain.pop("pairs")
                return cls(
                    pairs=tuple(Pair(int(number), sy, yy) for number, sy, yy in pairs),
                    commit=tuple(Instruction.from_plain(instruction) for instruction in plain.pop("commit")),
                    **plain,
                )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRequest(f"the coordinator's state on server 0 cannot be read ({error}); {_ADVICE}") from error
        raise BadRequest(f"the coordinator's state on server 0 has format {found}, expected {_FORMAT}; {_ADVICE}")


_ADVICE = "start the coordinator in the version that began this run, or the servers anew"
