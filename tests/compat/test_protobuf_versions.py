"""The client in fresh environments: each major of protobuf that it names, and the oldest of every dependency.

The environments are built once, under .envs, and kept.
"""

import sys
import zipfile

import pytest

from environments import build_environment, run
from support import ROOT

# Each environment takes minutes to build.
pytestmark = pytest.mark.extended

ENVIRONMENTS = {
    "oldest": ["protobuf==5.26.1", "grpcio==1.62.3", "numpy==1.26.4"],
    "protobuf-5": ["protobuf==5.29.*", "grpcio", "numpy"],
    "protobuf-6": ["protobuf==6.33.*", "grpcio", "numpy"],
    "protobuf-7": ["protobuf==7.*", "grpcio", "numpy"],
}

# Loads every module but torch's and sends a message through framing and generated classes, both ways.
PROGRAM = """
import importlib, pkgutil, warnings
warnings.simplefilter("error")
import google.protobuf
import numpy as np
import pyps_client, pyps_wire

on_torch = [f"pyps_client.replica.{name}" for name in ("processes", "dtensor", "steps")]
on_torch += [f"pyps_client.lbfgs.{name}" for name in ("run", "gradient")]
packages = [pyps_wire, pyps_client]
for package in packages:
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        # A library of C, which ctypes loads, is no module.
        if module.name not in ("pyps_wire._codecs", "pyps_client.torch", "pyps_client.integrations", *on_torch):
            loaded = importlib.import_module(module.name)
            packages += [loaded] if module.ispkg else []
assert callable(pyps_client.Client) and callable(pyps_client.Observer)
try:
    pyps_client.RemoteOptimizer
except ImportError as error:
    assert "torch" in str(error), error
else:
    raise AssertionError("torch was not to be here")

from pyps_wire import codecs, framing, partition
from pyps_wire.parameter_server_pb2 import HelloRequest, PushRequest

values = np.array([1.5, -2.0, 0.25], np.float32)
header = PushRequest(sequence=7, shard_id=2, base_version=-1, codec=codecs.codec_of("bfloat16"))
message = PushRequest.FromString(framing.join(header, codecs.codec_numbered(header.codec).encode(values)))
assert message.sequence == 7 and message.base_version == -1
rest, payload = framing.split(message.SerializeToString())
assert PushRequest.FromString(rest) == header
assert codecs.codec_numbered(header.codec).decode(payload, 3).tolist() == values.tolist()

model = partition.Model((partition.Tensor("weight", (3, 2)), partition.Tensor("scale", (), 1)))
hello = HelloRequest.FromString(HelloRequest(model=model.to_proto()).SerializeToString())
assert partition.Model.from_proto(hello.model) == model

print(google.protobuf.__version__)
"""

# Trains one step of a worker, reads the result as an observer; then rounds on a stream that stays open.
WORKER = """
import sys
import numpy as np
from pyps_client import Client, Launch, Observer

model = {"w": np.zeros(4, np.float32)}, ("sgd", {"learning_rate": 0.5})
with Client(*model, servers=sys.argv[1]) as client:
    run_id = client.session.run_id
    client.push({"w": np.ones(4, np.float32)}, examples=1)
    assert client.pull()["w"].tolist() == [-0.5] * 4
with Observer(servers=sys.argv[1]) as observer:
    print(observer.snapshot()["w"].tolist())

with Client(*model, launch=Launch(sys.argv[1], run_id=run_id, transport="grpc")) as client:
    before = client.pull()["w"]
    for step in range(3):
        after = client.exchange({"w": np.ones(4, np.float32)})["w"]
    assert (after - before).tolist() == [-1.5] * 4, (before, after)
"""


def environment_python(name, requirements):
    """Returns the Python of that environment, built at the first call and whenever its list changes."""
    folder = ROOT / ".envs" / f"compat-{name}"
    python = folder / "bin" / "python"
    complete = folder / "complete"  # Written last: what is half built is built again.
    recipe = " ".join([sys.version, str(ROOT), *requirements])
    if not complete.exists() or complete.read_text(encoding="utf-8") != recipe:
        build_environment(folder, *requirements)
        complete.write_text(recipe, encoding="utf-8")
    return python


@pytest.mark.compat
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_client_loads_sends_and_trains_under(name, start_server):
    requirements = ENVIRONMENTS[name]
    python = str(environment_python(name, requirements))
    wanted = requirements[0].removeprefix("protobuf==").removesuffix("*")
    assert run(python, "-c", PROGRAM).strip().startswith(wanted)
    assert run(python, "-c", WORKER, start_server().data).splitlines() == ["[-0.5, -0.5, -0.5, -0.5]"]


@pytest.mark.compat
@pytest.mark.timeout(300)
def test_the_wheel_holds_every_module_and_the_type_markers(tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), "./client")
    (wheel,) = tmp_path.glob("pyps_client-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    client = ROOT / "client"
    sources = {
        str(path.relative_to(client))
        for package in ("pyps_wire", "pyps_client")
        for path in (client / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held - {"pyps_wire/_codecs.so"} == sources
    assert {"pyps_wire/py.typed", "pyps_client/py.typed"} <= held
