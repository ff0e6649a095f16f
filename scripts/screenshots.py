"""Makes the pictures of the dashboard in docs/images: four workers train on real images, one of them slowly.

python scripts/screenshots.py
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP_SECONDS, SLOW_STEP_SECONDS, STORY_SECONDS = 0.3, 1.2, 40
PICTURES: Sequence[tuple[str, dict[str, Any]]] = (
    ("dashboard", {"color_scheme": "light", "viewport": {"width": 1280, "height": 940}}),
    ("dashboard_dark", {"color_scheme": "dark", "viewport": {"width": 1280, "height": 940}}),
    ("dashboard_phone", {"color_scheme": "light", "viewport": {"width": 390, "height": 844}}),
)


def train() -> None:
    """Be a worker, the last of which is slow."""
    sys.path.insert(0, str(ROOT / "examples"))
    digits = import_module("digits")
    step, seconds = (
        digits.RemoteOptimizer.step,
        SLOW_STEP_SECONDS if os.environ["PYPS_WORKER_INDEX"] == "3" else STEP_SECONDS,
    )

    def slowly(optimizer: object, *arguments: object) -> object:
        time.sleep(seconds)
        return step(optimizer, *arguments)

    digits.RemoteOptimizer.step = slowly
    sys.argv[1:] = ["--epochs=100000"]
    digits.main()


def main() -> None:
    from playwright.sync_api import sync_playwright

    with contextlib.ExitStack() as ends, sync_playwright() as engine:

        def started(command: str, pattern: str) -> str:
            """Start a command that ends with us; return what the pattern finds in its output."""
            arguments = [sys.executable, "-m", "pyps", *command.split()]
            process = ends.enter_context(subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            ends.callback(process.terminate)
            assert process.stdout is not None
            return next(found[1] for line in process.stdout if (found := re.search(pattern, line)))

        train = f"{sys.executable} {__file__} --train"
        servers = started(f"run --servers=2 --workers=4 --run-id=digits -- {train}", r"status --servers (\S+)")
        address = started(
            f"dashboard --servers={servers} --port=0 --eval=examples/digits.py --every=2", r"(http://\S+)"
        )
        browser = engine.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, options in PICTURES:
            page = browser.new_page(**options)
            page.goto(address)
            if name == "dashboard":
                page.wait_for_timeout(1000 * STORY_SECONDS)
                page.fill("form[data-field=protocol] input", "hardsync")
                page.press("form[data-field=protocol] input", "Enter")
                page.click("#confirm-yes")
                page.evaluate("scrollTo(0, 0)")
                page.wait_for_timeout(1000 * STORY_SECONDS)
            page.wait_for_timeout(4000)
            page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png")
            print(f"docs/images/{name}.png")
        browser.close()


if __name__ == "__main__":
    train() if "--train" in sys.argv else main()
