"""Portions of data for workers of Downpour: what they hand out, when they deliver, where they end."""

import itertools
import threading

import numpy as np
import pytest
import torch

from pyps_client.data import Portions
from pyps_wire.errors import InvalidArgument
from shards import counted
from support import wait_until
from training import PortionWorker, Stopped, make_queue

PACES = [{}, {"push_every": 4}, {"overlap": "step"}, {"overlap": "step", "push_every": 4}]


def train(worker: PortionWorker, batches) -> list[int]:
    seen: list[int] = []
    for batch in batches:
        seen += [int(example) for example in batch]
        worker.step()
    return seen


@pytest.mark.parametrize("pace", PACES)
def test_an_epoch_hands_out_and_delivers_every_example_once_by_any_loader(pace):
    for shuffle, num_workers in ((True, None), (False, None), (True, 0), (True, 2)):
        work = make_queue()
        worker = PortionWorker(work, **pace)
        portions = Portions(range(50), worker, batch_size=4, portion_batches=3, shuffle=shuffle)
        epochs = []
        for number in range(2):
            if num_workers is None:
                batches = portions
            else:
                loader = torch.utils.data.DataLoader(torch.arange(50), batch_sampler=portions, num_workers=num_workers)
                batches = portions.epoch(loader)
            epochs.append(train(worker, batches))
            assert sorted(epochs[-1]) == list(range(50))
            assert counted(work, number) == list(range(50))
        assert (epochs[0] == list(range(50))) == (not shuffle)
        assert (epochs[0] != epochs[1]) == shuffle


def test_a_loader_ahead_goes_on_with_the_epoch_of_an_ended_loop(caplog):
    work = make_queue()
    worker = PortionWorker(work)
    portions = Portions(range(50), worker, batch_size=4, portion_batches=3)
    loader = torch.utils.data.DataLoader(torch.arange(50), batch_sampler=portions, num_workers=2)
    assert sorted(train(worker, loader)) == list(range(50))
    # The gradients of the last batches came after the loader had asked for the last time.
    assert len(counted(work, 0)) < 50
    seen = train(worker, loader)
    assert counted(work, 0) == list(range(50))
    assert not seen
    train(worker, loader)
    train(worker, portions.epoch(loader))
    told = [record.getMessage() for record in caplog.records if "ends before its epoch does" in record.getMessage()]
    assert len(told) == 1
    assert "Write `for batch in portions.epoch(loader)`" in told[0]


def test_loops_that_end_with_their_epoch_are_told_nothing(caplog):
    worker = PortionWorker(make_queue())
    portions = Portions(range(50), worker, batch_size=4, portion_batches=3, epochs=3)
    loader = torch.utils.data.DataLoader(torch.arange(50), batch_sampler=portions, num_workers=2)
    for batches in (portions, portions.epoch(loader), portions.epoch()):
        assert train(worker, batches)
    assert not caplog.records
    assert not train(worker, portions) and not train(worker, portions.epoch()), "after the last epoch there is none"


def test_a_portion_is_delivered_only_once_its_pushes_are_answered():
    work = make_queue()
    worker = PortionWorker(work, overlap="step")
    portions = Portions(range(16), worker, batch_size=4, portion_batches=2, shuffle=False)
    batches = iter(portions)
    next(batches)
    worker.step()
    wait_until(lambda: worker.stepper.steps_answered == 1)
    next(batches)
    worker.session.gate.clear()
    worker.step()
    next(batches)
    assert counted(work, 0) == []
    worker.session.gate.set()
    wait_until(lambda: worker.stepper.steps_answered == 2)
    worker.step()
    next(batches)
    assert counted(work, 0) == list(range(8))


def test_where_a_protocol_sums_a_pushs_worth_of_minibatches_a_portion_is_one_push():
    """Zhang et al. 2013 (A4): updates per epoch = ceil(N / (K b))."""
    work = make_queue(accumulate=lambda: 4)
    worker = PortionWorker(work, has={"accumulate": 4})
    portions = Portions(range(50), worker, batch_size=4)
    for _ in range(2):
        train(worker, portions)
    assert [pushed.minibatch_count for pushed in worker.session.pushes] == [4, 4, 4, 1] * 2
    assert [pushed.example_count for pushed in worker.session.pushes] == [16, 16, 16, 2] * 2
    # A pull before the first, and one with each.
    assert worker.session.pulls == 1 + 8


