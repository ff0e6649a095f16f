"""The numpy client trains against real servers: what it gets back is what the formula says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from client_support import (
    OPTIMIZERS,
    Reference,
    addresses,
    gradients_like,
    make_client,
    small_model,
    start_servers,
)
from pyps_client import BadRequest, ModelMismatch, NotFinite
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from support import ServerThread

Start = Callable[..., ServerThread]


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_one_worker_equals_the_numpy_reference_bit_for_bit(start_server: Start, num_servers: int, rule: str) -> None:
    tensors = small_model()
    reference = Reference(tensors, rule)
    servers = addresses(start_servers(start_server, num_servers))
    with make_client(servers, optimizer=OPTIMIZERS[rule]) as client:
        reference.check(client.pull())
        for step in range(20):
            gradients = gradients_like(tensors, step)
            receipts = client.push(gradients, examples=8)
            reference.step(gradients)
            assert [receipt.outcome for receipt in receipts] == [OUTCOME_APPLIED] * len(receipts)
            assert {receipt.version_after for receipt in receipts} == {step + 1}
            reference.check(client.pull())

        assert client.global_step == 20
        assert client.session.num_workers == 1


def test_pulling_again_changes_nothing_and_costs_no_parameters(start_server: Start) -> None:
    server = start_server()
    with make_client(server.data) as client:
        vectors = [client._parameters]

        assert client.session.pull(vectors) == set()
        client.push({"scale": np.float32(1).reshape(())})
        assert len(client.session.pull(vectors)) == 1


@pytest.mark.parametrize("num_servers", [1, 2])
def test_an_absent_tensor_is_not_a_zero_gradient(start_server: Start, num_servers: int) -> None:
    """Adagrad with a zero gradient changes nothing either, so the accumulators are probed by what follows."""
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    servers = addresses(start_servers(start_server, num_servers))
    with make_client(servers) as client:
        for step, names in enumerate([["embed", "bias"], ["layer"], ["scale"], ["embed", "layer"], list(tensors)]):
            gradients = {name: gradients_like(tensors, step)[name] for name in names}
            receipts = client.push(gradients)
            reference.step(gradients)
            assert receipts
            reference.check(client.pull())

        versions = client.session.held_versions
        assert min(versions.values()) < 5, "a shard without a present tensor was updated"
        # A push of nothing is answered, and changes nothing.
        assert {(receipt.version_before, receipt.version_after) for receipt in client.push({})} == {
            (version, version) for version in versions.values()
        }


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_halves_travel_and_are_applied_as_float32(start_server: Start, codec: str) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    servers = addresses(start_servers(start_server, 2))
    with make_client(servers, codec=codec) as client:
        for step in range(5):
            gradients = gradients_like(tensors, step)
            client.push(gradients)
            reference.step({name: rounded(gradient, codec) for name, gradient in gradients.items()})
            reference.check(client.pull())


def rounded(gradient: np.ndarray, codec: str) -> np.ndarray:
    """The gradient after its trip in 16 bits, by numpy and by the definition of round-to-nearest-even."""
    if codec == "float16":
        return gradient.astype(np.float16).astype(np.float32)
    exact = gradient.astype(np.float64)
    unit = np.exp2(np.floor(np.log2(np.abs(exact))) - 7)
    return (np.rint(exact / unit) * unit).astype(np.float32)


def test_what_does_not_fit_is_refused_before_anything_is_sent(start_server: Start) -> None:
    server = start_server()
    with make_client(server.data) as client:
        good = gradients_like(small_model(), 0)
        for bad, complaint in [
            ({"embd": good["embed"]}, "no tensor 'embd' in this model; it has embed, scale, layer, bias"),
            ({"bias": good["bias"][:-1]}, r"'bias' has shape \[600\]; expected \[601\]"),
            ({"bias": good["bias"].astype(np.float64)}, "is float64; expected float32: use .astype"),
        ]:
            with pytest.raises(ModelMismatch, match=complaint):
                client.push(good | bad)

        client.pull()
        assert client.global_step == 0


def test_nan_is_skipped_with_its_place_named_and_ten_in_a_row_end_the_worker(
    start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    gradients = gradients_like(small_model(), 0)
    gradients["layer"][3, 7] = np.nan
    with make_client(server.data) as client:
        for _ in range(9):
            assert client.push(gradients) == []
        assert "the gradient of layer[3, 7] is nan" in caplog.text

        with pytest.raises(NotFinite, match=r"layer\[3, 7\] is nan; 10 gradients in a row"):
            client.push(gradients)

        client.pull()
        assert client.global_step == 0


def test_a_number_too_large_for_float16_is_skipped(start_server: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server()
    with make_client(server.data, codec="float16") as client:
        assert client.push({"scale": np.float32(1e6).reshape(())}) == []

    assert "the gradient of scale is 1000000.0" in caplog.text


def test_pull_waits_for_a_version_that_another_worker_brings(start_server: Start) -> None:
    server = start_server()
    with make_client(server.data, worker_id="a") as waiting, make_client(server.data, worker_id="b") as other:
        shard_ids = waiting.session.held_versions.keys()

        pushing = threading.Timer(0.1, lambda: other.push(gradients_like(small_model(), 0)))
        pushing.start()
        waiting.session.pull([waiting._parameters], min_versions=dict.fromkeys(shard_ids, 1), wait_seconds=20)
        pushing.join()

        assert set(waiting.session.held_versions.values()) == {1}


def test_the_first_parameters_must_be_float32_and_named() -> None:
    with pytest.raises(ModelMismatch, match=r"Tensor 'w' is float64; servers hold float32"):
        make_client("127.0.0.1:1", tensors={"w": np.zeros(3)})
    with pytest.raises(BadRequest, match="No tensors were given"):
        make_client("127.0.0.1:1", tensors={})


def test_staleness_is_told_in_receipts(start_server: Start) -> None:
    server = start_server("--staleness", "divide")
    tensors = small_model()
    with make_client(server.data, worker_id="a") as slow, make_client(server.data, worker_id="b") as fast:
        for step in range(4):
            fast.push(gradients_like(tensors, step))
            fast.pull()

        receipts = slow.push(gradients_like(tensors, 9))

        assert {receipt.staleness for receipt in receipts} == {4}
        assert {receipt.rate_scale for receipt in receipts} == {0.25}
        assert {receipt.num_workers for receipt in receipts} == {2}
        assert slow.session.staleness == "divide"
