"""Calls that wait for other workers: coroutines, not threads, with a deadline whose error names these workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

from pyps.core.store import Store
from pyps.run.handshake import RunState
from pyps.run.observers import Wait
from pyps.run.run import Run
from pyps.service.executor import KernelExecutor
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import InvalidArgument, NotInitialized, WaitTimedOut

NAMES_MAX = 8


class LongPoll:
    """Lets one call wait on the event loop. Only `wake` and `wake_by` may be called from any thread."""

    def __init__(
        self,
        run: Run,
        work: KernelExecutor,
        *,
        worker_id: str,
        wait_seconds: float,
        describe: Callable[[], str],
        waits_for: Callable[[], tuple[str, ...]],
    ):
        self._run = run
        self._work = work
        self._wait = Wait(worker_id, describe, waits_for, self.wake)
        self._wait_seconds = wait_seconds
        # By the run's clock; None before the first wait.
        self._began: float | None = None
        # The workers whose push or step has woken the call.
        self._woken_by: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + wait_seconds
        self._woken = asyncio.Event()

    def wake(self) -> None:
        # The server may have ended meanwhile, and the loop with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._woken.set)

    def wake_by(self, *worker_ids: str) -> None:
        """Wake, since these workers have pushed or taken a step, or are not waited for any more."""
        self._woken_by.update(worker_ids)
        self.wake()

    def look(self) -> None:
        """Call this before checking the condition, so that a later `wake` ends the wait."""
        self._woken.clear()

    async def wait(self) -> None:
        """Wait until `wake`; WaitTimedOut at the deadline."""
        began = self._run.clock()
        self._began = began if self._began is None else self._began
        try:
            with self._run.waits.waiting(self._wait):
                async with asyncio.timeout_at(self._deadline):
                    await self._woken.wait()
        except TimeoutError:
            # Both take locks.
            what = await self._work.begin(self._wait.describe)
            self._woken_by.update(await self._work.begin(self._wait.waits_for))
            raise WaitTimedOut(f"after {self._wait_seconds:g} s: {what}") from None
        finally:
            if worker_id := self._wait.worker_id:
                run, now, others = self._run, self._run.clock(), tuple(sorted(self._woken_by - {worker_id, ""}))
                run.statistics.blocked(worker_id, now - began, since=self._began, now=now, waited_for=others)
                if run.recorder is not None:
                    wait = {"worker_id": worker_id, "seconds": now - began, "waited_for": others}
                    run.recorder.note({"event": "wait", **wait})


class VersionWait:
    """Shards in the order in which they get the version that a pull waits for. A context manager, for one call."""

    def __init__(
        self, run: Run, work: KernelExecutor, request: wire.PullRequest, sender: Sender, *, observer: bool = False
    ):
        """Renew a worker's lease; refuse too many shards, an unknown worker, and shards that it may not read."""
        self._run = run
        self._shards = run.content.shards
        if self._shards and len(request.wants) > len(self._shards):
            raise InvalidArgument(
                f"a pull names {len(request.wants)} shards, and this server holds {len(self._shards)}: name each once"
            )
        # Empty for an observer.
        self.worker_id = "" if observer else sender.worker_id
        # Everything is newer than versions of another epoch, and none of those is worth waiting for.
        wants = request.wants if request.epoch == run.content.epoch else ()
        self.min_versions = {want.shard_id: want.min_version for want in wants}
        self.held_versions = {want.shard_id: want.held_version for want in wants}
        self.shards = run.shards_to_pull(
            sender.run_id,
            sender.worker_id,
            sender.incarnation,
            sender.secret,
            observer=observer,
            shard_ids=dict.fromkeys([want.shard_id for want in request.wants]),
        )
        # The shards still to be sent, and the ids of those that may be ready, which other threads add.
        self._waiting = {shard.shard_id: shard for shard in self.shards}
        self._arrived: deque[int] = deque()
        # Of the shards that are not ready.
        self._num_parameters = 0
        self._cancels: list[Callable[[], bool]] = []
        self._over = False
        self._work = work
        self._parking = LongPoll(
            run,
            work,
            worker_id=self.worker_id,
            wait_seconds=request.wait_milliseconds / 1000,
            describe=self._describe,
            waits_for=self._waits_for,
        )

    async def __aenter__(self) -> VersionWait:
        late: list[Store] = []
        for shard in self.shards:
            if self.is_ready(shard):
                self._arrived.append(shard.shard_id)
            else:
                late.append(shard)
        self._num_parameters = sum(shard.length * (1 + shard.num_pending) for shard in late)

        def register() -> None:
            for shard in late:
                arrive = partial(self._arrive, shard)
                self._cancels.append(shard.when_version(self.min_versions[shard.shard_id], arrive))
            if self._over:
                self._cancel()

        try:
            await self._work.compute(self._num_parameters, register)
        except BaseException:
            # The call was cancelled: a thread may still register, or has yet to begin.
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # However the call ends.
        self._over = True
        if self._work.is_little(self._num_parameters):
            self._cancel()
        else:
            self._work.hand_over(self._cancel)

    def _arrive(self, shard: Store) -> None:
        self._arrived.append(shard.shard_id)
        self._parking.wake_by(*((shard.updated_by,) if shard.updated_by else self._run.rounds.left_out))

    def _cancel(self) -> None:
        for cancel in list(self._cancels):
            cancel()

    async def next(self) -> Store | None:
        """Return the next shard to send, None after the last; WaitTimedOut when a version did not come in time."""
        while self._waiting:
            self._parking.look()
            # Before the finished shards: those of a run that was reset are finished too.
            if self._run.content.shards is not self._shards:
                raise NotInitialized("the run was reset while the pull waited")
            # Each shard wakes the call once, so the hundreds that wait are not scanned.
            while self._arrived:
                if (shard := self._waiting.pop(self._arrived.popleft(), None)) is not None:
                    return shard
            if self._run.state == RunState.FINISHED:
                return self._waiting.popitem()[1]
            self._run.refuse_when_unavailable()
            await self._parking.wait()
        return None

    async def all(self) -> None:
        """Wait until there is nothing to wait for; raise as `next`."""
        async with self:
            while await self.next() is not None:
                continue

    def is_ready(self, shard: Store) -> bool:
        """Return whether a shard has nothing to wait for."""
        # A finished shard never gets a newer version.
        if shard.version >= self.min_versions.get(shard.shard_id, 0) or shard.finished:
            return True
        return self._run.state == RunState.FINISHED

    def _describe(self) -> str:
        # Called from other threads too, while the call goes on.
        waiting = list(self._waiting.values())
        if not waiting:
            return f"{self.worker_id or 'an observer'} waits no longer"
        shard = waiting[0]
        wanted = self.min_versions.get(shard.shard_id, 0)
        return (
            f"{self.worker_id or 'an observer'} waits for version {wanted} of shard {shard.shard_id}, which is at "
            f"{shard.version}; {self._whom(shard)}"
        )

    def _whom(self, shard: Store) -> str:
        if others := self._others(shard):
            return f"its round waits for {names_in_words(others)}"
        alive = sorted(member.worker_id for member in self._run.membership.alive())
        return f"live workers: {names_in_words(alive) or 'none'}"

    def _waits_for(self) -> tuple[str, ...]:
        return tuple(sorted({name for shard in list(self._waiting.values()) for name in self._others(shard)}))

    def _others(self, shard: Store) -> list[str]:
        return [
            name for name in shard.waiting_for(self._run.rounds.roster_of(shard.shard_id)) if name != self.worker_id
        ]


def names_in_words(names: list[str] | tuple[str, ...]) -> str:
    """Return the names of workers, the first few of many."""
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more
