"""The terminal program of `pyps top`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult, RenderResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, ScrollableContainer, Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from pyps.cli.status import harmless
from pyps.cli.top import pictures
from pyps.cli.top.history import INTERVAL_SECONDS, Answer, History, Point, configure, poll
from pyps.control import not_named
from pyps.units import counted
from pyps_wire import inspector_pb2 as pb

TABS = ("workers", "servers", "waits", "portions", "events")


class Top(App[None]):
    """A view of a run, redrawn each second, with keys that sort, pause and change it."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (76, "-wide")]  # noqa: RUF012, the base class declares it so
    CSS = """
    #headline { background: $panel; padding: 0 1; height: auto; }
    #figures { width: 42; padding: 0 1; }
    #stream { width: 1fr; height: 1fr; padding: 0 1; }
    .-wide #charts { height: 8; }
    .-narrow #charts { layout: vertical; height: 12; }
    .-narrow #figures { width: 1fr; height: 7; }
    .-narrow Footer { layout: grid; grid-size: 4; grid-columns: auto; height: 2; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0 1; }
    ScrollableContainer > Static { width: auto; min-width: 100%; }
    Change { align: center middle; }
    Change > Vertical { width: 64; max-width: 90%; height: auto; padding: 1 2; border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('workers')", "tabs", key_display="1-5"),
        *(Binding(str(index), f"tab('{name}')", name, show=False) for index, name in enumerate(TABS[1:], 2)),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse"),
        Binding("space", "pause", "pause"),
        Binding("p", "protocol", "protocol"),
        Binding("r", "rate", "rate"),
        Binding("w", "why", "read-only"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self,
        addresses: Sequence[str],
        token_file: Path | None,
        *,
        read_only: bool = False,
        interval_seconds: float = INTERVAL_SECONDS,
    ):
        super().__init__()
        self.history = History(addresses)
        self._addresses, self._token_file, self._read_only = addresses, token_file, read_only
        self._interval_seconds = interval_seconds
        self._answers: SimpleQueue[tuple[str, Answer | str]] = SimpleQueue()
        self._unpaused, self._unmounted = Event(), Event()
        self._unpaused.set()
        self._sorted_by, self._reverse = 0, False
        # Why this caller may change nothing; "" where it may.
        self._refusal = "no server has answered yet"

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        with Horizontal(id="charts"):
            yield Static(id="figures")
            yield Stream(self.history.points)
        with TabbedContent():
            for name in TABS:
                with TabPane(name, id=name), ScrollableContainer():
                    yield Static(id=f"{name}-shown")
        yield Keys()

    def on_mount(self) -> None:
        settings = {"interval_seconds": self._interval_seconds, "running": self._unpaused, "closed": self._unmounted}
        for address in self._addresses:
            arguments = (address, self._token_file, self._report)
            Thread(target=poll, args=arguments, kwargs=settings, daemon=True).start()
        self.set_interval(self._interval_seconds, self._update)
        self._draw()

    def on_unmount(self) -> None:
        self._unmounted.set()
        self._unpaused.set()

    def on_tabbed_content_tab_activated(self) -> None:
        self._draw()

    def _report(self, address: str, answer: Answer | str) -> None:
        """Queue an answer; called on the server's thread."""
        self._answers.put((address, pictures.drawable(address, answer)))

    def _update(self) -> None:
        count = self._answers.qsize()
        for _ in range(count):
            self.history.take(*self._answers.get())
        if not count or not self._unpaused.is_set():
            return
        self.history.tick()
        refusal = next((answer.refusal for answer in self.history.answers if answer.refusal), "")
        refusal = "it was started with --read-only" if self._read_only else refusal
        if self.history.answers and refusal != self._refusal:
            self._refusal = refusal
            self.refresh_bindings()
        self._draw()

    def _draw(self) -> None:
        if not self.query("#events-shown") or not self.query("#headline"):
            # A dialog is open, or the program ends.
            return
        history, tab = self.history, self.query_one(TabbedContent).active or TABS[0]
        order = {"sorted_by": pictures.COLUMNS[self._sorted_by], "reverse": self._reverse} if tab == "workers" else {}
        try:
            self._show("headline", pictures.headline(history, paused=not self._unpaused.is_set()))
            self._show("figures", pictures.figures(history))
            self.query_one(Stream).refresh()
            self._show(f"{tab}-shown", getattr(pictures, tab)(history, **order))
        except pictures.ODD as error:
            # Each answer alone can be drawn.
            self._show("headline", Text(f"the servers' answers cannot be shown together: {error}", "bold red"))

    def _show(self, place: str, picture: RenderableType) -> None:
        self.query_one(f"#{place}", Static).update(picture)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key is available: changes are for operators."""
        if action in ("protocol", "rate"):
            return not self._refusal
        return bool(self._refusal) if action == "why" else True

    def action_tab(self, name: str) -> None:
        """Show a tab; the arrows scroll in it."""
        self.query_one(TabbedContent).active = name
        self.query_one(f"#{name} ScrollableContainer").focus()

    def action_sort(self) -> None:
        self._sorted_by, self._reverse = (self._sorted_by + 1) % len(pictures.COLUMNS), False
        self._draw()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._draw()

    def action_pause(self) -> None:
        """Pause the view and the calls, or go on."""
        (self._unpaused.clear if self._unpaused.is_set() else self._unpaused.set)()
        self._draw()

    def action_why(self) -> None:
        self._notify(self._refusal)

    @work
    async def action_protocol(self) -> None:
        await self._change("protocol", lambda status: status.protocol, lambda text: {"protocol": text})

    @work
    async def action_rate(self) -> None:
        await self._change("learning rate", _present_rate, _rate)

    async def _change(self, name: str, present: Callable[[pb.Status], str], fields: Callable[[str], Any]) -> None:
        """Change all servers after a dialog, if all answer."""
        if self._incomplete():
            return
        servers, old = counted(len(self._addresses), "server"), present(self.history.answers[0].status)
        wanted = await self.push_screen_wait(Change(f"the {name} of {servers}", old, fields))
        if wanted and not self._incomplete():
            request = pb.ConfigureRequest(**wanted)
            self._notify(await asyncio.to_thread(configure, self._addresses, self._token_file, request))

    def _incomplete(self) -> bool:
        """Return whether there is no run or one of its servers does not answer; show which."""
        silent = [f"{server.address} does not answer" for server in self.history.silent]
        statuses = [answer.status for answer in self.history.answers]
        missing = "; ".join(silent) or not_named(statuses)
        if not missing and not any(status.num_servers for status in statuses):
            missing = "there is no run yet"
        if missing:
            self._notify(f"nothing is set: {missing}")
        return bool(missing)

    def _notify(self, words: str) -> None:
        self.notify(pictures.harmless_lines(words.splitlines()).plain, timeout=15, markup=False)


class Keys(Footer):
    """The keys: one line, or two lines of four keys in a narrow terminal."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        self.styles.grid_size_columns = None


