"""Ports at which the processes of a replica meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pyps.launcher import ports


def first_ephemeral() -> int:
    return int(ports.EPHEMERAL_RANGE.read_text().split()[0])


def use_range(text: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "ip_local_port_range"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", file)


def test_a_port_lies_below_those_that_the_system_gives_away() -> None:
    if first_ephemeral() <= ports.LOWEST:
        pytest.skip("this machine gives nearly all its ports away")

    assert all(ports.LOWEST <= ports.free_port() < first_ephemeral() for _ in range(20))


def test_a_port_that_is_taken_or_promised_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", taken)
        # Room for one port alone.
        use_range(f"{taken + 1}\t60999\n", tmp_path, monkeypatch)

        assert ports.free_port() != taken

    assert ports.free_port() == taken
    assert ports.free_port(but={taken}) != taken


@pytest.mark.parametrize("text", ["1024\t65535\n", "", None])
def test_without_room_below_any_free_port_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    use_range(text, tmp_path, monkeypatch)

    with socket.create_server(("127.0.0.1", ports.free_port())) as listener:
        assert listener.getsockname()[1]
