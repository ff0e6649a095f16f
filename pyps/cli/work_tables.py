"""How far the workers are with the data set, as `pyps status` shows it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pyps_wire import work_pb2 as wire


def work_tables(work: wire.WorkProgress) -> Iterator[Table]:
    """The pass as a whole, and each worker's part in it; nothing where server 0 hands out no data set."""
    if not work.HasField("data"):
        return
    table = Table(title="work", show_header=False)
    for name, fact in _facts(work).items():
        if fact:
            table.add_row(name, harmless(fact))
    yield table
    if work.workers:
        yield _workers_table(work)


def harmless(words: str) -> Text:
    """The words without what a terminal, or rich, would take for a command: others chose the names in them."""
    return Text("".join(character if character.isprintable() else "?" for character in words))


def _facts(work: wire.WorkProgress) -> dict[str, str]:
    """What is told of the work, by the name of its row; "" where there is nothing to tell."""
    return {
        "data set": f"{work.data.name or 'unnamed'}, {work.data.num_examples:,} examples",
        "pass": _pass_in_words(work),
        "portions": f"{work.done:,} of {work.num_portions:,} done, {work.running:,} running, {work.pending:,} pending",
        "ahead": f"{work.ahead:,} done of later passes" if work.ahead else "",
        "backup copies": f"{work.copies:,}, {work.stolen:,} of them finished first" if work.copies else "",
        "lost": f"{work.lost:,} leases of portions that went to others" if work.lost else "",
        "thrown away": f"{work.wasted:,} results" if work.wasted else "",
        "coordinator": ", ".join(f"{name} {value:.4g}" for name, value in sorted(work.scalars.items())),
    }


def _pass_in_words(work: wire.WorkProgress) -> str:
    number = getattr(work, "pass")  # A keyword of Python's.
    standing = "the work has ended" if work.ended else f"{work.passes_done:,} done"
    return f"{number:,} ({standing})"


def _workers_table(work: wire.WorkProgress) -> Table:
    table = Table(title="portions of this pass")
    table.add_column("worker")
    for name in ("done", "running", "examples/s"):
        table.add_column(name, justify="right")
    for worker in work.workers:
        speed = f"{worker.examples_per_second:,.3g}" if worker.examples_per_second else "not known yet"
        table.add_row(harmless(worker.worker_id), f"{worker.done:,}", f"{worker.running:,}", speed)
    return table
