"""The files of the page, and the page as one file that needs no server."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyps_wire.errors import InvalidArgument

PAGE = Path(__file__).with_name("page")
POLICY = "default-src 'none'; {}; img-src 'self' data:; base-uri 'none'; form-action 'none'"
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Write the page with its data into a file, which readers find whole, as it was or as it is."""
    whole, temporary = Path(os.path.realpath(path)), None
    try:
        if os.path.lexists(whole) and not stat.S_ISREG(os.lstat(whole).st_mode):
            raise InvalidArgument(f"the page {path} cannot be written: that is no file")
        temporary = whole.with_name(f".{whole.name}.{os.getpid()}")
        temporary.write_text(page_with({**data, "live": False}), encoding="utf-8")
        temporary.replace(whole)
    except OSError as error:
        with suppress(OSError):
            if temporary is not None:
                temporary.unlink()
        raise InvalidArgument(f"the page {path} cannot be written: {error.strerror}") from None


def page_with(data: Mapping[str, Any]) -> str:
    """Return the page with styles, scripts and data in it, which may run no other script and ask no host."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}

    def within(kind: str, found: re.Match[str]) -> str:
        text = (PAGE / found[1]).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    head, body = (PAGE / "index.html").read_text(encoding="utf-8").split("<body>")
    head = _STYLE.sub(lambda found: within("style", found), head)
    body = _SCRIPT.sub(lambda found: within("script", found), body)
    policy = POLICY.format("; ".join(f"{kind}-src {' '.join(hashes)}" for kind, hashes in allowed.items()))
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    # So that no name in it ends the element.
    words = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    data_first = f'<body>\n<script type="application/json" id="data">{words}</script>'
    return head.replace("<head>", f"<head>\n{meta}") + data_first + body
