"""Faults seeded into the product: one text of a function replaced each, while histories are played."""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    name: str
    # A module and a function or method in it.
    where: str
    old: str
    new: str

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """Run the function with the fault, wherever it was imported, while the block runs."""
        module, _, path = self.where.partition(":")
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = inspect.getattr_static(function, part)
        function = getattr(function, "fget", function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} stands {source.count(self.old)} times"
        space: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(source.replace(self.old, self.new), self.where, "exec", flags), function.__globals__, space)
        former, function.__code__ = function.__code__, space[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = former


_SHARD, _FOLDER = "pyps.core.shard:Shard", "pyps.storage.folder:CheckpointFolder"
_LOOKUP = "self._ledger.lookup(gradient.worker_id, gradient.incarnation, gradient.sequence)"
_RECORD = "self._ledger.record(gradient.worker_id, gradient.incarnation, receipt, roster=roster)"
_STANDBY = "pyps.service.standby"
_PUSH = "made = shard.push(gradient, roster=roster).receipt"
_PUSH_TWICE = (
    f"{_PUSH}\n            shard.push(gradient._replace(sequence=gradient.sequence + 1_000_000), roster=roster)"
)
_WRITER, _MANIFEST = "pyps.storage.checkpoint:Writer.write", "pyps.storage.checkpoint:put_manifest"

MUTANTS = (
    Mutant("a push that was answered is taken for new", f"{_SHARD}.push", _LOOKUP, "None"),
    Mutant("no receipt is kept", f"{_SHARD}._decide", _RECORD, "None"),
    Mutant(
        "a later life gets the receipts of the earlier one",
        "pyps.core.ledger:Ledger.lookup",
        "self._lives.get((worker_id, incarnation))",
        "self._lives.get((worker_id, self._latest.get(worker_id)))",
    ),
    Mutant("a restore begins no epoch", "pyps.run.run:Run.restore", "header.epoch + 1", "header.epoch"),
    Mutant(
        "an epoch is claimed nowhere",
        f"{_FOLDER}.claim_epoch",
        r'self._disk.put(self.path / "epoch", [f"{epoch + 1}\n".encode()])',
        "pass",
    ),
    Mutant("what is written is not synced", "pyps.storage.disk:Disk.put", "self.sync(file)", "pass"),
    Mutant(
        "the name of a checkpoint is not synced",
        _MANIFEST,
        "positions)])\n    disk.sync_folder(path.parent)",
        "positions)])",
    ),
    Mutant("the names of shards' files are not synced", _MANIFEST, "disk.sync_folder(path.parent / SHARDS)", "pass"),
    Mutant("a shard that has moved is not written again", _WRITER, "before != moves", "False"),
    Mutant("files that a checkpoint needs are removed", f"{_FOLDER}._remove_unnamed", "files.keys() - named", "files"),
    Mutant(
        "a version is told as durable when it is copied",
        f"{_SHARD}._state",
        "return ShardState(",
        "self.durable_version = self.version\n    return ShardState(",
    ),
    Mutant(
        "a version is told as durable that came after the copy",
        _WRITER,
        "= entry.version, num_moves",
        "= shard.version, num_moves",
    ),
    Mutant(
        "a checkpoint goes on changing while it is written",
        f"{_SHARD}.state",
        "self._state(aligned_copy, rows_after)",
        "self._state(lambda values: values, rows_after)",
    ),
    Mutant("a checkpoint has no receipts", f"{_SHARD}._state", "self._ledger.entries()", "Ledger().entries()"),
    Mutant(
        "what no checkpoint holds is not sent again",
        "pyps_client.kept:KeptPushes.__call__",
        "for of_shard in self._pushes.values() for push in of_shard",
        "for of_shard in () for push in of_shard",
    ),
    Mutant("the oldest checkpoint is first", "pyps.storage.folder:checkpoint_paths", "reverse=True", "reverse=False"),
    Mutant("the newest checkpoints are removed", f"{_FOLDER}.prune", "[keep:]", "[: -keep or None]"),
    Mutant(
        "a lease never ends",
        "pyps.core.membership:Membership.expire",
        "if member.alive and silent > self.lease_seconds:",
        "if False:",
    ),
    Mutant(
        "a round waits for a worker that is gone",
        "pyps.run.rounds:RoundController.complete_rounds",
        "if content is None or roster is before:",
        "if True:",
    ),
    Mutant("who waits for a version is not woken", f"{_SHARD}.push", "wake_all(reached)", "pass"),
    Mutant(
        "a push counts twice in its round",
        "pyps.core.protocols.barrier:Barrier.decide",
        "if worker_id in pending.workers:",
        "if False:",
    ),
    Mutant(
        "an orderly end saves nothing",
        "pyps.service.server:Server._end",
        "saved = gave_way or await asyncio.to_thread(self._save)",
        "saved = True",
    ),
    Mutant(
        "a suspended server forgets its workers",
        "pyps.service.server:Server._note_standstill",
        "if late_seconds := self._standstill.look():",
        "if False:",
    ),
    Mutant(
        "a push gets another number when it is sent again",
        "pyps_client.push:Outgoing._fill",
        "plan, receiver, rates = self.plan, self.receiver, self.learning_rates",
        "plan, receiver, rates = self.plan, self.receiver, self.learning_rates\n    self.sequence += 1000",
    ),
    Mutant(
        "versions of another epoch are kept",
        "pyps_client.pull:Held.enter_epoch",
        "self.versions = dict.fromkeys(self.versions, -1)",
        "pass",
    ),
    Mutant(
        "parameters of another epoch are mixed in",
        "pyps_client.push:Outgoing._take",
        "reply.epoch == held.epoch",
        "True",
    ),
    Mutant(
        "a push is answered before the standby has received it",
        "pyps.service.conversation:Conversation._release",
        "self._feed.holds and",
        "False and",
    ),
    Mutant("a standby makes an update twice", f"{_STANDBY}.shards:FollowedShards._follow", _PUSH, _PUSH_TWICE),
    Mutant("events overtake others", f"{_STANDBY}.feed:Feed.add", "_queue.append(event)", "_queue.appendleft(event)"),
    Mutant(
        "a server whose place was taken goes on",
        f"{_STANDBY}.primary:StandbyService.Meet",
        "self._primary.fence(request.address, request.epoch)",
        "pass",
    ),
    Mutant(
        "a server that finds its place taken goes on",
        f"{_STANDBY}.primary:Primary._find",
        "self.fence(address, reply.epoch)",
        'self._go_on("it lives")',
    ),
    Mutant(
        "a silent standby is taken for one that has ended",
        f"{_STANDBY}.primary:Primary._find",
        "await look(address) is Found.REFUSED",
        "True",
    ),
    Mutant(
        "a refusal from elsewhere is taken for the end of a standby",
        f"{_STANDBY}.primary:Primary._find",
        "is_loopback(address) and",
        "",
    ),
    Mutant(
        "a standby takes over under its server's epoch",
        f"{_STANDBY}.shards:FollowedShards.given_up",
        "self.header, {}",
        "dataclasses.replace(self.header, epoch=self.header.epoch - 1), {}",
    ),
    Mutant(
        "a shard that differs stays so",
        f"{_STANDBY}.follower:Follower._applied",
        "self._again.append(shard_id)",
        "pass",
    ),
    Mutant(
        "answers go before the standby has all shards", f"{_STANDBY}.primary:Primary._serve", "feed.guard(True)", "pass"
    ),
    Mutant(
        "a standby waits for a silent server for ever",
        f"{_STANDBY}.follower:Follower._look",
        "silent_seconds + EARLY_SECONDS >= self._lease_seconds",
        "False",
    ),
    Mutant(
        "a server that begins again does not ask its standby",
        "pyps.service.server:Server._resume",
        "self._primary.resume(note, served_epoch=self._checkpoints.resumed_epoch)",
        "pass",
    ),
    Mutant(
        "a standby does not say who serves",
        "pyps.service.parameter_server:ParameterServer.Hello",
        "elsewhere := self._run.elsewhere",
        'elsewhere := ""',
    ),
    Mutant(
        "gradients that wait are not taken over",
        f"{_STANDBY}.shards:FollowedShards.given_up",
        "states[shard_id] = shard.given_up()",
        "states[shard_id] = dataclasses.replace(shard.given_up(), pending=())",
    ),
    Mutant(
        "receipts are not taken over",
        f"{_STANDBY}.shards:FollowedShards._follow",
        "made = shard.push(gradient",
        "made = shard.push(gradient._replace(sequence=gradient.sequence + 1_000_000)",
    ),
)
