"""A run's history from its update log: the same picture as the live one's, and one clear word where there is none."""

import json
from pathlib import Path

import numpy as np
import pytest

from pyps.core.gradient import PushPlan
from pyps.storage.update_log import UpdateLog, UpdateLogError, decode, encode
from pyps.watch.replay import replayed
from shards import SHARD_SIZE, gradient, pull, serving

WAIT = {"event": "wait", "worker_id": "a", "seconds": 0.25, "waited_for": ["b"]}


def logged(folder: Path, staleness: str = "divide") -> list[Path]:
    """Log a run of two workers: "a" pushes four times, each time of the newest version, "b" once, of the first."""
    log = UpdateLog(folder / "server-0")
    run = serving("a", "b", recorder=log, staleness=staleness, expected_workers=2)
    for sequence in range(1, 5):
        for shard_id, shard in run.content.shards.items():
            pull(shard, "a")
            version = shard.version
            sent = gradient(
                np.ones(SHARD_SIZE), sequence=sequence, base_version=version, clock=sequence, example_count=8
            )
            run.push(PushPlan(shard_id, sent))
        run.heartbeat("r", "a", 1, clock=sequence, scalars={"loss": 1 / sequence, "accuracy": 0.5})
        log.note(WAIT)
    for shard_id in run.content.shards:
        run.push(PushPlan(shard_id, gradient(np.ones(SHARD_SIZE), worker_id="b", sequence=1)))
    run.leave("r", "b", 1, failed=True, message="its process has ended")
    run.configure(protocol="hardsync", learning_rate=0.25)
    log.end()
    return sorted(folder.rglob("*.jsonl"))


def spread(paths: list[Path]) -> None:
    """Let half a second pass before each line."""
    lines = [(path, line) for path in paths for text in path.open("rb") if (line := decode(text))]
    times = {
        line["at"]: 1000 + number / 2 for number, (_, line) in enumerate(sorted(lines, key=lambda each: each[1]["at"]))
    }
    for path in paths:
        path.write_bytes(b"".join(encode({**line, "at": times[line["at"]]}) for of, line in lines if of == path))


def test_a_log_gives_the_history_that_the_run_had(tmp_path):
    paths = logged(tmp_path)
    # A second server's log has the same waits and events.
    (run,) = tmp_path.rglob("run-0.jsonl")
    spread(paths)
    lines = [line for text in run.open("rb") if (line := decode(text))]
    second = [{**line, "server_index": 1} if line["event"] == "begin" else line for line in lines]
    run.with_stem("run-1").write_bytes(b"".join(map(encode, second)))
    # The first one starts once more.
    run.with_stem("run-0.2").write_bytes(encode({**lines[0], "at": lines[-1]["at"] + 8}))
    shown = json.loads(json.dumps(replayed(tmp_path).to_json(), allow_nan=False))

    steps = [
        ("a", began, ended, 0) for began, ended in ((1002.5, 1005.5), (1007, 1008.5), (1010, 1011.5), (1013, 1014.5))
    ]
    assert [tuple(step[1:5]) for step in shown["steps"]] == [*steps, ("b", 1017, 1018, 4)]
    # Right after a push came the report, then the end of a wait.
    assert [wait[1:] for wait in shown["waits"]] == [["a", step[2] + 0.75, step[2] + 1, ["b"]] for step in steps]
    assert (shown["live"], shown["state"], shown["run"], shown["protocol"], shown["staleness_policy"]) == (
        *(False, "ended", "r", "async", "divide"),
    )
    assert [shown[name] for name in ("version", "examples", "rule", "rate")] == [5, 32, "sgd", 0.25]
    assert shown["sentence"].startswith("in the log's last minute: ")
    a, b = shown["workers"]
    assert (a["state"], a["loss"], a["steps"], a["step_lost"]) == ("alive", 0.25, 4, 0)
    assert (b["state"], b["staleness_mean"], b["step_lost"], b["pace"]) == ("failed", 4, 0.75, 0)
    assert (b["bytes_in"], shown["servers"]) == (None, [])
    assert shown["staleness"]["buckets"] == [[0, 8], [4, 2]]
    assert a["pace"] == pytest.approx(4 / (shown["now"] - shown["began"]))
    last = shown["rows"][-1]
    assert (last["version"], last["seen"], last["alive"], last["loss"]) == (5, 32, 1, {"a": 0.25})
    # Both servers tell of the failure.
    assert [event[2:5] for event in shown["events"] if event[3] in ("failed", "found")] == [
        ["server 0", "failed", "b failed: its process has ended"],
        ["server 0", "found", "server 0 started again"],
    ]


@pytest.mark.parametrize("policy", ["divide", "per_update", "hinge:a=2,b=1", "constant", "polynomial"])
def test_what_the_policy_in_force_takes_of_the_histogram_is_what_was_counted(policy, tmp_path):
    logged(tmp_path, policy)
    shown = replayed(tmp_path).to_json()
    [in_force] = [each for each in shown["staleness"]["policies"] if each["in_force"]]
    a, b = (worker["step_lost"] for worker in shown["workers"])
    assert policy.startswith(in_force["name"])
    # Of four gradients of one worker, and one of the other.
    assert in_force["lost"] == pytest.approx((4 * a + b) / 5) and in_force["lost"] > 0


def test_a_log_that_ends_early_gives_the_part_that_is_whole(tmp_path):
    spread(logged(tmp_path))
    for path in tmp_path.rglob("shard-*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        # What follows the last push is missing, and half of that.
        last = max(number for number, line in enumerate(lines) if decode(line)["event"] == "push")
        path.write_bytes(b"".join(lines[:last]) + lines[last][:40])
    shown = replayed(tmp_path).to_json()
    assert (shown["state"], shown["version"], len(shown["steps"])) == ("broken off", 4, 4)


def test_what_is_no_log_of_one_run_is_refused_in_words(tmp_path):
    with pytest.raises(UpdateLogError, match=r"there is no update log in .*--update-log"):
        replayed(tmp_path)
    _, shard, _ = logged(tmp_path)
    whole = shard.read_bytes()
    begin, *rest = (line for text in whole.splitlines(keepends=True) if (line := decode(text)))
    shard.write_bytes(encode(begin) + encode({"event": "push", "at": 1.0}))
    with pytest.raises(UpdateLogError, match="does not understand"):
        replayed(tmp_path)
    shard.write_bytes(whole)
    other = {**begin, "run": {**begin["run"], "run_id": "another"}}
    shard.with_stem("shard-000007").write_bytes(b"".join(map(encode, [other, *rest])))
    with pytest.raises(UpdateLogError, match=r"logs of several runs \(another, r\)"):
        replayed(tmp_path)