class Stream(Widget):
    """The stream of staleness, as large as its place."""

    def __init__(self, points: Sequence[Point]):
        super().__init__(id="stream")
        self._points = points

    def render(self) -> RenderResult:
        width, height = self.content_size
        return pictures.stream(self._points, width=width, height=height)


class Change(ModalScreen[dict[str, Any] | None]):
    """A dialog for a setting's new value, with a confirmation; returns the fields to configure, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "dismiss(None)", "no"),
        Binding("y", "change", "yes"),
    ]

    def __init__(self, what: str, present: str, fields: Callable[[str], dict[str, Any]]):
        super().__init__()
        self._what, self._present, self._fields = what, present, fields
        self._wanted: dict[str, Any] | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(f"Change {self._what} to: (Enter goes on, Escape leaves all as it is)", markup=False)
            yield Input(harmless(self._present).plain)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        old, new = self._present or "none", event.value.strip()
        try:
            self._wanted = self._fields(new)
            words = f"Change {self._what} from {old} to {new}? y: yes, n: no"
            # The keys y and n answer.
            event.input.display = False
            self.set_focus(None)
        except ValueError as error:
            words = str(error)
        self.query_one(Static).update(pictures.harmless_lines([words]))

    def action_change(self) -> None:
        if self._wanted:
            self.dismiss(self._wanted)


def _present_rate(status: pb.Status) -> str:
    return f"{status.learning_rates[0].base:g}" if status.learning_rates else ""


def _rate(text: str) -> dict[str, float]:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return {"learning_rate": float(text)}
    raise ValueError(f"{text!r} is no learning rate; expected a number above 0, as 0.05")
