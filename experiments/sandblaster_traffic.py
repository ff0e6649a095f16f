"""How few bytes do Sandblaster's coordinator and workers exchange?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.adagrad_rates import PAPER
from experiments.digits_network import NUM_PARAMETERS
from experiments.harness import Condition, Experiment, Measure, Results, Trial, beside
from experiments.sandblaster_crew import Numerics, VirtualCrew
from experiments.sandblaster_servers import NUM_SERVERS, LocalServers
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.core.arrays import Floats
from pyps.simulation.simulation import normal
from pyps.work.portions import Portion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COORDINATOR, WORKERS = "coordinator", "workers"
SIZES = (1_000, 1_000_000)
CREWS = (2, 4, 8, 20, 100)
EXAMPLES, BATCH, PORTIONS = 1437, 8, 10
# Claimed portions whose gradients are summed before they are sent: `--fold group:k=4`, and `--fold portion`.
GROUPED, SINGLE = 4, 1
# Numbers of a model of any size that matter, on each server: so the coordinator hears the same of all.
LIVE = 400
# A vector of the digits' network, and more than all else in a worker's request and its answer.
VECTOR, SMALL = 4 * NUM_PARAMETERS, 128


@dataclass(frozen=True, kw_only=True)
class CoordinatorBytes(Trial):
    """What a coordinator and the servers say to each other in eight iterations, by the model's size."""

    of: str = COORDINATOR
    size: int
    group: int = SINGLE

    def measure(self) -> dict[str, float]:
        first, target, steepness = (np.zeros(self.size, np.float32) for _ in range(3))
        random = np.random.default_rng(self.seed)
        for part in np.array_split(np.arange(self.size), NUM_SERVERS):
            first[part[:LIVE]], target[part[:LIVE]] = random.standard_normal((2, LIVE)).astype(np.float32)
            steepness[part[:LIVE]] = np.geomspace(0.1, 10, LIVE)
        live = np.flatnonzero(steepness)

        def compute(at: Floats, portion: Portion) -> tuple[Floats, float]:
            gradient = steepness * (at - target)
            losses = 0.5 * gradient[live].astype(np.float64) * (at - target)[live]
            return gradient * np.float32(portion.num_examples), float(losses.sum()) * portion.num_examples

        servers = LocalServers(first)
        numerics = Numerics(servers.parameters, compute, servers.stage)
        crew = VirtualCrew([normal(variation=0.1)] * 4, num_examples=64, numerics=numerics, seed=self.seed)
        servers.lower(crew, CoordinationSettings(history=5, iterations=8, portions=8), lambda _: None)
        return {"bytes": servers.traffic.bytes, "parameters": 0.0, "downpour": 0.0}


@dataclass(frozen=True, kw_only=True)
class WorkerBytes(Trial):
    """Bytes an example of all workers, both ways, in a pass over the digits; and Downpour's."""

    of: str = WORKERS
    # How many there are.
    size: int
    group: int

    def measure(self) -> dict[str, float]:
        crew = VirtualCrew([normal(1 / BATCH, variation=0.1)] * self.size, num_examples=EXAMPLES, seed=self.seed)
        crew.begin_pass(1, num_portions=PORTIONS * self.size, portions_per_stage=self.group)
        crew.await_pass(1)
        pulled, sent = (VECTOR * crew.messages[kind] / EXAMPLES for kind in ("pull", "stage"))
        return {
            "bytes": pulled + sent + SMALL * crew.messages.total() / EXAMPLES,
            "parameters": pulled,
            "downpour": 2 * VECTOR / BATCH,
        }


def trials(seeds: Sequence[int]) -> Iterator[Trial]:
    for seed in seeds:
        for size in SIZES:
            yield CoordinatorBytes(seed=seed, size=size)
        for size in CREWS:
            for group in (GROUPED, SINGLE):
                yield WorkerBytes(seed=seed, size=size, group=group)


def share(workers: int, group: int = GROUPED) -> Measure:
    """Of Downpour's bytes."""
    fields = {"of": WORKERS, "size": workers, "group": group}
    return lambda results: results.mean("bytes", **fields) / results.mean("downpour", **fields)


def growth(results: Results) -> float:
    """The largest relative distance between a coordinator's bytes for the two sizes."""
    small, large = (results.values("bytes", of=COORDINATOR, size=size) for size in SIZES)
    return max(abs(more / less - 1) for less, more in zip(small, large, strict=True))


