"""The dashboard's page in a browser, before real servers: what each chart draws, and who can read it."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from pyps.cli.dashboard import served
from pyps.dashboard.files import write_page
from pyps.watch.history import History
from pyps.watch.replay import replayed
from pyps.watch.watch import Watch
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import Receipt
from support import ServerThread, inspect, wait_until
from wire_worker import WireWorker

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the PATH")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make install")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed: make install")

NAMES = ["worker-0", "worker-1", "worker-2", "worker-3"]
SLOW, KILLED, FAILED = "worker-3", "worker-2", "worker-1"
PLACE = {"x": 100, "y": 50}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as engine:
        # As root, in a container, Chromium has no sandbox.
        found = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextlib.contextmanager
def opened(browser: Browser, address: str, *, faults: int = 0, **options: Any) -> Iterator[Page]:
    """Open a page; at the end its console is empty, but for so many failed requests."""
    said: list[str] = []
    page = browser.new_page(**options)
    page.set_default_timeout(60_000)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(f"{error}"))
    page.goto(address)
    yield page
    page.close()
    assert len(said) <= faults, said
    assert all("Failed to load resource" in line for line in said), said


class Training(WireWorker):
    """A worker whose steps take a time; it reports a loss with each, until it dies without a word."""

    def __init__(self, server: ServerThread, name: str):
        super().__init__(server.data, name)
        self.seconds, self.killed = 0.6 if name == SLOW else 0.15, threading.Event()

    def push_step(self, values: float, base_versions: Any = 0, **fields: Any) -> list[Receipt]:
        if self.killed.wait(self.seconds):
            raise EOFError
        self.heartbeat(clock=fields["clock"], scalars={"loss": 1 / (1 + fields["clock"])})  # type: ignore[arg-type]
        return super().push_step(values, base_versions, **fields)


@contextlib.contextmanager
def training(server: ServerThread) -> Iterator[dict[str, Training]]:
    """Yield four workers that train, one slowly."""
    with ThreadPoolExecutor(len(NAMES)) as pool, contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Training(server, name)) for name in NAMES}
        for worker in workers.values():
            worker.join()
            pool.submit(worker.train, 1_000_000, value=0.01)
            stack.callback(worker.killed.set)
        yield workers


def lines_of(page: Page, chart: str) -> dict[str, list[float]]:
    """Return what a chart draws, without its gaps: values by line."""
    drawn = page.evaluate(f"pyps.charts['{chart}'].lines()")
    assert drawn["x"] == sorted(drawn["x"])
    return {line["name"]: [value for value in line["values"] if value is not None] for line in drawn["lines"]}


def assert_everybody_can_read(page: Page) -> None:
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 15
    assert [each for each in found["violations"] if each["impact"] in ("serious", "critical")] == []


def until(page: Page, condition: str) -> None:
    # Playwright's own way of waiting is script that the page's policy forbids.
    wait_until(lambda: page.evaluate(condition), what=condition)


def test_a_run_is_seen_as_it_is(browser, start_server, tmp_path):
    log = f"--update-log={tmp_path / 'log'}"
    flags = ("--expected-workers=4", "--heartbeat-seconds=0.3", "--lease-seconds=3", "--run-id=run-1", log)
    server, other = start_server("--protocol=hardsync", "--staleness=divide", *flags), start_server()
    watch = Watch([server.control, other.control])
    dashboard, words = served(watch.history, [server.control], None)
    watch.start()
    with (
        contextlib.closing(watch),
        training(server) as workers,
        dashboard,
        opened(browser, words.rpartition(" ")[2], faults=1, viewport={"width": 1440, "height": 3600}) as page,
    ):
        # One slow worker under a barrier: the sentence, its mark, and hatching for those who wait for it.
        until(page, f"pyps.held.doc?.slow === '{SLOW}' && pyps.timeline.lane('{NAMES[0]}').waits.length > 5")
        assert "token" not in page.url
        assert (page.inner_text("#sentence .slow"), page.inner_text("#run")) == (SLOW, "run-1")
        lanes = page.evaluate("Object.fromEntries(pyps.timeline.lanes)")
        assert sorted(lanes) == NAMES
        assert {step["staleness"] for lane in lanes.values() for step in lane["steps"]} == {0}
        assert all(SLOW in wait["others"] for wait in lanes[NAMES[0]]["waits"][-3:])
        assert all(0 < values[-1] < values[0] for values in lines_of(page, "loss").values())
        assert max(lines_of(page, "waited")["waited"]) > 0.3

        # Another protocol, by the page: asked for, looked at, confirmed.
        for protocol, said in (("nonsense", "Not possible"), ("async", "Change the protocol of all servers to async")):
            page.fill("#protocol input", protocol)
            page.press("#protocol input", "Enter")
            page.get_by_text(said).wait_for()
        assert page.evaluate("pyps.held.doc.protocol") == "hardsync"
        page.click("#confirm")
        page.get_by_text("Changed.").wait_for()
        until(page, f"pyps.timeline.lane('{SLOW}').steps.at(-1).staleness > 3 && pyps.timeline.updates.length > 20")
        until(page, "document.getElementById('law').textContent.includes('the law (L-1)/c = (4-1)/1 says 3')")
        assert sum(lines_of(page, "histogram")["share"]) == pytest.approx(1)
        until(page, f"document.querySelector('#losers li').textContent.startsWith('{SLOW}')")
        assert page.locator("#policies li", has_text="(now)").count() == 1
        # The servers count the same.
        assert 1.5 < max(lines_of(page, "pace")["steps"]) < 40
        assert 0 < max(lines_of(page, "stale")["mean"]) <= page.evaluate("pyps.held.doc.staleness.max")
        assert max(lines_of(page, "bytes")["in"]) > 37 * 4
        assert set(lines_of(page, "cpu")) == {server.control, other.control}
        assert max(lines_of(page, "queue")["waiting"]) <= len(NAMES)
        parameters = inspect(server.control, "GetMemory").parameters_bytes
        assert f"\t{parameters} B\t" in page.locator("#servers tbody tr").first.inner_text()
        watch.history.add_row(row := {"t": time.time(), "seen": 64, "version": 2, "score": {"accuracy": 0.25}})
        until(page, "pyps.charts.score.plot")
        for over in ("seen", "version", "t"):
            page.select_option("#over", over)
            assert page.evaluate("pyps.charts.score.lines().x") == [pytest.approx(row[over], abs=0.001)]
            assert lines_of(page, "score") == {"accuracy": [0.25]}

        # Deaths, and a server that no longer answers: all are said and marked, and greyed where they are.
        workers[KILLED].killed.set()
        until(page, f"pyps.held.doc.workers.find((one) => one.name === '{KILLED}').state === 'expired'")
        workers[FAILED].killed.set()
        workers[FAILED].leave(wire.LeaveRequest.CAUSE_FAILED)
        other.stop()
        page.locator("#servers tr", has_text=other.control).get_by_text("✕ silent").wait_for()
        for kind in ("configured", "expired", "failed", "lost"):
            until(page, f"pyps.charts.loss.marks.includes('{kind}') && pyps.charts.cpu.marks.includes('{kind}')")
            assert page.locator("#events .bad", has_text=kind).count() == (kind != "configured")
        assert page.inner_text("#state") == "1 of 2 servers silent"
        dead = page.locator("#workers tr:has(.bad)").all_inner_texts()
        assert [words.split()[:3] for words in dead] == [[FAILED, "✕", "failed"], [KILLED, "✕", "expired"]]
        assert page.locator("#tl .bad").all_inner_texts() == ["✕ failed", "✕ expired"]

        # By keyboard: pause, back in time, and on; by mouse: a part of the time in all charts.
        page.focus("#tl")
        page.keyboard.press("Space")
        page.keyboard.press("Home")
        assert page.evaluate("pyps.timeline.end") < time.time() - 2
        page.keyboard.press("Space")
        assert page.evaluate("pyps.timeline.following")
        page.drag_and_drop("#pace .u-over", "#pace .u-over", source_position=PLACE, target_position=PLACE | {"x": 200})
        assert page.evaluate("pyps.charts.cpu.plot.scales.x.max") == page.evaluate("pyps.held.view[1]")

        assert_everybody_can_read(page)
        light = page.evaluate("look().text")
        page.emulate_media(color_scheme="dark")
        until(page, f"look().text !== '{light}'")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert_everybody_can_read(page)

    # A page of its log: what a log does not know is no zero.
    server.stop()
    saved = tmp_path / "run.html"
    write_page(saved, replayed(tmp_path / "log").to_json())
    with opened(browser, saved.as_uri()) as page:
        until(page, "pyps.timeline.lanes.size && pyps.charts.loss.plot")
        assert sorted(lines_of(page, "loss")) == NAMES
        for chart in ("bytes", "cpu", "queue"):
            page.locator(f"#{chart}", has_text="Not in an update log.").wait_for()
        assert page.locator("form input:enabled:visible").count() == 0


def test_it_asks_for_a_token_says_when_the_dashboard_is_gone_and_goes_on_when_it_is_back(browser, tmp_path):
    history, token_file = History(), tmp_path / "token"
    history.add_row({"t": time.time(), "steps": 1.0})
    token_file.write_text("a-reader's-token")
    dashboard, _ = served(history, ["127.0.0.1:1"], token_file)
    with opened(browser, "about:blank", faults=100) as page:
        with dashboard:
            page.goto(dashboard.address)
            page.locator("#facts").wait_for(state="hidden")
            page.fill("#token", "a-reader's-token")
            page.keyboard.press("Enter")
            until(page, "pyps.held.doc")
            port = int(re.search(r":(\d+)/", dashboard.address)[1])
        page.get_by_text("The dashboard has not answered since").wait_for()
        with served(history, ["127.0.0.1:1"], token_file, port=port)[0]:
            page.locator("#broken").wait_for(state="hidden")


def test_names_of_workers_are_text_and_256_of_them_keep_the_page_quick(browser):
    names = [f"<img src=x onerror=alert({index})>" for index in range(254)] + ["constructor", "__proto__"]
    history, now = History(live=True), time.time()
    for index, name in enumerate(names):
        for at in range(-40, 120):
            history.add_step(name, now + at / 2, now + (at + 1) / 2, staleness=index)
    for at in range(60):
        history.add_row({"t": now - 60 + at, "steps": 512.0, "loss": dict.fromkeys(names[:-2], 1 / (at + 1))})
    history.add_row({"t": now, "steps": 1.7e308, "loss": dict.fromkeys(names, 1.7e308)})
    history.facts = {"slow": names[7], "skipped": 1234}
    history.facts["workers"] = [{**WORKER, "name": name, "transport": name} for name in names]
    dashboard, _ = served(history, [], None)
    with dashboard, opened(browser, dashboard.address, viewport={"width": 1440, "height": 1000}) as page:
        until(page, "pyps.timeline.motion?.playState === 'running' && pyps.charts.loss.plot")
        drawn = page.evaluate("pyps.charts.loss.lines()")
        assert [line["name"] for line in drawn["lines"]] == ["median", names[7]]
        assert {line["values"][-1] for line in drawn["lines"]} == {None}
        assert max(lines_of(page, "pace")["steps"]) == 512
        page.get_by_text("1,234 steps are missing").wait_for()
        page.locator("#workers tbody tr").nth(255).wait_for()
        # The browser moves the timeline; the page itself is at work once a second.
        busy = page.evaluate("[performance.now(), render(), timeline.draw(), performance.now()]")
        print(f"{busy[3] - busy[0]:.0f} ms a second with 256 workers")
        assert busy[3] - busy[0] < 1000
        assert page.evaluate("Object.keys(Object.prototype).length") == 0
        assert page.locator("img").count() == 0


NUMBERS = "steps pace loss staleness_mean step_lost waited slower bytes_in bytes_out"
WORDS = "host device message"
WORKER = {**dict.fromkeys(NUMBERS.split(), 1), **dict.fromkeys(WORDS.split(), ""), "state": "alive", "waits_for": []}
