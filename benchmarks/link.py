"""Rounds per second over a network: worker and server in two network namespaces, joined by a link of a chosen speed.

    python benchmarks/link.py [--peers FOLDER] [--rates 1gbit,10gbit] [--repeats 2] [--quick]      (as root)

The link is full duplex: a token bucket limits each direction for itself (`network.py`). One worker and the big model,
since the link is what counts; otherwise as rounds.py. A subject among the others is plain TCP, a stream each way at
once: what the link allows; each speed is shown with the share of that which a round uses. A round that pushes and
pulls at the same time needs its bytes one way only, so a float32 round of 102.4 MB takes 0.82 s of a gigabit at best.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import figures
import peers
import trial
from measure import exit_on_sigterm, machine, spread, write_results
from network import Link, unavailable
from rich.console import Console
from rich.table import Table
from rounds import Row, Subject, in_turn
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
    for turn in range(1 if options.quick else options.repeats):
        for rate in options.rates.split(","):
            size = replace(BIG, rounds=3 if options.quick else ROUNDS.get(rate, 10), warmup=1)
            with Link(rate) as link:
                for row in in_turn(subjects(options.peers, found, link), size, 1, turn):
                    row.pop("versions", None)
                    rows.append({"rate": rate} | row)
                    write_results(options.json, rows, left_out=left_out, quick=options.quick)
            console.print(table(rate, [row for row in rows if row["rate"] == rate]))
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    parser.add_argument("--rates", default=RATES, help="speeds of the link, as `tc` writes them")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="each subject once, for three rounds")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def subjects(folder: Path | None, found: list[peers.Peer], link: Link) -> dict[str, Subject]:
    """What goes over the link, by name."""
    chosen: dict[str, Subject] = {figures.PLAIN_TCP: partial(plain_tcp, link)}
    for variant in (trial.LANE, trial.LANE_BFLOAT16, trial.LANE_INT4, trial.GRPC):
        chosen[variant.name] = partial(trial.run, variant, link=link)
    if folder is not None:
        for peer in found:
            chosen[peer.name] = partial(peers.run, folder, peer, link=link)
    return chosen


def plain_tcp(link: Link, size: Size, num_workers: int) -> Row:
    """The rounds that bytes alone would make."""
    return {"rounds_per_s": link.tcp_gbit() * 1e9 / 8 / size.nbytes, "verified": True}


def table(rate: str, rows: list[Row]) -> Table:
    """One row a subject, with the fastest peer, and the share of the link that its rounds use."""
    drawn = Table(title=f"{rate} each way: {BIG.params:,} parameters, 1 worker", title_justify="left")
    drawn.add_column("")
    for heading in ("x fastest peer", "rounds/s", "p50 ms", "of the link, both ways at once", "checked"):
        drawn.add_column(heading, justify="right")
    fastest = figures.fastest(rows, figures.is_peer)
    for name in dict.fromkeys(row["subject"] for row in rows):
        speed, share = figures.median(rows, name), figures.share_of_link(rows, name)
        drawn.add_row(
            name,
            f"{speed / fastest[1]:.2f}" if speed and fastest else "–",
            spread(figures.values(rows, name), 2),
            spread(figures.values(rows, name, "p50_ms"), 0),
            f"{share:.2f}" if share else "–",
            "yes" if all(row.get("verified") for row in rows if row["subject"] == name) else "NO",
        )
    return drawn


if __name__ == "__main__":
    sys.exit(main())
