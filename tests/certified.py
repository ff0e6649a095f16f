"""Certificates for tests, and how servers and workers are told of them."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from pyps.certificates import Authority


def make(folder: Path) -> Path:
    """Certificates by what is wrong with them, in a folder each, of which all but "strange" have one CA."""
    for name, days in (("sound", 1), ("expired", -1), ("early", 1), ("strange", 1)):
        if name in ("expired", "early"):
            shutil.copytree(folder / "sound", folder / name, ignore=shutil.ignore_patterns("server.*", "worker.*"))
        authority = Authority(folder / name, create=True)
        # For how long they are good before they are made.
        with patch("pyps.certificates._CLOCKS", timedelta(hours=-1 if name == "early" else 1)):
            authority.make_server(["127.0.0.1"], days=days)
            authority.make_worker("worker", days=days)
    return folder


def served(folder: Path, *, mutual: bool = False) -> list[str]:
    flags = ["--tls-cert", str(folder / "server.crt"), "--tls-key", str(folder / "server.key")]
    return flags + (["--tls-client-ca", str(folder.parent / "sound" / "ca.crt")] if mutual else [])


def shown(folder: Path, *, mutual: bool = False) -> dict[str, str]:
    own = {"tls_cert": str(folder / "worker.crt"), "tls_key": str(folder / "worker.key")} if mutual else {}
    return {"tls_ca": str(folder.parent / "sound" / "ca.crt"), **own}
