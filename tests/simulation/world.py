"""Virtual time, processes, threads and event loops: everything happens in one order, which a seed decides."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

# A history has far fewer events.
EVENTS_MAX = 100_000
# Wall clocks show this when a history begins, in seconds since 1970.
EPOCH_SECONDS = 1_800_000_000.0


class Killed(BaseException):
    """The process of this thread is gone."""


class Stuck(Exception):
    """Something is still to happen at the end of a history's time."""


class Event:
    __slots__ = ("call", "process")

    def __init__(self, process: Process | None, call: Callable[[], object] | None):
        self.process, self.call = process, call

    def cancel(self) -> None:
        self.call = None


class World:
    """The events to come of one history, and what it has noted."""

    active: World

    def __init__(self, seed: int, *, switch_share: float = 0.0):
        World.active = self
        self.now = 0.0
        self.seed, self.random = seed, random.Random(seed)
        # How often a thread that takes a lock lets others go first.
        self.switch_share = switch_share
        self.process: Process | None = None
        self.thread: Thread | None = None
        self.hub = getcurrent()
        self.marks: Counter[str] = Counter()
        # What happened, one text an event; and what must not happen.
        self.trace: list[str] = []
        self.failures: list[str] = []
        self._events: list[tuple[float, int, Event]] = []
        self._number = 0

    def at(self, seconds: float, process: Process | None, call: Callable[[], object]) -> Event:
        """Call something in so many seconds, in a process; None for the network, which nobody pauses or kills."""
        event = Event(process, call)
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, event))
        return event

    def run(self, is_over: Callable[[], bool], *, seconds_max: float) -> None:
        """Let events happen until the history is over. Raises Stuck past its time."""
        while self._number % 8 or not is_over():
            time, _, event = heapq.heappop(self._events)
            if event.call is None:
                continue
            if time > seconds_max or self._number > EVENTS_MAX:
                raise Stuck(f"after {self.now:g} s and {self._number} events")
            self.now, process = max(self.now, time), event.process
            if process is not None:
                if process.dead:
                    continue
                if process.paused:
                    process.backlog.append(event)
                    continue
            self.process, call, event.call = process, event.call, None
            call()
        self.process = None

    def note(self, *words: object) -> None:
        name = "" if self.process is None else self.process.name
        self.trace.append(f"{self.now:10.4f} {name:9} {' '.join(map(str, words))}")

    def fail(self, what: str) -> None:
        self.note("FAILURE:", what)
        self.failures.append(what)

    @property
    def trace_hash(self) -> str:
        return blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()

    def park(self, waiters: deque[Waiter] | None, seconds: float | None = None) -> bool:
        """Let others go on until the thread is woken (True) or the time is over (False)."""
        thread = self.thread
        if thread is None:
            raise AssertionError("an event loop would wait here, and with it all that its process does")
        process = thread.process
        if process.dead:
            raise Killed
        waiter = Waiter(thread)
        timer = None if seconds is None else self.at(max(seconds, 0.0), process, partial(waiter.go_on, False))
        if waiters is not None:
            waiters.append(waiter)
        woken: bool = self.hub.switch()
        if timer is not None:
            timer.cancel()
        if process.dead:
            raise Killed
        return woken


class Waiter:
    """A thread that is parked."""

    __slots__ = ("_thread",)

    def __init__(self, thread: Thread):
        self._thread: Thread | None = thread

    def wake(self) -> bool:
        """Let the thread go on soon; return False where it does already."""
        if (thread := self._thread) is None:
            return False
        self._thread = None
        World.active.at(0, thread.process, partial(thread.switch, True))
        return True

    def go_on(self, woken: bool) -> None:
        if (thread := self._thread) is not None:
            self._thread = None
            thread.switch(woken)


def wake_all(waiters: deque[Waiter]) -> None:
    while waiters:
        waiters.popleft().wake()


class Process:
    """What is killed, paused and given the time as a whole."""

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.dead = self.paused = False
        # What would have happened during a pause.
        self.backlog: deque[Event] = deque()
        self._arrivals: list[Callable[[], object]] = []
        self._arrive_at = 0.0
        # How far the wall clock is from the right time.
        self.clock_error = 0.0
        self.threads: dict[Thread, None] = {}
        self.random = random.Random(f"{world.seed} {name} {world.now}")
        self.loop = Loop(self)

    def at(self, seconds: float, call: Callable[[], object]) -> Event:
        return self.world.at(seconds, self, call)

    def pause(self, seconds: float) -> None:
        if not (self.paused or self.dead):
            self.paused = True
            self.world.note("pause", self.name, seconds)
            self.world.at(seconds, None, self._resume)

    def _resume(self) -> None:
        self.paused = False
        while self.backlog:
            event = self.backlog.popleft()
            if event.call is not None:
                self.at(0, event.call)
        # What the system has received meanwhile is read at once, or after timers that are late.
        self._arrive_at = self.world.now + self.random.choice((0.0, 0.003))
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            self.arrive(arrival)

    def arrive(self, call: Callable[[], object]) -> None:
        """Take a message from the network."""
        if self.paused:
            self._arrivals.append(call)
        else:
            self.at(max(0.0, self._arrive_at - self.world.now), call)

    def kill(self) -> None:
        """End at once: no thread or task of the process does anything more that others could see."""
        if self.dead:
            return
        self.dead = True
        self.world.note("kill", self.name)
        for thread in list(self.threads):
            thread.end()

    def check(self) -> None:
        if self.dead:
            raise Killed


