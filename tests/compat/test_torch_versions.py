"""The oldest torch that the client's package names, in a fresh environment: it trains there as torch alone does."""

import re

import pytest

from environments import environment, run
from support import ROOT

# The environment takes minutes to build, and gigabytes while it is there.
pytestmark = [pytest.mark.extended, pytest.mark.compat, pytest.mark.timeout(600)]

(FLOOR,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "client" / "pyproject.toml").read_text(encoding="utf-8"))

# Arguments: a server each for gRPC and shared memory.
PROGRAM = """
import sys
import torch
from pyps_client import Launch, RemoteOptimizer

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))

for transport, servers in zip(("grpc", "shm"), sys.argv[1:]):
    model, twin = network(), network()
    adam, its = (torch.optim.AdamW(of.parameters(), lr=0.01, weight_decay=0.1) for of in (model, twin))
    with RemoteOptimizer(model, adam, launch=Launch(servers, transport=transport), buffers="average") as optimizer:
        pairs = [
            (of, by, torch.optim.lr_scheduler.StepLR(by, 2, 0.5)) for of, by in ((model, optimizer), (twin, its))
        ]
        for inputs in torch.randn(6, 16, 8):
            for module, by, scheduler in pairs:
                by.zero_grad(set_to_none=False)
                module(inputs).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                by.step()
                scheduler.step()
        found = optimizer.snapshot()
        print(optimizer.transport)
    for name, expected in twin.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)
print(torch.__version__)
"""


python = environment(f"torch=={FLOOR}.0", "numpy==2.0.*", "grpcio", "protobuf")


def test_a_worker_trains_as_torch_does_under_the_oldest_that_is_named(start_server, python):
    output = run(str(python), "-c", PROGRAM, *(start_server().data for _ in range(2)))
    grpc, shm, version = output.split()[-3:]
    assert (grpc, shm) == ("grpc", "shm") and version.startswith(FLOOR)
