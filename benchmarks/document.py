"""Makes docs/performance.md and choose.md: the words are those of their templates, the figures those of the results.

    python benchmarks/document.py docs/performance.json --into docs
    python benchmarks/document.py docs/robustness.json --into docs

The second makes docs/robustness.md; `make robustness` measures what it needs, and gives it a folder of results.
In the template {{name}} stands for a figure, a table or a picture, each a function here. What was not measured is said
to be missing, so that a document of a few benchmarks is made too. The figures in docs/migrate.md stand between a
comment with their name and one that ends them, and are written again there.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import figures
import pictures
import rounds
import targets
from figures import ALONE, Results
from measure import spread

# The pages of each file of results, which are kept beside them.
PAGES = {"performance": ("performance", "choose", "slow-links"), "robustness": ("robustness",)}
# What a complete document has the results of.
BENCHMARKS = ("rounds", "link", "overlap", "training", "kernel", "load", "gpu", "huge", "few_bits", "local_training")
# Whom the page that helps to choose compares in training.
COMPARED = (
    ALONE,
    "DDP gloo",
    "DDP gloo, float16",
    "DDP gloo, PowerSGD rank 4",
    "torchft",
    "Hivemind",
    "torch RPC hardsync",
    "torch RPC async",
    "pyps hardsync",
    "pyps hardsync, overlapped in backward, bfloat16",
    "pyps hardsync, overlapped in backward, int4",
    "pyps local training, H = 8",
    "pyps async",
    "pyps async, overlapped, bfloat16",
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_RENEWED = re.compile(r"(?<=<!-- )(against_\w+) -->\n.*?(?=<!-- end -->)", re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON that bench.py wrote")
    parser.add_argument("--into", type=Path, default=Path("docs"), help="folder of the document")
    options = parser.parse_args()
    given = options.results
    if given.is_dir():
        results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(given.glob("*.json"))}
    else:
        results = json.loads(given.read_text(encoding="utf-8"))
    write(results, options.into)
    kept = options.into / f"{_of(results)}.json"
    kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if _of(results) == "performance" and (page := options.into / "migrate.md").exists():
        page.write_text(renewed(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def _of(results: Results) -> str:
    """Which pages the results are for."""
    return "robustness" if results.keys() & {"faults", "soak"} else "performance"


def write(results: Results, folder: Path) -> None:
    """Writes the pages and their pictures."""
    drawn = pictures.draw_all(results, folder / "images")

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("picture_"):
            file = drawn.get(name.removeprefix("picture_"))
            return f"![{name.removeprefix('picture_').replace('_', ' ')}](images/{file})" if file else ""
        return PIECES[name](results)

    for name in PAGES[_of(results)]:
        template = Path(__file__).with_name(f"{name}_template.md")
        text = _PLACE.sub(put, template.read_text(encoding="utf-8"))
        page = folder / f"{name}.md"
        page.write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")


def renewed(page: str, results: Results) -> str:
    """The page with the figures of these results between its comments."""

    def piece(match: re.Match[str]) -> str:
        sentences = PIECES[match[1]](results)
        return f"{match[1]} -->\n{_wrapped(sentences)}\n"

    return _RENEWED.sub(piece, page)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, width=160, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def machine(results: Results) -> str:
    """The machine and the versions, which all benchmarks of one run share."""
    machines = dict.fromkeys(result["machine"] for result in results.values() if "machine" in result)
    dates = sorted({result["date"] for result in results.values() if "date" in result})
    lines = [f"* {text}" for text in machines]
    versions: dict[str, dict[str, str]] = {}
    for result in results.values():
        versions |= result.get("peer_versions", {})
    if versions:
        reported = "; ".join(f"{name}: {', '.join(f'{k} {v}' for k, v in of.items())}" for name, of in versions.items())
        lines.append(_wrapped(f"* Peers: {reported}", indent="  "))
    if runs := _runs(results):
        lines.append(f"* Runs of a cell: {runs}")
    if dates:
        short = [name for name, result in results.items() if result.get("quick")]
        note = f"; the short form of {', '.join(short)}, a first impression only" if short else ""
        lines.append(f"* Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}{note}")
    return "\n".join(lines)


def _runs(results: Results) -> str:
    """How many runs a cell is the median of, by benchmark."""
    counts = {}
    for name in ("rounds", "link", "overlap", "training", "few_bits"):
        cells = Counter(
            (row["subject"], *(row.get(key) for key in ("size", "workers", "rate", "slowed")))
            for row in figures.rows(results, name)
        )
        if cells:
            counts[name] = sorted(set(cells.values()))
    return ", ".join(f"{name} {' to '.join(map(str, (of[0], of[-1])[: len(of)]))}" for name, of in counts.items())


def target_table(results: Results) -> str:
    rows = []
    for target in targets.targets(results):
        verdict = {True: "yes", False: "**no**", None: "–"}[target.met]
        rows.append((target.what, target.wanted, target.measured, verdict))
    return _table(("what, compared with what", "target", "measured", "met"), rows, left=4)


def rounds_tables(results: Results) -> str:
    found = figures.rows(results, "rounds")
    if not found:
        return _missing(results, "rounds")
    parts = []
    for _, size, workers in sorted({(row["params"], row["size"], row["workers"]) for row in found}):
        parts.append(f"**{pictures.SIZES[size]}, {workers} worker{'s' if workers > 1 else ''}**")
        parts.append(_rounds_table([row for row in found if (row["size"], row["workers"]) == (size, workers)], size))
    return "\n\n".join(parts)


def _rounds_table(found: list[figures.Row], size: str) -> str:
    reference = figures.fastest(found, figures.is_torch_rpc)
    rows = []
    for subject in figures.subjects(found):
        speed = figures.median(found, subject)
        rows.append(
            (
                subject,
                spread(figures.values(found, subject), 0 if size == "small" else 1),
                f"{speed / reference[1]:.2f}" if speed and reference else "–",
                *(
                    spread(figures.values(found, subject, column), digits)
                    for column, digits in (
                        ("p50_ms", 2),
                        ("p99_ms", 2),
                        ("server_cpu_s_per_gb", 2),
                        ("worker_cpu_s_per_gb", 2),
                        ("server_peak_mb", 0),
                    )
                ),
                "yes" if all(value for value in figures.values(found, subject, "verified")) else "**no**",
            )
        )
    headings = ("", "rounds/s", "x torch RPC", "p50, ms", "p99, ms", "CPU s/GB, server", "worker", "server's peak, MB")
    return _table((*headings, "checked"), rows)


def rounds_beside(results: Results) -> str:
    """Rounds a second, a line a subject and a column a case: what the tables of each case have in detail."""
    found = figures.rows(results, "rounds")
    if not found:
        return _missing(results, "rounds")
    subjects = [figures.SHARED_MEMORY, figures.LANE, *filter(figures.is_peer, figures.subjects(found))]
    cases = sorted({(row["params"], row["size"], row["workers"]) for row in found if row["workers"] <= 2})
    rows = []
    for subject in subjects:
        speeds = [
            figures.median([row for row in found if (row["size"], row["workers"]) == case[1:]], subject)
            for case in cases
        ]
        rows.append((subject, *("–" if speed is None else f"{speed:,.{speed < 100:d}f}" for speed in speeds)))
    headings = [f"{pictures.SIZES[size]}, {workers} worker{'s' * (workers > 1)}" for _, size, workers in cases]
    return _table(("", *headings), rows)


def link_table(results: Results) -> str:
    found = figures.rows(results, "link")
    if not found:
        return _missing(results, "link")
    parts = []
    for rate in dict.fromkeys(row["rate"] for row in found):
        of_rate = [row for row in found if row["rate"] == rate]
        fastest = figures.fastest(of_rate, figures.is_peer)
        rows = []
        for subject in figures.subjects(of_rate):
            share, speed = figures.share_of_link(of_rate, subject), figures.median(of_rate, subject)
            rows.append(
                (
                    subject,
                    spread(figures.values(of_rate, subject), 2),
                    f"{speed / fastest[1]:.2f}" if speed and fastest else "–",
                    spread(figures.values(of_rate, subject, "p50_ms"), 0),
                    f"{share:.2f}" if share else "–",
                )
            )
        most = figures.median(of_rate, figures.PLAIN_TCP)
        reported = f" (plain TCP, both ways at once: {most * of_rate[0]['params'] * 32 / 1e9:.2f})" if most else ""
        parts.append(f"**{_link_name(rate)}**{reported}")
        parts.append(_table(("", "rounds/s", "x fastest peer", "p50, ms", "of the link, both ways at once"), rows))
    return "\n\n".join(parts)


def overlap_table(results: Results) -> str:
    found = figures.rows(results, "overlap")
    rows = [
        (
            name,
            spread(figures.values(found, name, "longer_s"), 2),
            *(
                spread([row[column] / row["longer_s"] for row in found if row["subject"] == name], 2)
                for column in ("off_s", "backward_s")
            ),
        )
        for name in figures.subjects(found)
    ]
    headings = (
        "",
        "the longer of a round and as much computing, s",
        'overlap="off", of that',
        'overlap="backward", of that',
    )
    return _table(headings, rows) if rows else _missing(results, "overlap")


def training_tables(results: Results, benchmark: str = "training") -> str:
    found = figures.rows(results, benchmark)
    if not found:
        return _missing(results, benchmark)
    reported = results[benchmark]
    model = f"{reported['params']:,} parameters; the loss to reach is {reported['loss']:g}"
    parts = [f"{model}; pyps by `transport={reported['transport']}`."]
    for rate, slowed in dict.fromkeys((row["rate"], row["slowed"]) for row in found):
        cells = figures.training_cells(figures.of_training_case(found, rate, slowed))
        parts += [f"**{_link_name(rate)}{_slowness(slowed)}**", _table(figures.TRAINING_HEADINGS, cells)]
    return "\n\n".join(parts)


def local_training_tables(results: Results) -> str:
    """Loss, bytes and batches of local training and its rivals, a table a case."""
    found = figures.rows(results, "local_training")
    if not found:
        return _missing(results, "local_training")
    parts = []
    for case, workers in dict.fromkeys((row["case"], row["workers"]) for row in found):
        of_case = [row for row in found if (row["case"], row["workers"]) == (case, workers)]
        parts.append(f"**{_case_name(case)}, {workers} workers, {of_case[0]['limit_s']:g} s**")
        parts.append(_table(figures.LOCAL_HEADINGS, figures.local_cells(of_case)))
    return "\n\n".join(parts)


def _case_name(case: str) -> str:
    """The words for a case of local_training.py."""
    link, _, last = case.partition(":")
    rate, _, delay = link.partition("+")
    slow = {"": "", "killed": ", the last worker killed each minute"}.get(
        last, f", the last worker {last} times as slow"
    )
    return _link_name(rate) + (f", {delay.removesuffix('ms')} ms there and back" if delay else "") + slow


def training_beside(results: Results, benchmark: str = "training") -> str:
    """The figures of each link and slowness for a choice: samples a second, and seconds to the stated loss."""
    found = figures.rows(results, benchmark)
    if not found:
        return _missing(results, benchmark)
    cases = _training_cases(found)
    headings = ["", *(f"{_link_name(rate)}{_slowness(slowed)}" for rate, slowed in cases)]
    rows = [(name, *(_trained(found, name, *case) for case in cases)) for name in COMPARED]
    return _table(headings, [row for row in rows if any(row[1:])])


def against_hivemind(results: Results) -> str:
    """The same where workers are alike, in a sentence."""
    parts, found = [], figures.rows(results, "training")
    for rate, slowed in _training_cases(found):
        if slowed == 1 and _trained(found, "Hivemind", rate, slowed):
            both = (f"{name} {_trained(found, name, rate, slowed)}" for name in ("Hivemind", "pyps hardsync"))
            parts.append(f"{'; '.join(both)} over {_link_name(rate)}")
    reported = "; ".join(parts) or "not measured in this run"
    return (
        "Samples a second, and the time to a stated loss, of a transformer of 25 million parameters with two workers: "
        f"{reported} ([what was trained](performance.md#training-end-to-end))."
    )


def _training_cases(found: Iterable[figures.Row]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row["rate"], row["slowed"]) for row in found if row["subject"] != ALONE))


def _trained(found: list[figures.Row], name: str, rate: str, slowed: float) -> str:
    of_case = figures.of_training_case(found, rate, slowed)
    speed, seconds = (figures.median(of_case, name, column) for column in ("samples_per_s", "seconds_to_loss"))
    if not speed:
        return ""
    limit = figures.median(of_case, name, "limit_s")
    return f"{speed:.1f}, " + (f"{seconds:.1f} s" if seconds else f"not in {limit:g} s")


def _slowness(slowed: float) -> str:
    return "" if slowed == 1 else f", the second worker {slowed:g} times as slow"


def _link_name(rate: str) -> str:
    unit = {"gbit": "Gbit/s", "mbit": "Mbit/s"}.get(rate[-4:])
    return f"{rate[:-4]} {unit} each way" if unit else rate


def rounds_told(results: Results, is_peer: Callable[[str], bool]) -> str:
    """Rounds of the big model by one worker next to the fastest of those peers: on one machine, and over each link."""
    places = {"on one machine": figures.rows(results, "rounds", size="big", workers=1)}
    for row in figures.rows(results, "link"):
        places[f"over {_link_name(row['rate'])}"] = figures.rows(results, "link", rate=row["rate"])
    parts = []
    for place, found in places.items():
        if peer := figures.fastest(found, is_peer):
            ours = [(name, figures.median(found, name)) for name in (figures.SHARED_MEMORY, figures.LANE)]
            speeds = [f"{name} {speed:.{1 + (speed < 10)}f}" for name, speed in (*ours, peer) if speed]
            parts.append(f"{', '.join(speeds)} {place}")
    reported = "; ".join(parts) or "not measured in this run"
    return f"Rounds a second of 25.6 million parameters by one worker: {reported} ([what a round is](performance.md))."


def load_table(results: Results) -> str:
    found = figures.rows(results, "load")
    columns = {
        "workers": ("workers", 0),
        "updates/s": ("updates_per_s", 0),
        "p50, ms": ("p50_ms", 2),
        "p99, ms": ("p99_ms", 2),
        "slowest worker's rounds, of the mean": ("slowest_of_mean", 2),
        "cores the server used": ("server_cores", 2),
        "its peak memory, MB": ("server_peak_mb", 0),
        "its threads": ("server_threads", 0),
    }
    rows = [
        (row["subject"], *(f"{row[name]:,.{digits}f}" for name, digits in columns.values()))
        for row in sorted(found, key=lambda row: (row["subject"] != figures.SHARED_MEMORY, row["workers"]))
    ]
    return _table(("", *columns), rows) if rows else _missing(results, "load")


def huge_sentence(results: Results) -> str:
    found = figures.rows(results, "huge")
    if not found:
        return _missing(results, "huge")
    row, gigabytes = found[0], found[0]["params"] * 4 / 1e9
    right = (
        "every parameter ended where it should" if row["verified"] else "**not every parameter ended where it should**"
    )
    return (
        f"{row['params']:,} parameters, {gigabytes:.1f} GB: joined in {row['join_s']:.1f} s, one step in "
        f"{row['step_s']:.1f} s ({2 * gigabytes / row['step_s']:.2f} GB/s, both ways together), {right}. Peak memory: "
        f"{row['server_peak_mb'] / 1e3:.1f} GB in the server, {row['worker_peak_mb'] / 1e3:.1f} GB in the worker."
    )


def gpu_table(results: Results) -> str:
    found = figures.rows(results, "gpu")
    if not found:
        return _missing(results, "gpu")
    parts = [f"On one {results['gpu']['device']}:"]
    for size in dict.fromkeys(row["size"] for row in found):
        of_size = [row for row in found if row["size"] == size]
        rows = []
        for subject in figures.subjects(of_size):
            plain = figures.median(
                of_size, f"plain copy, {'bfloat16' if 'bfloat16' in subject else 'float32'}", "p50_ms"
            )
            own = figures.median(of_size, subject, "p50_ms")
            times = f"{own / plain:.2f}" if own and plain else "–"
            rows.append(
                (subject, *(spread(figures.values(of_size, subject, c), 2) for c in ("p50_ms", "p99_ms")), times)
            )
        parts.append(f"**{pictures.SIZES[size]}**")
        parts.append(_table(("", "p50, ms", "p99, ms", "x plain copy of that type"), rows))
    return "\n\n".join(parts)


def faults_table(results: Results) -> str:
    """What each fault cost each protocol, a line a run."""
    found = [row for row in figures.rows(results, "faults") if "accuracy" not in row]
    rows = []
    for fault in dict.fromkeys(row["fault"] for row in found):
        for row in (row for row in found if row["fault"] == fault):
            seconds = [row["noticed_s"], row["still_s"] or None, row["again_s"] or None]
            counted = row["protocol"] != "sandblaster"
            counts = [f"{row[name]:,}" if counted else "–" for name in ("acknowledged", "lost", "applied_twice")]
            end = "all train" if row["goes_on"] else "**not all train**"
            cells = ["–" if one is None else f"{one:.1f}" for one in seconds]
            rows.append((fault, f"`{row['protocol']}`", *cells, *counts, end))
    headings = ("fault", "protocol", "noticed, s", "longest step of others, s", "all are back, s")
    return _table((*headings, "acknowledged", "lost", "twice", "end"), rows, left=2) if rows else "*Not measured.*"


def digits_table(results: Results) -> str:
    """What the digits came to while everybody was killed, a line a run."""
    rows = [
        (
            f"{'a standby each' if 'followed' in row['fault'] else 'checkpoints alone'}",
            "portions" if "portions" in row["fault"] else "its own part",
            f"`{row['protocol']}`",
            f"{row['accuracy']:.3f}",
            *(f"{row[name]:,}" for name in ("acknowledged", "lost", "applied_twice")),
            f"{row['still_s']:.1f}",
        )
        for row in figures.rows(results, "faults")
        if "accuracy" in row
    ]
    headings = ("servers have", "a worker trains on", "protocol", "accuracy", "acknowledged", "lost", "twice")
    return _table((*headings, "longest step, s"), rows, left=3) if rows else "*Not measured.*"


def same_bits_sentence(results: Results) -> str:
    """Whether Sandblaster came to one result, whatever was done to it but for a server that lost iterations."""
    found = [row for row in figures.rows(results, "faults", protocol="sandblaster") if "crcs" in row]
    found = [row for row in found if not row["fault"].startswith("kill -9 server")]
    num = len({crc for row in found for crc in row["crcs"]})
    how = "to the same bits" if num == 1 else f"to **{num} results**"
    return f"The {len(found)} runs of Sandblaster in which no server was killed came {how}."


def soak_sentence(results: Results) -> str:
    """What a soak did, and what servers held early and late in it."""
    if not (of := results.get("soak", {})):
        return "*Not measured.*"
    ended = ", ".join(f"{count} {how}" for how, count in of["ended"].items())
    names = {"memory_mb": "memory (MB)", "descriptors": "descriptors", "threads": "threads"}
    held = "; ".join(f"{names[what]} {early:.0f} and {late:.0f}" for what, (early, late) in of["summary"].items())
    return _wrapped(
        f"{of['lives']} lives of workers in {of['minutes']:g} minutes ({ended}), {of['workers']} at once; "
        f"{len(of['failed'])} ended otherwise than they should, {len(of['said'])} lines told of an error. Medians of a "
        f"server after the first minutes and at the end: {held}."
    )


def kernel_text(results: Results) -> str:
    text = results.get("kernel", {}).get("text")
    return f"```\n{text.rstrip()}\n```" if text else _missing(results, "kernel")


def ps_lite_table(results: Results) -> str:
    rows = []
    for (size, workers), (lite, torch_rpc) in figures.PS_LITE.items():
        here = figures.ps_lite(figures.rows(results, "rounds", size=size, workers=workers), size, workers)
        would_be = f"{here:,.{0 if here >= 100 else 1}f}" if here is not None else "–"
        rows.append((pictures.SIZES[size], str(workers), f"{lite:,g}", f"{lite / torch_rpc:.2f}", would_be))
    headings = ("", "workers", "ps-lite, rounds/s, recorded", "x torch RPC there", "so much of torch RPC here")
    return _table(headings, rows)


def left_out(results: Results) -> str:
    """What was not measured, and why, by name."""
    absent = [f"* {name}: not run." for name in BENCHMARKS if name not in results]
    absent += [f"* rounds, {case}: not run." for case in _absent_cases(results)]
    skipped = [f"* {name}: {result['skipped']}." for name, result in results.items() if "skipped" in result]
    reported = dict.fromkeys(
        f"* {benchmark}, {name}: {reason}."
        for benchmark, result in results.items()
        for name, reason in result.get("left_out", {}).items()
    )
    failed = dict.fromkeys(
        f"* {benchmark}, {row['subject']} failed: {_reason(row['error'])[:200]}"
        for benchmark, result in results.items()
        for row in result.get("rows", [])
        if "error" in row
    )
    return "\n".join([*absent, *skipped, *reported, *failed]) or "* Nothing."


def _reason(error: str) -> str:
    """Its last line but for where it was, which is indented."""
    return [line for line in error.splitlines() if line and not line.startswith(" ")][-1]


def _absent_cases(results: Results) -> list[str]:
    """Sizes and numbers of workers that rounds.py did not come to."""
    found = {(row["size"], row["workers"]) for row in results.get("rounds", {}).get("rows", [])}
    missing = [case for case in rounds.CASES if found and (case.size, case.workers) not in found]
    return [f"{pictures.SIZES[case.size]}, {case.workers} worker{'s' * (case.workers > 1)}" for case in missing]


def _missing(results: Results, benchmark: str) -> str:
    reason = results.get(benchmark, {}).get("skipped")
    return f"*Not measured: {reason}.*" if reason else f"*Not measured in this run (`make bench BENCH={benchmark}`).*"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are text."""
    lines = [headings, ["---" if index < left else "--:" for index in range(len(headings))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PIECES: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "target_table": target_table,
    "rounds_tables": rounds_tables,
    "rounds_beside": rounds_beside,
    "link_table": link_table,
    "overlap_table": overlap_table,
    "training_tables": training_tables,
    "training_beside": training_beside,
    "few_bits_tables": partial(training_tables, benchmark="few_bits"),
    "few_bits_beside": partial(training_beside, benchmark="few_bits"),
    "local_training_tables": local_training_tables,
    "against_torch_rpc": partial(rounds_told, is_peer=figures.is_torch_rpc),
    "against_hivemind": against_hivemind,
    "against_tensorflow": partial(rounds_told, is_peer=lambda name: name.startswith("TensorFlow")),
    "load_table": load_table,
    "huge_sentence": huge_sentence,
    "gpu_table": gpu_table,
    "kernel_text": kernel_text,
    "faults_table": faults_table,
    "digits_table": digits_table,
    "same_bits_sentence": same_bits_sentence,
    "soak_sentence": soak_sentence,
    "ps_lite_table": ps_lite_table,
    "left_out": left_out,
}


if __name__ == "__main__":
    main()
