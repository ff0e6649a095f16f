"""One history: the product's servers and workers in a world, its faults, and what became of them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np

import pyps.service.server
from pyps.config import ServerConfig
from pyps.service import hosting
from pyps.service.hosting import Grpc
from pyps.storage.checkpoint import Checkpoint, CheckpointError
from pyps.storage.folder import CheckpointFolder
from pyps_client.launch import Launch
from pyps_client.push import Plan as Push
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import OUTCOME_REJECTED, GroupSettings, OptimizerSettings
from pyps_wire.errors import PypsError, RunFinished, StateLost, Superseded
from pyps_wire.partition import Model as Tensors
from pyps_wire.partition import Tensor, partition
from tests.simulation import world as virtual
from tests.simulation.disk import Folder, SimDisk
from tests.simulation.model import Model
from tests.simulation.network import AioChannel, Channel, GrpcServer, Link, Network, RpcFailed
from tests.simulation.plan import Fault, Plan
from tests.simulation.world import Process, Stuck, World

# The numbers of a shard: a history has fewer pushes.
SIZE = 64
SHARDS = 3
MODEL = Tensors((Tensor("w", (SIZE * SHARDS,)),), shard_size=SIZE)
OPTIMIZER = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})])
# All faults are over after so long; a call may wait for 60 s, and for 80 s on a connection that is silent.
SECONDS_MAX = 400.0
STANDBY_LEASE_SECONDS = 2.0
# After the end of a server whose standby has all.
TAKEOVER_SECONDS_MAX = STANDBY_LEASE_SECONDS + 3.0
SERVER = {"heartbeat_seconds": 0.7, "lease_seconds": 3.0, "stall_seconds": 90.0, "drain_seconds": 5.0}

CHECKED_VERSIONS = 2

# What the product asks of the system, and what answers instead.
CLIENT = "pyps_client"
PATCHES: dict[str, dict[str, Any]] = {
    f"{CLIENT}.retry": {"time": virtual.time, "threading": virtual.threading},
    f"{CLIENT}.lease": {"time": virtual.time, "threading": virtual.threading},
    f"{CLIENT}.pull": {"time": virtual.time, "threading": virtual.threading},
    f"{CLIENT}.run_state": {"time": virtual.time, "threading": virtual.threading},
    f"{CLIENT}.worker": {"time": virtual.time, "threading": virtual.threading},
    f"{CLIENT}.join": {"time": virtual.time, "threading": virtual.threading},
    f"{CLIENT}.transport.sharing": {"time": virtual.time},
    f"{CLIENT}.transport.connection": {"threading": virtual.threading},
    f"{CLIENT}.transport.grpc": {
        "threading": virtual.threading,
        "queue": virtual.queue,
        "open_channel": lambda address, credentials, options: Channel(History.active.network, address),
    },
    f"{CLIENT}.transport.threads": {
        "time": virtual.time,
        "threading": virtual.threading,
        "queue": virtual.queue,
        "_thread": virtual._thread,
        # Nobody sends a signal.
        "SIGNAL_SECONDS": 1e6,
    },
    f"{CLIENT}.leave": {
        "expect": lambda worker, of=None: None,
        # Nobody sends a signal.
        "undisturbed": lambda job: job(),
        "wait_for_leaving": lambda: None,
        "install_where_asked": lambda: None,
    },
    "pyps.run.run": {"time": virtual.time},
    "pyps.service.calls": {
        "time": virtual.time,
        "log_bug": lambda error, what: World.active.fail(f"a bug in the server: {what}: {error!r}"),
    },
    "pyps.service.executor": {"ThreadPoolExecutor": virtual.Pool},
    "pyps.service.hosting": {
        "grpc": SimpleNamespace(
            aio=SimpleNamespace(
                server=lambda interceptors, options: GrpcServer(History.active.network, interceptors, options)
            ),
            method_handlers_generic_handler=hosting.grpc.method_handlers_generic_handler,
            **{name: getattr(hosting.grpc, name) for name in dir(hosting.grpc) if name.endswith("_rpc_method_handler")},
        ),
        "listening_socket": lambda host, port, backlog=1: SimpleNamespace(close=lambda: None),
        "health_pb2_grpc": SimpleNamespace(add_HealthServicer_to_server=lambda servicer, server: None),
        "add_reflection": lambda server, services: None,
    },
    "pyps.service.server": {
        "threading": virtual.threading,
        "TRANSPORTS": (Grpc,),
        "TICK_SECONDS": 0.5,
        "RETRY_SECONDS": 1.0,
        "CheckpointFolder": lambda path, **options: CheckpointFolder(path, disk=History.active.disk(), **options),
        "Checkpoint": lambda path: Checkpoint(path, History.active.disk()),
        "RunCollector": lambda host, transports: None,
        "MetricsServer": lambda collector, host: SimpleNamespace(address="", start=_nothing, stop=lambda: None),
        "_check_ready_file": lambda path: None,
        "give_back_free_memory": lambda: None,
    },
    "pyps.service.standby.feed": {"threading": virtual.threading, "CHECKED_VERSIONS": CHECKED_VERSIONS},
    "pyps.service.standby.follower": {
        "time": virtual.time,
        "ThreadPoolExecutor": virtual.Pool,
        "look": lambda address: History.active.network.look(address),
        "is_loopback": lambda address: History.active.plan.near,
    },
    "pyps.service.standby.link": {
        "grpc": SimpleNamespace(
            aio=SimpleNamespace(
                insecure_channel=lambda address, options: AioChannel(History.active.network, address),
                AioRpcError=RpcFailed,
            )
        ),
    },
    "pyps.service.standby.primary": {
        "look": lambda address: History.active.network.look(address),
        "is_loopback": lambda address: History.active.plan.near,
        "secrets": SimpleNamespace(token_hex=lambda size: f"{World.active.process.name} {World.active.now}"),
    },
    "pyps.storage.folder": {"time": virtual.time, "threading": virtual.threading},
}


async def _nothing() -> None:
    pass


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Let the product run in histories, and not in the world, while the block runs."""
    logging.disable(logging.CRITICAL)
    # Of coroutines that a killed process has left.
    ignored = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
    ignored.__enter__()
    former: list[tuple[Any, str, Any]] = []
    patches = [
        *((importlib.import_module(name), patch) for name, patch in PATCHES.items()),
        (hosting.Port, {"_keep_room": lambda port: _nothing()}),
        (
            pyps.service.server.Server,
            {
                "_add_inspector": lambda *_: None,
                "_announce": lambda *_: None,
                "_end_late": lambda server: World.active.process.die("crash", 0.5),
            },
        ),
    ]
    try:
        for owner, patch in patches:
            for name, value in patch.items():
                if hasattr(owner, name):
                    former.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, value)
        # A dead process's coroutines are freed between histories, not at any moment.
        gc.collect()
        gc.freeze()
        gc.disable()
        yield
    finally:
        gc.collect()
        ignored.__exit__(None, None, None)
        gc.enable()
        gc.unfreeze()
        for owner, name, value in reversed(former):
            setattr(owner, name, value)
        logging.disable(logging.NOTSET)


