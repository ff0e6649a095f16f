"""What pyps is built towards, each a ratio within one run, and what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import figures
from figures import GRPC, LANE, LANE_BFLOAT16, LANE_INT4, LANE_TLS, SHARED_MEMORY, TORCH_RPC, Results
from work import BIG

# Its better transport is the one that counts.
TORCH_RPC_AT_ITS_BEST = (f"{TORCH_RPC} auto", f"{TORCH_RPC} tcp")
HARDSYNC_INT4 = "pyps hardsync, overlapped in backward, int4"
LOCAL_INT4 = "pyps local average int4"


@dataclass(frozen=True)
class Target:
    """One line of the table; `met` is None where this run cannot say."""

    what: str
    wanted: str
    measured: str = "not measured in this run"
    met: bool | None = None


def targets(results: Results) -> list[Target]:
    """All of them, in order."""
    return [
        _rounds(results, LANE, "big", 1, (GRPC,), 2.0),
        _rounds(results, LANE, "big", 1, TORCH_RPC_AT_ITS_BEST, 1.15),
        _rounds(results, LANE, "big", 2, ("Ray", f"{TORCH_RPC} tcp"), 1.0),
        _rounds(results, LANE_BFLOAT16, "big", 1, (LANE,), 1.6),
        _rounds(results, LANE_TLS, "big", 1, (LANE,), 0.6),
        _rounds(results, LANE, "mid", 1, TORCH_RPC_AT_ITS_BEST, 1.0),
        _rounds(results, LANE, "small", 1, ("naive gRPC",), 1.0),
        _rounds(results, LANE, "small", 1, TORCH_RPC_AT_ITS_BEST, 1.0),
        _ps_lite(results),
        _server_cpu(results),
        _memory(results),
        *(_link(results, subject, rate) for rate in ("1gbit", "10gbit") for subject in (LANE, LANE_BFLOAT16)),
        _few_bits(results),
        _overlap(results),
        *(_kernel(results, rule) for rule in ("adam", "adamw")),
        *(_loop(results, rule) for rule in ("adam", "adamw")),
        _seconds(results, "1gbit", HARDSYNC_INT4, (figures.ALONE,)),
        _seconds(results, "1gbit", HARDSYNC_INT4, ("DDP gloo, float16", "DDP gloo, PowerSGD rank 4")),
        _seconds(results, "10gbit:3"),
        *(_seconds(results, case, rivals=True) for case in ("100mbit", "100mbit:3")),
        *(_seconds(results, case, most=1.0, local=True) for case in ("100mbit", "50mbit+100ms")),
        *(_goodput(results, subject) for subject in (LOCAL_INT4, "pyps local async int4")),
        *_few_bytes(results),
    ]


def _rounds(results: Results, subject: str, size: str, workers: int, others: Sequence[str], least: float) -> Target:
    """Rounds a second of a subject over those of the fastest of others."""
    found = figures.rows(results, "rounds", size=size, workers=workers)
    what = f"{subject}, {size} model, {workers} worker{'s' * (workers > 1)}: {' or '.join(others)}"
    ours, theirs = figures.median(found, subject), figures.fastest(found, lambda name: name in others)
    if ours is None or theirs is None:
        return _ratio(what, None, least=least)
    reported = f" {theirs[0]} ({ours:,.4g} against {theirs[1]:,.4g})"
    target = _ratio(what, ours / theirs[1], least=least, more=reported)
    absent = [name for name in others if name not in figures.subjects(found)]
    if not absent:
        return target
    # The fastest may be one that was left out.
    return replace(target, measured=f"{target.measured}; {' and '.join(absent)} not measured", met=None)


def _ps_lite(results: Results) -> Target:
    found = figures.rows(results, "rounds", size="small", workers=1)
    ours, theirs, here = figures.median(found, SHARED_MEMORY), figures.PS_LITE_SMALL, figures.ps_lite(found, "small", 1)
    reported = f" ({ours:,.0f})" if ours else ""
    if ours and here:
        reported += f"; {ours / here:.2f} x the estimate below, {here:,.0f}"
    what = f"{SHARED_MEMORY}, small model, 1 worker: ps-lite, estimated before, {theirs:,}"
    return _ratio(what, ours / theirs if ours else None, least=1.0, more=reported)


def _server_cpu(results: Results) -> Target:
    found = figures.rows(results, "rounds", size="big", workers=1)
    what, wanted = f"{LANE}, big model, 1 worker: the server's CPU seconds per GB", "≤ 0.40"
    reported = {name: figures.median(found, name, "server_cpu_s_per_gb") for name in (LANE, GRPC, "TensorFlow gRPC")}
    if (ours := reported.pop(LANE)) is None:
        return Target(what, wanted)
    others = "".join(f", {name} {value:.2f}" for name, value in reported.items() if value is not None)
    recorded = f"ps-lite {figures.PS_LITE_SERVER_CPU_S_PER_GB:.2f}"
    return Target(what, wanted, f"{ours:.2f}{others}, {recorded}", ours <= 0.40)


def _memory(results: Results) -> Target:
    found = figures.rows(results, "rounds", size="big", workers=4)
    limit = 2.3 * BIG.nbytes / 1e6 + 100
    what = f"{LANE}, big model, 4 workers: the server's memory at its peak"
    wanted = f"≤ 2.3 x the model + 100 MB = {limit:.0f} MB"
    peak, by_grpc = (figures.median(found, name, "server_peak_mb") for name in (LANE, GRPC))
    if peak is None:
        return Target(what, wanted)
    return Target(what, wanted, f"{peak:.0f} MB" + (f", {GRPC} {by_grpc:.0f} MB" if by_grpc else ""), peak <= limit)


def _link(results: Results, subject: str, rate: str) -> Target:
    share = figures.share_of_link(figures.rows(results, "link", rate=rate), subject)
    what = f"{subject}, big model, 1 worker, {rate.removesuffix('gbit')} Gbit/s: plain TCP, both ways at once"
    return _ratio(what, share, least=0.95)


def _few_bits(results: Results) -> Target:
    found = figures.rows(results, "link", rate="1gbit")
    few, all_bits = figures.median(found, LANE_INT4), figures.median(found, LANE)
    ratio = few / all_bits if few and all_bits else None
    return _ratio(f"{LANE_INT4}, big model, 1 worker, 1 Gbit/s: {LANE}", ratio, least=6.0)


def _overlap(results: Results) -> Target:
    found = figures.rows(results, "overlap", rate="1gbit", subject=LANE)
    what = f'{LANE}, overlap="backward", 1 Gbit/s, a step that computes as long as a round takes: that round'
    times = statistics.median(row["backward_s"] / row["longer_s"] for row in found) if found else None
    return _ratio(what, times, most=1.15)


def _kernel(results: Results, rule: str) -> Target:
    of_torch = figures.median(figures.rows(results, "kernel"), rule, "of_torch")
    return _ratio(f"The {rule} kernel, one thread: torch's fused optimizer", of_torch, least=1.0)


def _loop(results: Results, rule: str) -> Target:
    found = figures.rows(results, "kernel", subject=rule)
    what = f"The {rule} kernel, one thread: a plain loop over the same arrays"
    return _ratio(what, found[0]["shares"]["alone"] if found else None, least=0.9)


def _seconds(
    results: Results,
    case: str,
    ours: str = "pyps",
    others: Sequence[str] = (),
    *,
    most: float = 0.9,
    local: bool = False,
    rivals: bool = False,
) -> Target:
    """Seconds to the loss of the fastest whose name begins so, over those of the fastest of others, or of all.

    `rivals`: not of one process alone.
    """
    rate, _, slowed = case.partition(":")
    if local:
        found = figures.rows(results, "local_training", case=case, workers=2)
    else:
        found = figures.of_training_case(figures.rows(results, "few_bits"), rate, float(slowed or 1))
    names = figures.subjects(found)
    own = [name for name in names if name.startswith(ours)]
    theirs = [name for name in names if (name in others if others else not name.startswith("pyps"))]
    if rivals:
        theirs = [name for name in theirs if not name.startswith("one process")]
    what = f"{case}{', local' * local}, s to the loss, {'fastest of ' * (ours == 'pyps')}{ours}: "
    what += " or ".join(others) or ("rivals" if rivals else "all others")
    if not own or not theirs:
        return _ratio(what, None, most=most)
    limit = max(row["limit_s"] for row in found)
    # Who did not come to it took longer than the limit, at least.
    (seconds, name), (reference, other) = (
        min((figures.median(found, name, "seconds_to_loss") or limit, name) for name in some) for some in (own, theirs)
    )
    if seconds >= limit:
        return replace(_ratio(what, None, most=most), measured=f"not in {limit:g} s", met=False)
    own_name = f"{name.removeprefix('pyps ')} " * (name != ours)
    other_name = f"{other} " * (other not in others[:1])
    more = f" ({own_name}{seconds:.1f} s, {other_name}{reference:.1f} s)"
    return _ratio(what, seconds / reference, most=most, more=more)


def _goodput(results: Results, subject: str) -> Target:
    """Batches a second with a worker that is killed each minute, over those without."""
    paces = [
        [row["batches"] / row["curve"][-1][0] for row in found if row["subject"] == subject]
        for found in (
            figures.rows(results, "local_training", case=f"100mbit{what}", workers=4) for what in (":killed", "")
        )
    ]
    ratio = statistics.median(paces[0]) / statistics.median(paces[1]) if all(paces) else None
    what = f"{subject}, 100 Mbit/s, one of 4 workers killed each minute, batches a second: without that"
    return _ratio(what, ratio, least=0.88)


def _few_bytes(results: Results) -> list[Target]:
    """Local training in the fewest bits, next to a step's bytes without it, and to the loss after as many batches."""
    found = figures.rows(results, "local_training", case="1gbit", workers=2)
    few, all_bits, loss, reference = (
        figures.median(found, subject, column)
        for column, others in (("kilobytes_a_batch", "async"), ("loss_at_batches", "hardsync"))
        for subject in ("pyps local average topk2bit", f"pyps {others} float32")
    )
    return [
        _ratio(
            "pyps async float32, 1 Gbit/s, bytes a batch: pyps local average topk2bit",
            all_bits / few if few and all_bits else None,
            least=100,
        ),
        _ratio(
            "pyps local average topk2bit, loss at equal batches: pyps hardsync float32",
            loss / reference if loss and reference else None,
            most=1.01,
        ),
    ]


def _ratio(what: str, value: float | None, *, least: float = 0.0, most: float = math.inf, more: str = "") -> Target:
    wanted = f"≥ {least:g} x" if least else f"≤ {most:g} x"
    return (
        Target(what, wanted) if value is None else Target(what, wanted, f"{value:.2f} x{more}", least <= value <= most)
    )
