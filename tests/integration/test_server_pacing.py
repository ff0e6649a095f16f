"""Proceed on a real server: turns, clocks, and whom a waiting worker is told of."""

from __future__ import annotations

import contextlib
import threading

from support import wait_until
from wire_worker import QUICK_LEASES, WireWorker, beating, crew, events_of, refusal_of, status_of, wait_for_event


def asking(worker: WireWorker, clock: int, seconds: float = 100.0):
    """Starts a Proceed call."""
    return worker.stub.Proceed.future(worker.proceed_request(clock, seconds), timeout=seconds + 10)


def waits(server) -> list[str]:
    return list(status_of(server).waiting_for)


def test_turns_go_round_and_nobody_computes_beside_another(start_server):
    server = start_server("--protocol", "serial", "--expected-workers", "3")
    computing, most = [0], [0]
    lock = threading.Lock()
    order = []

    def work(worker: WireWorker) -> None:
        for clock in range(5):
            worker.proceed(clock)
            with lock:
                computing[0] += 1
                most[0] = max(most[0], computing[0])
                order.append(worker.sender.worker_id)
            [shard] = worker.pull()
            [receipt] = worker.push(worker.push_request(1.0, base_version=shard.version))
            assert receipt.ask_to_proceed
            assert receipt.staleness == 0
            with lock:
                computing[0] -= 1
        worker.leave()

    with crew(server, 3) as workers:
        assert workers[0].hello().ask_to_proceed
        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert most == [1]
    assert len(order) == 15
    assert all(set(order[round : round + 3]) == {"w0", "w1", "w2"} for round in (0, 3, 6))


def test_parked_calls_are_answered_in_their_order_when_their_turns_come(start_server):
    server = start_server("--protocol", "serial")
    with crew(server, 8) as workers:
        first, *others = workers
        first.proceed(0)
        calls = []
        for worker in others:
            calls.append(asking(worker, 0))
            # In this order they get their turns.
            wait_until(lambda: len(waits(server)) == len(calls), 60, "the wait")
        assert all(wait.endswith("waits to begin step 1, for w0") for wait in waits(server))
        for index in range(5):
            workers[index].push(workers[index].push_request(0.0, base_version=index))
            workers[index].leave()
            calls[index].result(60)
            assert sum(call.done() for call in calls) == index + 1
        assert len(waits(server)) == 2
        for call in calls:
            call.cancel()


def test_a_worker_waits_when_it_is_too_far_ahead_of_the_slowest(start_server):
    """Ho et al. 2013: a worker at clock c proceeds while c - min c <= s (algorithm notes 2.9, R1)."""
    server = start_server("--protocol", "ssp:s=2", "--staleness", "none")
    with crew(server, 2) as [fast, slow]:
        slow.proceed(0)
        for clock in range(3):
            fast.proceed(clock)
            fast.push(fast.push_request(1.0, base_version=clock))
        call = asking(fast, 3)
        [wait] = wait_until(lambda: waits(server), 20, "the wait")
        assert wait == "w0 waits to begin step 4, for w1"
        slow.push(slow.push_request(1.0))
        assert not call.done()
        slow.proceed(1)
        call.result(20)
        assert wait_until(lambda: status_of(server).blocked_seconds > 0, 20, "the blocked time")


def test_a_wait_ends_by_its_deadline_with_the_names(start_server):
    server = start_server("--protocol", "serial")
    with crew(server, 2) as [first, second]:
        first.proceed(0)
        status, name, text = refusal_of(second.proceed, 0, wait_seconds=0.3)
        assert (status, name) == ("DEADLINE_EXCEEDED", "WaitTimedOut")
        assert text == "after 0.3 s: w1 waits to begin step 1, for w0"
        # The answer that nobody took is given when it is asked for again.
        first.leave()
        second.proceed(0)
        second.proceed(0)


def test_a_dead_worker_s_turn_passes_within_its_lease(start_server):
    server = start_server("--protocol", "serial", *QUICK_LEASES)
    with WireWorker(server.data, "dead") as dead, WireWorker(server.data, "alive") as alive:
        dead.join()
        alive.join()
        dead.proceed(0)
        with beating([alive]):
            alive.proceed(0, wait_seconds=15)
    assert "dead" in wait_for_event(server, "expired")
    assert not any("alive" in message for message in events_of(server, "expired"))


def test_a_worker_that_lives_and_does_nothing_loses_its_turn_after_the_stall_time(start_server):
    server = start_server("--protocol", "serial", "--stall-seconds", "0.5")
    with crew(server, 2) as [idle, busy]:
        idle.proceed(0)
        busy.proceed(0, wait_seconds=15)
        assert "worker w0" in wait_for_event(server, "stalled")
        # Back at work it takes its turn again.
        idle.push(idle.push_request(1.0))
        call = asking(idle, 1)
        busy.leave()
        call.result(20)


def test_a_cancelled_or_vanished_asker_leaves_nothing_behind(start_server):
    server = start_server("--protocol", "serial", *QUICK_LEASES)
    with crew(server, 3) as [first, cancels, vanishes], contextlib.ExitStack() as stack:
        first.proceed(0)
        call = asking(cancels, 0)
        stack.callback(asking(vanishes, 0).cancel)
        wait_until(lambda: len(waits(server)) == 2, 20, "both waits")
        call.cancel()
        vanishes.channel.close()
        wait_until(lambda: not waits(server), 20, "the end of both waits")
    assert "Traceback" not in server.output()


def test_a_cancelled_asker_is_given_no_turn(start_server):
    server = start_server("--protocol", "serial", "--stall-seconds", "30")
    with crew(server, 3) as [first, cancels, third]:
        first.proceed(0)
        call = asking(cancels, 0)
        wait_until(lambda: len(waits(server)) == 1, 20, "the first wait")
        behind = asking(third, 0)
        wait_until(lambda: len(waits(server)) == 2, 20, "both waits")
        call.cancel()
        wait_until(lambda: len(waits(server)) == 1, 20, "the end of one")
        again = asking(first, 1)
        behind.result(10)
        again.cancel()


def test_a_clock_that_goes_backwards_is_refused(start_server):
    server = start_server("--protocol", "ssp:s=1")
    with crew(server, 2) as [worker, other]:
        other.proceed(0)
        worker.proceed(0)
        worker.proceed(1)
        status, name, text = refusal_of(worker.proceed, 0)
        assert (status, name) == ("INVALID_ARGUMENT", "BadRequest")
        assert "send a count that never falls" in text


def test_servers_beside_the_first_never_ask(start_server):
    server = start_server("--protocol", "serial")
    with WireWorker(server.data, server_index=1, num_servers=2) as worker:
        worker.hello()
        worker.initialize(1)
        assert not worker.hello().ask_to_proceed


def test_protocols_without_turns_answer_at_once(start_server):
    for protocol in ("async", "hardsync", "ssp:s=0,strict_bsp=true"):
        with crew(start_server("--protocol", protocol), 1) as [worker]:
            assert not worker.hello().ask_to_proceed, protocol
            assert not worker.proceed(0).ask_to_proceed, protocol


def test_a_finished_run_keeps_nobody_waiting_for_its_turn(start_server):
    server = start_server("--protocol", "serial", "--stop-after", "updates=1")
    with crew(server, 2) as [first, second]:
        first.proceed(0)
        call = asking(second, 0)
        wait_until(lambda: waits(server), 20, "the wait")
        first.push(first.push_request(1.0))
        call.result(20)
