"""`pyps top --web` in a real Chromium: what it shows while four workers train and one dies, by the keyboard alone."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from client_support import addresses
from support import DEADLINE_SECONDS, ROOT, PythonProcess, ServerProcess, status_of, wait_until, workers_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Where `make screenshots` puts them.
PICTURES = os.environ.get("SCREENSHOTS")
WIDTHS = {"narrow": (560, 720), "middle": (900, 640), "wide": (1440, 760)}

WORKER = """
import os, time, torch
from sklearn.datasets import load_digits
from pyps_client import RemoteOptimizer
from pyps_client.data import Portions

dataset = torch.utils.data.TensorDataset(*map(torch.tensor, load_digits(return_X_y=True)))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = RemoteOptimizer(model, torch.optim.Adagrad(model.parameters(), lr=0.01))
portions = Portions(dataset, optimizer, batch_size=32, epochs=9999)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=portions)
for x, y in (batch for epoch in range(9999) for batch in loader):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x.float() / 16), y)
    loss.backward()
    # As if each had another GPU.
    time.sleep(0.02 * (1 + int(os.environ["PYPS_WORKER_INDEX"])))
    optimizer.step()
    optimizer.report(loss=loss.item())
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (scripts/install_engines.sh)")


class Browser:
    """A headless Chromium with one page, driven by its DevTools protocol over a pipe."""

    def __init__(self, profile: Path) -> None:
        down, self._commands = os.pipe()
        self._replies, up = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        # Chromium reads from 3 and writes to 4.
        script = f'exec "$0" {flags} --remote-debugging-pipe "--user-data-dir=$1" 3<&{down} 4>&{up} 2>/dev/null'
        self._process = subprocess.Popen(["bash", "-c", script, str(CHROMIUM), str(profile)], pass_fds=[down, up])
        os.close(down)
        os.close(up)
        self._unread, self._num_sent, self._session = b"", 0, {}
        # What the page logged as an error, what it asked the network for, and what the terminal was sent.
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.terminal, self.num_resizes = "", 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Makes a call; notes what happens until its answer comes."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                self._unread += os.read(self._replies, 1 << 20) or b'{"id": -1}\0'
            line, _, self._unread = self._unread.partition(b"\0")
            told = json.loads(line)
            if "id" in told:
                assert told["id"] == self._num_sent and "error" not in told, told
                return told["result"]
            self._note(told["method"], told.get("params", {}))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def press(self, *keys: str) -> None:
        """Presses keys one after another."""
        for name in keys:
            key, code, text = {"enter": ("Enter", 13, "\r"), "tab": ("Tab", 9, "")}.get(
                name, (name, ord(name[0].upper()), name)
            )
            event = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
            self.call("Input.dispatchKeyEvent", type="keyDown", **event)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def see(self, *words: str) -> None:
        """Waits until the terminal has been sent these words since it was last looked at."""
        try:
            # What has come meanwhile is noted with the answer to any call.
            wait_until(lambda: self.run("1") and all(each in self.terminal for each in words), 30)
        except AssertionError:
            missing = [each for each in words if each not in self.terminal]
            raise AssertionError(f"{missing} did not come, but {self.terminal[-4000:]!r}") from None
        self.terminal = ""

    def close(self) -> None:
        self._session = {}
        self.call("Browser.close")
        self._process.wait(DEADLINE_SECONDS)
        os.close(self._commands)
        os.close(self._replies)

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown" or facts.get("type") == "error":
            self.errors.append(str(facts))
        elif event == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.errors.append(str(facts["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif event == "Network.webSocketFrameSent" and facts["response"]["payloadData"].startswith('["resize"'):
            # All is drawn anew.
            self.num_resizes, self.terminal = self.num_resizes + 1, ""
        elif event == "Network.webSocketFrameReceived" and facts["response"]["opcode"] == 2:
            sent = base64.b64decode(facts["response"]["payloadData"]).decode(errors="replace")
            self.terminal += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sent)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def test_four_workers_train_and_one_is_killed_as_a_browser_shows_it_at_three_widths(
    browser: Browser,
    tmp_path: Path,
    start_server_process: Callable[..., ServerProcess],
    start_python: Callable[..., PythonProcess],
) -> None:
    flags = ["--heartbeat-seconds=0.5", "--lease-seconds=3", "--checkpoint-seconds=2", "--expected-workers=4"]
    servers = [
        start_server_process(*flags, "--run-id=digits", "--start-together", f"--checkpoint-dir={tmp_path}/{index}")
        for index in range(2)
    ]
    environment = {"PYPS_SERVERS": addresses(servers), "PYPS_RUN_ID": "digits", "PYPS_WORKER_COUNT": "4"}
    workers = [start_python("-c", WORKER, env={**environment, "PYPS_WORKER_INDEX": str(index)}) for index in range(4)]
    token = tmp_path / "token"
    token.write_text("observers-9c1f")
    page = start_python("-m", "pyps", "top", "--web", "--port=0", f"--token-file={token}", env=environment)
    [address] = re.findall(r"http://\S+", page.wait_for_output("until Ctrl-C"))
    assert "key=" not in address

    def resize(name: str) -> None:
        width, height = WIDTHS[name]
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **device)

    resize("wide")
    browser.call("Page.navigate", url=address)
    wait_until(lambda: browser.run("document.activeElement.id") == "token", what="the question for the token")
    browser.call("Input.insertText", text="observers-9c1f")
    browser.press("enter")
    browser.see("digits", "async", "worker-3", "1-5 tabs", "protocol")

    wait_until(lambda: status_of(servers[0]).version_min > 300, what="some training")
    workers[3].kill()
    wait_until(lambda: workers_of(servers[0].control)["worker-3"].state == "expired", what="the end of its lease")
    browser.see("expired", "3 alive")
    for name in WIDTHS:
        before = browser.num_resizes
        resize(name)
        wait_until(lambda before=before: browser.run("1") and browser.num_resizes > before, what="another size")
        browser.see("worker-3", "1-5 tabs")
        for _ in range(2):
            browser.see("worker-3")
        picture = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        colours = Image.open(io.BytesIO(picture)).convert("RGB").getcolors(1 << 24)
        most, total = max(count for count, _ in colours), sum(count for count, _ in colours)
        assert len(colours) > 50 and most < 0.95 * total, "the page is empty"
        if PICTURES:
            (ROOT / PICTURES / f"top-{name}.png").write_bytes(picture)

    browser.press("2")
    browser.see("in flight", "behind", servers[1].data)
    browser.press("4")
    browser.see("1,797 examples", "done")
    browser.press("5")
    browser.see("lease")
    browser.press("1", "s", "s", "S")
    browser.see("steps ▲")
    browser.press(" ")
    browser.see("paused: nothing is asked")
    browser.press(" ", "p")
    browser.see("Escape leaves all as it is")
    # What is written replaces what stood there.
    browser.press("tab", "tab", *"hardsync", "enter")
    browser.see("Change the protocol of 2 servers from async to hardsync?")
    browser.press("y")
    browser.see("hardsync, staleness divide")
    assert {status_of(server).protocol for server in servers} == {"hardsync"}
    browser.press("3")
    browser.see("worker-0 waits for worker-")
    servers[1].kill()
    browser.see("1 of 2 servers do not answer")
    browser.press("q")
    wait_until(lambda: browser.run("document.activeElement.id") == "again", what="the end of the view")
    browser.press("enter")
    browser.see("digits", "1 of 2 servers do not answer")
    assert browser.errors == []
    assert {url for url in browser.requests if not url.startswith((address, "data:"))} == set()
