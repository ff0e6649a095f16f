"""By what top-k deltas of local training should be divided: by all workers, or number by number by those that sent it.

Eight workers take 16 steps of SGD a round on the digits and send the largest numbers of what they changed, with error
feedback of 0.95. The servers' own shard merges them under hardsync and applies them by SGD at some rate, the outer one.
The published papers and programs differ; the table has the training loss after 50 rounds, of five seeds.

    python -m experiments.sparse_merging    # minutes
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.digits_network import Digits, Floats, first_parameters, load, loss_gradient, mean_loss
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.roster import Roster
from pyps.core.rules import SGD
from pyps.core.shard import Shard
from pyps_wire.codecs import Codec

WORKERS, LOCAL_STEPS, ROUNDS, SEEDS = 8, 16, 50, range(5)
BATCH, LOCAL_RATE, FEEDBACK = 16, 0.05, 0.95
OUTER_RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
# How many of the numbers a worker sends, and whether with two bits each: a sign and one of two levels.
CODECS = {"topk:ratio=0.01": (0.01, False), "topk2bit:ratio=0.015625": (1 / 64, True)}


class Pairs(Codec):
    """Each number that is not 0 as its place and itself: the wire's codecs with more bytes, and the same numbers."""

    sparse = True

    def encode(self, values: Floats) -> memoryview:
        [places] = np.nonzero(values)
        return memoryview(places.astype(np.uint32).tobytes() + values[places].tobytes())

    def decode_into(self, payload: bytes | memoryview, place: Floats) -> None:  # type: ignore[override]
        half = len(payload) // 2
        place.fill(0.0)
        place[np.frombuffer(payload[:half], np.uint32)] = np.frombuffer(payload[half:], np.float32)


PAIRS = Pairs(99, "pairs", lambda count: 8 * count)


def largest(values: Floats, ratio: float, *, two_bits: bool) -> Floats:
    """Return the values with all but the largest of them, in magnitude, set to 0."""
    kept = np.argsort(-np.abs(values), kind="stable")[: max(1, round(ratio * values.size))]
    sent = np.zeros_like(values)
    sent[kept] = values[kept]
    if two_bits:
        sizes = np.abs(values[kept])
        high = sizes >= sizes.mean()
        levels = [sizes[chosen].mean() if chosen.any() else 0.0 for chosen in (~high, high)]
        sent[kept] = np.sign(values[kept]) * np.where(high, levels[1], levels[0])
    return sent


def final_loss(digits: Digits, *, codec: str, merge: str, rate: float, seed: int) -> float:
    """Return the training loss after all rounds."""
    random = np.random.default_rng(seed)
    behaviour = Behaviour.parse(protocol=f"hardsync:weighting=equal,merge={merge}")
    settings = {"learning_rate": rate}
    shard = Shard(0, first_parameters(random), rule=SGD, hyperparameters=settings, behaviour=behaviour)
    names = [f"w{index}" for index in range(WORKERS)]
    residuals = {name: np.zeros(shard.length, np.float32) for name in names}
    parts = dict(zip(names, np.array_split(random.permutation(digits.num_examples), WORKERS), strict=True))
    for version in range(ROUNDS):
        held: Floats = shard.read(lambda _, values: values.copy())
        for name in names:
            present = held.copy()
            for _ in range(LOCAL_STEPS):
                batch = random.choice(parts[name], BATCH)
                present -= np.float32(LOCAL_RATE) * loss_gradient(present, digits.images[batch], digits.labels[batch])
            owed = np.float32(FEEDBACK) * residuals[name] + (held - present)
            ratio, two_bits = CODECS[codec]
            sent = largest(owed, ratio, two_bits=two_bits)
            residuals[name] = owed - sent
            delta = Gradient(name, 1, version, version, 0, PAIRS, PAIRS.encode(sent))
            shard.push(delta, roster=Roster(tuple(names)))
    return mean_loss(shard.read(lambda _, values: values.copy()), digits.images, digits.labels)


def rows() -> Iterator[str]:
    digits = load()
    yield "codec                     divided by  " + "".join(f"    rate {rate:<5g}" for rate in OUTER_RATES)
    for codec in CODECS:
        for merge in ("senders", "all"):
            cells = []
            for rate in OUTER_RATES:
                losses = [final_loss(digits, codec=codec, merge=merge, rate=rate, seed=seed) for seed in SEEDS]
                cells.append(f"  {np.mean(losses):5.3f} ± {np.std(losses, ddof=1):5.3f}")
            yield f"{codec:24}  {merge:10}" + "".join(cells)


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
