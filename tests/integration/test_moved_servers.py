"""Servers that come back at another address, with their checkpoint: workers and commands find them there."""

import socket

import pytest

from client_support import gradients_like, make_client, small_model
from support import ServerThread, replace_file, server_port, shell, wait_until


def pushed(client: object, seed: int) -> set[int]:
    receipts = client.push(gradients_like(small_model(), seed))  # type: ignore[attr-defined]
    return {receipt.version_after for receipt in receipts}


def require_no_loss(client: object) -> None:
    """Push twice: the first was computed before the server's end."""
    assert pushed(client, 1) == {2}
    assert pushed(client, 2) == {3}


def test_a_worker_finds_a_moved_server(start_server, tmp_path, caplog):
    file = tmp_path / "servers"
    kept = ("--checkpoint-dir", str(tmp_path / "kept"))
    first, second = start_server("--host", "127.0.0.2", *kept), start_server("--host", "127.0.0.3")
    replace_file(file, f"{first.data}\n{second.data}\n")
    client = make_client(f"file:{file}", loss_wait_seconds=60)
    client.pull()
    assert pushed(client, 0) == {1}

    first.stop()
    moved = start_server("--host", "127.0.0.4", *kept, "--resume")
    replace_file(file, f"{moved.data}\n{second.data}\n")

    require_no_loss(client)
    assert f"(file:{file}#0) is at {moved.data} now" in caplog.text
    # Heartbeats have found it too.
    wait_until(lambda: " alive " in shell("status", "--servers", f"file:{file}"), what="a worker that is alive")
    assert moved.data in shell("health", "--servers", f"file:{file}")
    client.close()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    addresses: set[str] = set()
    lookup = socket.getaddrinfo

    def patched(host: str, port: int, *arguments: int, **options: int) -> list[tuple[object, ...]]:
        names = addresses if host == "pyps-servers" else [host]
        return [found for name in names for found in lookup(name, port, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", patched)
    return addresses


def test_servers_behind_one_name_keep_their_places(start_server, tmp_path, hosts):
    port = server_port()

    def start(host: str, name: str, *flags: str) -> ServerThread:
        hosts.add(host)
        kept = ("--checkpoint-dir", str(tmp_path / name))
        return start_server("--host", host, "--port", str(port), *kept, *flags)

    first, _ = start("127.0.0.2", "first"), start("127.0.0.3", "second")
    named = f"dns:2@pyps-servers:{port}"
    client = make_client(named, loss_wait_seconds=60)
    client.pull()
    assert pushed(client, 0) == {1}

    first.stop()
    hosts.discard("127.0.0.2")
    # After the other by its address; by its checkpoint it is the first.
    start("127.0.0.9", "first", "--resume")

    require_no_loss(client)
    make_client(named, worker_id="later", run_id=client.session.run_id).close()
    status = shell("status", "--servers", named)
    assert "0 of 2" in status and "1 of 2" in status
    client.close()