def test_batches_grow_with_the_epochs_where_the_servers_say_so():
    for overlap in ("off", "step"):
        work = make_queue(accumulate=lambda: 2, batch_size_of=lambda epoch: 4 * 2**epoch)
        worker = PortionWorker(work, has={"accumulate": 2, "batch_size": 4}, overlap=overlap)
        portions = Portions(range(40), worker)
        sizes = [len(batch) for _ in range(2) for batch in portions if not worker.step()]
        assert sizes == [4] * 10 + [8] * 5
        assert [pushed.minibatch_count for pushed in worker.session.pushes] == [2] * 5 + [2, 2, 1]


def test_a_worker_that_comes_late_has_the_past_epochs_behind_it_and_a_resumed_one_may_begin_with_any():
    work = make_queue()
    first = PortionWorker(work, "a")
    portions = Portions(range(20), first, batch_size=4)
    for _ in range(2):
        train(first, portions)
    late = PortionWorker(work, "b")
    theirs = Portions(range(20), late, batch_size=4)
    assert [len(train(late, theirs.epoch())) for _ in range(3)] == [0, 0, 20]
    again = PortionWorker(work, "a")
    resumed = Portions(range(20), again, batch_size=4)
    resumed.set_epoch(3)
    assert len(train(again, resumed)) == 20


def test_portions_made_anew_for_each_epoch_are_refused_as_they_would_begin_with_the_first_again():
    worker = PortionWorker(make_queue())
    with pytest.raises(
        InvalidArgument, match=r"Make Portions\(\.\.\.\) and its loader once, before the loop over the epochs"
    ):
        for _ in range(2):
            train(worker, Portions(range(20), worker, batch_size=4))
    assert worker.stepper.steps == 5


@pytest.mark.parametrize(("pace", "num_workers"), [*((pace, None) for pace in PACES), ({}, 0), (PACES[3], 2)])
def test_a_free_worker_goes_on_with_the_next_epoch_and_its_iteration_ends_with_its_own(pace, num_workers):
    work, epochs = make_queue(epochs_ahead=lambda: 1), 3
    slow, quick = PortionWorker(work, "slow"), PortionWorker(work, "quick", **pace)
    portions = Portions(range(40), slow, batch_size=4, portion_batches=2, epochs=epochs)
    batches = portions.epoch()
    slows = next(batches)
    mine = Portions(range(40), quick, batch_size=4, portion_batches=2, epochs=epochs)
    source = mine
    if num_workers is not None:
        loader = torch.utils.data.DataLoader(torch.arange(40), batch_sampler=mine, num_workers=num_workers)
        source = mine.epoch(loader)
    seen: list[int] = []
    for batch in source:
        seen += [int(example) for example in batch]
        if len(seen) == 32 + 16:
            # The answer comes after the loop has asked whether its epoch is over.
            quick.session.gate.clear()
            threading.Timer(0.05, quick.session.gate.set).start()
        quick.step()
        if len(seen) == 32 + 12:
            # All that was left of its own epoch, and one and a half portions of the next.
            assert (work.pass_, work.progress().passes_done) == (0, 0)
            slow.step()
            slows += next(batches)
            slow.step()
            assert next(batches, None) is None
    assert sorted(seen[:32] + slows) == list(range(40))
    # Whatever it had at hand is in before the loop goes to something else.
    progress = work.progress()
    assert (work.pass_, progress.running) == (1, 0)
    assert len(seen) >= 32 + 16
    # In the next one's own order.
    order = np.random.RandomState([0, 1]).permutation(40)
    assert sorted(seen[32:]) == sorted(order[counted(work, 1)].tolist())
    for _ in range(epochs - 1):
        train(quick, mine.epoch())
    assert [counted(work, epoch) for epoch in range(epochs)] == [list(range(40))] * epochs
    assert (work.pass_, work.progress().ahead) == (epochs - 1, 0)