@cache
def launch_of(num_servers: int, name: str) -> Launch:
    return Launch(
        [address_of(index) for index in range(num_servers)],
        run_id="run",
        worker_id=name,
        worker_key=f"{name}-has-this-key",
        transport="grpc",
        start_wait_seconds=200.0,
        loss_wait_seconds=200.0,
        wait_seconds=200.0,
        environment={},
    )


@cache
def address_of(index: int) -> str:
    return f"127.0.0.1:{7610 + 10 * index}"


class History:
    """A plan that is played."""

    active: History

    def __init__(self, plan: Plan):
        History.active = self
        self.plan = plan
        self.world = World(plan.seed, switch_share=plan.switch_share)
        importlib.import_module(f"{CLIENT}.retry")._jitter = random.Random(plan.seed)  # type: ignore[attr-defined]
        self.network = Network(self.world)
        self.network.held_refuses = not plan.near
        self.network.on_message = self._on_message
        self.model = Model()
        self.root = Folder()
        self.servers: list[Server] = []
        self.workers: list[WorkerProcess] = []
        self.num_pushes = self.num_messages = 0
        self._operations: dict[str, int] = {}
        self._full_until: dict[str, int] = {}
        self._met: dict[tuple[str, str, int], list[Fault]] = {}
        for fault in plan.faults:
            if fault.meets == "time":
                self.world.at(fault.place, None, partial(self._begin, fault, "time"))
            else:
                of = fault.target if fault.meets == "disk" else ""
                self._met.setdefault((fault.meets, of, int(fault.place)), []).append(fault)
        # Where each server of the run serves: at its own place, or at its standby's.
        self.serving = list(range(plan.num_servers))
        # Processes that are to come back, and whether the run was lost before it was saved.
        self.num_returning = 0
        self.lost = self._is_ending = False

    def play(self) -> History:
        """Let everything happen, and check it."""
        plan, world = self.plan, self.world
        self.servers = [Server(self, place) for place in range(plan.num_servers * (2 if plan.standby else 1))]
        self.workers = [WorkerProcess(self, index) for index in range(len(plan.steps))]
        for process in (*self.servers, *self.workers):
            world.at(world.random.uniform(0.0, 0.3), None, process.start)
        try:
            world.run(lambda: self.lost or self._is_over(), seconds_max=SECONDS_MAX)
            if not self.lost:
                self._end()
        except Stuck as stuck:
            waiting = [each.name for each in self.workers if not each.over]
            world.fail(f"{stuck} these go on: {', '.join(waiting) or 'servers'}")
        world.failures += self.model.check()
        for process in (*self.servers, *self.workers):
            process.kill()
        return self

    def server_of(self, shard: int) -> int:
        return partition(MODEL, num_servers=self.plan.num_servers).server_of(shard)

    def _is_over(self) -> bool:
        if not all(each.over for each in self.workers):
            return False
        # Where all workers were killed for good before the run began, nobody begins it.
        self.lost = not self.num_returning and not self.model.states
        return self._are_ready()

    def _are_ready(self) -> bool:
        return (
            not (self.num_returning or self.network.num_late)
            and not any(each.paused for each in self.servers)
            and all(sum(each.serves for each in self.pair(index)) == 1 for index in range(self.plan.num_servers))
        )

    def pair(self, place: int) -> list[Server]:
        """Return the server in a place, and its standby if there is one."""
        return self.servers[place % self.plan.num_servers :: self.plan.num_servers]

    def standby_of(self, place: int) -> int | None:
        """Return the place of the server that one in this place is to follow."""
        plan, pair = self.plan, range(place % self.plan.num_servers, len(self.servers), self.plan.num_servers)
        serving = self.serving[pair[0]]
        if place == serving or not plan.standby:
            return None
        # Whoever starts it again may not know that its standby has taken over.
        unaware = plan.unaware and place == pair[0] and not self.servers[place].was_fenced
        return None if unaware and self.servers[serving].serves else serving

    def _end(self) -> None:
        """See what the servers hold at the end, and what their disks do after another end of them."""
        world = self.world
        before = [server for server in self.servers if server.serves]
        for server in before:
            server.see("at the end")
            if server.num_bytes:
                world.fail(f"{server.name} holds {server.num_bytes} bytes of calls at the end")
        self.network.on_message = lambda *_: None
        self._is_ending = True
        self._full_until.clear()
        if self.plan.standby:
            world.run(lambda: all(each.is_guarded for each in before), seconds_max=world.now + 60.0)
        seconds = 10.0 if self.plan.standby else 0.1
        for server in before:
            server.stop(seconds) if self.plan.final == "stop" else server.die(self.plan.final, seconds)
        world.run(lambda: all(each.dead for each in before), seconds_max=world.now + 60.0)
        if self.plan.standby:
            began, places = world.now, [server.place for server in before]
            world.run(
                lambda: self.lost or all(any(each.serves for each in self.pair(place)) for place in places),
                seconds_max=world.now + 60.0,
            )
            if world.now - began > TAKEOVER_SECONDS_MAX:
                world.fail(f"nobody served for {world.now - began:.0f} s after the end of servers with standbys")
        world.run(lambda: self.lost or self._are_ready(), seconds_max=world.now + 60.0)

    # Faults.

    def _on_message(self, link: Link, up: bool, method: str, size: int) -> None:
        self.num_messages += 1
        self.world.note(*link.key, ">" if up else "<", method, size)
        for fault in self._met.get(("message", "", self.num_messages), ()):
            begin = partial(self._begin, fault, method, link)
            if fault.kind in ("cut", "late"):
                begin() if fault.kind == "cut" else self.world.at(0.0, None, begin)
            else:
                self.world.at(fault.delay, None, begin)

    def disk(self) -> SimDisk:
        server = self.world.process
        assert server is not None
        return SimDisk(self.root, server, partial(self._on_operation, server))

    def _on_operation(self, server: Process, operation: str, name: str) -> bool:
        number = self._operations[server.name] = self._operations.get(server.name, 0) + 1
        self.world.note("disk", operation, name)
        for fault in self._met.get(("disk", server.name, number), ()):
            self._begin(fault, operation)
        return number < self._full_until.get(server.name, 0)

    def _begin(self, fault: Fault, met: str, link: Link | None = None) -> None:
        world, target = self.world, self._process(fault.target)
        if target is None or target.dead or self._is_ending:
            return
        if fault.kind == "hold" and isinstance(target, Server) and self.plan.near:
            # Nothing comes between two servers of one machine.
            return
        state = target.state() if fault.meets == "time" or fault.kind in ("crash", "power", "pause", "kill") else ""
        world.note("fault", fault, met)
        world.marks[" ".join(filter(None, [fault.kind, met if fault.meets != "time" else "", state]))] += 1
        world.marks[fault.kind] += 1
        key = fault.target, address_of(fault.server)
        if fault.kind in ("crash", "power", "kill"):
            target.die(fault.kind, fault.seconds)
        elif fault.kind == "stop":
            target.stop(fault.seconds)
        elif fault.kind == "pause":
            target.pause(fault.seconds)
        elif fault.kind == "flip":
            target.flip()
        elif fault.kind == "jump":
            target.clock_error += fault.seconds
        elif fault.kind == "full":
            self._full_until[fault.target] = self._operations.get(fault.target, 0) + int(4 * fault.seconds) + 1
        elif fault.kind == "hold":
            self.network.hold(*key, fault.seconds)
            if isinstance(target, Server):
                self.network.hold(self.servers[fault.server].name, address_of(target.place), fault.seconds)
        elif fault.kind == "slow":
            self.network.slowness[key] = 40.0
            world.at(fault.seconds, None, partial(self.network.slowness.pop, key, None))
        elif fault.kind == "repeat" and self.network.pushed:
            world.at(fault.seconds, None, partial(self.network.repeat, *world.random.choice(self.network.pushed)))
        elif link is not None:
            link.cut(late=fault.seconds if fault.kind == "late" else None)

    def _process(self, name: str) -> Server | WorkerProcess | None:
        kind, _, index = name.partition("-")
        of_kind: Any = self.servers if kind == "server" else self.workers
        return of_kind[int(index)] if int(index) < len(of_kind) else None


