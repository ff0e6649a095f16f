"""Hello and Initialize on a real server: who may join a run, and who sends the first parameters."""

import itertools
import time

from pyps_wire import common_pb2 as common
from pyps_wire.partition import Model, Tensor
from wire_worker import WireWorker, refusal_of, sgd, values_of


def test_a_life_of_the_future_is_refused(start_server):
    """It would keep its name from every later process, and make first pushes of others look forgotten."""
    server = start_server()
    with WireWorker(server.data, "a") as worker:
        worker.sender.incarnation = 2**63 + 1
        status, name, text = refusal_of(worker.hello)
        assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert "days ahead of this server's clock" in text
        worker.sender.incarnation = time.time_ns()
        assert worker.hello().initialize


def test_a_truncated_initialisation_leaves_the_server_empty(start_server):
    with WireWorker(start_server().data) as worker:
        term = worker.hello().term
        header_only = itertools.islice(worker.initialize_messages(term), 1)
        status, name, text = refusal_of(worker.stub.Initialize, header_only, timeout=20)
        assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert "shard 0" in text
        assert worker.hello().state == common.RUN_STATE_INITIALIZING
        worker.initialize(term)
        assert worker.hello().state == common.RUN_STATE_READY


def test_an_initialisation_sent_again_is_answered_as_done(start_server):
    with WireWorker(start_server().data) as worker:
        term = worker.hello().term
        worker.initialize(term, value=1.0)
        worker.push(worker.push_request(1.0))
        assert worker.initialize(term, value=9.0).state == common.RUN_STATE_READY
        assert set(values_of(worker.pull()[0])) == {0.0}


def test_first_parameters_with_nan_are_refused_by_tensor_name(start_server):
    with WireWorker(start_server().data) as worker:
        term = worker.hello().term
        status, _, text = refusal_of(worker.initialize, term, value=float("nan"))
        assert status == "INVALID_ARGUMENT"
        assert "'layer.weight'" in text


def test_a_further_server_follows_the_higher_term_until_the_first_update(start_server):
    data = start_server().data
    both = {"server_index": 1, "num_servers": 2, "model": Model((Tensor("x", (4096,)),))}
    with WireWorker(data, "a", **both) as first, WireWorker(data, "b", **both) as second:
        assert not first.hello().initialize, "only server 0 elects"
        first.initialize(1, value=1.0)
        second.hello()
        second.initialize(2, value=2.0)
        status, name, _ = refusal_of(first.initialize, 1, value=1.0)
        assert (status, name) == ("ABORTED", "Superseded")
        shard_id = second.plan.of_server(1)[0].shard_id
        second.push(second.push_request(0.0, shard_id))
        status, name, text = refusal_of(first.initialize, 3, value=3.0)
        assert name == "RunMismatch"
        assert "'run-1' at version 1" in text


def test_no_run_id_joins_until_the_first_update_only(start_server):
    server = start_server()
    with (
        WireWorker(server.data, "a") as first,
        WireWorker(server.data, "b", run_id="") as second,
        WireWorker(server.data, "c", run_id="") as third,
    ):
        first.join()
        assert second.hello().run_id == "run-1"
        first.push(first.push_request(1.0))
        status, name, text = refusal_of(third.hello)
        assert (status, name) == ("FAILED_PRECONDITION", "RunMismatch")
        for word in ("'run-1'", "version 1", " s ago", "PYPS_RUN_ID=run-1", "`pyps reset run-1`"):
            assert word in text


def test_a_worker_that_does_not_fit_is_refused_with_the_difference(start_server):
    shape = Model((Tensor("layer.weight", (10, 3)), Tensor("layer.bias", (8,))))
    adagrad, lion = (common.OptimizerSettings(rule=rule) for rule in ("adagrad", "lion"))
    deltas = sgd(0.5)
    deltas.groups[0].kind = common.PAYLOAD_KIND_DELTA
    data = start_server().data
    with WireWorker(data, "a", optimizer=sgd(0.5)) as first:
        first.join()
        for options, name, words in (
            ({"run_id": "other"}, "RunMismatch", ("'run-1'", "'other'")),
            ({"model": shape}, "ModelMismatch", ("'layer.bias'", "(7,)", "(8,)", "pyps reset")),
            ({"num_servers": 2}, "ModelMismatch", ("has 1, this one at place 0",)),
            ({"optimizer": sgd(0.25)}, "OptimizerMismatch", ("learning_rate of group 0: 0.5 here, 0.25 there",)),
            ({"optimizer": adagrad}, "OptimizerMismatch", ("rule: sgd here, adagrad there",)),
            ({"optimizer": deltas}, "OptimizerMismatch", ("pushes of group 0: GRADIENT here, DELTA there",)),
            ({"optimizer": lion}, "UnsupportedOptimizer", ("'lion'", "sgd", "adagrad")),
        ):
            with WireWorker(data, "b", **options) as second:
                status, error, text = refusal_of(second.hello)
            assert (status, error) == ("FAILED_PRECONDITION", name), options
            assert all(word in text for word in words), text
        status, name, text = refusal_of(first.hello, protocol_version=2, software="pyps-client 9.9")
        assert (status, name) == ("FAILED_PRECONDITION", "ProtocolMismatch")
        for word in ("version 1", "version 2", "pyps-client 9.9", "install"):
            assert word in text
        # The same model, cut by another release.
        status, name, text = refusal_of(first.hello, fingerprint="0123")
        assert (status, name) == ("FAILED_PRECONDITION", "ModelMismatch")
        assert "fingerprint 0123, here " + first.plan.fingerprint in text


def test_a_server_started_for_a_run_takes_no_other(start_server):
    server = start_server("--run-id", "mine")
    with WireWorker(server.data, "a", run_id="other") as other, WireWorker(server.data, run_id="") as none:
        _, name, text = refusal_of(other.hello)
        assert name == "RunMismatch"
        assert "'mine'" in text
        assert none.hello().run_id == "mine"


def test_hello_tells_limits_protocol_and_settings(start_server):
    server = start_server("--max-workers", "5", "--heartbeat-seconds", "2", "--optimizer", "sgd:learning_rate=1")
    with WireWorker(server.data) as worker:
        reply = worker.join()
        assert reply.limits.workers_max == 5
        assert reply.limits.message_bytes_max == 16 * 2**20
        assert (reply.heartbeat_seconds, reply.lease_seconds) == (2.0, 30.0)
        assert (reply.protocol, reply.staleness) == ("async", "divide")
        assert reply.optimizer.rule == "sgd"
        assert reply.control_address == server.control
