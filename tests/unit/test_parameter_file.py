"""A run that begins with the parameters of a file: which files are read, what is refused, and who is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from client_support import Reference, addresses, make_client, small_model, start_servers
from pyps.storage.parameter_file import ParameterFile
from pyps_client import InvalidArgument, ModelMismatch
from pyps_wire.partition import Model, Tensor, partition
from support import Start

TENSORS = {"w": torch.arange(96.0).view(6, 16) / 3, "b": torch.tensor(2.5), "n": torch.tensor(7)}
# As a worker's model has it: "w" cut in two, and no "n".
MODEL = Model(
    (
        Tensor("w", (6, 8), whole_shape=(6, 16), offset=(0, 8)),
        Tensor("b", ()),
        Tensor("w", (6, 8), group=1, whole_shape=(6, 16), offset=(0, 0), part=1),
    ),
    shard_size=16,
)


def values_in(file: ParameterFile, model: Model) -> list[float]:
    file.check(model)
    plan = partition(model, num_servers=2)
    return np.concatenate([file.values(plan, shard.shard_id) for shard in plan.shards]).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_kind_of_file_and_of_numbers_gives_its_values_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in TENSORS.items()}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save({"model": state, "epoch": 3}, tmp_path / "whole.pth")
    w = state["w"].float()
    expected = [*w[:, 8:].reshape(-1).tolist(), 2.5, *w[:, :8].reshape(-1).tolist()]
    for name in ("a.safetensors", "a.pt", "whole.pth"):
        assert values_in(ParameterFile(tmp_path / name), MODEL) == expected


def test_a_file_that_does_not_fit_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    save_file(TENSORS | {"n": torch.ones(2, dtype=torch.int64)}, tmp_path / "a.safetensors")
    file = ParameterFile(tmp_path / "a.safetensors")
    model = Model((Tensor("w", (4, 3)), Tensor("bias", ()), Tensor("n", (2,))))
    with pytest.raises(
        ModelMismatch,
        match=r"not in the file: bias; of another shape: w \(the model's is \[4, 3\], the file's \[6, 16\]\); "
        r"of another kind: n \(I64\); in the file alone: b$",
    ):
        file.check(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), r"of another kind: w \(F32, torch.strided on meta\)$"),
        (lambda: torch.zeros(2).to_sparse(), r"of another kind: w \(F32, torch.sparse_coo on cpu\)$"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), r"of another kind: w \(F32, nested\)$"),
        (lambda: torch._neg_view(torch.ones(2)), ""),
    ],
)
def test_a_tensor_that_torch_holds_in_another_form_is_refused_by_it(
    tmp_path: Path, make: Callable[[], torch.Tensor], words: str
) -> None:
    torch.save({"w": make()}, tmp_path / "a.pt")
    file, model = ParameterFile(tmp_path / "a.pt"), Model((Tensor("w", (2,)),))
    if not words:
        assert values_in(file, model) == [-1, -1]
        return
    with pytest.raises(ModelMismatch, match=words):
        file.check(model)


def test_a_long_name_is_cut_in_a_message(tmp_path: Path) -> None:
    save_file({"n" * 10**6: torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelMismatch, match=r"in the file alone: n{200}\.\.\.$"):
        ParameterFile(tmp_path / "a.safetensors").check(Model((Tensor("w", (2,)),)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.safetensors", b"nothing", "cannot be read"),
        ("none.safetensors", None, "cannot be read: No such file or directory$"),
        ("none.pt", None, "cannot be read: No such file or directory$"),
        ("a.pt", b"nothing", "is no state dict that torch saved: it is no zip file$"),
        ("a.pt", b"", "is no state dict that torch saved: it is no zip file$"),
        ("a.pt", {"w": torch.nn.Linear(1, 1)}, "is no state dict that torch saved: Weights only load failed"),
        ("a.pt", {"optimizer": 3}, "holds more than tensors by their names: save model.state_dict"),
        ("a.safetensors", {"w": torch.tensor([1.0, torch.nan])}, "holds NaN or infinity, in tensor 'w'"),
    ],
)
def test_a_file_that_holds_no_model_is_refused_in_a_sentence(
    tmp_path: Path, name: str, content: Any, words: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        (save_file if name.endswith("s") else torch.save)(content, path)
    with pytest.raises(InvalidArgument, match=words):
        values_in(ParameterFile(path), Model((Tensor("w", (2,)),)))


def test_servers_begin_with_a_file_tell_the_worker_and_leave_it_out_on_resume(
    start_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pyps.client")
    file, own = tmp_path / "a.safetensors", small_model(seed=1)
    save_file({name: torch.from_numpy(array) for name, array in own.items()} | {"extra": torch.ones(1)}, file)
    servers = start_servers(start_server, 2, "--init-from", str(file))
    with pytest.raises(ModelMismatch, match="not in the file: other"):
        make_client(addresses(servers), tensors={"other": np.ones(3, np.float32)})
    with make_client(addresses(servers), run_id="r") as client:
        Reference(own).check(client.pull())
    assert f"differ from those of run r, begun with {file}, which replace them" in caplog.text
    assert "not of the shared model" in servers[0].output() and "extra" in servers[0].output()

    folder = ("--checkpoint-dir", str(tmp_path / "kept"), "--init-from", str(file))
    first = start_server(*folder)
    with make_client(first.data, run_id="kept") as client:
        client.push({"bias": np.ones(601, np.float32)})
        trained = client.pull()
    first.stop()
    second = start_server(*folder, "--resume")
    assert "--init-from is left out: the run is resumed" in second.output()
    with make_client(second.data, run_id="kept") as client:
        np.testing.assert_array_equal(client.pull()["bias"], trained["bias"])
    assert "resumed from a checkpoint at update 1, which replace them" in caplog.text
