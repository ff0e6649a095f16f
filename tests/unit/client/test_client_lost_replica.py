"""How a process ends whose replica is lost: by the thread that trains, or without it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps_client import leave
from pyps_client.lease import LostReplica
from pyps_wire.errors import ReplicaLost, Superseded

HANGS = """\
import sys, threading
from pyps_client import lease
from pyps_wire.errors import ReplicaLost

lease.GRACE_SECONDS = 0.2
lost = lease.LostReplica()
sys.stdout.write("so far")
lost.note(ReplicaLost("process 'r/1' is gone"))
lost.note(ReplicaLost("told twice"))
threading.Event().wait()
"""

# Nobody reads what it prints, and it has printed more than a pipe holds.
CANNOT_FLUSH = """\
import io, os, sys, threading
from pyps_client import lease, leave
from pyps_wire.errors import ReplicaLost

lease.GRACE_SECONDS = leave.FLUSH_SECONDS = 0.2
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(writer, True)
sys.stdout = {stdout}
lost = lease.LostReplica()
lost.note(ReplicaLost("process 'r/1' is gone"))
threading.Event().wait()
"""
COMES_TO_KNOW = """\
import sys, threading
from pyps_client import lease
from pyps_wire.errors import ReplicaLost

lease.GRACE_SECONDS = 600.0
lost = lease.LostReplica()
lost.note(ReplicaLost("process 'r/1' is gone"))
try:
    lost.check()
except ReplicaLost as error:
    print("raised", error)
for watch in threading.enumerate():
    if watch.name == "pyps-lost-replica":
        watch.join()
sys.exit(7)
"""

DIES_OF_ANOTHERS_ERROR = """\
from pyps_client import install_process_hooks, leave
from pyps_wire.errors import ReplicaLost

class Closable:
    def close(self, cause="finished", message=""):
        print("left as", cause, "with", message)

leave.translate_with(lambda error: ReplicaLost(f"lost ({error})") if isinstance(error, RuntimeError) else None)
closable = Closable()
install_process_hooks()
leave.expect(closable)

def forward():
    raise RuntimeError("Connection closed by peer")

forward()
"""


def test_a_process_whose_main_thread_hangs_ends_with_the_sentence(start_python):
    process = start_python("-c", HANGS)
    assert process.wait() == 1
    assert "so far" in process.output()
    assert process.output().count("pyps: process 'r/1' is gone") == 1
    assert "told twice" not in process.output()


def test_a_process_ends_though_nobody_reads_its_output(start_python):
    for stdout in ("None", "open(writer, 'w', buffering=1 << 16); sys.stdout.write('more')"):
        process = start_python("-c", CANNOT_FLUSH.format(stdout=stdout))
        assert process.wait() == 1
        assert process.output() == "pyps: process 'r/1' is gone\n"


def test_a_process_whose_main_thread_comes_to_know_is_left_alone(start_python):
    process = start_python("-c", COMES_TO_KNOW)
    assert process.wait() == 7
    assert process.output() == "raised process 'r/1' is gone\n"


def test_any_thread_raises_the_noted_error():
    for kind in (ReplicaLost, Superseded):
        lost = LostReplica()
        lost.check()
        lost.note(kind("gone"))
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(lost.check).exception(60)
        assert (type(met), str(met)) == (kind, "gone")
        with pytest.raises(kind, match="gone"):
            lost.check()


def test_a_translated_error_of_another_library_is_one_sentence(start_python):
    process = start_python("-c", DIES_OF_ANOTHERS_ERROR)
    assert process.wait() == 1
    assert process.output() == (
        "pyps: lost (Connection closed by peer)\n  at <string>:14\n"
        "left as failed with ReplicaLost: lost (Connection closed by peer)\n"
    )

    shown = start_python("-c", DIES_OF_ANOTHERS_ERROR, env={"PYPS_TRACEBACK": "1"})
    assert shown.wait() == 1
    assert "Traceback" in shown.output() and "RuntimeError: Connection closed by peer" in shown.output()


def test_an_error_that_no_translator_knows_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(leave, "_translators", [])
    leave.translate_with(lambda error: ReplicaLost("lost") if isinstance(error, OSError) else None)
    error = KeyError("x")
    assert leave.translated(error) is error
    assert leave.cause_of(error) == ("failed", "KeyError: 'x'")
    assert leave.cause_of(OSError()) == ("failed", "ReplicaLost: lost")
