"""The place in the data: it comes back to whoever takes a worker's place, and each example is trained once."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from client_support import addresses, make_client
from pyps.core.receipt import Outcome
from pyps.run.handshake import Greeting
from pyps.run.positions import WORKERS_MAX, Positions
from pyps.storage.checkpoint_set import convert
from pyps_client import Client, InvalidArgument, Launch, LimitExceeded, LocalTraining, RemoteOptimizer
from pyps_client.data import worker_sampler
from pyps_client.data.samplers import permutation
from shards import MODEL, RunDriver
from support import Start, inspect

TENSORS = {"w": np.zeros(4, np.float32)}
# Of 150 examples, those of the second of two workers: 10 batches of 7 leave five.
LENGTH = 150


def part(epoch: int) -> list[int]:
    return sorted(permutation(LENGTH, 3, epoch)[1::2].tolist())


def join(servers: Any, **options: Any) -> Client:
    return make_client(servers if isinstance(servers, str) else servers.data, tensors=TENSORS, run_id="r", **options)


def sampler_of() -> Any:
    return worker_sampler(range(LENGTH), seed=3, index=1, count=2)


def train(client: Client, sampler: Any, batches: int | None = None, **loader: Any) -> Iterator[int]:
    """Yield each example that was trained, once the servers have its gradient."""
    for batch in islice(DataLoader(range(LENGTH), batch_size=7, sampler=sampler, **loader), batches):  # type: ignore[arg-type]
        client.push({"w": np.ones(4, np.float32)}, examples=len(batch))
        yield from batch.tolist()


@pytest.mark.parametrize("loader", [{}, {"drop_last": True}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_each_example_of_an_epoch_is_trained_once_by_all_lives_of_a_worker_over_a_servers_restart(
    start_server: Start, tmp_path: Path, loader: dict[str, Any]
) -> None:
    flags = ("--checkpoint-dir", str(tmp_path))
    server = start_server(*flags)
    first = join(server)
    trained = list(train(first, sampler_of(), 2, **loader))
    first.close("failed")
    with join(server) as second:
        trained += train(second, sampler_of(), 2, **loader)
    server.stop()
    again = start_server(*flags, "--resume")
    with join(again) as third:
        sampler = sampler_of()
        assert sampler.epoch == 0
        trained += train(third, sampler, **loader)
        dropped = 5 if "drop_last" in loader else 0
        assert len(trained) == len(set(trained)) == 75 - dropped
        assert sampler.epoch == 1
    again.stop()
    convert([tmp_path], tmp_path / "two", num_servers=2)
    servers = [start_server("--checkpoint-dir", str(tmp_path / "two" / f"server-{i}"), "--resume") for i in range(2)]
    # What was dropped is too little for a batch, and so begins the next epoch.
    with join(addresses(servers)) as fourth:
        sampler = sampler_of()
        more = list(train(fourth, sampler, **loader))
        assert sampler.epoch == 2
    assert sorted(trained + more[:dropped]) == part(0)
    assert set(more[dropped:]) <= set(part(1)) and len(set(more)) >= 75 - dropped


def test_an_optimizer_or_local_training_sends_the_place_and_the_first_batch_of_its_successor_knows_it(
    start_server: Start,
) -> None:
    server = start_server("--optimizer", "sgd:learning_rate=0.1", "--protocol", "async")

    def examples(batches: int | None, *, local: bool = False, **options: Any) -> list[int]:
        loader = DataLoader(torch.arange(float(LENGTH)), batch_size=7, sampler=sampler_of())
        names: Any = {"run_id": "r", "worker_id": "w", "transport": "grpc"}
        model, launch = torch.nn.Linear(1, 1), Launch(server.data, worker_index=0, **names)
        inner, trained = torch.optim.SGD(model.parameters(), lr=0.1), []
        make = {True: lambda: LocalTraining(model, inner, sync_every=1, launch=launch)}
        optimizer: Any = make.get(local, lambda: RemoteOptimizer(model, inner, launch=launch, **options))()
        for batch in islice(loader, batches):
            optimizer.zero_grad()
            model(batch[:, None] / LENGTH).sum().backward()
            optimizer.step()
            trained += batch.int().tolist()
        optimizer.close()
        return trained

    trained = examples(2) + examples(1, local=True) + examples(3, overlap="backward") + examples(None)
    assert sorted(trained) == part(0)


def test_a_script_hands_over_words_of_its_own_to_a_worker_with_its_number(start_server: Start) -> None:
    server = start_server()
    with join(server, worker_id="host-1", worker_index=3) as first:
        assert first.restored_position == b""
        first.data_position = b"file 7, line 12"
        first.push({"w": np.ones(4, np.float32)})
        assert inspect(server.control, "GetMemory").positions_bytes == 15
        with join(server, worker_id="host-2", worker_index=3) as twin:
            assert twin.restored_position == b"", "the other lives"
        for wrong, what in ((b"x" * 65537, "65537 bytes"), ("text", "a str")):
            first.data_position = wrong  # type: ignore[assignment]
            with pytest.raises(InvalidArgument, match=f"data_position is {what}; expected None or bytes, 65536 at"):
                first.push({"w": np.ones(4, np.float32)})
    with join(server, worker_id="host-3", worker_index=3) as successor:
        assert successor.restored_position == b"file 7, line 12"
        assert list(sampler_of()) == list(sampler_of()), "words that are no sampler's"
    with join(server, worker_id="host-4", worker_index=2) as other:
        assert other.restored_position == b""


def test_the_position_of_a_push_counts_once_all_shards_have_it_and_never_goes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    positions = Positions()

    def found(applied: int, *, life: int = 2, name: str = "w") -> bytes:
        return positions.of_predecessor(name, None, life, is_alive=lambda _: False, applied=lambda *_: applied)

    for sequence in (1, 2, 3, 2):
        positions.note("w", None, 1, sequence, b"%d" % sequence)
    assert [found(applied) for applied in (1, 2, 3, 9)] == [b"", b"2", b"3", b"3"]
    assert (found(9, life=1), found(9, name="other")) == (b"", b"")
    again = Positions()
    again.restore(positions.state())
    assert again.state() == positions.state()
    positions.note("w", None, 2, 1, b"new")
    positions.note("w", None, 1, 4, b"old")
    assert found(9, life=3) == b"new"
    with pytest.raises(LimitExceeded, match="has 65537 bytes; expected 65536"):
        positions.note("w", None, 2, 2, b"x" * 65537)
    for index in range(WORKERS_MAX):
        positions.note(f"w{index}", None, 1, 1, b"x")
    assert len(positions.state()) == WORKERS_MAX
    assert found(9, life=3) == b""
    # What is noted again, withdrawn, or of a new life is counted once.
    for index, life, sequence in ((0, 1, 1), (0, 1, 2), (0, 2, 1), *((index, 2, 1) for index in range(WORKERS_MAX))):
        positions.note(f"w{index}", None, life, sequence, b"x" * 2**16)
    positions.withdraw("w1023", 2, 1)
    positions.note("w1023", None, 2, 1, b"x" * 2**16)
    assert list(positions.state()) == [f"w{index}" for index in range(512, 1024)]
    assert [record.message for record in caplog.records] == ["places in the data are forgotten, the oldest first"]


def test_refused_pushes_hide_no_position_of_one_that_was_taken() -> None:
    driver = RunDriver("w", staleness="polynomial:rounds_max=2")
    for sequence in range(1, 6):
        # From the fourth on the gradient is too old.
        receipt = driver.push("w", base_version=0 if sequence > 3 else sequence - 1, position=b"%d" % sequence)
        assert (receipt.outcome is Outcome.REJECTED) == (sequence > 3)
    successor = Greeting("r", "w", 2, 1, "test", False, 0, 1, MODEL, None, "", "", 0, "")
    assert driver.run.position_for(successor) == b"3"
