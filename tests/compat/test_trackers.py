"""The scripts of docs/trackers.md as they stand, all beside one run: what each tracker has kept of it."""

import json
import re

import pytest

from environments import environment, run, scripts_of
from support import ROOT, PythonProcess, shell, status_of, wait_until

# The environment takes a minute to build, and more than a gigabyte while it is there.
pytestmark = [pytest.mark.extended, pytest.mark.compat, pytest.mark.timeout(900)]

TRACKERS = ("tensorboard==2.21.0", "trackio==0.43.0", "wandb==0.31.0")
# What torch and the client need, in the versions of everything else here; what trackers need is theirs to say.
PINNED = (ROOT / "constraints.txt").read_text(encoding="utf-8")
BENEATH = re.findall(r"^(?:torch|numpy|grpcio|protobuf)==\S+$", PINNED, re.M)

PAGE = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
SCRIPTS = scripts_of(PAGE)
# Where each keeps what it has got, and what prints that as JSON: by figure a list of updates and values.
KEPT = {
    "TensorBoard": (
        "runs/*/events.*",
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as Events\n"
        "events = Events(path).Reload()\n"
        "kept = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()['scalars']}\n",
    ),
    "Weights & Biases": (
        "wandb/offline-run-*/run-*.wandb",
        # A log in blocks of 32 KiB, of records that may lie in several pieces.
        "import struct\n"
        "from wandb.proto.wandb_internal_pb2 import Record\n"
        "data, at, whole, kept = open(path, 'rb').read(), 7, b'', {}\n"
        "while at + 7 <= len(data):\n"
        "    at += -at % 2**15 if -at % 2**15 < 7 else 0\n"
        "    length, kind = struct.unpack_from('<HB', data, at + 4)\n"
        "    whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length\n"
        "    if kind in (1, 4):\n"
        "        items, whole = Record.FromString(whole).history.item, b''\n"
        "        row = {'/'.join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}\n"
        "        [kept.setdefault(name, []).append((row['_step'], row[name])) for name in row]\n",
    ),
    "trackio": (
        "trackio/digits*.db",
        "import sqlite3\n"
        "kept = {}\n"
        "for step, row in sqlite3.connect(path).execute('SELECT step, metrics FROM metrics ORDER BY step'):\n"
        "    [kept.setdefault(name, []).append((step, value)) for name, value in json.loads(row).items()]\n",
    ),
}


python = environment(*BENEATH, *TRACKERS)


def test_the_page_names_the_versions_that_are_tried():
    assert f"pip install {' '.join(TRACKERS)}\n" in PAGE
    assert SCRIPTS.keys() == KEPT.keys()


def test_trackers_get_the_runs_figures(python, tmp_path, start_server_process, start_python):
    serve, train, track = re.findall(r"^(?:PYPS_\S+ )*(?:pyps|python) .*$", PAGE.split("```")[1], re.M)
    server = start_server_process(*serve.split()[2:], "--heartbeat-seconds", "0.5")

    def start(command: str, *arguments: str, **apart: str | None) -> PythonProcess:
        variables = dict(word.split("=") for word in command.split() if word.startswith("PYPS_"))
        return start_python(*arguments, cwd=apart.get("PWD"), env=variables | {"PYPS_SERVERS": server.data} | apart)

    start(train, str(ROOT / train.split()[-1]), "--epochs", "100000")
    trackers = {}
    for name, script in SCRIPTS.items():
        (folder := tmp_path / name).mkdir()
        (folder / "track.py").write_text(script, encoding="utf-8")
        (folder / "run.py").write_text("import os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n", encoding="utf-8")
        apart = {
            "PYTHONPATH": None,
            "PWD": str(folder),
            "WANDB_MODE": "offline",
            "TRACKIO_DIR": str(folder / "trackio"),
        }
        trackers[name] = start(track, "run.py", str(python), track.split()[-1], **apart)

    def begun() -> bool:
        assert all(tracker.running for tracker in trackers.values()), [t.output() for t in trackers.values()]
        return all(list((tmp_path / name).glob(pattern)) for name, (pattern, _) in KEPT.items())

    wait_until(begun, 120, "what trackers keep")
    seen = status_of(server).version_max
    wait_until(lambda: status_of(server).version_max > seen + 2000, 120, "further updates")
    shell("stop", "--servers", server.control)
    for name, tracker in trackers.items():
        assert tracker.wait(120) == 0, tracker.output()
        pattern, read = KEPT[name]
        [path] = (tmp_path / name).glob(pattern)
        reader = f"import json\npath = {str(path)!r}\n{read}print(json.dumps(kept))"
        kept = json.loads(run(str(python), "-c", reader).splitlines()[-1])
        steps = [step for step, _ in kept["updates"]]
        assert len(steps) > 1 and steps == sorted(steps) == [value for _, value in kept["updates"]], name
        assert kept["workers"][0][1] == 1 and kept["updates_per_second"][-1][1] > 0, name
        assert kept["staleness"][-1][1] == kept["step_lost"][-1][1] == 0, name
        [own] = [figure for figure in kept if figure.startswith("loss/")]
        assert 0 < kept["loss"][-1][1] == kept[own][-1][1] < 3, name
