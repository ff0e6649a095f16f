"""Makes the picture of the dashboard in docs/images: four workers train on real images, one of them slowly.

python scripts/screenshots.py
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
STORY_SECONDS = 40


def train() -> None:
    """Be a worker, the last of which is slow."""
    sys.path.insert(0, str(ROOT / "examples"))
    digits = import_module("digits")
    step, seconds = digits.RemoteOptimizer.step, 1.2 if os.environ["PYPS_WORKER_INDEX"] == "3" else 0.3

    def slowly(optimizer: object, *arguments: object) -> object:
        time.sleep(seconds)
        return step(optimizer, *arguments)

    digits.RemoteOptimizer.step = slowly
    sys.argv[1:] = ["--epochs=100000"]
    digits.main()


def main() -> None:
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
        watch = f"dashboard --servers={servers} --port=0 --eval=examples/digits.py --every=2"
        browser = engine.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 940})
        page.goto(started(watch, r"(http://\S+)"))
        page.wait_for_timeout(1000 * STORY_SECONDS)
        page.fill("#protocol input", "hardsync")
        page.press("#protocol input", "Enter")
        page.click("#confirm")
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(1000 * STORY_SECONDS)
        page.screenshot(path=ROOT / "docs" / "images" / "dashboard.png")
        browser.close()


if __name__ == "__main__":
    train() if "--train" in sys.argv else main()
