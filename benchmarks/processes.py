"""Worker processes that begin together and write their lines into one pipe."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from trial import Failed

if TYPE_CHECKING:
    from typing import Self


class Processes:
    """Processes of these commands; all are killed with the context, or when `limit_seconds` are over.

    Leaving the context raises Failed where one of them had ended by itself, or all were too late.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], environment: dict[str, str], log: Path, *, limit_seconds: float
    ):
        self._commands, self._environment, self._log = commands, environment, log
        self._writing: int | None
        reading, self._writing = os.pipe()
        self.lines = os.fdopen(reading, encoding="utf-8")
        self._late = threading.Event()
        # So that lines end, even where no worker writes one any more.
        self._limit = threading.Timer(limit_seconds, self._end_late)

    def __enter__(self) -> Self:
        self._processes = [self._start(index) for index in range(len(self._commands))]
        self._limit.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limit.cancel()
        self._end(self._processes)
        self._close_writing()
        self.lines.close()
        died = [process.returncode for process in self._processes if process.returncode != -signal.SIGKILL]
        if error is None and (died or self._late.is_set()):
            why = f"of its processes some ended, with {died}" if died else "it stood still"
            raise Failed(f"{why}: {self._log.read_text(encoding='utf-8')[-1000:]}")

    def go(self, num_workers: int, *, restarts: bool = False) -> float:
        """Waits until so many are ready, and lets all of them begin; when that was.

        Without restarts the lines end when all processes have ended.
        """
        if not restarts:
            self._close_writing()
        # Gloo has lines of its own among them.
        ready = sum(1 for _ in itertools.islice((line for line in self.lines if line == "ready\n"), num_workers))
        began = time.perf_counter()
        for process in self._processes if ready == num_workers else ():
            self._say_go(process)
        return began

    def restart(self, index: int) -> None:
        """Kills a process and starts it again; it begins when it is ready."""
        self.end([index])
        self._processes[index] = self._start(index)
        self._say_go(self._processes[index])

    def end(self, indices: Iterable[int]) -> None:
        """Kills these processes, which is no failure of theirs."""
        self._end([self._processes[index] for index in indices])

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with self._log.open("a", encoding="utf-8") as errors:
            return subprocess.Popen(
                self._commands[index],
                stdin=subprocess.PIPE,
                stdout=self._writing,
                stderr=errors,
                # By its key a worker that is started again takes its name over at once.
                env=self._environment
                | {"PYPS_WORKER_INDEX": str(index), "PYPS_WORKER_KEY": f"key of worker {index:4}"},
                # A peer of Hivemind has processes of its own, which are to end with it.
                start_new_session=True,
            )

    def _say_go(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()

    def _close_writing(self) -> None:
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None

    def _end_late(self) -> None:
        self._late.set()
        self._end(self._processes)
        self._close_writing()

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            # Its group may still be there where it has died itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
