"""Checkpoints in what fsspec knows by a URL: S3, on a server of this machine, and memory."""

import logging
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyps.storage import object_store
from pyps.storage.checkpoint import CheckpointError
from pyps.storage.checkpoint_set import convert, newest_set
from pyps.storage.disk import Disk
from pyps.storage.folder import CheckpointFolder
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import InvalidArgument
from shards import adagrad_shards, everything, push, restored, write_checkpoint
from support import checksums, inspect
from wire_worker import WireWorker

moto = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
BUCKET = "s3://checkpoints"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**told, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            environment.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="checkpoints")
        # One of this process may know the server of an earlier use of this fixture.
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
        yield BUCKET
    server.stop()


@pytest.mark.parametrize("root", ["s3://checkpoints/job", "memory://job", "file://{}"])
def test_a_folder_there_is_like_one_on_a_disk(bucket, tmp_path, root):
    path = Path(root.format(tmp_path)) / "server-0"
    folder = CheckpointFolder(path)
    assert folder.resume() is None
    shards = adagrad_shards()
    for sequence in range(5):
        write_checkpoint(folder, shards)
        push(shards[1], np.ones(16), sequence=10 + sequence, epoch=3)
    written = write_checkpoint(folder, shards)
    # Three are kept, and the shard that never moved has one file.
    names = folder._disk.sizes(path)
    assert {f"checkpoint-0000000{i}.json" for i in (4, 5, 6)} == {name for name in names if name.endswith(".json")}
    assert len(folder._disk.sizes(path / "shards")) == 4
    again = CheckpointFolder(path)
    run = again.resume()
    assert run is not None and again.newest == written
    for shard_id, shard in shards.items():
        assert everything(restored(shard, run.shards[shard_id])) == everything(shard)
    # Of its new owner, whose manifest follows.
    again._disk.put(path / "shards" / "under way", [b""])
    with pytest.raises(CheckpointError, match="was taken by process"):
        write_checkpoint(folder, shards)
    assert "under way" in again._disk.sizes(path / "shards")
    again.forget("run-1", reset=lambda name: None)
    assert again.resume() is None
    # The next owner comes amid a save, whose files it removes.
    shards[1].state = lambda **_: (CheckpointFolder(path), adagrad_shards()[1].state())[1]
    with pytest.raises(CheckpointError, match="was taken by process"):
        write_checkpoint(again, shards)
    assert again.resume() is None
    with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
        newest_set([path.parent])


class Deaf(Disk):
    def put(self, path: Path, buffers: Iterable[bytes | memoryview]) -> None:
        raise OSError(5, "no answer")

    def sizes(self, folder: Path) -> dict[str, int]:
        raise OSError(5, "no answer")


def test_a_store_that_does_not_answer_is_told_and_what_it_holds_is_not_denied(bucket, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = CheckpointFolder(tmp_path / "here")
    newest = write_checkpoint(folder)
    folder._disk = Deaf()
    with pytest.raises(CheckpointError, match=f"no answer; {newest} was written before it$"):
        write_checkpoint(folder)
    S3FileSystem = pytest.importorskip("s3fs").S3FileSystem
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(object_store, "ANSWER_SECONDS", 1)
        S3FileSystem.clear_instance_cache()
        with pytest.raises(CheckpointError, match="s3:/checkpoints/job cannot be used: no answer in 1 s; "):
            CheckpointFolder(Path("s3://checkpoints/job"))
        S3FileSystem.clear_instance_cache()
    assert "asking for the folder of checkpoints" in caplog.text


def test_servers_save_there_and_go_on_from_there_in_another_number(bucket, start_server, tmp_path):
    folder = f"{bucket}/trained"
    server = start_server("--checkpoint-dir", f"{folder}/server-0")
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        worker.push(worker.push_request(1.0))
        saved = inspect(server.control, "SaveCheckpoint", pb.SaveCheckpointRequest())
        assert saved.path.startswith("s3:/checkpoints/trained/server-0/checkpoint-0000000")
        held = checksums(server.control)
    assert server.stop() == 0
    again = start_server("--checkpoint-dir", f"{folder}/server-0", "--resume")
    assert checksums(again.control) == held
    assert again.stop() == 0
    convert([Path(folder)], tmp_path, num_servers=1)
    local = start_server("--checkpoint-dir", str(tmp_path / "server-0"), "--resume")
    assert checksums(local.control) == held


def test_a_store_that_cannot_be_reached_or_is_unknown_is_one_clear_error(bucket):
    with pytest.raises(CheckpointError, match=r"s3:/absent/server-0 cannot be used: .*bucket"):
        CheckpointFolder(Path("s3://absent/server-0"))
    with pytest.raises(InvalidArgument, match=r"nonsense:// cannot be used: Protocol not known.*pyps\[fsspec\]"):
        CheckpointFolder(Path("nonsense://x/server-0"))
