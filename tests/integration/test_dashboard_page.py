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
from itertools import chain
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
    """Return what a chart has drawn, without its gaps: values by line."""
    names, (x, *lines) = page.evaluate(f"(({{ drawn, plot }}) => [drawn.lines, plot.data])(pyps.charts['{chart}'])")
    assert x == sorted(x)
    drawn = zip(names, lines, strict=True)
    return {line["name"]: [value for value in values if value is not None] for line, values in drawn}


def place(page: Page, when: float, lane: int) -> tuple[float, float]:
    """Return where the timeline's canvas has a time in a worker's lane, clear of words; lane -1 is of updates."""
    span, end, width = page.evaluate("[timeline.span, timeline.viewEnd, timeline.view.clientWidth]")
    return width * (1 - (end - when) / span), 44 + 30 * lane + 7 if lane >= 0 else 30


def inked(page: Page, ink: str, x: float, y: float, size: int = 1) -> set[str]:
    """Return the colours on a canvas from a point on, as hexadecimal digits."""
    # Of a copy: Chromium warns of what is read twice.
    copy = "const copy = new OffscreenCanvas(9, 9).getContext('2d')"
    draw = f"{copy}; copy.drawImage({ink}.canvas, {-int(x)}, {-int(y)})"
    shown = bytes(page.evaluate(f"(() => {{ {draw}; return [...copy.getImageData(0, 0, {size}, {size}).data]; }})()"))
    return {shown[at : at + 4].hex() for at in range(0, len(shown), 4)}


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
        assert page.evaluate("document.activeElement.id") == "said"
        assert not page.locator("#give").is_visible()
        until(page, f"pyps.timeline.lane('{SLOW}').steps.at(-1).staleness > 3 && pyps.timeline.updates.length > 20")
        until(page, "document.getElementById('law').textContent.includes('the law (L-1)/c = (4-1)/1 says 3')")
        until(page, f"document.querySelector('#losers li').textContent.startsWith('{SLOW}')")
        # The servers count the same.
        assert 1.5 < max(lines_of(page, "pace")["steps"]) < 40
        assert max(lines_of(page, "bytes")["in"]) > 37 * 4
        assert set(lines_of(page, "cpu")) == {server.control, other.control}
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


