"""The numpy client trains against real servers: what it gets back is what the formula says."""

import threading

import numpy as np
import pytest

from client_support import Reference, addresses, gradients_like, make_client, small_model, start_servers
from pyps_client import InvalidArgument, ModelMismatch, NotFinite
from pyps_client.arrays import Arrays


def test_pulling_again_changes_nothing_and_costs_no_parameters(start_server):
    server = start_server()
    with make_client(server.data) as client:
        vectors = [client._parameters]

        assert client.session.pull(vectors) == set()
        client.push({"scale": np.float32(1).reshape(())})
        assert len(client.session.pull(vectors)) == 1


@pytest.mark.parametrize("num_servers", [1, 2])
def test_an_absent_tensor_is_not_a_zero_gradient(start_server, num_servers):
    """Adagrad with a zero gradient changes nothing either, so the accumulators are probed by what follows."""
    tensors = small_model()
    reference = Reference(tensors)
    servers = addresses(start_servers(start_server, num_servers))
    with make_client(servers) as client:
        for step, names in enumerate([["embed", "bias"], ["layer"], ["scale"], ["embed", "layer"], list(tensors)]):
            gradients = {name: gradients_like(tensors, step)[name] for name in names}
            receipts = client.push(gradients)
            reference.step(gradients)
            assert receipts
            reference.check(client.pull())

        versions = client.session.held_versions
        assert versions.copy().epochs == versions.epochs == (0,) * num_servers
        assert min(versions.values()) < 5, "a shard without a present tensor was updated"
        assert {(receipt.version_before, receipt.version_after) for receipt in client.push({})} == {
            (version, version) for version in versions.values()
        }


def test_the_servers_schedule_sets_the_size_of_the_next_minibatch(start_server):
    server = start_server("--batch-growth", "start=8,maximum=32,every=1", "--epoch-examples", "10")
    sizes = []
    with make_client(server.data) as client:
        for step in range(6):
            sizes.append(client.batch_size)
            client.push(gradients_like(small_model(), step), examples=5)

    assert sizes == [8, 8, 16, 16, 32, 32]


def test_wrong_gradients_are_refused_before_anything_is_sent(start_server):
    server = start_server()
    with make_client(server.data) as client:
        good = gradients_like(small_model(), 0)
        for bad, complaint in [
            ({"embd": good["embed"]}, "no tensor 'embd' in this model; it has embed, scale, layer, bias"),
            ({"bias": good["bias"][:-1]}, r"'bias' is float32\[600\]; expected float32\[601\]"),
            ({"bias": good["bias"].astype(np.float64)}, "use .astype"),
        ]:
            with pytest.raises(ModelMismatch, match=complaint):
                client.push(good | bad)

        client.pull()
        assert client.global_step == 0


def test_nan_is_skipped_and_ten_in_a_row_are_an_error(start_server, caplog):
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
    with make_client(server.data, gradient_codec="float16", worker_id="halves") as client:
        assert client.push({"scale": np.float32(1e6).reshape(())}) == []
    assert "the gradient of scale is 1000000.0" in caplog.text


def test_while_one_thread_pushes_another_is_refused_and_nothing_is_lost(start_server):
    refused: list[InvalidArgument] = []
    gradients = gradients_like(small_model(), seed=0)
    with make_client(start_server().data) as client:
        write = client._write

        def push() -> None:
            try:
                client.push(gradients)
            except InvalidArgument as error:
                refused.append(error)

        def write_beside(arrays: Arrays) -> bool:
            other = threading.Thread(target=push)
            other.start()
            other.join()
            return write(arrays)

        client._write = write_beside
        for _ in range(3):
            assert client.push(gradients)
        assert client.global_step == client.session.clock == len(refused) == 3
    assert str(refused[0]).startswith("Another thread takes a step with this worker right now: this step was not taken")
