"""`pyps replay` on the logs of real servers: the final bits, or where a log differs, is damaged or says too little."""

from pathlib import Path

from client_support import addresses, gradients_like, make_client, start_servers
from pyps.storage.replay import ShardLog, log_paths, replay
from pyps.storage.update_log import LoggedUpdate, decode, encode
from support import checksums, shell
from wire_worker import WireWorker


def test_the_logs_of_a_job_replay_or_name_what_differs(start_server, tmp_path):
    servers = start_servers(start_server, 2, "--update-log", str(tmp_path), "--log-gradients")
    with make_client(addresses(servers), run_id="logged") as client:
        for step in range(3):
            client.push(gradients_like(client.pull(), seed=step))
    final: dict[int, tuple[int, str]] = {}
    for server in servers:
        final |= checksums(server.control)
        assert server.stop() == 0

    paths = log_paths(tmp_path)
    assert len(paths) == len(final) >= 4
    for path in paths:
        replayed = replay(path)
        assert (replayed.ended, replayed.difference, replayed.updates) == (True, "", 3)
        assert (replayed.version, replayed.checksum) == final[replayed.shard_id]
    shown = shell("replay", "--opposed", str(tmp_path))
    assert "no push was computed while another came" in shown
    for _, checksum in final.values():
        assert checksum in shown
    assert shown.count("yes") == len(paths)

    first = next(event for event in ShardLog(paths[0]).events() if isinstance(event, LoggedUpdate))
    tamper(paths[0], first.checksum)
    words = " ".join(shell("replay", str(tmp_path), status=1).split())
    assert f"{paths[0]}: update 1, by push" in words
    assert f"logged as 00000000, replayed it is {first.checksum} at version 1" in words
    assert f"1 of {len(paths)} logs do not replay" in words

    paths[1].write_bytes(paths[1].read_bytes()[:-50] + b"x" * 49 + b"\n")
    words = " ".join(shell("replay", str(tmp_path), status=1).split())
    assert f"{paths[1]} is damaged" in words
    assert f"1 of {len(paths)} logs do not replay to what was logged; 1 could not be replayed" in words


def tamper(path: Path, checksum: str) -> None:
    lines = [decode(line) for line in path.read_bytes().splitlines(keepends=True)]
    changed = [{**line, "checksum": "0" * 8} if line.get("checksum") == checksum else line for line in lines if line]
    path.write_bytes(b"".join(map(encode, changed)))


def test_a_log_without_gradients_is_not_taken_for_a_damaged_one(start_server, tmp_path):
    server = start_server("--update-log", str(tmp_path))
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
    words = " ".join(shell("replay", str(tmp_path), status=1).split())
    assert "holds no gradients: a server keeps them with --log-gradients" in words
    assert "could not be replayed, so nothing is said of what they hold" in words and "do not replay" not in words
