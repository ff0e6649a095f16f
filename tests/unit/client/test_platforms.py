"""The client where Linux's and Unix's own means are missing, as on Windows and macOS: it trains by gRPC."""

WITHOUT = """
import importlib.abc, mmap, os, signal, socket, sys

def without(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

# What others import from the standard library is loaded with them.
import ctypes, multiprocessing, subprocess, tempfile
import torch, torch.distributed, torch._dynamo, grpc
for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
without(os, "register_at_fork", "fork", "memfd_create", "posix_fallocate", "geteuid", "getuid", "confstr")
without(os, "sched_getaffinity", "MFD_CLOEXEC")
without(mmap, "MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_POPULATE", "PROT_READ", "PROT_WRITE")
without(socket, "AF_UNIX", "SO_PEERCRED", "send_fds", "recv_fds")
without(signal, "SIGKILL", "SIGALRM", "setitimer", "pthread_sigmask", "pthread_kill")

import importlib, pkgutil
import pyps_client, pyps_client.torch
from pyps_client import Launch, RemoteOptimizer
from pyps_wire.errors import PypsError

ONLY_LINUX = {"pyps_client.transport.shared_memory"}
for found in pkgutil.walk_packages(pyps_client.__path__, "pyps_client."):
    if found.name not in ONLY_LINUX:
        importlib.import_module(found.name)
assert not ONLY_LINUX & sys.modules.keys()

model = torch.nn.Linear(3, 1, bias=False)
optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), launch=Launch(sys.argv[1], run_id="r"))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
print(optimizer.transport, optimizer.global_step)
optimizer.close()
try:
    Launch(servers=("a:1",), transport="shm")
except PypsError as refused:
    print(refused)
"""


def test_it_trains_by_a_lane_where_memory_cannot_be_shared(start_server, start_python):
    process = start_python("-c", WITHOUT, start_server().data, fresh=True)
    assert process.wait() == 0, process.output()
    assert "tcp 3\n" in process.output()
    assert "transport is 'shm', but workers share memory with servers on Linux only" in process.output()