@pytest.mark.parametrize("num_batches", [4, 5])
def test_an_iteration_that_was_broken_off_is_continued_by_the_next(num_batches, caplog):
    work = make_queue()
    worker = PortionWorker(work)
    portions = Portions(range(40), worker, batch_size=4, portion_batches=2, shuffle=False)
    train(worker, itertools.islice(portions.epoch(), num_batches))
    # Two portions were trained on, up to the very last step. A third that was begun goes back as a whole.
    seen = train(worker, portions.epoch())
    assert seen == list(range(16, 40))
    assert counted(work, 0) == list(range(40))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_portion_of_which_a_batch_got_no_step_before_the_loop_ended_goes_back():
    work = make_queue()
    worker = PortionWorker(work)
    portions = Portions(range(15), worker, batch_size=4, portion_batches=2, shuffle=False)
    loader = torch.utils.data.DataLoader(torch.arange(15), batch_sampler=portions, num_workers=2)
    for _ in portions.epoch(loader):
        worker.step()
        break
    assert sorted(train(worker, portions.epoch(loader))) == list(range(15))
    assert counted(work, 0) == list(range(15))
    # Each batch goes with its own size, whatever the loader had fetched before; the last portion comes first.
    assert [pushed.example_count for pushed in worker.session.pushes] == [4, 4, 3, 4, 4]


def test_a_batch_that_the_loop_passes_over_counts_as_done():
    work = make_queue()
    worker = PortionWorker(work)
    portions = Portions(range(24), worker, batch_size=4, portion_batches=2)
    for number, _ in enumerate(portions.epoch()):
        if number != 3:
            worker.step()
    assert counted(work, 0) == list(range(24))
    assert len(worker.session.pushes) == 5


def test_several_batches_before_one_step_count_together():
    work = make_queue()
    worker = PortionWorker(work)
    portions = Portions(range(24), worker, batch_size=4, portion_batches=3, shuffle=False)
    early: list[int] = []
    for number, _ in enumerate(portions.epoch(), start=1):
        if number == 4:
            # The third batch's gradient has not gone yet: it goes with the fourth's.
            early = counted(work, 0)
        if number % 2 == 0:
            worker.step()
    assert early == []
    assert [pushed.example_count for pushed in worker.session.pushes] == [8, 8, 8]
    assert counted(work, 0) == list(range(24))


def test_a_finished_run_ends_the_epoch_and_then_the_loop():
    work = make_queue()
    worker = PortionWorker(work)
    portions = Portions(range(40), worker, batch_size=4, portion_batches=2)
    seen = 0
    for _ in portions.epoch():
        worker.step()
        seen += 1
        worker.session.finished = seen >= 5
    assert seen == 5
    with pytest.raises(Stopped):
        next(iter(portions.epoch()))


def test_a_run_that_finishes_while_a_worker_waits_ends_its_epoch(monkeypatch):
    monkeypatch.setattr("pyps_client.data.queue.LOOK_SECONDS", 0.05)
    work = make_queue()
    holder, worker = PortionWorker(work, "a"), PortionWorker(work, "b")
    batches = iter(Portions(range(16), holder, batch_size=4, portion_batches=2))
    next(batches)
    seen: list[int] = []
    portions = Portions(range(16), worker, batch_size=4, portion_batches=2)
    thread = threading.Thread(target=lambda: seen.extend(train(worker, portions)))
    thread.start()
    wait_until(lambda: len(counted(work, 0)) == 8)
    worker.session.parameters[0][:] = 7
    worker.session.version += 1
    worker.session.finished = True
    thread.join(60)
    assert not thread.is_alive()
    assert len(seen) == 8
    # With the run's last parameters.
    assert worker.weight.detach().flatten().tolist() == [7.0] * 4