class Server(Process):
    """One life of a server."""

    def __init__(self, history: History, place: int):
        super().__init__(history.world, f"server-{place}")
        self._history, self.place, self.index = history, place, place % history.plan.num_servers
        self.server: Any = None
        self.was_fenced = False
        self._follows = False
        # Shards that a flip has changed while they followed, and the version at which that will be noticed.
        self._flipped: list[tuple[Any, int]] = []
        self._down_seconds = 0.1

    def start(self) -> None:
        self.world.note("start", self.name)
        self.at(0, lambda: self.loop.call_soon(self._begin))

    def _begin(self) -> None:
        plan, standby_of = self._history.plan, self._history.standby_of(self.place)
        config = ServerConfig(
            protocol=plan.protocol,
            staleness="none",
            port=7610 + 10 * self.place,
            control_port=7611 + 10 * self.place,
            checkpoint_dir=PurePosixPath(f"/{self.name}"),  # type: ignore[arg-type]
            checkpoint_seconds=plan.checkpoint_seconds,
            checkpoint_keep=2,
            resume=True,
            threads=2,
            standby_of="" if standby_of is None else address_of(standby_of),
            standby_lease_seconds=STANDBY_LEASE_SECONDS,
            **SERVER,
        )
        self._follows = standby_of is not None
        try:
            self.server = pyps.service.server.Server(config, instruction_set="any", clock=virtual.time.monotonic)
        except CheckpointError as error:
            # Another start may find room.
            self.world.note("no start:", error)
            self.die("crash", 1.0)
            return
        if self._follows:
            self.server._run.on_ready = self._on_takeover
        self.loop.create_task(self.server.run(signals=False, on_ready=self._on_start)).add_done_callback(self._ended)

    def _on_start(self, _: object) -> None:
        history, model = self._history, self._history.model
        newest, run = self.server._checkpoints.newest, self.server._run
        if self._follows:
            return
        parent = None if newest is None else Checkpoint(newest, history.disk()).header.epoch
        refuse = run.refuse

        def begin(reason: str = "") -> None:
            refuse(reason)
            if reason:
                return
            run.refuse = refuse
            if parent is not None:
                self._go_on(parent)
                self.see("after its restart")
                return
            shards = [shard for shard in range(SHARDS) if history.server_of(shard) == self.index]
            if any(model.durable[shard, model.lives[shard][-1]] for shard in shards):
                self.world.fail(
                    f"{self.name} came back without its run, of which receipts had told that it was durable"
                )
            # Beside a server that serves nothing is lost, unless that had been overtaken by this one.
            if history.serving[self.index] == self.place or not any(each.serves for each in history.pair(self.place)):
                # A run of which another server holds a part is not begun anew.
                saved = any(
                    name.startswith("checkpoint-") for each in history.root.entries.values() for name in each.entries
                )
                history.lost = saved or bool(model.receipts) or any(states for states in model.states.values())

        if run._unavailable:
            # Its standby may have taken over.
            run.refuse = begin
        else:
            begin()

    def _on_takeover(self) -> None:
        header, model = self.server._follower._shards.header, self._history.model
        # All that its server has answered is here.
        for shard in self.server._run.content.shards:
            model.saved(shard, header.epoch)
            model.takeovers.add((shard, self.server._run.content.epoch))
        for flipped, noticed_at in self._flipped:
            if (
                flipped.version < noticed_at
                and flipped.version == self.server._run.content.shards[flipped.shard_id].version
            ):
                # Before anybody could notice.
                self._history.lost = True
                return
        self.world.note("takeover", self.name, self.server._follower._reason)
        self.world.marks["takeover"] += 1
        self._history.serving[self.index] = self.place
        self._go_on(header.epoch)
        self.see("after its takeover")

    def _go_on(self, parent: int) -> None:
        content = self.server._run.content
        for shard_id, shard in content.shards.items():
            self._history.model.restored(shard_id, content.epoch, shard.version, parent)

    def _ended(self, task: Any) -> None:
        if self.dead:
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, CheckpointError):
                self.world.fail(f"{self.name} ended by {error!r}")
            self.world.note("end:", repr(error))
        elif task.result() == 0 and not self._follows:
            content = self.server._run.content
            self.was_fenced = bool(self.server._primary.fenced)
            for shard_id in () if self.was_fenced else content.shards:
                self._history.model.saved(shard_id, content.epoch)
        self.die("crash", self._down_seconds)

    @property
    def serves(self) -> bool:
        return (
            not self.dead
            and self.server is not None
            and self.server._run.is_ready
            and not self.server._run._unavailable
        )

    @property
    def is_guarded(self) -> bool:
        """Whether its standby could take over now, as both know."""
        others = [each for each in self._history.pair(self.place) if each is not self and not each.dead]
        followers = [each.server._follower for each in others if each.server is not None]
        return self.server._primary.is_guarded and any(each is not None and each._is_whole for each in followers)

    @property
    def num_bytes(self) -> int:
        return 0 if self.server is None else self.server._budget.bytes_held

    def see(self, when: str) -> None:
        """Note what the server holds, as nobody else can."""
        content = self.server._run.content
        for shard_id, shard in content.shards.items():
            version, state = shard.read(lambda version, values: (version, tuple(values.tolist())))
            self._history.model.see(f"{self.name} {when}", shard_id, content.epoch, version, state)

    def flip(self) -> None:
        follower = self.server._follower if self.server is not None else None
        if follower is not None and follower._shards is not None and not follower.has_taken_over:
            for shard in list(follower._shards._shards.values())[:1]:
                shard._parameters[shard.version % SIZE] += 0.25
                self._flipped.append((shard, shard.version // CHECKED_VERSIONS * CHECKED_VERSIONS + CHECKED_VERSIONS))

    def state(self) -> str:
        """What it is doing, for the marks."""
        if self.server is None:
            return "starting"
        run, states = self.server._run, []
        if (follower := self.server._follower) is not None and not follower.has_taken_over:
            return "following" if follower._is_whole else "receiving"
        if not run.is_ready:
            return "empty"
        if self.server._primary.is_guarded:
            states.append("guarded")
        if self.server._checkpoints._saving.locked():
            states.append("saving")
        if any(shard.num_pending for shard in run.content.shards.values()):
            states.append("pending")
        if run.waits._waits:
            states.append("parked")
        return "+".join(states) or "idle"

    def stop(self, seconds: float) -> None:
        if self.server is not None:
            self._down_seconds = seconds
            self.at(0, partial(self.server.stop, "asked to"))

    def die(self, how: str, seconds: float) -> None:
        """End at once, and come back after a while: with what the disk still has."""
        history, network, address = self._history, self._history.network, address_of(self.place)
        if self.dead:
            return
        if self.server is not None and history.plan.spares_workers:
            for event in self.server._run.events:
                if event.kind == "expired":
                    self.world.fail(f"{self.name}: {event.message}")
        self.kill()
        network.servers.pop(address, None)
        if how == "power":
            folder = history.root.entries.get(self.name)
            if isinstance(folder, Folder):
                folder.crash(self.random)
            network.gone_until[address] = self.world.now + seconds
        # Also those of one that does not listen any more, since it is ending.
        for link in [each for each in network.links if each.address == address or each.client is self]:
            if how == "power":
                # Its callers hear nothing until it is back.
                link.silent = True
                self.world.at(seconds + 0.01, None, partial(link.cut, "connection reset"))
            else:
                link.cut("connection reset")
        history.num_returning += 1
        self.world.at(seconds, None, self._come_back)

    def _come_back(self) -> None:
        self._history.num_returning -= 1
        later = Server(self._history, self.place)
        later.was_fenced = self.was_fenced
        self._history.servers[self.place] = later
        later.start()


class WorkerProcess(Process):
    """One life of a worker."""

    def __init__(self, history: History, index: int):
        super().__init__(history.world, f"worker-{index}")
        self._history, self.index = history, index
        self._steps = history.plan.steps[index]
        self.over = False
        self.doing = "starting"
        # The shards and pushes of this life that were taken, and whether one may wait at a shard while others go on.
        self._taken: list[tuple[int, int]] = []
        self._may_wait = False

    def start(self) -> None:
        self.at(0, lambda: virtual.Thread(target=self._main, name="main").start())

    def state(self) -> str:
        return self.doing

    def stop(self, seconds: float) -> None:
        self.die("kill", seconds)

    def die(self, how: str, seconds: float) -> None:
        """End at once; come back after a while, unless that is long."""
        if self.over or self.dead:
            return
        self.kill()
        for link in [each for each in self._history.network.links if each.client is self]:
            self.world.at(0.001, None, partial(link.cut, "the worker is gone"))
        self.over = True
        if seconds < 10.0:
            self._history.num_returning += 1
            self.world.at(seconds, None, self._come_back)

    def _come_back(self) -> None:
        self._history.num_returning -= 1
        later = self._history.workers[self.index] = WorkerProcess(self._history, self.index)
        later.clock_error = self.clock_error
        later.start()

    def _main(self) -> None:
        try:
            self._train()
        except RunFinished:
            pass
        except StateLost as error:
            self._history.lost = True
            if any(each.serves and each.server._follower for each in self._history.servers):
                self.world.fail(f"{self.name} ended beside a server that had taken over: {error}")
        except Superseded as error:
            self.world.note(error)
        except PypsError as error:
            self.world.fail(f"{self.name} ended by {type(error).__name__}: {error}")
        self.over = True

    def _train(self) -> None:
        history, world = self._history, self.world
        launch = launch_of(history.plan.num_servers, self.name)
        worker = Worker(MODEL, OPTIMIZER, launch=launch, initial=lambda: [np.zeros(SIZE * SHARDS, np.float32)])
        self._timed("connecting", worker.connect)
        lent = worker.lend()
        [[gradient]], parameters = lent.gradients, lent.parameters
        self._pull(worker, parameters)
        for _ in range(self._steps):
            self.doing = "computing"
            world.park(None, self.random.expovariate(2.0))
            self._timed("proceeding", worker.proceed)
            worker.clock += 1
            if history.num_pushes == SIZE:
                break
            push, history.num_pushes = history.num_pushes, history.num_pushes + 1
            world.note("push", push)
            gradient[:] = 0.0
            gradient[push::SIZE] = -1.0
            exchanges = self.random.random() < history.plan.exchange_share
            call = partial(worker.exchange, Push([gradient], parameters if exchanges else None))
            self._may_wait = history.plan.protocol.startswith("softsync")
            for receipt in self._timed("exchanging" if exchanges else "pushing", call):
                world.note("receipt", push, receipt.shard_id, receipt.outcome, receipt.reason, receipt.version_after)
                history.model.note(push, receipt)
                if receipt.outcome == OUTCOME_REJECTED:
                    self._may_wait = True
                else:
                    self._taken.append((receipt.shard_id, push))
            if exchanges:
                self._see(worker, parameters[0])
            if not exchanges or worker.pull_needed:
                self._pull(worker, parameters)
        self._timed("leaving", worker.close)

    def _pull(self, worker: Worker, parameters: Any) -> None:
        self._timed("pulling", partial(worker.pull, parameters))
        self._see(worker, parameters[0])
        # Whatever lives the servers have had. After a push that came too late somewhere no pull waits.
        for shard, push in () if self._may_wait else self._taken:
            if not parameters[0][shard * SIZE + push]:
                self.world.fail(f"{self.name} pulled shard {shard} without its push {push}, which was taken")

    def _timed(self, doing: str, call: Callable[[], Any]) -> Any:
        self.doing, began = doing, self.world.now
        result = call()
        if self.world.now - began > self._history.plan.wait_seconds_max:
            self.world.fail(f"{self.name} was {doing} for {self.world.now - began:.0f} s")
        return result

    def _see(self, worker: Worker, parameters: Any) -> None:
        versions = worker.held_versions
        for shard_id, version in versions.items():
            if version >= 0:
                state = tuple(parameters[shard_id * SIZE : (shard_id + 1) * SIZE].tolist())
                epoch = versions.epochs[worker.partition.server_of(shard_id)]
                self._history.model.see(self.name, shard_id, epoch, version, state)
