"""What a virtual cluster is like: the flags of `pyps simulate`, checked, and what follows from them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer

from pyps.cli.serve import with_flags
from pyps.core import schedule
from pyps.core.gradient import PayloadKind
from pyps.core.protocols.base import Aggregation
from pyps.core.rule_settings import RuleSettings
from pyps.simulation.network import Network
from pyps.simulation.simulation import Failures, Timing, WorkerPlan, parse_timing
from pyps.units import SECONDS_MAX, counted, parse_bandwidth, parse_seconds
from pyps_wire.codecs import Codec, codec_of
from pyps_wire.errors import InvalidArgument

# A shard's time for a message, and for a number of it: a small push and its pull take a server's Python 0.1 ms, the
# kernels of Adagrad with the scan, and of the reply, so long a number (docs/performance.md, one thread of an EPYC).
PUSH_SECONDS = (7.5e-5, 6e-10)
PULL_SECONDS = (2.5e-5, 2e-10)
# A push must come of one life of a worker in a hundred, by its mean length.
LIVES_SHARE = math.log(100)
# What a worker pushes at least once without a model, where nothing says how much.
PUSHES_PER_WORKER = 20


def _flag(default: Any, meaning: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": meaning, **more})


def listed(text: str) -> list[str]:
    """Return the items of "async,softsync:n=8,merge=all": a comma before a setting is the item's."""
    return [item.strip() for item in re.split(r",(?!\s*\w+=)", text) if item.strip()]