class Thread:
    """threading.Thread, of the process that makes it."""

    def __init__(self, group: None = None, target: Any = None, name: str = "", args: Any = (), *, daemon: Any = None):
        self._world = world = World.active
        assert world.process is not None
        self.process, self.name, self._call = world.process, name, partial(target, *args)
        self._greenlet = greenlet(self._run, parent=world.hub)
        self._ended = False
        self._joining: deque[Waiter] = deque()

    def start(self) -> None:
        self.process.check()
        self.process.threads[self] = None
        self.process.at(0, partial(self.switch, None))

    def is_alive(self) -> bool:
        return not self._ended

    def join(self, timeout: float | None = None) -> None:
        if not self._ended:
            self._world.park(self._joining, timeout)

    def switch(self, value: object) -> None:
        self._world.thread = self
        self._greenlet.switch(value)
        self._world.thread = None

    def end(self) -> None:
        """Unwind, in a dead process; the thread that has killed its own process unwinds by itself."""
        if self._greenlet and self._greenlet is not getcurrent():
            before = self._world.thread
            self._world.thread, self._greenlet.parent = self, getcurrent()
            self._greenlet.throw(Killed)
            self._world.thread = before

    def _run(self, _: object) -> None:
        try:
            self._call()
        except Killed:
            pass
        except BaseException as error:
            if not self.process.dead:
                self._world.fail(f"thread {self.name} of {self.process.name} ended by {error!r}")
        self._ended = True
        self.process.threads.pop(self, None)
        wake_all(self._joining)


class Lock:
    """threading.Lock and _thread.LockType."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = World.active
        if world.switch_share and world.thread is not None and world.random.random() < world.switch_share:
            world.park(None, 0)
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        until = None if timeout < 0 else world.now + timeout
        while self._held:
            left = None if until is None else until - world.now
            if (left is not None and left <= 0) or (not world.park(self._waiters, left) and self._held):
                return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        while self._waiters and not self._waiters.popleft().wake():
            continue

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Flag:
    """threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[Waiter] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        wake_all(self._waiters)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._is_set or World.active.park(self._waiters, timeout) or self._is_set


class Condition:
    """threading.Condition, of which nobody waits for the lock: no thread lets others go on while it has it."""

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        wake_all(self._waiters)

    def wait_for(self, predicate: Callable[[], object]) -> object:
        while not (result := predicate()):
            World.active.park(self._waiters)
        return result


class Queue:
    """queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters: deque[Waiter] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        while self._waiters and not self._waiters.popleft().wake():
            continue

    def get(self) -> Any:
        while not self._items:
            World.active.park(self._waiters)
        return self._items.popleft()


class Pool:
    """ThreadPoolExecutor. One of a single thread does one thing after the other."""

    def __init__(self, size: int = 0, **_: object):
        self._size, self._running = size, 0
        self._queue: deque[Callable[[], None]] = deque()
        self._closed = False
        self._waiters: deque[Waiter] = deque()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._running += 1

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(work(*arguments))
            except Exception as error:
                future.set_exception(error)
            finally:
                self._running -= 1
                wake_all(self._waiters)
                if self._queue:
                    Thread(target=self._queue.popleft(), name="kernel").start()

        if self._size == 1 and self._running > 1:
            self._queue.append(run)
        else:
            Thread(target=run, name="kernel").start()
        return future

    def shutdown(self, **_: object) -> None:
        self._closed = True
        while self._running:
            World.active.park(self._waiters)


class Loop(asyncio.BaseEventLoop):
    """A process's event loop: each callback is an event of the world."""

    def __init__(self, process: Process):
        self._process, self._world = process, process.world
        super().__init__()

    def set_debug(self, enabled: bool) -> None:
        self._debug = False

    def __del__(self) -> None:
        # Nothing is open.
        pass

    def time(self) -> float:
        return self._world.now

    def is_running(self) -> bool:
        return True

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, self, context)
        if not self._process.dead:
            self._process.at(0, partial(self._step, handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, arguments, self, context)
        self._process.at(max(0.0, when - self._world.now), partial(self._step, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *arguments, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_task(self, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coroutine, **options)
        # A killed process leaves its tasks as they are.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future((executor or Pool()).submit(work, *arguments), loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._process.dead and not isinstance(context.get("exception"), Killed):
            self._world.fail(f"{self._process.name}: {context.get('message')}: {context.get('exception')!r}")

    def _step(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            asyncio._set_running_loop(self)
            try:
                handle._run()
            finally:
                asyncio._set_running_loop(None)


def _wall_clock() -> float:
    world = World.active
    return EPOCH_SECONDS + world.now + (world.process.clock_error if world.process else 0.0)


def _sleep(seconds: float) -> None:
    World.active.park(None, seconds)


def _timer(seconds: float, call: Callable[[], object]) -> Any:
    timer = SimpleNamespace(daemon=True, _event=Event(None, None))

    def start() -> None:
        assert World.active.process is not None
        timer._event = World.active.process.at(seconds, call)

    timer.start, timer.cancel = start, lambda: timer._event.cancel()
    return timer


# In place of the modules of these names.
time = SimpleNamespace(
    monotonic=lambda: World.active.now,
    time=_wall_clock,
    time_ns=lambda: int(_wall_clock() * 1e9),
    sleep=_sleep,
)
threading = SimpleNamespace(
    Thread=Thread,
    Lock=Lock,
    Event=Flag,
    Condition=Condition,
    Timer=_timer,
    get_ident=lambda: id(World.active.thread) or 1,
)
queue = SimpleNamespace(SimpleQueue=Queue)
_thread = SimpleNamespace(allocate_lock=Lock)
