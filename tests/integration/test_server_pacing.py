"""Proceed on a real server: turns, clocks, and the workers that a wait names."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil

from client_support import Clock, gradients_like, make_client, small_model
from support import events_of, status_of, wait_for_event, wait_until
from wire_worker import QUICK_LEASES, WireWorker, beating, crew, refusal_of


def asking(worker: WireWorker, clock: int, seconds: float = 100.0):
    return worker.stub.Proceed.future(worker.proceed_request(clock, seconds), timeout=seconds + 10)


def waits(server) -> list[str]:
    return list(status_of(server).waiting_for)


def test_64_parked_calls_hold_no_thread_and_are_answered_in_their_order_when_their_turns_come(start_server_process):
    server = start_server_process("--protocol", "serial")
    with crew(server, 64) as workers:
        first, *others = workers
        first.proceed(0)
        before, calls = psutil.Process(server.pid).num_threads(), []
        for worker in others:
            calls.append(asking(worker, 0))
            # In this order they get their turns.
            wait_until(lambda: len(waits(server)) == len(calls), 60, "the wait")
        assert all(wait.endswith("waits to begin step 1, for w0") for wait in waits(server))
        assert psutil.Process(server.pid).num_threads() < before + 16
        for index in range(5):
            workers[index].push(workers[index].push_request(0.0, base_version=index))
            workers[index].leave()
            calls[index].result(60)
            assert sum(call.done() for call in calls) == index + 1
        assert len(waits(server)) == 58
        for call in calls:
            call.cancel()


def test_with_start_together_no_worker_begins_under_async_before_the_last_has_come(start_server):
    server = start_server("--start-together", "--expected-workers", "2", "--run-id", "r")
    gradients = gradients_like(small_model(), 0)
    with make_client(server.data, worker_id="w0", run_id="r") as first, ThreadPoolExecutor(1) as thread:
        begun = thread.submit(first.push, gradients)
        wait_until(lambda: waits(server), what="its wait")
        assert not begun.done()

        with make_client(server.data, worker_id="w1", run_id="r") as second:
            second.push(gradients)

        assert begun.result(60)
        first.pull()
        assert not first.session.terms.ask_to_proceed
    with make_client(server.data, worker_id="late", run_id="r") as late:
        assert late.push(gradients)


def test_a_wait_ends_by_its_deadline_with_the_names(start_server):
    server = start_server("--protocol", "serial")
    with crew(server, 2) as [first, second]:
        first.proceed(0)
        status, name, text = refusal_of(second.proceed, 0, wait_seconds=0.3)
        assert (status, name) == ("DEADLINE_EXCEEDED", "WaitTimedOut")
        assert text == "after 0.3 s: w1 waits to begin step 1, for w0"
        # The next call gets the answer that nobody took.
        first.leave()
        second.proceed(0)
        second.proceed(0)


def test_a_dead_worker_s_turn_passes_within_its_lease(start_server):
    clock = Clock()
    server = start_server("--protocol", "serial", *QUICK_LEASES, clock=clock)
    with WireWorker(server.data, "dead") as dead, WireWorker(server.data, "alive") as alive:
        dead.join()
        alive.join()
        dead.proceed(0)
        with beating([alive]):
            clock.during(partial(alive.proceed, 0, wait_seconds=60), server, living=["alive"])
    assert "dead" in wait_for_event(server, "expired")
    assert not any("alive" in message for message in events_of(server, "expired"))


def test_a_cancelled_or_vanished_asker_leaves_nothing_behind(start_server):
    # Nobody's lease ends here: only who goes ends a wait.
    server = start_server("--protocol", "serial")
    with crew(server, 3) as [first, cancels, vanishes], contextlib.ExitStack() as stack:
        first.proceed(0)
        call = asking(cancels, 0)
        stack.callback(asking(vanishes, 0).cancel)
        wait_until(lambda: len(waits(server)) == 2, 20, "both waits")
        call.cancel()
        vanishes.channel.close()
        wait_until(lambda: not waits(server), 20, "the end of both waits")
    assert "Traceback" not in server.output()


def test_servers_other_than_the_first_never_ask(start_server):
    server = start_server("--protocol", "serial")
    with WireWorker(server.data, server_index=1, num_servers=2) as worker:
        worker.hello()
        worker.initialize(1)
        assert not worker.hello().ask_to_proceed
