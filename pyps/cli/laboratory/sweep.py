"""Grids of trials, in processes of one thread each: a result does not depend on how many there are."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pyps.cli.evaluate import explained, run_script
from pyps.cli.laboratory.settings import Settings, listed
from pyps.cli.laboratory.trial import Outcome, Trial
from pyps.config import ServerConfig
from pyps.core import protocols, staleness
from pyps_wire.errors import InvalidArgument, PypsError

T = TypeVar("T")

# Read when a process loads a library.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARM_UP_STEPS, STEPS_MIN = 3, 8


class ScriptFailed(Exception):
    """A user's script raised an error, which the text shows as Python does."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, in the main thread, unless they are ignored (nohup)."""

    def end(number: int, frame: object) -> None:
        # A closed terminal sends two.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    taken = [each for each in _SIGNALS[1:] if in_main and signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def grid(settings: Settings) -> tuple[list[Trial], list[str]]:
    """Return the trials of all combinations that differ, seeds last, and what to know of them, in sentences."""
    trials: dict[Trial, None] = {}
    remarks = []
    for name in dict.fromkeys(listed(settings.protocol)):
        protocol, policies = protocols.parse(name), listed(settings.staleness)
        if protocol.coordinated:
            raise InvalidArgument(f"--protocol names {name}, under which no worker pushes; expected another one")
        protocol.check(settings.workers)
        remarks += [f"{protocol.text}: {warning}." for warning in protocol.warnings(settings.workers)]
        texts = [
            (ServerConfig(protocol=name).behaviour.staleness if policy == "auto" else staleness.parse(policy)).text
            for policy in policies
        ]
        if protocol.barrier or protocol.name == "serial" or settings.workers == 1:
            if len(policies) > 1:
                remarks.append(f"{protocol.text}: one row for all policies, as no gradient is stale there.")
            texts = ["none"]
        for text in texts:
            for rate in settings.rates:
                trials |= {Trial(protocol.text, text, rate, seed): None for seed in range(settings.seeds)}
    return list(trials), remarks


class Pool:
    """Processes that have run the user's script, if there is one."""

    def __init__(self, script: Path | None, processes: int, *, threads: int = 1) -> None:
        """`threads`: of each process; their number may change the last bits."""
        context = multiprocessing.get_context("spawn")
        self._done = context.Value("d", 0.0)
        self._executor = ProcessPoolExecutor(processes, context, _begin, (script, self._done, threads))
        self._processes, self._threads = processes, threads
        self._before = {name: os.environ[name] for name in _THREADS if name in os.environ}

    def __enter__(self) -> Pool:
        os.environ.update(dict.fromkeys(_THREADS, str(self._threads)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a failure a trial that runs is not waited for.
        for child in multiprocessing.active_children() if kind else ():
            child.kill()
        self._executor.shutdown(cancel_futures=True)
        for name in _THREADS:
            del os.environ[name]
        os.environ.update(self._before)

    def _submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        # A process that begins now hears Ctrl-C once it can end in silence.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return self._executor.submit(call, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def sizes(self) -> tuple[int, int]:
        """Return how many parameters the script's model has, and how many examples its data."""
        return self._submit(_sizes).result()

    def steps(self, batch_size: int, seconds: float) -> list[float]:
        """Compute minibatches in all processes at once, for so long; return the seconds of each."""
        futures = [self._submit(_steps, batch_size, seconds) for _ in range(self._processes)]
        return [taken for future in futures for taken in future.result()]

    def run(
        self, trials: Sequence[Trial], settings: Settings, *, tell: Callable[[float], None] = lambda done: None
    ) -> list[Outcome]:
        """Return the trials' outcomes, in order; `tell` is called with the number of trials done, in parts."""
        futures = [self._submit(_run, trial, settings) for trial in trials]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, _LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                # A failure ends the others.
                future.result()
            tell(self._done.value)
        return [future.result() for future in futures]


# What follows is called in the processes.

_script: Path | None = None
_defined: dict[str, Any] = {}
_done: Synchronized[float]
_threads = 1


def _begin(script: Path | None, done: Synchronized[float], threads: int) -> None:
    global _script, _done, _threads
    _script, _done, _threads = script, done, threads
    # Ctrl-C ends them in silence: the parent says what happens.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Pushes make no cycles: the collector would look through all workers for nothing.
    gc.set_threshold(100_000)
    # What servers would log of virtual workers.
    logging.getLogger("pyps").setLevel(logging.CRITICAL)


def _end_with_parent() -> None:
    """End this process once the one that began it has ended, however it did."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _problem(seed: int) -> Any:
    """Return the script's problem for a seed; None without a script."""
    if _script is None:
        return None
    from pyps_client.torch.problem import Problem, seed_all, use_threads

    if not _defined:
        use_threads(_threads)
        # The script's data are the same in each process.
        seed_all(0)
        _defined.update(run_script(_script))
    return Problem(_defined, script=str(_script), seed=seed)


def _in_script(call: Callable[[], T]) -> T:
    try:
        return call()
    except SystemExit as ended:
        raise ScriptFailed(f"pyps: {_script} ended with exit status {ended.code or 0}.") from None
    except Exception as error:
        if _script is None or isinstance(error, PypsError):
            raise
        raise ScriptFailed(explained(error, _script)) from None


def _sizes() -> tuple[int, int]:
    problem = _in_script(lambda: _problem(0))
    return problem.num_parameters, problem.num_examples


def _steps(batch_size: int, seconds: float) -> list[float]:
    """Compute minibatches for so long; return the seconds of each but the first ones."""
    problem, drawn = _in_script(lambda: _problem(0)), np.random.default_rng(0)
    taken, end = list[float](), math.inf
    while len(taken) < STEPS_MIN or time.perf_counter() < end:
        began = time.perf_counter()
        gradient = _in_script(lambda: problem.gradient("", drawn.integers(problem.num_examples, size=batch_size)))
        if not taken and not np.isfinite(gradient).all():
            raise InvalidArgument(f"the gradient of {_script}'s first loss is not finite; expected numbers")
        taken.append(time.perf_counter() - began)
        if len(taken) == WARM_UP_STEPS:
            end = time.perf_counter() + seconds
    return taken[WARM_UP_STEPS:]


def _run(trial: Trial, settings: Settings) -> Outcome:
    def tell(share: float) -> None:
        with _done.get_lock():
            _done.value += share

    return _in_script(lambda: trial.run(settings, _problem(trial.seed), tell))
