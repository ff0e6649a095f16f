"""The server process: it starts everything, keeps time, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pyps import _kernels, logs
from pyps.config import ConfigError, ServerConfig
from pyps.core.store import Store
from pyps.run.handshake import RunState
from pyps.run.observers import Standstill
from pyps.run.run import SOFTWARE, Run
from pyps.run_header import RestoredRun
from pyps.service import hosting
from pyps.service.calls import LATE_MIN, WaitingCalls
from pyps.service.executor import KernelExecutor
from pyps.service.health import Health
from pyps.service.hosting import Grpc
from pyps.service.inspector import Inspector
from pyps.service.lane.connection import Tcp
from pyps.service.limits import ByteBudget
from pyps.service.metrics import MetricsServer, RunCollector
from pyps.service.parameter_server import ParameterServer
from pyps.service.reflection import add_reflection
from pyps.service.report import Addresses
from pyps.service.security import Access
from pyps.service.serializations import Serializations
from pyps.service.shm.listener import SharedMemory
from pyps.service.standby.follower import Follower
from pyps.service.standby.link import Link, own_address
from pyps.service.standby.primary import Primary, StandbyService
from pyps.service.tls import Tls
from pyps.service.transport import Host, Transport
from pyps.service.vector_machine import VectorMachineService
from pyps.service.work_queue import WorkQueueService
from pyps.storage.checkpoint import CheckpointError
from pyps.storage.folder import CheckpointFolder
from pyps.storage.parameter_file import ParameterFile
from pyps.storage.update_log import UpdateLog
from pyps.units import counted, in_bytes
from pyps_wire.allocator import keep_large_blocks
from pyps_wire.contract import INSPECTOR, PARAMETER_SERVER, STANDBY, VECTOR_MACHINE, WORK_QUEUE
from pyps_wire.errors import NotInitialized

# How often leases, checkpoints and the end of the job are checked.
TICK_SECONDS = 0.2
# After this time a checkpoint that could not be written is tried again.
RETRY_SECONDS = 10.0
# A signal that comes sooner after another ends no server: the system sends two where a launcher is killed.
SIGNALS_APART_SECONDS = 1.0
# How long a standby that ends may take to say so, or to take over first.
LEAVE_SECONDS = 5.0
# The share of drain_seconds for calls under way; the rest is for the checkpoint.
_CALLS_SHARE = 0.4

# The first that knows a worker is its transport; the last knows every worker.
TRANSPORTS: Sequence[type[Transport]] = (SharedMemory, Tcp, Grpc)

# The condition to end with the workers, by the value of --exit-when.
_ALL_WORKERS: Mapping[str, Callable[[Run], bool]] = {
    "never": lambda run: False,
    "gone": lambda run: run.done,
    "finished": lambda run: run.workers_finished,
}

_Health = health_pb2.HealthCheckResponse
_CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

log = logs.get("pyps.server")


def serve(config: ServerConfig) -> int:
    """Run a server until a signal, or until its job is done; return the exit status."""
    try:
        instruction_set = _kernels.isa()
    except ValueError as error:
        raise ConfigError(f"PYPS_ISA in the environment cannot be used: {error}") from None
    _check_ready_file(config.ready_file)
    keep_large_blocks(shared=True)
    # Connections may take half of the open files, and a shell allows 1024 even where the system allows more.
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    return asyncio.run(Server(config, instruction_set=instruction_set).run())


class Server:
    """One server process around one run."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        instruction_set: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config
        self._instruction_set = instruction_set
        self._clock = clock
        self._checkpoints = (
            CheckpointFolder(
                config.checkpoint_dir,
                keep=config.checkpoint_keep,
                notify=lambda text, is_warning: self._run.events.add("checkpoint", text, warning=is_warning),
                # A standby's may be its server's, until that ends.
                later=bool(config.standby_of),
            )
            if config.checkpoint_dir
            else None
        )
        self._update_log = (
            UpdateLog(
                config.update_log, log_gradients=config.log_gradients, payload_bytes_max=config.log_gradients_max_bytes
            )
            if config.update_log
            else None
        )
        self._run = Run(config, clock=clock, recorder=self._update_log)
        self._run.on_ready = self._log_ready
        self._standstill = Standstill(TICK_SECONDS, clock=clock)
        self._budget = ByteBudget(config.max_in_flight_bytes, self._run)
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._work = KernelExecutor(self._threads, logged=self._update_log is not None)
        self._host = Host(
            config=config,
            access=Access(config),
            tls=Tls.of(config),
            run=self._run,
            work=self._work,
            budget=self._budget,
            # Each worker may keep two streams open: one of exchanges and one of pushes.
            waiting=WaitingCalls(max(2 * config.max_workers, LATE_MIN)),
            health=Health(),
            serializations=Serializations(),
            checkpoints=self._checkpoints,
        )
        self._primary = Primary(self._run, self._host.feed, partial(Link, config))
        self._primary.on_fenced = self.stop
        if self._checkpoints is not None:
            self._primary.on_guard = self._checkpoints.note_standby
        self._primary.on_request = partial(self.stop, "its standby takes over by an operator's word")
        # Of a server that was started as a standby.
        self._follower: Follower | None = None
        # Whether the server ends since the work is done, so that nobody is to go on with it.
        self._is_done = False
        self._transports = [transport(self._host) for transport in TRANSPORTS]
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._status = 0
        self._signalled_at: float | None = None
        self._said_what_is_unsaved = False

    async def run(self, *, signals: bool = True, on_ready: Callable[[Addresses], None] = lambda addresses: None) -> int:
        """Serve until a signal or the end of the job, then drain, save and return the exit status.

        `signals=False` leaves SIGTERM and SIGINT alone; `on_ready` gets the addresses once the server answers.
        """
        control = hosting.control_port(self._host.access, budget=self._budget)
        collector = RunCollector(self._host, transports=self._transports)
        metrics = MetricsServer(collector, self._host)
        addresses = self._bind(control, metrics)
        self._stand_by(addresses)
        self._resume(addresses)
        self._add_inspector(control.server, addresses)
        services = self._services(addresses)
        self._set_health(_Health.SERVING)
        if signals:
            self._handle_signals()
        for transport in self._transports:
            await transport.start(services, addresses.data)
        await control.start()
        await metrics.start()
        self._announce(addresses)
        on_ready(addresses)
        await self._keep_serving()
        return await self._end(control, metrics)

    def stop(self, reason: str) -> None:
        """Make `run` end in order."""
        self._stop_reason = self._stop_reason or reason
        self._stop.set()

    def _bind(self, control: hosting.Port, metrics: MetricsServer) -> Addresses:
        return Addresses(
            data="".join([transport.bind() for transport in self._transports]),
            control=control.bind(
                self._config.host, self._config.control_port, tls=self._host.tls, field="control_port"
            ),
            metrics=metrics.address,
        )

    def _services(self, addresses: Addresses) -> Mapping[str, object]:
        return {
            PARAMETER_SERVER: ParameterServer(
                self._host, control_address=addresses.control, transports=self._transports
            ),
            WORK_QUEUE: WorkQueueService(self._host),
            VECTOR_MACHINE: VectorMachineService(self._host),
            STANDBY: StandbyService(self._run, self._primary, self._follower),
        }

    def _add_inspector(self, control: grpc.aio.Server, addresses: Addresses) -> None:
        inspector = Inspector(
            self._host,
            addresses=addresses,
            transports=self._transports,
            primary=self._primary,
            follower=self._follower,
            stop=self.stop,
        )
        control.add_generic_rpc_handlers((hosting.handlers_of(INSPECTOR, inspector),))
        health_pb2_grpc.add_HealthServicer_to_server(self._host.health, control)
        channelz.add_channelz_servicer(control)
        add_reflection(control, [INSPECTOR, health.SERVICE_NAME, _CHANNELZ])

    def _stand_by(self, addresses: Addresses) -> None:
        """Follow another server, where that is asked for."""
        config, checkpoints = self._config, self._checkpoints
        if config.standby_of:
            self._follower = Follower(
                self._run,
                Link(config, config.standby_of),
                own_address=partial(own_address, config, addresses.data),
                lease_seconds=config.standby_lease_seconds,
                threads=self._threads,
                on_end=self._end_with_primary,
                claim=self._claim if checkpoints is not None else lambda restored: restored,
            )

    def _claim(self, restored: RestoredRun) -> RestoredRun:
        """Claim a run's next epoch for a standby; a folder that cannot be written does not end the run."""
        assert self._checkpoints is not None
        try:
            return self._checkpoints.claim_epoch(restored)
        except CheckpointError as error:
            log.error("this standby takes over without its folder for checkpoints", reason=error)
            return restored

    def _resume(self, addresses: Addresses) -> None:
        """Restore the newest checkpoint where that is asked for; else take the first parameters from their file."""
        restored, file = None, self._config.init_from
        if self._checkpoints is None or self._follower is not None:
            # What a standby follows is newer than any checkpoint.
            pass
        elif not self._config.resume:
            self._checkpoints.require_empty()
        else:
            restored = self._checkpoints.resume()
            if restored is not None:
                self._run.restore(restored)
            else:
                log.info("nothing to resume: the server starts empty", folder=self._checkpoints.path)
            note = self._checkpoints.standby
            if note is not None and note.address != addresses.data:
                # Also without any checkpoint: the standby may hold what this server had answered.
                self._primary.resume(note, served_epoch=self._checkpoints.resumed_epoch)
        if file is not None and restored is None:
            self._run.source = ParameterFile(file)
        elif file is not None:
            log.info("--init-from is left out: the run is resumed", file=file)

    def _end_with_primary(self, reason: str, status: int) -> None:
        self._status = status
        self.stop(reason)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        now = self._clock()
        if self._signalled_at is not None:
            unsaved = counted(self._run.content.unsaved_updates, "update")
            if self._checkpoints is not None and not self._said_what_is_unsaved:
                self._said_what_is_unsaved = True
                log.warning(f"this server is saving, {unsaved} not saved yet: another signal ends it without them")
            elif now - self._signalled_at > SIGNALS_APART_SECONDS:
                log.warning(f"another signal: exit at once, {unsaved} not saved", signal=number.name)
                os._exit(128 + number)
            else:
                return
        self._signalled_at = now
        if not self._stop.is_set() and self._config.exit_condition.workers == "finished":
            # With status 0 an engine that drains a machine would take the server's part of the job for done.
            self._status = 128 + number
        self.stop(number.name)

    def _announce(self, addresses: Addresses) -> None:
        facts = self._facts(addresses)
        if self._config.log_format == "json":
            log.info("server started", **facts)
        else:
            width = max(map(len, facts))
            lines = [f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in facts.items()]
            print(f"{SOFTWARE} parameter server", *lines, sep="\n", flush=True)
        if self._config.ready_file is not None:
            ready = {**asdict(addresses), "pid": os.getpid(), "run_id": self._run.content.run_id}
            _write_whole(self._config.ready_file, json.dumps(ready))

    def _facts(self, addresses: Addresses) -> Mapping[str, str]:
        """Return the lines of the start block, by name."""
        config, run = self._config, self._run
        later = "open until a worker initialises the run"
        return {
            "kernels": f"{self._instruction_set}, {self._threads} threads",
            **{name: words for transport in reversed(self._transports) for name, words in transport.facts.items()},
            "control": addresses.control,
            "metrics": f"http{'s' if self._host.tls else ''}://{addresses.metrics}/metrics",
            "access": _access(config),
            "run": run.content.run_id or "named by the first worker",
            "optimizer": str(run.content.settings) if run.content.settings else "requested by the first worker",
            "protocol": run.rounds.behaviour.aggregation.text,
            "staleness": _staleness_in_words(config, run),
            "schedule": run.rounds.behaviour.schedule.text,
            **(_held_in_words(run) if run.content.partition else {"shards": later, "memory": later}),
            "in flight": f"at most {in_bytes(config.max_in_flight_bytes)} of pushes and pulls",
            "pending": f"at most {in_bytes(config.max_pending_bytes)} of gradients that wait for an update",
            "checkpoints": f"{config.checkpoint_dir}, every {config.checkpoint_seconds:g} s"
            if config.checkpoint_dir
            else "none (--checkpoint-dir)",
            "update log": _update_log_in_words(config),
        }

    def _log_ready(self) -> None:
        run = self._run
        log.info(
            "run ready",
            run=run.content.run_id,
            epoch=run.content.epoch,
            server=f"{run.content.server_index} of {run.content.num_servers}",
            optimizer=run.content.settings,
            **_held_in_words(run),
        )

    async def _keep_serving(self) -> None:
        keeps = [self._keep_time(), self._keep_checkpoints(), self._keep_noting_standstills()]
        if self._follower is not None:
            keeps.append(self._follower.keep())
        tickers = [asyncio.create_task(keep) for keep in keeps]
        for ticker in tickers:
            ticker.add_done_callback(self._report_ticker)
        await self._stop.wait()
        if self._follower is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._follower.leave(), LEAVE_SECONDS)
        for ticker in tickers:
            ticker.cancel()

    async def _keep_time(self) -> None:
        exit_when, seen_at = self._config.exit_condition, self._clock()
        all_done = _ALL_WORKERS[exit_when.workers]
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._note_standstill()
            # On a thread, since it may make updates; with the present time, so that a wait for a thread ends no lease.
            await self._work.begin(partial(self._run.tick, self._run.clock()))
            self._host.serializations.tidy(self._run.content.shards)
            if all_done(self._run):
                # On a thread too: a shard may still be busy with an update that the last worker's leave completed.
                await self._work.begin(partial(self._run.finish, "all workers are done"))
                self._is_done = True
                self.stop("all workers are done")
                return
            if self._run.membership.num_alive or (self._follower and not self._follower.has_taken_over):
                seen_at = self._clock()
            elif self._clock() - seen_at >= exit_when.idle_seconds:
                self._is_done = True
                self.stop(f"no worker was there for {exit_when.idle_seconds:g} s")
                return

    async def _keep_checkpoints(self) -> None:
        # A task of its own: leases and rounds go on while a checkpoint is written.
        next_at = self._clock() + self._config.checkpoint_seconds
        progress: tuple[int, dict[int, int]] | None = None
        saved_end = progress
        num_ended = num_changes = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            over = self._run.done or self._run.state == RunState.FINISHED
            before, progress = progress, (self._run.content.epoch, _versions(self._run))
            ended_before, num_ended = num_ended, self._run.membership.num_ended
            # The pushes that a worker keeps are gone with it.
            has_left = self._config.resends and num_ended > ended_before
            # A server that is killed comes back with what was set, too.
            changed_before, num_changes = num_changes, self._run.rounds.num_changes
            has_changed = num_changes > changed_before
            due = self._clock() >= next_at or self._is_unsaved() or has_left or has_changed
            # Other shards of the last push may still be under way: an end is saved once nothing changes any more.
            at_end = over and progress == before and (due or progress != saved_end)
            if at_end or (due and not over):
                try:
                    saved = await asyncio.to_thread(self._save, only_changes=not has_changed and (at_end or has_left))
                except Exception as error:
                    # No thread or no memory: the run goes on, as with a full disk.
                    log.error("no checkpoint could be written", reason=repr(error))
                    saved = False
                pause = self._config.checkpoint_seconds
                next_at = self._clock() + (pause if saved else min(pause, RETRY_SECONDS))
                saved_end = progress if at_end else saved_end

    def _is_unsaved(self) -> bool:
        """Return whether no checkpoint holds the run, which would be lost with its server."""
        checkpoints, run = self._checkpoints, self._run
        if checkpoints is None or checkpoints.newest is not None or checkpoints.failure:
            return False
        return run.content.partition is not None and not run.measures

    async def _keep_noting_standstills(self) -> None:
        # A task of its own: a long update delays the ticks while workers' calls are received.
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._note_standstill()

    def _note_standstill(self) -> None:
        if late_seconds := self._standstill.look():
            self._run.stood_still(late_seconds)

    def _report_ticker(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # A server without its clock would never forget a worker.
            log.error("the server's clock failed", reason=repr(task.exception()))
            self.stop("an error in the server")

    def _save(self, *, only_changes: bool = False) -> bool:
        """Write a checkpoint where there is a folder and a run; return False when it failed, which ends nothing."""
        if self._checkpoints is None or self._run.content.partition is None or self._run.measures:
            return True
        if only_changes and self._checkpoints.newest and all(map(_is_durable, self._run.content.shards.values())):
            return True
        try:
            self._checkpoints.save(self._run.snapshot)
        except NotInitialized:
            # The run was reset meanwhile.
            return True
        except CheckpointError:
            # The folder has noted it among the run's events.
            return False
        return True

    async def _end(self, control: hosting.Port, metrics: MetricsServer) -> int:
        """Stop serving, drain, save: in this order, so that acknowledged pushes are in the checkpoint."""
        began = self._clock()
        log.info("server ends", reason=self._stop_reason, drain_seconds=self._config.drain_seconds)
        # On a thread of its own, which goes on even when the loop or a kernel hangs.
        late = threading.Timer(max(self._config.drain_seconds, 0.1), self._end_late)
        late.daemon = True
        late.start()
        self._set_health(_Health.NOT_SERVING)
        self._run.refuse("this server is shutting down: try again once it is back")
        calls_end_at = began + _CALLS_SHARE * self._config.drain_seconds
        await self._calls_end(calls_end_at)
        gave_way = await self._give_way(calls_end_at - self._clock())
        for transport in self._transports:
            await transport.stop(calls_end_at - self._clock())
        await asyncio.to_thread(self._work.shutdown)
        # Else the run goes on elsewhere, and a checkpoint of it here would only be mistaken for it.
        saved = gave_way or await asyncio.to_thread(self._save)
        while not saved and self._follower is not None and self._clock() < calls_end_at:
            # Its server, which ended a moment ago, may have the folder still.
            await asyncio.sleep(TICK_SECONDS)
            saved = await asyncio.to_thread(self._save)
        if not saved and self._checkpoints is not None:
            log.error("the server ends without its last checkpoint", reason=self._checkpoints.failure)
        if self._update_log is not None:
            await asyncio.to_thread(self._update_log.end)
        metrics.stop()
        await control.stop()
        if self._checkpoints is not None:
            # Not earlier: a call at the control port may have requested a checkpoint.
            await asyncio.to_thread(partial(self._checkpoints.close, gives_way=bool(self._primary.fenced)))
        late.cancel()
        log.info("server ended", seconds=round(self._clock() - began, 2))
        return self._status if saved else 1

    def _end_late(self) -> None:
        newest = self._checkpoints.newest if self._checkpoints else None
        log.error(
            "the end took too long, the last checkpoint included: raise --drain-seconds",
            drain_seconds=self._config.drain_seconds,
            newest_checkpoint=newest or "none",
        )
        sys.stderr.flush()
        os._exit(1)

    async def _give_way(self, seconds: float) -> bool:
        """Hand over to the standby, if there is one; return whether the run goes on elsewhere."""
        if self._primary.fenced:
            return True
        with contextlib.suppress(TimeoutError):
            handed_over = self._primary.hand_over(ends=self._is_done, reason=self._stop_reason)
            return await asyncio.wait_for(handed_over, seconds) and not self._is_done
        return False

    async def _calls_end(self, deadline: float) -> None:
        while self._budget.bytes_held and self._clock() < deadline:
            for transport in self._transports:
                transport.let_go()
            await asyncio.sleep(0.01)

    def _set_health(self, status: int) -> None:
        # For both ports and the whole server, so that a probe needs one port only.
        self._host.health.set(status, "", PARAMETER_SERVER, INSPECTOR)


def _access(config: ServerConfig) -> str:
    reach = "open to everybody who can reach it (--insecure)" if config.insecure else "this machine only"
    token = f"with the token in {config.token_file}" if config.token_file else reach
    named = (
        ("observers with that in {}", config.observer_token_file),
        ("operators with that in {}", config.operator_token_file),
        ("by TLS as {}", config.tls_cert),
        ("with a certificate that {} signed", config.tls_client_ca),
    )
    return ", ".join([token, *(text.format(file) for text, file in named if file)])


def _staleness_in_words(config: ServerConfig, run: Run) -> str:
    """Return the staleness policy, and its origin where --staleness is not set."""
    policy = run.rounds.behaviour.staleness.text
    if policy != config.brought_policy:
        return policy
    return f"{policy}, as {config.protocol.partition(':')[0].strip()} brings it (--staleness)"


def _held_in_words(run: Run) -> dict[str, str]:
    """Return how much of the run this server holds, and the memory for it."""
    total = run.content.partition.num_shards if run.content.partition else 0
    held = sum(shard.length for shard in run.content.shards.values())
    slots = sum(shard.slots_bytes for shard in run.content.shards.values())
    return {
        "shards": f"{len(run.content.shards)} of {total}, {held:,} parameters",
        "memory": f"{in_bytes(4 * held)} of parameters, {in_bytes(slots)} of slots",
    }


def _update_log_in_words(config: ServerConfig) -> str:
    if config.update_log is None:
        return "none (--update-log)"
    if not config.log_gradients:
        return f"{config.update_log}, without gradients (--log-gradients)"
    return f"{config.update_log}, with gradients up to {in_bytes(config.log_gradients_max_bytes)}"


def _versions(run: Run) -> dict[int, int]:
    return {shard_id: shard.version for shard_id, shard in run.content.shards.items()}


def _is_durable(shard: Store) -> bool:
    return (shard.version, shard.moves) == (shard.durable_version, shard.durable_moves)


def _check_ready_file(path: Path | None) -> None:
    """Raise ConfigError for a ready file that could not be written later."""
    if path is not None and not (os.access(path.parent, os.W_OK) and path.parent.is_dir()):
        raise ConfigError(f"the ready file {path} cannot be written: {path.parent} is no folder to write in")
    if path is not None and path.is_dir():
        raise ConfigError(f"the ready file {path} cannot be written: it is a folder")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that readers find either whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"the ready file {path} cannot be written: {error.strerror}") from None
