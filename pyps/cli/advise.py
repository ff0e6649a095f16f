"""`pyps advise`: measures a user's script, tries ways to train it in virtual time, and says which to start with."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pyps.cli.evaluate import require_script
from pyps.cli.laboratory import report
from pyps.cli.laboratory.advice import LOCAL_STEPS, Advice, Way
from pyps.cli.laboratory.advice import advise as make_advice
from pyps.cli.laboratory.check import check as check_way
from pyps.cli.laboratory.measure import Round, measure_round, measure_steps
from pyps.cli.laboratory.settings import Settings, with_cluster
from pyps.cli.laboratory.sweep import Pool, ScriptFailed, ended_by_signals
from pyps.units import counted, in_bytes, in_seconds, parse_seconds
from pyps_wire.errors import InvalidArgument

STEPS_MIN = 4
SHOWN = 8
# A target that is reached in this share of the training.
EARLY = 0.1
# A prediction that is off by more is named.
FAR_OFF = 0.25
NOT_MODELLED = (
    "GPUs that share a machine, data loading, other traffic, packet loss, TLS, servers with too few cores",
    "rates that change over time, weight decay, clipping, and any optimizer but the servers' SGD",
    "figures after more examples than were tried: who is ahead early may not be ahead late",
    "DDP is taken at its best: its exchange is hidden behind the backward pass as far as it fits there",
    "buffers such as BatchNorm's stay with their worker",
)


@with_cluster("batch_size", "epochs", "slow", "failures", "target")
@ended_by_signals()
def advise(
    script: Annotated[
        Path,
        typer.Argument(help="Python file that defines model(), loss(model, batch), data, maybe evaluate(model)."),
    ],
    workers: Annotated[int, typer.Option(help="Workers that you have.", min=2, max=4096)] = 8,
    rate: Annotated[str, typer.Option(help="Learning rates to try; otherwise around one process's best.")] = "",
    step_seconds: Annotated[
        str, typer.Option(help="Mean time of a worker's step, as 20ms; otherwise that of this machine's processors.")
    ] = "",
    times: Annotated[str, typer.Option(help="How it varies; otherwise as measured, or lognormal:0.15.")] = "",
    latency: Annotated[str, typer.Option(help="Of the workers' links, as 1ms; otherwise this machine's own.")] = "",
    bandwidth: Annotated[str, typer.Option(help="Each way, as 1gbit; otherwise as on this machine.")] = "",
    seeds: Annotated[int, typer.Option(help="Trials of each way.", min=1)] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder for the page and the picture.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Then run it on this machine, and compare.")] = False,
    check_seconds: Annotated[float, typer.Option(help="How long that is measured.", min=1.0)] = 60.0,
    processes: Annotated[int, typer.Option(help="Trials at once; 0: one a core.", min=0, max=1024)] = 0,
    **flags: Any,
) -> None:
    """Measure a model of yours, and say which way of training it to start with, and why.

    Protocols, staleness policies, rates, codecs, local steps and numbers of workers are tried in virtual time, with
    real gradients. Where one process, or DDP, does as well, it says so.
    """
    require_script(script)
    cores, console = os.cpu_count() or 1, Console()
    # Until a step is measured, one that takes hardly any time.
    flags |= {"step_seconds": step_seconds or "1us", "times": times or "fixed", "latency": latency or "0"}
    given = Settings(workers=workers, rate=rate, bandwidth=bandwidth, seeds=seeds, **flags)
    if out is not None:
        # The trials take long: what cannot be written is said now.
        with report.writing(out):
            pass
    try:
        typer.echo("measuring a step and a round ...", err=True)
        load = os.getloadavg()[0]
        steps = measure_steps(script, batch_size=given.batch_size, at_once=1, threads=cores)
        around = measure_round(script, given, steps.seconds, threads=cores)
        with Pool(script, processes or cores) as pool:
            size, num_examples = pool.sizes()
            measured = replace(
                given,
                step_seconds=step_seconds or f"{steps.seconds:.6g}",
                times=times or ("lognormal:0.15" if step_seconds else f"lognormal:{steps.sigma:.3g}"),
                # Half there and half back: so it is each worker's own, however many steps it takes between.
                latency=f"{given.network.latency_seconds + around.exchange_seconds / 2:.6g}",
            ).sized(num_parameters=size, num_examples=num_examples)
            if measured.examples < STEPS_MIN * workers * given.batch_size:
                raise InvalidArgument(
                    f"--epochs {given.epochs:g} of {counted(num_examples, 'example')} are {measured.examples:,}, less"
                    f" than {STEPS_MIN} steps of each worker; expected more epochs, or smaller batches"
                )
            here = 8 * size / max(around.exchange_seconds, 1e-9)
            link = replace(given.network, bytes_per_second=given.network.bytes_per_second if bandwidth else here)
            tried = given.rates if rate else []
            found = make_advice(pool, measured, link, around.service_for, rates=tried, tell=_tell)
        page = _page(script, found, measured, around, given=given, is_given=bool(step_seconds))
        if load > cores / 2:
            page.insert(2, f"Do not trust this: other work (load {load:.1f}) held up what was measured here.")
        for line in page:
            # What is to be copied is not folded.
            console.print(line, highlight=False, markup=False, soft_wrap=line.startswith("  "))
        console.print(_table(found))
        if check:
            page.append(_check(script, found.best, min(workers, cores), check_seconds))
            console.print(page[-1], highlight=False, markup=False)
    except ScriptFailed as failed:
        typer.echo(str(failed), err=True)
        raise typer.Exit(1) from None
    if out is not None:
        with report.writing(out):
            _write(out, page, found)


def _tell(text: str) -> None:
    typer.echo(f"trying {text} ...", err=True)


def _measured_words(given: Settings, measured: Settings, around: Round, *, is_given: bool) -> str:
    step = _milliseconds(parse_seconds(measured.step_seconds, what="--step-seconds"))
    network, size = given.network, 4 * measured.parameters
    over = "; no link is given, so that workers are as near to the server as on this machine"
    if not network.is_instant:
        moving = _milliseconds(size / network.bytes_per_second + network.latency_seconds)
        over = f", which takes {moving} over the link that is given"
    return (
        f"A step of {measured.batch_size} examples takes {step} ({'as given' if is_given else 'measured here'}, "
        f"{measured.times}). To exchange it takes a worker {_milliseconds(around.exchange_seconds)} more, and the "
        f"server {_milliseconds(around.service_seconds)} (measured here). A gradient is {in_bytes(size)}{over}."
    )


def _page(
    script: Path, found: Advice, measured: Settings, around: Round, *, given: Settings, is_given: bool
) -> list[str]:
    """Return the page, a paragraph each."""
    best, target = found.best, found.target
    lines = [f"Advice for {script}", _measured_words(given, measured, around, is_given=is_given)]
    times = [_time(way, target) for way in (found.one, best, found.ddp)]
    lines.append(f"To a figure of {target:.4g}: one process {times[0]}, pyps {times[1]}, DDP at its best {times[2]}.")
    if found.verdict == "one":
        lines.append("Stay with one process: more workers do not get there clearly sooner.")
    elif found.verdict == "ddp":
        lines.append(
            "Take DDP (torch.distributed): it is as quick here, and simpler. pyps pays where workers differ more in "
            "speed, fail, or have slower links."
        )
    elif found.verdict == "none":
        lines.append("No way gets there with so many examples: give more --epochs, or another --target.")
    lines.append("Start with:" if found.verdict == "pyps" else "With pyps the best way is:")
    lines += [_command(best), *_why(found)]
    spread = "how far seeds differ, one does not tell (--seeds)"
    if measured.seeds > 1:
        spread = f"the best takes {_spread(best, target)}. Ways within that of each other are not told apart"
    lines.append(
        f"How sure: {counted(measured.seeds, 'seed')} of each way, of {best.settings.examples:,} examples; {spread}."
    )
    if best.mean_seconds_to(target) < EARLY * fmean(points[-1].seconds for points in best.curves):
        lines.append("The target is reached early, where chance decides: name a lower one (--target).")
    lines.append("Not modelled: " + "; ".join(NOT_MODELLED) + ".")
    return lines


def _why(found: Advice) -> list[str]:
    best, target, lines = found.best, found.target, list[str]()
    for name in ("protocol", "staleness"):
        own, like = getattr(best.trial, name), best.settings.workers
        others = [way for way in found.ways if getattr(way.trial, name) != own and way.settings.workers == like]
        if others:
            lines.append(f"The best other {name}, {getattr(others[0].trial, name)}, takes {_time(others[0], target)}.")
    if best.settings.codec != "float32":
        lines.append(f"{best.settings.codec}: with float32 workers would compute clearly fewer examples a second.")
    if best.settings.local_steps > 1:
        lines.append(f"{LOCAL_STEPS} local steps: with one a step workers would compute clearly fewer examples.")
    fewer = [way for way in found.ways if way.settings.workers < best.settings.workers]
    lines += [f"With {way.settings.workers} workers it takes {_time(way, target)}." for way in fewer]
    staleness, waiting = best.mean("mean_staleness"), best.mean("waiting")
    lines.append(f"Mean staleness is {staleness:.2f} updates; workers wait {waiting:.0%} of the time.")
    return lines


def _command(way: Way) -> str:
    flags = ["--workers", str(way.settings.workers), "--protocol", way.trial.protocol]
    flags += ["--staleness", way.trial.staleness]
    command = f"pyps run {shlex.join(flags)} -- python train.py"
    codecs, name, more = _codecs(way), "RemoteOptimizer", ""
    if way.settings.local_steps > 1:
        name, more = "LocalTraining", f', outer="average", sync_every={way.settings.local_steps}'
    launch = f", launch=Launch({codecs})" if codecs else ""
    line = f"optimizer = {name}(model, torch.optim.SGD(model.parameters(), lr={way.trial.rate:g}){more}{launch})"
    imported = f"from pyps_client import {'Launch, ' if codecs else ''}{name}"
    return f"  {command}    # all on this machine; docs/machines.md has more machines\n  {imported}\n  {line}"


def _codecs(way: Way) -> str:
    name = way.settings.codec
    return "" if name == "float32" else f'gradient_codec="{name}", parameter_codec="{name}"'


def _table(found: Advice) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("way", "policy", "codec"):
        table.add_column(name, overflow="fold")
    for name in ("work-\ners", "rate", "local\nsteps", "to the\ntarget", "figure", "stale-\nness", "wait-\ning"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in [*found.ways[:SHOWN], found.ddp, found.one]:
        is_pyps = way.name == "pyps"
        table.add_row(
            way.trial.protocol if is_pyps else way.name,
            way.trial.staleness if is_pyps else "",
            way.settings.codec if is_pyps else "",
            str(way.settings.workers),
            f"{way.trial.rate:g}",
            str(way.settings.local_steps),
            _time(way, found.target),
            f"{way.last:.3g}",
            f"{way.mean('mean_staleness'):.2f}",
            f"{way.mean('waiting'):.0%}" if is_pyps else "",
        )
    return table


def _check(script: Path, best: Way, workers: int, seconds: float) -> str:
    """Run the best way with as many workers as this machine has processors; say what was predicted and measured."""
    best = best._replace(settings=replace(best.settings, local_steps=1))
    typer.echo(f"running {counted(workers, 'worker')} on this machine for {in_seconds(seconds)} ...", err=True)
    rows = check_way(script, best, workers=workers, seconds=seconds)
    said = [f"{row.what} {row.predicted:,.2f} predicted, {row.measured:,.2f} measured, {row.off:+.0%}" for row in rows]
    far = any(abs(row.off) > FAR_OFF for row in rows)
    doubt = " So far off, the times above are not to be trusted." if far else ""
    who = f"{counted(workers, 'real worker')} and a server on this machine, {best.trial.protocol}"
    return f"Checked with {who}: {'; '.join(said)}.{doubt}"


def _time(way: Way, target: float) -> str:
    return _seconds(way.mean_seconds_to(target))


def _spread(way: Way, target: float) -> str:
    there = way.seconds_to(target)
    return f"{_seconds(min(there))} to {_seconds(max(there))}"


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "never"
    return in_seconds(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else in_seconds(seconds)


def _write(folder: Path, page: list[str], found: Advice) -> None:
    text = "\n\n".join([f"# {page[0]}", *(f"```\n{line}\n```" if line.startswith("  ") else line for line in page[1:])])
    ways = [*found.ways[:SHOWN], found.ddp, found.one]
    drawn = report.draw_curves(folder / "advice.png", [(_label(way), way.curves) for way in ways], target=found.target)
    picture = "\n\n![The figure against time](advice.png)" if drawn else ""
    (folder / "advice.md").write_text(f"{text}{picture}\n", encoding="utf-8")
    typer.echo(f"Written: {folder / 'advice.md'}" + (f", {folder / 'advice.png'}" if drawn else ""))


def _label(way: Way) -> str:
    if way.name != "pyps":
        return way.name
    local = f", {way.settings.local_steps} local steps" if way.settings.local_steps > 1 else ""
    return f"{way.settings.workers} x {way.trial.protocol}, {way.trial.staleness}, {way.trial.rate:g}{local}"
