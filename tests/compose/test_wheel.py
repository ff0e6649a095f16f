"""The wheels of `make wheel` in a container without compiler, index or network: a server, a worker, `pyps status`.

Needs an engine, as test_compose.py does.
"""

import json
import re
import sys
from functools import partial

import pytest

import environments
from support import ROOT

# A cold build compiles, and pip fetches what pyps stands on.
SECONDS = 600
[IMAGE] = set(re.findall(r"^FROM (python:\S+)", (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8"), re.M))

WORKER = """
import numpy
from pyps_client import Client

start = {"weight": numpy.zeros(10, "float32")}
with Client(start, ("sgd", {"learning_rate": 0.1}), servers="127.0.0.1:7610") as client:
    for _ in range(5):
        client.push({"weight": -numpy.ones(10, "float32")})
        weight = client.pull()["weight"]
print(f"trained to {weight.mean():.3f}")
"""
# An image that stands in for the official one may have a compiler: it goes first.
JOB = """
set -eu
rm -rf /usr/bin/*gcc* /usr/bin/*g++* /usr/bin/cc /usr/bin/c++ /usr/bin/ld* /usr/bin/make /usr/lib/gcc/*/*/cc1*
for tool in cc gcc c++ g++ clang ld make cmake ninja; do
  if command -v $tool; then exit 1; fi
done
python3 -m venv /tmp/pyps
. /tmp/pyps/bin/activate
pip install --quiet --no-index --find-links /wheels pyps
pyps serve --ready-file /tmp/ready.json >/tmp/server.txt 2>&1 &
server=$!
python /wheels/worker.py || { cat /tmp/server.txt; exit 1; }
pyps status --json
kill $server
wait $server
"""


@pytest.mark.timeout(3 * SECONDS)
def test_the_wheels_install_and_train_where_nothing_can_be_compiled(tmp_path):
    environments.require_engine(SECONDS)
    run = partial(environments.run, seconds=SECONDS)
    built = re.findall(r"^dist/(\S+\.whl)$", run("make", "--no-print-directory", "wheel"), re.M)
    client, server = sorted(built, reverse=True)
    assert re.fullmatch(r"pyps_client-.*-py3-none-manylinux[\w.]+\.whl", client)
    assert re.fullmatch(r"pyps-.*-cp3\d+-cp3\d+-manylinux_2_\d+_\w+\.whl", server)
    # Both of dist/, the others as an index has them; only wheels, since a source would want a compiler.
    fetch = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(tmp_path))
    run(*fetch, "--constraint", "constraints.txt", *(f"dist/{name}" for name in built))
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")

    output = run("docker", "run", "--rm", "--network", "none", "-v", f"{tmp_path}:/wheels:ro", IMAGE, "sh", "-c", JOB)

    trained, _, status = output.partition("\n")
    assert trained == "trained to 0.500"
    [answer] = json.loads(status)["servers"]
    assert answer["status"]["versionMax"] == "5"
