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


def _ratio(what: str, value: float | None, *, least: float = 0.0, most: float = math.inf, more: str = "") -> Target:
    wanted = f"≥ {least:g} x" if least else f"≤ {most:g} x"
    return (
        Target(what, wanted) if value is None else Target(what, wanted, f"{value:.2f} x{more}", least <= value <= most)
    )