@pytest.mark.parametrize("name", ["current_version_only", "ask_to_proceed"])
def test_a_worker_without_a_portion_takes_part_where_others_wait_for_its_steps(name):
    """Else a round would wait for the worker, and the worker for the round."""
    work = make_queue()
    holder, idle = PortionWorker(work, "a", has={name: True}), PortionWorker(work, "b", has={name: True})
    batches = iter(Portions(range(16), holder, batch_size=4, portion_batches=2))
    next(batches)
    theirs = Portions(range(16), idle, batch_size=4, portion_batches=2)
    thread = threading.Thread(target=lambda: train(idle, theirs))
    thread.start()
    # Two pushes with gradients, then some that say that there are none.
    wait_until(lambda: len(idle.session.pushes) >= 4)
    assert [any(pushed.present) for pushed in idle.session.pushes[:4]] == [True, True, False, False]
    holder.step()
    next(batches)
    holder.step()
    next(batches, None)
    thread.join(60)
    assert not thread.is_alive()
    assert counted(work, 0) == list(range(16))


def test_a_queue_that_came_back_empty_hears_of_the_data_set_again():
    worker = PortionWorker(make_queue())
    portions = Portions(range(16), worker, batch_size=4, portion_batches=2)
    batches = iter(portions)
    next(batches)
    worker.step()
    restarted = make_queue(first_lease=1000)
    worker.session.channel._queue = restarted
    seen = [example for batch in batches if not worker.step() for example in batch]
    assert len(seen) >= 16
    assert counted(restarted, 0) == list(range(16))


class Lengthless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


WRONG = [
    ({"dataset": Lengthless()}, "The data set, a Lengthless, has no length; expected one with __len__"),
    ({"dataset": []}, "The data set, a list, is empty; expected at least one example"),
    ({"batch_size": 0}, "batch_size is 0; expected a whole number, 1 to"),
    ({"batch_size": 2.5}, "batch_size is 2.5; expected a whole number"),
    ({"epochs": 0}, "epochs is 0; expected a whole number, 1 to"),
    ({"portion_batches": 0}, "portion_batches is 0; expected a whole number, 1 to"),
    ({"seed": -1}, "seed is -1; expected a whole number, 0 to 4294967295"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "optimizer is a SGD; expected a pyps_client.Remote"),
    ({"optimizer": None}, "optimizer is a NoneType; expected a pyps_client.RemoteOptimizer or a pyps_client.Cli"),
]
DIFFERENT = [
    ({"batch_size": 8}, "portion_examples 64"),
    ({"batch_size": 8, "portion_batches": 4}, "batch_size 8 of the data set, but the run's has 4"),
    ({"batch_size": 4, "seed": 1}, "seed 1 of the data set, but the run's has 0"),
    ({"batch_size": 4, "shuffle": False}, "shuffle False of the data set, but the run's has True"),
]


def test_wrong_uses_and_workers_that_differ_are_refused_in_one_sentence():
    for arguments, message in WRONG:
        given = {"dataset": range(10), "optimizer": PortionWorker(make_queue())} | arguments
        with pytest.raises(InvalidArgument, match=message):
            Portions(given.pop("dataset"), given.pop("optimizer"), **given)
    for other, message in DIFFERENT:
        work = make_queue()
        Portions(range(10), PortionWorker(work, "a"), batch_size=4)
        with pytest.raises(InvalidArgument, match=message):
            Portions(range(10), PortionWorker(work, "b"), **other)


def test_a_loader_of_something_else_is_refused():
    worker = PortionWorker(make_queue())
    portions = Portions(range(8), worker, batch_size=4)
    with pytest.raises(InvalidArgument, match=r"given to epoch\(\) draws no batches from these portions"):
        train(worker, portions.epoch(torch.utils.data.DataLoader(torch.arange(8), batch_size=4)))


def test_all_workers_draw_the_same_permutation():
    orders = []
    for name in "ab":
        worker = PortionWorker(make_queue(), name)
        portions = Portions(range(30), worker, batch_size=4, seed=5)
        orders.append([train(worker, portions) for _ in range(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert orders[0][1] == np.random.RandomState([5, 1]).permutation(30).tolist()
