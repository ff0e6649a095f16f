"""What a history is made of, drawn from its seed: servers, workers, their steps, and faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

# Messages of a usual history, and operations of a server's disk.
MESSAGES, OPERATIONS, SECONDS = 500, 100, 12.0

KINDS = {
    # A server's process ends; its machine does; it is asked to end. It comes back after a while.
    "crash": 5,
    "power": 4,
    "stop": 2,
    # A worker's process ends; it comes back, or it does not.
    "kill": 3,
    # A connection breaks at a message: what is on its way is lost; or it still arrives, the answers do not.
    "cut": 6,
    "late": 6,
    # Nothing passes between a worker and a server for a time; all passes slowly; a message is delivered once more.
    "hold": 3,
    "slow": 2,
    "repeat": 3,
    # A process stands still; its wall clock jumps.
    "pause": 3,
    "jump": 2,
    # A server's disk has no room for some operations.
    "full": 3,
    # A number of a standby's changes in its memory.
    "flip": 3,
}
# What they meet: a message of the network by number, an operation of the server's disk, or a time.
# A server that finds no room begins again until there is.
FULL_SECONDS = 60.0

BY_DISK = ("crash", "power", "full", "pause")
BY_MESSAGE = ("crash", "power", "stop", "kill", "cut", "late", "hold", "repeat", "pause")

PROTOCOLS = ("async", "async", "hardsync", "hardsync", "softsync:n=2", "backup:b=1", "asgd:mutex=whole")


@dataclass(frozen=True)
class Fault:
    kind: str
    # A process: "server-0", "worker-1".
    target: str
    # "message", "disk" or "time", and which.
    meets: str
    place: float
    # How long it lasts.
    seconds: float
    # How long after what it meets it comes, and for some kinds the server of a link.
    delay: float = 0.0
    server: int = 0

    def __str__(self) -> str:
        where = f"{self.meets} {self.place:g}" + (f" + {self.delay:g} s" if self.delay else "")
        return f"{self.kind} {self.target} at {where}, for {self.seconds:g} s"


@dataclass(frozen=True)
class Plan:
    seed: int
    num_servers: int
    protocol: str
    checkpoint_seconds: float
    # Pushes of each worker.
    steps: tuple[int, ...]
    # How many of them bring newer parameters in the same call.
    exchange_share: float
    switch_share: float
    faults: tuple[Fault, ...]
    # How the servers end at last: by a crash, without power, or asked to.
    final: str
    # Whether each server has a standby, which follows it under another number; on the same machine, so that a refused
    # connection is an end; and whether a server is started again in the old way where its standby may have taken over.
    standby: bool = False
    near: bool = False
    unaware: bool = False

    def __str__(self) -> str:
        what = (
            f"{self.num_servers} servers, {self.protocol}, steps {self.steps}, save every {self.checkpoint_seconds} s"
        )
        if self.standby:
            what += f", standbys {'near' if self.near else 'far'}{', unaware' if self.unaware else ''}"
        return "\n  ".join([f"seed {self.seed}: {what}", *map(str, self.faults)])

    def smaller(self) -> Iterator[Plan]:
        """Yield plans with less in them, the smallest first."""
        faults, steps = self.faults, self.steps
        half = len(faults) // 2
        for kept in (faults[:half], faults[half:]) if half else ():
            yield replace(self, faults=kept)
        for place in range(len(faults)):
            yield replace(self, faults=faults[:place] + faults[place + 1 :])
        for place, count in enumerate(steps):
            if len(steps) > 1 and place == len(steps) - 1:
                yield replace(self, steps=steps[:-1])
            if count > 1:
                yield replace(self, steps=(*steps[:place], count // 2, *steps[place + 1 :]))
        if self.standby:
            yield replace(self, standby=False)
        if self.unaware:
            yield replace(self, unaware=False)
        if self.switch_share:
            yield replace(self, switch_share=0.0)
        if self.final == "power":
            yield replace(self, final="crash")

    @property
    def wait_seconds_max(self) -> float:
        """How long a call may take at the most, with all that goes wrong."""
        return 12.0 + sum(
            FULL_SECONDS if f.kind == "full" else 5.0 + f.seconds for f in self.faults if f.kind != "jump"
        )

    @property
    def spares_workers(self) -> bool:
        """Whether nothing happens to a worker or its connections."""
        return all(fault.target.startswith("server") or fault.kind in ("jump", "repeat") for fault in self.faults)


def draw(seed: int) -> Plan:
    r = random.Random(seed)
    standby = seed % 3 == 2
    num_servers, num_workers = 1 if standby else r.choice((1, 1, 2)), r.choice((1, 2, 2, 3))
    protocol = r.choice(PROTOCOLS if num_servers == 1 else PROTOCOLS[:-1])
    return Plan(
        seed=seed,
        num_servers=num_servers,
        protocol=protocol,
        checkpoint_seconds=r.choice((0.3, 1.0, 3.0)),
        steps=tuple(r.randint(3, 10) for _ in range(num_workers)),
        exchange_share=r.choice((0.0, 0.5, 1.0)),
        switch_share=r.choice((0.0, 0.02)),
        faults=_faults(r, num_servers, num_workers, standby=standby),
        final=r.choice(("crash", "power", "stop")),
        standby=standby,
        near=r.random() < 0.5,
        unaware=r.random() < 0.3,
    )


def _faults(r: random.Random, num_servers: int, num_workers: int, *, standby: bool) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(r.choice((0, 1, 1, 2, 2, 3, 4))):
        fault = _fault(r, num_servers, num_workers, standby=standby)
        if faults and r.random() < 0.5 and faults[-1].meets == "message" and fault.kind in BY_MESSAGE:
            # Soon after the one before, which is not over yet.
            fault = replace(fault, meets="message", place=faults[-1].place + r.randint(0, 12))
        faults.append(fault)
    return tuple(faults)


def _fault(r: random.Random, num_servers: int, num_workers: int, *, standby: bool) -> Fault:
    kinds = KINDS if standby else dict(list(KINDS.items())[:-1])
    kind = r.choices(list(kinds), kinds.values())[0]
    places = num_servers * (2 if standby else 1)
    server, worker = r.randrange(places), f"worker-{r.randrange(num_workers)}"
    between = standby and kind in ("hold", "slow") and r.random() < 0.6
    if kind == "flip":
        server = r.randrange(num_servers, places)
    of_server = (
        between
        or kind == "flip"
        or kind in ("crash", "power", "stop", "full")
        or (kind in ("pause", "jump") and r.random() < 0.6)
    )
    meets = [name for name, kinds in (("message", BY_MESSAGE), ("disk", BY_DISK)) if kind in kinds]
    if not of_server and "disk" in meets:
        meets.remove("disk")
    met = r.choice([*meets, "time"]) if kind not in ("cut", "late", "repeat") else "message"
    place = {
        "message": r.randint(1, MESSAGES),
        "disk": r.randint(1, OPERATIONS),
        "time": round(r.uniform(0.0, SECONDS), 3),
    }[met]
    seconds = {"late": r.uniform(0.01, 3.0), "jump": r.choice((-20_000.0, -30.0, 30.0, 20_000.0))}.get(
        kind, r.choice((0.05, 0.5, 2.0, 6.0, 15.0))
    )
    return Fault(
        kind,
        f"server-{server}" if of_server else worker,
        met,
        place,
        round(seconds, 3),
        delay=r.choice((0.0, 0.001, 0.01, 0.1)) if met == "message" else 0.0,
        server=(server + num_servers) % places if between else server,
    )
