"""The README and the pages say what is there: scripts, commands, targets and links; and what they show does run."""

import itertools
import json
import re
import shlex
from statistics import median

import pytest
from google.protobuf import json_format, message_factory
from typer.testing import CliRunner

from pyps.cli.main import COMMANDS, app
from pyps.core import protocols
from pyps.core.protocols import PROTOCOLS
from pyps.core.rules import RULES
from pyps.core.staleness import POLICIES
from pyps_wire import inspector_pb2
from shards import make_run
from support import ROOT, PythonProcess, inspect, parse_flags

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
FIRST_TRY, WORKER = re.findall(r"^```python\n(.*?)^```", PAGES["quickstart"], re.M | re.S)
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGE = PAGES["model-parallel"]
MEASURED = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))


def shown_in(*texts: str) -> str:
    return "".join("".join(text.split("```")[1::2]) for text in texts)


# Jobs that end by themselves, by their scripts.
OF_JOBS = shown_in(README, *(PAGES[name] for name in ("quickstart", "portions", "sandblaster", "model-parallel")))
JOBS = {name: job for job, name in re.findall(r"^(pyps (?:run|sandblaster) .*examples/(\w+)\.py.*)", OF_JOBS, re.M)}
# What each says on its way and at its end, in its own lines and the launcher's.
ENDINGS = {
    "minimal": r"worker-3 +\| epoch 19, update \d+: loss 0\.[0-2]",
    "char_lm": r"bits",
    # Ten portions a worker.
    "sandblaster_digits": r"  portions 40 \((?s:.*)worker-0 +\| .*held-out error [0-5]\.\d+ %",
    "model_parallel": r"replica-1 finished",
}


def test_the_first_try_trains_with_nothing_else_running(capsys):
    exec(FIRST_TRY, {})

    [(update, loss)] = re.findall(r"^update (\d+): loss (\d\.\d+)$", capsys.readouterr().out, re.M)
    assert update == "100"
    assert float(loss) < 0.01


def test_the_worker_script_is_the_example():
    example = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")

    assert example == WORKER
    for page in (README, PAGES["quickstart"]):
        assert f"```python\n{example}```" in page
        assert f"## A worker in {sum(map(bool, example.splitlines()))} lines\n" in page


def test_the_worker_script_trains_as_it_stands(start_server, start_python):
    server = start_server()
    worker = start_python(str(ROOT / "examples" / "minimal.py"), env={"PYPS_SERVERS": server.data})

    assert worker.wait() == 0, worker.output()
    epochs = re.findall(r"^epoch (\d+), update (\d+): loss (\d+\.\d+)$", worker.output(), re.M)
    # 1,797 images in whole minibatches of 32.
    assert [(int(epoch), int(update)) for epoch, update, _ in epochs] == [(n, 56 * (n + 1)) for n in range(20)]
    # That of one minibatch each, from a start that differs each time.
    assert min(float(loss) for *_, loss in epochs[-5:]) < 0.1 < float(epochs[0][2])
    assert inspect(server.control, "GetStatus").version_max == 56 * 20


@pytest.mark.extended
@pytest.mark.parametrize("script", ENDINGS)
def test_a_job_shown_runs_to_its_end_as_it_is_shown(tmp_path, script):
    assert JOBS.keys() == ENDINGS.keys(), "a job that nobody runs"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command, *arguments = shlex.split(JOBS[script])
    with PythonProcess("-m", command, *arguments, cwd=tmp_path) as job:
        assert job.wait(250) == 0
        assert re.search(ENDINGS[script], job.output())
    assert all((tmp_path / name).exists() for name in arguments if name.endswith(".png"))


def test_every_command_exists_with_the_flags_shown():
    shown = re.findall(r"^(?:\w+=\S+ )*pyps (\w+)(.*)$", shown_in(README, *PAGES.values()), re.M)
    assert {"run", "serve", "eval", "export"} <= {command for command, _ in shown}
    for command, rest in shown:
        assert command in COMMANDS
        below = rest.split()[:1] if command in ("certs", "checkpoint") else []
        options = CliRunner().invoke(app, [command, *below, "--help"], env={"COLUMNS": "200"}).output
        # What stands in quotes is for another program.
        for flag in re.findall(r"--[a-z-]+", re.sub(r"'[^']*'", "", rest).split(" -- ")[0].split("#")[0]):
            assert flag in options, f"pyps {command} has no {flag}"


