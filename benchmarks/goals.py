"""The goals that pyps was built towards, each as a ratio within one run, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import figures
from figures import GRPC, GRPC_BFLOAT16, SHARED_MEMORY, Results
from work import BIG


@dataclass(frozen=True)
class Goal:
    """One line of the table; `measured` is None where this run has no figures for it."""

    what: str
    wanted: str
    measured: str | None
    met: bool | None


def goals(results: Results) -> list[Goal]:
    """All of them, in order."""
    return [
        _torch_rpc(results, SHARED_MEMORY, "big", 1, 2.5),
        _torch_rpc(results, SHARED_MEMORY, "big", 2, 2.0),
        _torch_rpc(results, SHARED_MEMORY, "mid", 1, 2.0),
        _grpc_peers(results, 1, 1.2),
        _grpc_peers(results, 2, 1.0),
        _torch_rpc(results, GRPC_BFLOAT16, "big", 1, 1.0),
        _link(results, GRPC, 1.7),
        _link(results, GRPC_BFLOAT16, 3.4),
        _torch_rpc(results, GRPC, "small", 1, 1.5),
        _ps_lite_small(results),
        _tail(results, GRPC),
        _tail(results, SHARED_MEMORY),
        _memory(results),
        _server_cpu(results),
        _bandwidth(results),
        *(_fused(results, rule) for rule in ("adagrad", "adam", "sgd")),
    ]


def _ratio(what: str, ours: float | None, theirs: tuple[str, float] | None, least: float) -> Goal:
    """Ours over theirs."""
    if ours is None or theirs is None:
        return Goal(what, f"≥ {least} x", None, None)
    ratio = ours / theirs[1]
    return Goal(
        what, f"≥ {least} x", f"{ratio:.2f} x {theirs[0]} ({ours:,.4g} against {theirs[1]:,.4g})", ratio >= least
    )


def _torch_rpc(results: Results, subject: str, size: str, workers: int, least: float) -> Goal:
    found = figures.rows(results, "rounds", size=size, workers=workers)
    reference = figures.fastest(found, figures.is_torch_rpc)
    what = f"{subject}, {size} model, {_workers(workers)}: torch RPC at its best, float32"
    return _ratio(what, figures.median(found, subject), reference, least)


def _grpc_peers(results: Results, workers: int, least: float) -> Goal:
    found = figures.rows(results, "rounds", size="big", workers=workers)
    fastest = figures.fastest(found, lambda name: name.startswith(("TensorFlow", "Ray")))
    lite = figures.ps_lite(found, "big", workers)
    if lite is not None and (fastest is None or lite > fastest[1]):
        fastest = ("ps-lite as recorded", lite)
    what = f"{GRPC}, big model, {_workers(workers)}: the fastest of TensorFlow, Ray and ps-lite"
    return _ratio(what, figures.median(found, GRPC), fastest, least)


def _link(results: Results, subject: str, least: float) -> Goal:
    found = figures.rows(results, "link", rate="1gbit")
    what = f"{subject}, big model over 1 Gbit/s: the fastest peer's float32"
    ours = figures.median(found, subject)
    goal = _ratio(what, ours, figures.fastest(found, figures.is_peer), least)
    # The peers differ in whether they push and pull at the same time, as TensorFlow does and torch RPC does not.
    torch_rpc = figures.fastest(found, figures.is_torch_rpc)
    if goal.measured is None or torch_rpc is None or ours is None:
        return goal
    return replace(goal, measured=f"{goal.measured}; {ours / torch_rpc[1]:.2f} x {torch_rpc[0]}")


def _ps_lite_small(results: Results) -> Goal:
    found = figures.rows(results, "rounds", size="small", workers=1)
    lite = figures.ps_lite(found, "small", 1)
    what = f"{SHARED_MEMORY}, small model, 1 worker: ps-lite"
    theirs = ("ps-lite as recorded", lite) if lite is not None else None
    return _ratio(what, figures.median(found, SHARED_MEMORY), theirs, 1.0)


def _tail(results: Results, subject: str) -> Goal:
    found = figures.rows(results, "rounds", size="small", workers=1)
    p50, p99 = figures.median(found, subject, "p50_ms"), figures.median(found, subject, "p99_ms")
    what = f"{subject}, small model, 1 worker, pinned: p99 against p50"
    if p50 is None or p99 is None:
        return Goal(what, "< 3 x", None, None)
    return Goal(what, "< 3 x", f"{p99 / p50:.2f} x ({p99:.3g} against {p50:.3g} ms)", p99 < 3 * p50)


def _memory(results: Results) -> Goal:
    peak = figures.median(figures.rows(results, "rounds", size="big", workers=4), GRPC, "server_peak_mb")
    limit = 2.3 * BIG.nbytes / 1e6 + 100
    what = f"{GRPC}, big model, 4 workers: the server's memory at its peak"
    wanted = f"≤ 2.3 x the model + 100 MB = {limit:.0f} MB"
    if peak is None:
        return Goal(what, wanted, None, None)
    return Goal(what, wanted, f"{peak:.0f} MB", peak <= limit)


def _server_cpu(results: Results) -> Goal:
    found = figures.rows(results, "rounds", size="big", workers=1)
    ours, tensorflow = (figures.median(found, name, "server_cpu_s_per_gb") for name in (GRPC, "TensorFlow gRPC"))
    what = f"{GRPC}, big model, 1 worker: the server's CPU seconds per GB against TensorFlow's and ps-lite's"
    if ours is None or tensorflow is None:
        return Goal(what, "below both", None, None)
    lite = figures.PS_LITE_SERVER_CPU_S_PER_GB
    measured = f"{ours:.2f} against {tensorflow:.2f} and {lite:.2f} (as recorded)"
    return Goal(what, "below both", measured, ours < min(tensorflow, lite))


def _bandwidth(results: Results) -> Goal:
    what, wanted = "Every update rule by itself, one thread: a plain loop over the same arrays", "≥ 0.9 each"
    found = figures.rows(results, "kernel")
    shares = {row["subject"]: row["shares"]["alone"] for row in found}
    if not shares:
        return Goal(what, wanted, None, None)
    below = {rule: share for rule, share in shares.items() if share < 0.9}
    least = min(shares, key=shares.__getitem__)
    told = ", ".join(f"{rule} {share:.2f}" for rule, share in (below or {least: shares[least]}).items())
    ways = {way: min(row["shares"][way] for row in found) for way in ("+ both", "+ shared")}
    measured = f"{'below it' if below else 'the least'}: {told}; with guard and reply {ways['+ both']:.2f}, in memory"
    return Goal(what, wanted, f"{measured} that a worker may write to {ways['+ shared']:.2f}", not below)


def _fused(results: Results, rule: str) -> Goal:
    what = f"The {rule} kernel, one thread: torch's fused optimizer"
    ratio = figures.median(figures.rows(results, "kernel"), rule, "of_torch")
    if ratio is None:
        return Goal(what, "≥ 1.0 x", None, None)
    return Goal(what, "≥ 1.0 x", f"{ratio:.2f} x", ratio >= 1.0)


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"
