import re
import shlex

from pyps.certificates import describe
from support import ROOT, shell


def test_certificates_are_for_their_owner_alone_and_never_overwritten(tmp_path):
    folder = tmp_path / "certs"
    into = ("--folder", str(folder))
    shell("certs", "init", "--host", "first-host", "--host", "10.0.0.7", *into)
    shell("certs", "worker", "ann", *into)
    shell("certs", "worker", "eve", "--role", "observer", *into)
    assert "expected observer, worker or operator" in shell("certs", "worker", "bob", "--role", "x", *into, status=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {f"{name}.{kind}" for name in ("ca", "server", "ann", "eve") for kind in ("crt", "key")}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}

    assert "server.key and " in shell("certs", "init", "--host", "another", *into, status=2)
    assert "would be overwritten" in shell("certs", "worker", "ann", *into, status=2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    ann, ca, eve, server = shell("certs", "show", str(folder)).splitlines()
    assert "ann.crt: worker, ann, until" in ann and "(364 days left)" in ann and "ca.crt: CA, pyps CA" in ca
    assert "eve.crt: observer, eve, until" in eve
    assert "server.crt: server, first-host, 10.0.0.7, localhost, 127.0.0.1, ::1, until" in server
    assert "expected letters" in shell("certs", "worker", "../ann", *into, status=2)


def test_a_certificate_that_is_not_valid_yet_is_shown_as_such(made):
    since = describe(made / "early" / "worker.crt").since
    expected = f"(NOT VALID before {since:%Y-%m-%d %H:%M} UTC)"
    assert expected in shell("certs", "show", str(made / "early" / "worker.crt"))
    assert "EXPIRED" in shell("certs", "show", str(made / "expired" / "worker.crt"))


def test_a_server_s_name_may_be_long_and_what_is_refused_leaves_nothing(tmp_path):
    folder = tmp_path / "certs"
    into = ("--folder", str(folder))
    name = f"server-0.{'servers' * 9}.default.svc.cluster.local"
    refused = "--days is {}, but the CA is valid for 3650 more"
    for days in ("3651", "4000000"):
        assert refused.format(days) in shell("certs", "init", "--host", name, "--days", days, *into, status=2)
    assert "--host is" in shell("certs", "init", "--host", "no host", *into, status=2)
    assert not folder.exists()

    shell("certs", "init", "--host", name, "--days", "3650", *into)
    server, ca = describe(folder / "server.crt"), describe(folder / "ca.crt")
    assert server.names == (name, "localhost", "127.0.0.1", "::1")
    assert server.until == ca.until
    assert refused.format(4000000) in shell("certs", "worker", "ann", "--days", "4000000", *into, status=2)
    assert "has 65 characters" in shell("certs", "worker", 65 * "a", *into, status=2)


def test_the_commands_of_the_security_page_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    commands = [line.partition("#")[0] for line in page.splitlines() if line.startswith("pyps certs ")]
    assert len(commands) == 4
    # A server of that name is needed for the last.
    for command in commands[:3]:
        shell(*shlex.split(command)[1:])
    assert all((tmp_path / name).exists() for name in set(re.findall(r"certs/[\w-]+\.(?:crt|key)", page)))
