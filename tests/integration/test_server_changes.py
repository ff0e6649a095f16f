"""Protocol, rate and schedule changed while the run goes on; one owner of the learning rate."""

from pyps_wire import common_pb2 as common
from pyps_wire.partition import Model, Tensor
from support import configure, events_of, status_of, wait_for_event, wait_until
from wire_worker import WireWorker, crew, refusal_of


def test_a_protocol_with_turns_begins_and_ends_while_workers_train(start_server):
    server = start_server("--staleness", "none")
    with crew(server, 2) as [first, second]:
        assert not first.push(first.push_request(1.0))[0].ask_to_proceed
        configure(server, protocol="serial")
        assert first.push(first.push_request(1.0, base_version=1))[0].ask_to_proceed
        first.proceed(2)
        call = second.stub.Proceed.future(second.proceed_request(0), timeout=40)
        wait_until(lambda: status_of(server).waiting_for, 20, "the second worker's question")
        # The next pacer knows who computes.
        configure(server, protocol="ssp:s=0")
        assert call.result(20).ask_to_proceed
        first.push(first.push_request(1.0, base_version=2))
        call = first.stub.Proceed.future(first.proceed_request(3), timeout=40)
        wait_until(lambda: status_of(server).waiting_for, 20, "the first worker's question")
        configure(server, protocol="async")
        assert not call.result(20).ask_to_proceed


def test_a_change_that_cannot_be_is_refused_and_changes_nothing(start_server):
    server = start_server()
    with WireWorker(server.data, model=Model((Tensor("x", (4096,)),)), num_servers=2) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        for change, words in (
            ({}, ["nothing to configure: name a protocol"]),
            ({"protocol": "nonsense"}, ["'nonsense' is unknown; expected one of", "hardsync"]),
            ({"protocol": "softsync:n=0", "staleness": "none"}, ["softsync", "n is 0"]),
            ({"protocol": "asgd:mutex=whole"}, ["needs one server", "mutex=shard", "2"]),
            ({"protocol": "backup:b=2"}, ["backup:b=2 waits for none of"]),
            ({"staleness": "nonsense"}, ["'nonsense'", "divide"]),
            ({"learning_rate": -1.0, "staleness": "none"}, ["learning_rate is -1"]),
            ({"schedule": "nonsense"}, ["'nonsense'", "cosine"]),
            ({"protocol": "hardsync", "schedule": "sometimes"}, ["'sometimes' is unknown"]),
            ({"protocol": "hardsync", "staleness": "nonsense"}, ["'nonsense'"]),
        ):
            code, _, text = refusal_of(configure, server, **change)
            assert code == "INVALID_ARGUMENT" and all(word in text for word in words), (change, text)
            status = status_of(server)
            assert (status.protocol, status.staleness, status.schedule) == ("async", "divide", "constant"), change
            assert status.learning_rates[0].base == 1.0, change
        assert not events_of(server, "configured")
        assert configure(server, protocol="asgd:mutex=shard").protocol.startswith("asgd:mutex=shard")


def test_only_a_change_of_the_number_of_workers_that_is_meant_changes_it(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        configure(server, expected_workers=3)
        configure(server, expected_workers=5, validate_only=True)
        configure(server, learning_rate=0.5)
    assert [event for event in events_of(server, "configured") if "expected" in event] == [
        "settings changed: expected workers 3"
    ]


def test_a_protocols_name_brings_its_policy_where_none_is_set_and_others_leave_it(start_server):
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        for change, policy in (
            ({"protocol": "softsync:n=1"}, "divide"),
            ({"protocol": "ssp:s=2"}, "none"),
            ({"protocol": "async"}, "none"),
            ({"protocol": "asgd", "staleness": "divide"}, "divide"),
        ):
            assert configure(server, **change).staleness == policy, change
    assert "staleness none" in wait_for_event(server, "configured", "protocol ssp:s=2")


def test_a_late_joiner_s_own_rate_is_no_difference_after_the_owner_changed_it(start_server):
    server = start_server()
    with crew(server, 1) as [owner]:
        owner.push(owner.push_request(1.0, learning_rate=0.25))
        with WireWorker(server.data, "late") as late:
            assert late.hello().state == common.RUN_STATE_READY


def test_status_and_an_event_warn_of_a_softsync_that_does_not_divide_its_workers(start_server):
    server = start_server("--protocol", "softsync:n=2", "--expected-workers", "3")
    with crew(server, 3) as workers:
        for worker in workers:
            worker.push(worker.push_request(1.0))
        [warning] = wait_until(lambda: events_of(server, "warning"), 20, "the warning")
        assert "softsync:n=2" in warning and "3" in warning
        assert list(status_of(server).warnings) == [warning]
