"""Rounds per second over a network: worker and server in two network namespaces, joined by a link of a chosen speed.

    python benchmarks/link.py [--peers FOLDER] [--rates 1gbit,10gbit] [--repeats 3] [--quick]      (as root)

The link is full duplex: a token bucket limits each direction for itself (`network.py`). Its speed is checked with
plain TCP streams first. One worker and the big model, since the link is what counts; otherwise as rounds.py. What is
shown beside the speed is how much of the link a round uses: a round that pushes and pulls at the same time needs its
bytes one way only, so a float32 round of 102.4 MB takes 0.82 s of a gigabit at best.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from functools import partial
from pathlib import Path

import peers
import trial
from measure import exit_on_sigterm, machine, spread, write_results
from network import Link, unavailable
from rich.console import Console
from rich.table import Table
from rounds import Row, Subject, interleaved, of_subject
from work import BIG, Size

RATES = "1gbit,10gbit"
ROUNDS = {"1gbit": 5, "10gbit": 10}


def main() -> int:
    options = arguments()
    console = Console(width=150)
    exit_on_sigterm()
    print(machine(), flush=True)
    if reason := unavailable():
        console.print(f"link: skipped, {reason}")
        write_results(options.json, [], skipped=reason)
        return 0
    found, left_out = peers.available(options.peers, over_link=True)
    for name, why in left_out.items():
        console.print(f"{name} is left out: {why}", highlight=False)
    rows: list[Row] = []
    links: dict[str, dict[str, float]] = {}
    for rate in options.rates.split(","):
        size = Size(BIG.name, BIG.params, BIG.keys, rounds=3 if options.quick else ROUNDS.get(rate, 10), warmup=1)
        with Link(rate) as link:
            links[rate] = link.tcp_gbit()
            console.print(f"{rate}: plain TCP, Gbit/s: " + ", ".join(f"{k} {v:.2f}" for k, v in links[rate].items()))
            chosen = subjects(options.peers, found, link)
            measured = interleaved(chosen, size, 1, 1 if options.quick else options.repeats)
        console.print(table(rate, measured, links[rate]["to server"]))
        rows += [{"rate": rate} | {name: row[name] for name in row if name != "versions"} for row in measured]
        write_results(options.json, rows, left_out=left_out, quick=options.quick, plain_tcp_gbit=links)
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    parser.add_argument("--rates", default=RATES, help="speeds of the link, as `tc` writes them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="each subject once, for three rounds")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def subjects(folder: Path | None, found: list[peers.Peer], link: Link) -> dict[str, Subject]:
    """What goes over the link, by name."""
    chosen: dict[str, Subject] = {}
    for variant in (trial.GRPC, trial.GRPC_BFLOAT16):
        chosen[variant.name] = partial(trial.run, variant, link=link)
    if folder is not None:
        for peer in found:
            chosen[peer.name] = partial(peers.run, folder, peer, link=link)
    return chosen


def table(rate: str, rows: list[Row], plain_gbit: float) -> Table:
    """One row a subject, beside the fastest peer, and the share of the link's one-way capacity that the rounds use."""
    drawn = Table(title=f"{rate} each way: {BIG.params:,} parameters, 1 worker", title_justify="left")
    drawn.add_column("")
    for heading in ("x fastest peer", "rounds/s", "p50 ms", "float32 bytes one way, of plain TCP", "checked"):
        drawn.add_column(heading, justify="right")
    names = list(dict.fromkeys(row["subject"] for row in rows))
    speeds = {name: statistics.median(v) for name in names if (v := of_subject(rows, name, "rounds_per_s"))}
    fastest = max((speed for name, speed in speeds.items() if not name.startswith("pyps")), default=None)
    for name in names:
        speed = speeds.get(name)
        ok = all(row.get("verified") for row in rows if row["subject"] == name)
        drawn.add_row(
            name,
            f"{speed / fastest:.2f}" if speed and fastest else "–",
            spread(of_subject(rows, name, "rounds_per_s"), 2),
            spread(of_subject(rows, name, "p50_ms"), 0),
            f"{speed * BIG.nbytes * 8 / 1e9 / plain_gbit:.2f}" if speed else "–",
            "yes" if ok else "NO",
        )
    return drawn


if __name__ == "__main__":
    sys.exit(main())