def test_each_chart_table_and_bar_is_what_the_document_says(browser, tmp_path):
    history, saved = History(live=False), tmp_path / "page.html"
    for at in range(100):
        for stale, name in enumerate(NAMES):
            history.add_step(name, at, at + 0.5, staleness=stale, updates=int(name == NAMES[0]))
        history.add_wait(NAMES[1], at + 0.5, at + 1, (SLOW,))
        row = {"t": at, "loss": {NAMES[0]: 1 + at % 3}, "cpu": {"a:1": at / 7, "b:1": 2.0}}
        history.add_row(row | {field: at + kind for kind, field in enumerate(chain(*CHARTS.values()))})
    for kind in ("score", "joined", "counts"):
        history.add_event(5, "", kind, kind)
    policies = [{"name": str(lost), "lost": lost, "in_force": not lost} for lost in (0, 0.25)]
    staleness = {"buckets": [[0, 10], [1, 30], [2, 20], [3, 40]], "mean": 1.9, "max": 3, "law": 3.0, "law_words": ""}
    history.facts = {"staleness": {**staleness, "since": None, "policies": policies}, "slow": SLOW}
    history.facts |= {"now": 100, "rate": 0.25, "version": 17, "examples": 345}
    worker = {**WORKER, **{number: at / 8 for at, number in enumerate(NUMBERS.split())}, "transport": ""}
    tables = [{"name": "users", "rows": 1234, "bytes": 2e6, "hit_rate": 0.75, "candidates": 5, "admitted": 1300}]
    history.facts["tables"] = [{**each, "evicted": 60, "expired": 6} for each in tables]
    history.facts["workers"] = [{**worker, "name": name} for name in NAMES]
    write_page(saved, history.to_json())
    with opened(browser, saved.as_uri(), viewport={"width": 1440, "height": 3600}, has_touch=True) as page:
        until(page, "pyps.charts.loss.plot")
        colours, ink, law = page.evaluate("look()"), "timeline.ink", "pyps.charts.histogram.plot"
        ages, text = [f"{each[1:]}ff" for each in colours["ages"]], f"{colours['text'][1:]}ff"
        # The timeline, as it stands and nearer: bars by staleness, hatching, nothing, and a line an update.
        before = page.evaluate("timeline.span")
        for act in ("#tl-out", "#tl-in", "#tl-in"):
            page.click(act)
            assert [inked(page, ink, *place(page, 69.2, lane)) for lane in range(4)] == [{age} for age in ages[:4]]
            assert len(inked(page, ink, *place(page, 69.55, 1), 6) | {"00000000"}) > 3
            assert inked(page, ink, *place(page, 69.55, 2), 6) == {"00000000"}
            x, y = place(page, 69.5, -1)
            assert (text in inked(page, ink, x - 1, y, 4), inked(page, ink, x - 9, y, 4)) == (True, {"00000000"})
        assert page.evaluate("timeline.span") == pytest.approx(before / 1.5)
        # After a wait is a step that is not listed yet.
        assert page.evaluate("[0, 1].map((at) => timeline.waitsSince(timeline.lane(`worker-${at}`)))") == [99.5, 100.5]
        left, top = page.evaluate("(({ x, y }) => [x, y])(timeline.view.getBoundingClientRect())")
        for when, words in ((69.2, "step of 500 ms, staleness 1"), (69.7, f"waited 500 ms for {SLOW}")):
            x, y = place(page, when, 1)
            page.mouse.move(left + x, top + y)
            page.locator("#tip", has_text=words).wait_for()
        # What a finger has pointed at is told until it points elsewhere.
        page.touchscreen.tap(left + x, top + y + 30)
        assert page.inner_text("#tip") == NAMES[2]
        page.touchscreen.tap(5, 5)
        assert not page.locator("#tip").is_visible()

        drawn = {chart: [*lines_of(page, chart).values()] for chart in CHARTS}
        rows = [[[row[field] for row in history.rows] for field in fields] for fields in CHARTS.values()]
        assert drawn == dict(zip(CHARTS, rows, strict=True))
        assert lines_of(page, "cpu") == {"a:1": [at / 7 for at in range(100)], "b:1": [2.0] * 100}
        for keep in (0.9, 0.0):
            page.fill("#smooth", str(keep))
            mean = 1.0
            smooth = [mean := keep * mean + (1 - keep) * (1 + at % 3) for at in range(100)]
            assert lines_of(page, "loss") == {NAMES[0]: pytest.approx(smooth)}
            assert page.inner_text("#loss .key b") == "1"
        for seconds, first in ((60, 40), (0, 0)):
            page.select_option("#span", str(seconds))
            x_scale = page.evaluate("pyps.charts.pace.plot.scales.x")
            assert (x_scale["min"], x_scale["max"]) == pytest.approx((first, 100), abs=0.6)
        assert lines_of(page, "histogram")["share"] == pytest.approx([0.1, 0.3, 0.2, 0.4, 0])
        for value, colour in ((1.9, text), (3, f"{colours['accent'][1:]}ff")):
            assert colour in inked(page, f"{law}.ctx", page.evaluate(f"{law}.valToPos({value}, 'x', true)") - 1, 75, 4)
        assert "rate\n0.25\nversion\n17\nexamples\n345\n" in page.inner_text("#facts")
        assert [words.split()[1] for words in page.locator("#events li").all_inner_texts()] == ["✕", "+"]
        assert page.inner_text("#policies").split() == ["0", "(now)", "0", "%", "0.25", "25", "%"]
        assert page.evaluate("[...$('policies').querySelectorAll('progress')].map((bar) => bar.value)") == [0, 0.25]
        figures = "alive\t0\t0.125\t0.75\t0.25\t0.375\t50 %\t62.5 %\t\t0.875 B\t1 B\t\t\t\t"
        assert page.locator("#workers tbody tr").all_inner_texts() == [f"{name}\t{figures}" for name in NAMES]
        of_table = "users\t1,234\t1.91 MiB\t75 %\t5\t1,300\t60\t6"
        assert page.locator("#tables tbody tr").all_inner_texts() == [of_table]


def test_tables_have_no_place_where_a_run_has_none(browser, tmp_path):
    write_page(saved := tmp_path / "page.html", History(live=False).to_json())
    with opened(browser, saved.as_uri()) as page:
        until(page, "held.doc")
        assert not page.locator("#of-tables").is_visible()


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
            page.locator("#give").wait_for(state="hidden")
            # This token changes nothing: another is asked for, and with it the refusal is of the past.
            page.fill("#protocol input", "async")
            page.keyboard.press("Enter")
            page.get_by_text("Not possible: this token is not").wait_for()
            page.fill("#token", "another")
            page.keyboard.press("Enter")
            assert (page.inner_text("#said"), page.locator("#give").is_visible()) == ("", False)
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
        # The browser moves the timeline; the page itself is at work once a second, with other figures each time.
        page.locator("#workers").scroll_into_view_if_needed()
        anew = "held.doc.workers.forEach((worker) => { worker.steps = 77; worker.pace = 99; })"
        parts = f"{anew}, performance.now(), render(), performance.now(), $('workers').textContent"
        _, began, _, ended, words = page.evaluate(f"[{parts}]")
        assert (ended - began < 1000, words.count("alive7799")) == (True, 256)
        assert page.evaluate("Object.keys(Object.prototype).length") == 0
        assert page.locator("img").count() == 0


NUMBERS = "steps pace loss staleness_mean step_lost waited slower bytes_in bytes_out"
WORDS = "host device message"
WORKER = {**dict.fromkeys(NUMBERS.split(), 1), **dict.fromkeys(WORDS.split(), ""), "state": "alive", "waits_for": []}
CHARTS = {"pace": ["steps", "updates"], "bytes": ["bytes_in", "bytes_out"], "queue": ["queue"]}
CHARTS |= {"waited": ["waited"], "stale": ["staleness"]}