def table_of(flag: str, page: str) -> list[list[str]]:
    [rows] = re.findall(rf"^\| `{flag}` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def codes_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_a_server_takes_every_protocol_of_the_table_with_its_settings_and_has_no_other():
    shown = set()
    for cell, *others in table_of("--protocol", PAGES["protocols"]):
        names = codes_in(cell)
        # "`strict_bsp=true` with s = 0".
        needed = "".join(f"{key}={value}," for key, value in re.findall(r"with (\w) = (\d)", others[-1]))
        settings = [text.replace("=K", "=4") for text in codes_in(others[-1]) if "=" in text]
        for text in [*names, *(f"{names[0].split(':')[0]}:{needed}{setting}" for setting in settings)]:
            make_run(protocol=text)
            shown.add(protocols.parse(text).name)
    assert shown == set(PROTOCOLS)
    assert {codes_in(cell)[0].split(":")[0] for cell, *_ in table_of("--protocol", README)} == shown


def test_a_server_takes_every_staleness_policy_of_the_table_and_has_no_other():
    shown = [text for cell, _ in table_of("--staleness", PAGES["protocols"]) for text in codes_in(cell)]
    for text in shown:
        make_run(staleness=text)
    assert {text.split(":")[0] for text in shown} == set(POLICIES)


def test_a_server_has_every_optimizer_of_the_table_with_its_settings_and_no_other():
    shown = {
        rule: codes_in(settings)
        for cell, settings, _ in table_of("--optimizer", PAGES["schedules"])
        for rule in codes_in(cell)
    }
    assert shown.keys() == RULES.keys()
    for rule, settings in shown.items():
        make_run(optimizer=f"{rule}:learning_rate=0.1")
        assert {"learning_rate", *settings} == set(RULES[rule].settings), rule


def test_a_server_takes_every_further_choice_as_it_is_written():
    pages = ("schedules", "protocols", "change")
    of_schedules, *others = (codes_in(re.sub(r"^```.*?^```", "", PAGES[name], flags=re.M | re.S)) for name in pages)
    codes = [*of_schedules, *itertools.chain(*others)]
    flags = [shlex.split(text) for text in codes if re.match(r"--[a-z-]+ [^A-Z]+$", text)]
    flags += [["--schedule", *shlex.split(text)] for text in of_schedules if re.match(r"'?\w+:\S+=", text)]
    assert {flag for flag, _ in flags} >= {"--warmup", "--schedule", "--batch-growth", "--clip-norm", "--bounds"}
    for flag, value in flags:
        make_run(**parse_flags(["--epoch-examples", "1437", flag, value]))


def test_what_the_pages_for_contributors_name_is_there():
    folders = ("pyps", "client", "csrc", "proto", "scripts", "tests", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if "_pb2" not in path.name]
    sources = [path for path in paths if path.suffix in (".py", ".h", ".cpp", ".proto")]
    words = {path: set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in sources}
    anywhere = set().union(*words.values())

    def is_there(named: str) -> bool:
        if "/" in named or re.search(r"\.(py|h|cpp|proto|md|sh|toml|txt)$", named):
            return (ROOT / named).exists() or any(f"/{named}" in f"{path}" for path in paths)
        *owners, member = named.partition("(")[0].split(".")
        if not owners:
            return member in anywhere
        # A package's module; or what is in the file of its class, or of its module.
        return any(
            f"/{named.replace('.', '/')}" in f"{path}" or (member in found and owners[-1] in {path.stem, *found})
            for path, found in words.items()
        )

    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md"):
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
        named = [each for each in re.findall(r"`([^`]+)`", text) if re.fullmatch(r"[\w./]*\w/?(\(.*\))?", each)]
        assert len(named) > 10
        assert [each for each in named if not is_there(each)] == [], page


def test_every_make_target_and_every_linked_file_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        if document.parent == ROOT:
            assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets, document.name
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert "://" in target or (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_calls_and_answers_shown_are_those_of_the_service():
    methods = inspector_pb2.DESCRIPTOR.services_by_name["Inspector"].methods_by_name
    shown = set(re.findall(r"pyps\.v1\.Inspector/(\w+)", PAGES["watch"]))
    assert {"GetStatus", "ListWorkers"} <= shown <= set(methods)

    answers = re.findall(r"pyps\.v1\.Inspector/(\w+)\n(\{.*?^\})", PAGES["watch"], re.M | re.S)

    assert len(answers) >= 2
    for method, answer in answers:
        # Fails at a field that the message does not have.
        json_format.Parse(answer, message_factory.GetMessageClass(methods[method].output_type)())


def test_the_rounds_a_second_of_the_readme_are_those_measured():
    measured = MEASURED["rounds"]["rows"]

    def rounds_of(subject: str) -> float:
        rows = [row for row in measured if (row["subject"], row["size"], row["workers"]) == (subject, "big", 1)]
        return median(row["rounds_per_s"] for row in rows)

    ours_and_theirs = r"makes ([\d.]+) rounds a second over TCP, where torch RPC makes ([\d.]+)"
    shown = ours_and_theirs + r"(?s:.*?) makes ([\d.]+); over TLS .* ([\d.]+)\."
    [figures] = re.findall(shown, README)
    subjects = ("pyps lane float32", "torch RPC tcp", "pyps shared memory", "pyps lane float32, TLS")
    assert list(figures) == [f"{rounds_of(subject):.1f}" for subject in subjects]


def test_the_samples_a_second_of_the_readme_are_those_measured():
    measured = MEASURED["training"]["rows"]

    def cells(subject: str, *, slowed: float = 1.0, rate: str = "10gbit") -> list[str]:
        """Return samples a second and seconds to the loss."""
        [row] = [row for row in measured if (row["subject"], row["rate"], row["slowed"]) == (subject, rate, slowed)]
        return [f"{row['samples_per_s']:.1f}", f"{row['seconds_to_loss']:.1f}"]

    names = ("pyps, `async`", "torch RPC, asynchronous", "DDP over gloo")
    subjects = dict(zip(names, ("pyps async", "torch RPC async", "DDP gloo"), strict=True))
    shown = dict(re.findall(r"^\| (.*?) \| ([\d.]+ \| [\d.]+) \|$", README, re.M))
    assert {name: row.split(" | ") for name, row in shown.items()} == {
        name: cells(subject, slowed=3.0) for name, subject in subjects.items()
    }
    [equal] = re.findall(r"DDP makes ([\d.]+) and pyps `async` ([\d.]+):", README)
    assert list(equal) == [cells(subject)[0] for subject in ("DDP gloo", "pyps async")]
    [alone] = re.findall(r"one process alone makes ([\d.]+) \(([\d.]+) s\)", README)
    assert list(alone) == cells("one process alone", rate="1gbit")


def test_what_the_page_on_model_parallelism_shows_is_there():
    options = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    shown = {"--servers", "--replicas", "--parts", "--max-restarts"}
    assert shown <= set(re.findall(r"--[a-z-]+", PAGE))
    assert all(flag in options for flag in shown)
    sources = (ROOT / "client" / "pyps_client").rglob("*.py")
    # A message is written over several literals, which a line's end divides.
    spoken = re.sub(r'"\s*f?"', "", "".join(path.read_text(encoding="utf-8") for path in sources))
    messages = re.findall(r"^  `(.*?)`$", PAGE, re.M)
    assert len(messages) >= 5
    for message in messages:
        # Between names, numbers and shapes; a sentence may be put together of several, its beginning is of one.
        for piece in re.split(r"(?<!\w)'[^']*'|\[[^\]]*\]|\([^)]*\)|…|\b\d+\b", message):
            words = piece.strip(" :.,=").split()[:5]
            assert len(words) < 4 or " ".join(words) in spoken, words


def test_pages_have_lines_of_160_characters_and_architecture_4000_words_at_most():
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split()) <= 4000
    long = [
        f"{page.name}:{number}"
        for page in [*DOCUMENTS, *(ROOT / folder / "README.md" for folder in ("benchmarks", "tests"))]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        # A table's row cannot be wrapped.
        if len(line) > 160 and not line.startswith("| ")
    ]
    assert long == []