def pulls_apart(protocol: Aggregation) -> bool:
    """Return whether workers pull by a request of its own, where others' answers to a push bring the parameters."""
    return protocol.barrier or protocol.pacer() is not None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of a simulation. Raises InvalidArgument for a value that cannot be."""

    workers: int = _flag(8, "Virtual workers.", min=1, max=100_000)
    protocol: str = _flag("async", "Protocols, as async,softsync:n=8,hardsync.")
    staleness: str = _flag("auto", "Staleness policies, as none,divide,constant; auto: as `pyps serve`.")
    rate: str = _flag("", "Learning rates, as 0.1,0.3; if left out, the optimizer's, or 0.1.")
    optimizer: str = _flag("", "The servers' rule and settings, as momentum:momentum=0.9; if left out, sgd.")
    schedule: str = _flag("constant", "How the rate changes, as for `pyps serve`.")
    batch_size: int = _flag(32, "Examples in a minibatch.", min=1, max=10**7)
    examples: int = _flag(0, "Examples to train on, over all workers; 0: by --epochs.", min=0, max=10**12)
    epochs: float = _flag(5.0, "Passes over the data, of all workers together.", min=0.001, max=1e6)
    step_seconds: str = _flag("1", "Mean time in which a worker computes a minibatch, as 0.2 or 20ms.")
    times: str = _flag("lognormal:0.15", "How it varies: fixed, normal:0.1, lognormal:0.15, exponential, scripted:1,2.")
    slow: str = _flag("", "Slow workers, as 3x2 for three that take twice as long, or 3x2,1x10.")
    failures: str = _flag("", "A worker's mean time between failures, and to come back, as 3600,60 or 3600,inf.")
    latency: str = _flag("0", "Time of a message besides its bytes, as 0.001 or 1ms.")
    bandwidth: str = _flag("", "Of a worker's link, each way, as 1gbit or 12.5MB (a second); if left out, no limit.")
    server_bandwidth: str = _flag("", "Of the server's link; if left out, as a worker's.")
    service_seconds: str = _flag("kernel", "A shard's time for a push and a pull, as 1ms,0.2ms; kernel: by its size.")
    cores: float = _flag(0.0, "Processors that the server and all workers share, on one machine; 0: no limit.", min=0.0)
    shards: int = _flag(1, "Shards of the model, which work beside each other.", min=1, max=1024)
    codec: str = _flag("float32", "Codec of gradients.")
    pull_codec: str = _flag("float32", "Codec of parameters.")
    local_steps: int = _flag(1, "Steps of SGD at --rate before a worker pushes what they changed.", min=1, max=10**5)
    seeds: int = _flag(3, "Trials of each combination.", min=1, max=10**5)
    target: float | None = _flag(None, "Report the time until the figure is at most this.")
    parameters: int = _flag(1_000_000, "The model's size, with --no-gradients.", min=1, max=10**11)

    def __post_init__(self) -> None:
        for name in ("epochs", "cores", "target"):
            if not math.isfinite(value := getattr(self, name) or 0.0):
                raise InvalidArgument(f"--{name} is {value}; expected a finite number")
        schedule.parse(self.schedule, epoch_examples=1)
        _ = self.worker_plans, self.network, self.rates, self.rule_settings(0.1), self.service
        if not listed(self.protocol) or not listed(self.staleness):
            raise InvalidArgument("--protocol and --staleness must name one or more each, as async,hardsync")

    @property
    def rates(self) -> list[float]:
        try:
            rates = [float(each) for each in listed(self.rate)]
        except ValueError:
            rates = [math.nan]
        if not all(0 < each < math.inf for each in rates):
            raise InvalidArgument(f"--rate is {self.rate!r}; expected numbers above 0, as 0.1,0.3")
        of_rule = self.local_steps == 1 and "learning_rate" in self.optimizer
        if rates and of_rule:
            raise InvalidArgument(f"--rate {self.rate} and --optimizer {self.optimizer} both set it: leave one out")
        return rates or [self.rule_settings(0.1).groups[0]["learning_rate"] if of_rule else 0.1]

    def rule_settings(self, rate: float) -> RuleSettings:
        """Return the servers' rule: for a rate, or for what local steps changed, whose rule is the outer one."""
        text = self.optimizer or "sgd"
        if "learning_rate" not in text:
            text += f"{',' if ':' in text else ':'}learning_rate={1.0 if self.local_steps > 1 else rate!r}"
        try:
            settings = RuleSettings.parse(text)
        except ValueError as error:
            raise InvalidArgument(f"--optimizer is {self.optimizer!r}: {error}") from None
        return replace(settings, kinds=(PayloadKind.DELTA,)) if self.local_steps > 1 else settings

    @property
    def worker_plans(self) -> list[WorkerPlan]:
        mean = parse_seconds(self.step_seconds, what="--step-seconds")
        found = [re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", item) for item in listed(self.slow)]
        slow = [(int(each[1]), float(each[2])) for each in found if each and 0 < float(each[2]) <= SECONDS_MAX]
        if len(slow) < len(found) or sum(count for count, _ in slow) > self.workers:
            raise InvalidArgument(
                f"--slow is {self.slow!r}; expected at most {counted(self.workers, 'worker')} and how much longer each"
                " takes, as 3x2"
            )
        factors = [factor for count, factor in slow for _ in range(count)]
        factors += [1.0] * (self.workers - len(factors))
        timings = {factor: self._timing(factor * mean) for factor in dict.fromkeys(factors)}
        plan = WorkerPlan(
            "",
            codec=codec_of(self.codec, Codec.pushes, what="--codec"),
            pull_codec=codec_of(self.pull_codec, Codec.pulls, what="--pull-codec"),
            failures=self.failing,
        )
        width = len(str(self.workers - 1))
        return [replace(plan, worker_id=f"w{i:0{width}}", timing=timings[each]) for i, each in enumerate(factors)]

    def _timing(self, mean: float) -> Timing:
        timing, count = parse_timing(self.times, mean=mean), self.local_steps
        if count == 1:
            return timing
        return lambda step, random: sum(timing(step * count + each, random) for each in range(count))

    @property
    def failing(self) -> Failures | None:
        times = [parse_seconds(item, what="--failures", most=math.inf) for item in listed(self.failures)]
        # Who fails may stay away for ever.
        if times and (len(times) != 2 or not 0 < times[0] <= SECONDS_MAX):
            raise InvalidArgument(f"--failures is {self.failures!r}; expected two times, as 3600,60")
        step = self.local_steps * parse_seconds(self.step_seconds, what="--step-seconds")
        if times and times[0] < step / LIVES_SHARE:
            raise InvalidArgument(
                f"--failures is {self.failures!r}, but what a worker computes before a push takes {step:g} s: hardly"
                f" any push would come; expected at least {step / LIVES_SHARE:.2g} s between failures"
            )
        return Failures(*times) if times else None

    @property
    def network(self) -> Network:
        of_worker = parse_bandwidth(self.bandwidth or "inf", what="--bandwidth")
        of_server = parse_bandwidth(self.server_bandwidth or self.bandwidth or "inf", what="--server-bandwidth")
        return Network(parse_seconds(self.latency, what="--latency"), of_worker, of_server)

    @property
    def service(self) -> Callable[[int], tuple[float, float]]:
        """A function that returns a shard's seconds for a push and for a pull, by its size."""
        if self.service_seconds == "kernel":
            return lambda size: (PUSH_SECONDS[0] + size * PUSH_SECONDS[1], PULL_SECONDS[0] + size * PULL_SECONDS[1])
        what = "--service-seconds, unless kernel,"
        times = [parse_seconds(item, what=what) for item in listed(self.service_seconds)]
        if not 1 <= len(times) <= 2:
            raise InvalidArgument(f"{what} is {self.service_seconds!r}; expected one or two times, as 1ms,0.2ms")
        return lambda size: (times[0], times[1] if len(times) > 1 else times[0] / 3)

    def sized(self, *, num_parameters: int, num_examples: int) -> Settings:
        """Return the settings for a model and data of that size, 0 examples for none; later steps need no more."""
        if self.shards > num_parameters:
            raise InvalidArgument(
                f"--shards is {self.shards}; expected at most {num_parameters}, the number of the model's parameters"
            )
        per_push = self.batch_size * self.local_steps
        examples = self.examples or round(self.epochs * num_examples) or self.workers * PUSHES_PER_WORKER * per_push
        return replace(self, parameters=num_parameters, examples=examples)

    @property
    def pushes(self) -> int:
        return math.ceil(self.examples / (self.batch_size * self.local_steps))


_KINDS: dict[str, Any] = get_type_hints(Settings)


def _flag_of(setting: Field[Any]) -> inspect.Parameter:
    option: Any = Annotated[_KINDS[setting.name], typer.Option(**setting.metadata)]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=option)


def with_cluster(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**` parameter by a flag for each of these settings, or for all."""
    added = [_flag_of(each) for each in fields(Settings) if not names or each.name in names]
    return partial(with_flags, added=added)
