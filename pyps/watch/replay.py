"""The history of a run from its update log, whose lines are counted again as the run's servers counted them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from typing import Any

from pyps.core.receipt import Outcome
from pyps.statistics import ACTIVITIES_MAX, Statistics, activity_of, histogram_of, tally_of
from pyps.storage.plain import push_from_plain
from pyps.storage.replay import ShardLog, lines_in, log_paths
from pyps.storage.update_log import UpdateLogError
from pyps.watch.answer import Answer
from pyps.watch.history import History, counts, in_words
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb

# A row for each second at first, later for a part of the time so far.
ROWS = 1024
LINES_A_LOOK = 1000
# What a log does not say.
UNKNOWN = ("bytes_in", "bytes_out", "queue", "cpu")
STATES = {"joined": "alive", "back": "alive", "left": "finished", "failed": "failed", "expired": "expired"}
# A line with its time, and its shard's number or its server's name.
Timed = tuple[float, int | str, dict[str, Any]]


def replayed(folder: Path) -> History:
    """Return the history of the one run whose logs are in a folder and its folders. Raises UpdateLogError."""
    logs = [ShardLog(path) for path in log_paths(folder)]
    if not logs:
        raise UpdateLogError(f"there is no update log in {folder}: start a server with --update-log to make one")
    if len(runs := sorted({log.run.run_id for log in logs})) > 1:
        raise UpdateLogError(f"{folder} has logs of several runs ({', '.join(runs)}): name the folder of one")
    sources: dict[Path, int | str] = dict.fromkeys(sorted(folder.rglob("run-*.jsonl")), "")
    sources.update({log.path: log.shard_id for log in logs})
    replay = _Replay(folder.resolve().name, min(log.shard_id for log in logs))
    try:
        for each in heapq.merge(*starmap(_timed, sources.items()), key=itemgetter(0)):
            replay.follow(*each)
    except (LookupError, TypeError, ValueError) as error:
        raise UpdateLogError(f"{folder} has lines that this version does not understand: {error!r}") from None
    return replay.end()


def _timed(path: Path, source: int | str) -> Iterator[Timed]:
    for line in lines_in(path):
        source = f"server {line['server_index']}" if "server_index" in line else source
        yield line["at"], source, line


class _Replay:
    """A run as far as its log was read."""

    def __init__(self, address: str, first_shard: int):
        self._address, self._first_shard = address, first_shard
        self._now = self._began = self._pushed_at = self._row_at = 0.0
        self._history = History([address], live=False, clock=lambda: self._now)
        self._statistics = Statistics()
        self._status = pb.Status(state=common.RUN_STATE_READY)
        self._configured: dict[str, str] = {}
        # By shard; those whose logs ended in order.
        self._versions: dict[int, int] = {}
        self._ended = set[int]()
        self._workers: dict[str, pb.WorkerInfo] = {}
        self._begun = set[str]()
        # When a worker's state last changed.
        self._left: dict[str, float] = {}
        # By worker the server whose waits are taken: all servers log the same ones.
        self._waits_of: dict[str, int | str] = {}
        self._num_lines = self._num_steps = 0

    def follow(self, at: float, source: int | str, line: Mapping[str, Any]) -> None:
        # Clocks of several servers differ, and are set.
        now = self._now = max(self._now, at)
        self._began = self._began or now
        name, event = line.get("worker_id", ""), line["event"]
        worker = self._workers.setdefault(name, pb.WorkerInfo(worker_id=name)) if name else pb.WorkerInfo()
        if event == "run":
            self._history.add_event(at, f"{source}", line["kind"], line["message"], name)
            kind, message = in_words(line["kind"], line["message"], name)
            worker.state = STATES.get(kind, worker.state)
            self._left[name] = now
            worker.message = message.partition(": ")[2] if kind == "failed" else worker.message
        worker.clock = max(worker.clock, line.get("clock", 0))
        if isinstance(source, int):
            self._follow_shard(source, line, worker)
        elif event == "begin":
            if source in self._begun:
                self._history.add_event(at, source, "found", f"{source} started again")
            self._begun.add(source)
        elif event == "report":
            worker.scalars.update(line["scalars"])
        elif event == "wait" and self._waits_of.setdefault(name, source) == source:
            seconds, others = line["seconds"], tuple(line["waited_for"])
            self._statistics.blocked(name, seconds, since=now - seconds, now=now, waited_for=others)
        self._num_lines += 1
        is_row = now - self._row_at >= max(1.0, (now - self._began) / ROWS)
        if is_row or self._num_lines % LINES_A_LOOK == 0:
            self._history.take(self._address, self._answer())
        if is_row:
            self._row_at = now
            self._history.tick()
            for unknown in UNKNOWN:
                self._history.rows[-1].pop(unknown, None)

    def _follow_shard(self, shard_id: int, line: Mapping[str, Any], worker: pb.WorkerInfo) -> None:
        now, status, statistics = self._now, self._status, self._statistics
        self._configured.update(line.get("behaviour") or {})
        match line["event"]:
            case "begin":
                status.run_id, status.optimizer.rule = line["run"]["run_id"], line["run"]["optimizer"]["rule"]
                status.examples = line["examples"] if shard_id == self._first_shard else status.examples
                self._versions[shard_id] = line["version"]
                self._ended.discard(shard_id)
            case "roster":
                status.roster[:] = line["workers"]
            case "push":
                # Of a change after the last push no gradient tells.
                for text in ("protocol", "staleness", "schedule", "warmup"):
                    setattr(status, text, self._configured.get(text, ""))
                self._pushed_at, worker.state, receipt = now, "alive", push_from_plain(line, b"")[1]
                if shard_id == self._first_shard and receipt.outcome is not Outcome.REJECTED:
                    status.examples += line.get("example_count", 0)
                life = line["incarnation"]
                statistics.pushed(worker.worker_id, shard_id, receipt, payload_bytes=0, now=now, incarnation=life)
            case "pull":
                statistics.pulled(worker.worker_id, 0, now=now)
            case "end":
                self._ended.add(shard_id)
        update = line.get("update")
        if rate := update["rate"] if update else line["event"] == "configure" and line["learning_rate"]:
            status.ClearField("learning_rates")
            status.learning_rates.add(current=rate)
        if update:
            self._versions[shard_id] = line["version_after"] if "sequence" in line else line["version"]
            statistics.scaled(shard_id, [(part["worker_id"], part["rate_scale"]) for part in update["parts"]])

    def end(self) -> History:
        """Return the history, with what held the run back when the last push came."""
        history, ended = self._history, self._now
        self._now = self._pushed_at or ended
        history.take(self._address, self._answer(at_work=True))
        sentence, slow = history.verdict
        sentence = f"in the log's last minute: {sentence}"
        if self._workers and all(worker.state == "failed" for worker in self._workers.values()):
            why = next(filter(None, (worker.message for worker in self._workers.values())), "no reason is known")
            sentence = f"all workers have failed ({why}); {sentence}"
        in_order = "ended" if self._ended == self._versions.keys() else "broken off"
        history.facts = {
            "state": "finished" if any(event[3] == "finished" for event in history.events) else in_order,
            "sentence": sentence,
            "slow": slow,
            "began": round(self._began, 3),
            "servers": [],
        }
        self._now = ended
        answer = self._answer()
        history.take(self._address, answer)
        # Those of the whole run; of bytes there are none.
        seconds, numbers = max(1e-9, ended - self._began), counts(answer)
        rates = {key: count / seconds for key, count in numbers.items() if key[-1] == "steps"}
        history.servers[self._address].rates = rates
        return history

    def _answer(self, *, at_work: bool = False) -> Answer:
        """Return what a server would answer now; `at_work`: when nobody had left yet."""
        now, total, status = self._now, self._statistics.total(), deepcopy(self._status)
        workers = [*map(deepcopy, self._workers.values())]
        for worker in workers:
            worker.tally.CopyFrom(tally_of(self._statistics.worker(worker.worker_id)))
            if at_work and (self._left.get(worker.worker_id, now) >= now or worker.state == "finished"):
                worker.state = "alive"
        status.tally.CopyFrom(tally_of(total))
        status.uptime_seconds = max(now, self._row_at) - self._began
        status.workers_alive = sum(each.state == "alive" for each in workers)
        status.version_max, status.num_shards = max(self._versions.values(), default=0), len(self._versions)
        found = self._statistics.activities(self._num_steps, ACTIVITIES_MAX, now=math.inf if at_work else now)[0]
        self._num_steps = found[-1].number if found else self._num_steps
        steps = [activity_of(each, now=now) for each in found]
        return Answer(self._address, status, workers, staleness=histogram_of(total), activity=steps)
