"""A pull whose parameters go into the worker's memory."""

from __future__ import annotations

from functools import partial

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.gradient import item_bytes
from pyps.core.shard import Shard
from pyps.run.run import Run
from pyps.service.local.attachment import Attachment
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import BadRequest


class Pull:
    """One request of a worker: `read` for every shard, from any threads, or `read_whole` once; then `reply`."""

    def __init__(self, run: Run, attachment: Attachment, request: wire.PullRequest):
        """Refuses what names other shards or workers than those attached; it is a sign of life of the worker."""
        self._run = run
        self._attachment = attachment
        content = attachment.content
        attachment.require_shards(run.shards)
        attachment.require_sender(request.sender)
        if request.codec not in (0, attachment.codec):
            raise BadRequest(
                f"the pull wants codec {request.codec}; its parameters were attached with {attachment.codec}"
            )
        wants = {want.shard_id: want for want in request.wants}
        places = attachment.replies
        self.shards = run.shards_to_pull(
            content.run_id, attachment.worker_id, attachment.incarnation, observer=False, shard_ids=wants or places
        )
        for shard_id in wants:
            attachment.require_laid_out(shard_id, run.membership)
        # Versions of another epoch mean nothing here: everything is newer, and nothing is worth waiting for.
        same_epoch = request.epoch == content.epoch
        self.min_versions = {i: want.min_version if same_epoch else 0 for i, want in wants.items()}
        self._held = {i: want.held_version if same_epoch else -1 for i, want in wants.items()}
        self.wait_seconds = request.wait_milliseconds / 1000
        # By shard, the versions that were written.
        self._versions: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        """Whether every shard has the version wanted."""
        return all(shard.version >= self.min_versions.get(shard.shard_id, 0) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """The bytes of parameters that it is about, at most."""
        return sum(4 * shard.length for shard in self.shards)

    def read(self, shard: Shard) -> None:
        """Writes a shard's parameters where they are newer than those held."""
        shard.read(partial(self._write, shard.shard_id), worker_id=self._attachment.worker_id)

    def read_whole(self) -> None:
        """Writes all shards wanted, of one state of the model."""
        whole = self._run.whole
        if whole is None:
            # The protocol was replaced in between.
            for shard in self.shards:
                self.read(shard)
            return
        readers = {shard.shard_id: partial(self._write, shard.shard_id) for shard in self.shards}
        whole.read(readers, worker_id=self._attachment.worker_id)

    def reply(self) -> local.LocalReply:
        """What the worker is told, once every shard was read."""
        reply = local.LocalReply()
        reply.pulled.SetInParent()
        codec, epoch = self._attachment.codec, self._attachment.content.epoch
        num_bytes = 0
        for shard_id, version in sorted(self._versions.items()):
            written = reply.pulled.shards.add(shard_id=shard_id, version=version, epoch=epoch)
            written.codec = int(codec)  # type: ignore[assignment]
            num_bytes += item_bytes(codec) * self._attachment.shard(shard_id).length
        if num_bytes:
            self._run.statistics.pulled(self._attachment.worker_id, num_bytes, shard_ids=self._versions)
        return reply

    def _write(self, shard_id: int, version: int, parameters: Floats) -> None:
        """Called under the shard's lock; ServerUnavailable after the link's end."""
        self._attachment.segment.require_open()
        if version > self._held.get(shard_id, -1):
            _kernels.encode_into(parameters, self._attachment.replies[shard_id])
            self._versions[shard_id] = version