def draw(figure: Figure, results: Results) -> None:
    axis = figure.subplots()
    places = range(len(CREWS))
    for group, style in ((SINGLE, "tab:orange"), (GROUPED, "tab:red")):
        fold = "group:k=4" if group == GROUPED else "portion"
        offset = 0.2 if group == GROUPED else -0.2
        chosen = [results.where(of=WORKERS, group=group, size=size) for size in CREWS]
        pulled = [each.mean("parameters") for each in chosen]
        sent = [each.mean("bytes") - low for each, low in zip(chosen, pulled, strict=True)]
        at = [place + offset for place in places]
        axis.bar(at, pulled, width=0.38, color="lightgray")
        axis.bar(at, sent, width=0.38, bottom=pulled, color=style, label=f"--fold {fold}:\ngradients and the rest")
        for place, size, low, more in zip(at, CREWS, pulled, sent, strict=True):
            axis.annotate(f"{100 * share(size, group)(results):.0f} %", (place, low + more), ha="center", va="bottom")
    downpour = results.mean("downpour", of=WORKERS)
    axis.axhline(downpour, color="tab:blue", label="Downpour, each minibatch of 8")
    axis.axhline(downpour / 10, color="tab:blue", linestyle=":", label="a tenth of it")
    axis.bar([0], [0], color="lightgray", label="parameters, once a pass")
    axis.set_xticks(list(places), list(map(str, CREWS)))
    axis.set(xlabel="workers, ten portions each", ylabel="bytes an example", yscale="log", ylim=(10, 3e4))
    figure.legend(loc="outside right center", fontsize="small")


EXPERIMENT = Experiment(
    name="sandblaster_traffic",
    title="Sandblaster's coordinator exchanges no vectors, and its workers few",
    in_short="""The coordinator's bytes do not grow. The workers' are few only where each has 180 examples or more; 100
    workers exchange more than Downpour.""",
    paper=PAPER,
    section="section 4.2",
    claim="""The coordinator has no access to the parameters and sends small messages: so its traffic does not grow
    with the model. Workers fetch parameters only at the start of a batch and send gradients only every few portions,
    while Downpour needs a high frequency and bandwidth. A tenth of its bytes an example is our reading of that.""",
    setting="""Coordinator: the messages of eight iterations of L-BFGS on two servers, as they are sent, with models of
    1,000 and of 1,000,000 numbers, of which the same 800 matter, so that the iterations are alike. Attach, the first
    message, is not counted: its answer holds the number of parameters, and grows with its digits. Workers: a pass over
    the digits (1,437 examples, 2,410 numbers), ten portions a worker; each pulls once, and sends the sum of four
    portions (`--fold group:k=4`, as in the paper) or each (`--fold portion`, the default, for the same bits with any
    number of workers). Their vectors are counted, and 128 bytes for all else in a request and its answer, which is more
    than they have; of Downpour, which pushes and pulls with each minibatch of 8, vectors alone. A first verdict,
    "confirmed", judged 8 workers alone (9.84 %: yes), which had been chosen knowing that they pass. The claim names no
    number of workers: so all of 2 to 100 are judged now, at the same bounds and from the same table, knowing that they
    fail.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="nothing: the figures follow from the messages, and had been seen",
    conditions=(
        Condition(
            "coordinator: bytes for 1,000,000 numbers differ from those for 1,000 by",
            growth,
            at_most=0.0,
            opposite=1.0,
            has_error=False,
            unit="%",
        ),
        Condition(
            "2 to 100 workers, four portions summed: the largest share of Downpour's bytes an example",
            lambda results: max(share(workers)(results) for workers in CREWS),
            at_most=0.1,
            opposite=1.0,
            unit="%",
        ),
        *(
            beside(
                f"{workers} workers, {'four portions' if group == GROUPED else 'none'} summed: share",
                share(workers, group),
                at_most=0.1,
                unit="%",
            )
            for group in (GROUPED, SINGLE)
            for workers in CREWS
        ),
    ),
    shows_not="""The paper's traffic: of a billion examples thousands of workers have fair shares. gRPC's own bytes are
    not counted, nor what Downpour saves by pushing less often.""",
    reading="""What fails are the workers. Their share follows from counting: with four portions summed 1.2 % for each
    worker among which these examples are shared. So up to 8 workers, with 180 examples each, keep to a tenth, 20 do
    not, and 100, with 14 examples each, exchange more than under Downpour. With the default, each portion by itself, 2
    workers keep to it, 4 do not, and 100 exchange 3.2 times Downpour's bytes. What holds is the coordinator: its bytes
    are the same to the last one, Attach aside.""",
    draw=draw,
)
