"""The role of a caller, by the server's settings and by what the caller shows."""

import re
from pathlib import Path

import pytest

from pyps.config import ServerConfig
from pyps.roles import METRICS, PORTS, Role, role_in
from pyps.service.security import Access, is_own_machine
from pyps_wire.contract import INSPECTOR, PARAMETER_SERVER
from pyps_wire.errors import NotAllowed, NotAuthenticated

NONE, SEES, WORKS, RULES = None, Role.OBSERVER, Role.WORKER, Role.OPERATOR
FIELDS = {SEES: "observer_token_file", WORKS: "token_file", RULES: "operator_token_file"}
HERE, ELSEWHERE = "ipv4:127.0.0.1:5", "ipv4:10.0.0.1:5"

# The roles that have tokens, True if certificates are required; the caller's token, certificate and address; its role.
CASES = [
    ((), False, NONE, NONE, HERE, RULES),
    ((), False, NONE, NONE, ELSEWHERE, WORKS),
    ((WORKS,), False, WORKS, NONE, HERE, RULES),
    ((WORKS,), False, WORKS, NONE, ELSEWHERE, WORKS),
    ((SEES, WORKS), False, SEES, NONE, HERE, SEES),
    ((SEES, WORKS, RULES), False, WORKS, NONE, HERE, WORKS),
    ((SEES, WORKS, RULES), False, RULES, NONE, ELSEWHERE, RULES),
    ((), True, NONE, RULES, ELSEWHERE, RULES),
    ((), True, NONE, WORKS, HERE, WORKS),
    ((WORKS,), True, WORKS, RULES, HERE, RULES),
    ((WORKS,), True, WORKS, RULES, ELSEWHERE, WORKS),
    ((WORKS,), True, WORKS, SEES, HERE, SEES),
    ((SEES, WORKS, RULES), True, RULES, WORKS, HERE, WORKS),
    ((SEES, WORKS, RULES), True, SEES, RULES, HERE, SEES),
    ((SEES, WORKS, RULES), True, RULES, RULES, ELSEWHERE, RULES),
]


@pytest.mark.parametrize("case", CASES)
def test_a_caller_has_the_least_role_of_its_token_certificate_and_address(tmp_path, case):
    guarded, certified, token, certificate, place, expected = case
    access = access_with(tmp_path, *guarded, certified=certified)
    shown = None if token is None else f"Bearer the-token-of-{token.word}"
    subject = "CN=a" if certificate is None else f"OU={certificate.word},CN=a"

    assert access.admit(METRICS, shown, peer=place, subject=subject) is expected


def access_with(folder: Path, *roles: Role, certified: bool = False) -> Access:
    settings = {}
    for role in roles:
        settings[FIELDS[role]] = folder / role.word
        settings[FIELDS[role]].write_text(f"the-token-of-{role.word}", encoding="utf-8")
    return Access(ServerConfig(**settings, tls_client_ca=folder if certified else None))


def test_a_token_in_two_files_gives_the_least_of_both_roles_and_no_file_s_none(tmp_path):
    access = access_with(tmp_path, SEES, WORKS, RULES)
    (tmp_path / "observer").write_text("the-token-of-observer\nthe-token-of-operator", encoding="utf-8")
    assert access.admit(METRICS, b"Bearer the-token-of-operator", peer=HERE, subject="") is SEES
    for shown in (None, "", "Bearer the-token-of-nobody", "the-token-of-worker"):
        with pytest.raises(NotAuthenticated, match="token"):
            access.admit(METRICS, shown, peer=HERE, subject="")


def test_a_caller_without_a_token_learns_the_setting_of_the_role_that_the_call_needs(tmp_path):
    every, stop, hello = (SEES, WORKS, RULES), f"/{INSPECTOR}/Stop", f"/{PARAMETER_SERVER}/Hello"
    observer, worker = r"PYPS_OBSERVER_TOKEN_FILE \(as observer\)", r"PYPS_TOKEN_FILE \(as worker\)"
    operator = r"PYPS_OPERATOR_TOKEN_FILE \(as operator\)"
    for roles, call, settings in (
        (every, hello, f"{observer} or {worker} or {operator},"),
        (every, f"/{PARAMETER_SERVER}/Push", f"{worker} or {operator},"),
        (every, stop, f"{operator},"),
        ((SEES, WORKS), stop, f"{worker},"),
    ):
        with pytest.raises(NotAuthenticated, match=f"wants a token: set {settings}"):
            access_with(tmp_path, *roles).admit(call, None, peer=HERE, subject="")


def test_a_call_that_is_not_in_the_table_is_for_operators(tmp_path):
    with pytest.raises(NotAllowed, match="New is for the role operator, and this caller's is worker"):
        access_with(tmp_path, WORKS, RULES).admit("/a.B/New", "Bearer the-token-of-worker", peer=HERE, subject="")


def test_a_refusal_says_which_of_token_and_certificate_gives_too_little(tmp_path):
    access = access_with(tmp_path, WORKS, RULES, certified=True)
    for token, certificate in (("operator", "worker"), ("worker", "operator")):
        with pytest.raises(NotAllowed, match=rf"is worker \({token} by its token, {certificate} by its certificate\)"):
            access.admit("/a.B/New", f"Bearer the-token-of-{token}", peer=HERE, subject=f"OU={certificate},CN=a")


def test_observers_read_workers_train_and_operators_change_the_server():
    rows = {call.rpartition("/")[2]: role for calls in PORTS.values() for call, role in calls.items()}
    for call, role in rows.items():
        if call in ("Check", "List", "Watch"):
            expected = Role.ANYBODY
        elif call in ("Configure", "SaveCheckpoint", "Reset", "Stop", "Promote", "Drain", "Follow", "Meet"):
            expected = RULES
        else:
            reads = call.startswith(("Get", "List")) or call in ("Hello", "Pull", "ServerReflectionInfo", METRICS)
            expected = SEES if reads else WORKS
        assert role is expected, call


def test_the_role_in_a_subject_is_a_unit_of_it_and_nothing_that_looks_like_one():
    assert role_in("OU=operator,CN=a") is RULES
    assert role_in("CN=a+OU=observer,O=b") is SEES
    assert role_in("OU=operator,OU=observer,CN=a") is SEES
    for subject in ("", "CN=a", "OU=research,CN=a", r"CN=a\,OU=operator", "CN=OU=operator", "OU=operators,CN=a"):
        assert role_in(subject) is WORKS
    assert role_in(r"OU=observer,CN=a\\") is SEES
    assert role_in(r"CN=a\\,OU=observer") is SEES


def test_the_address_that_a_server_is_bound_to_is_its_own_machine_s():
    for host, peer in (
        ("0.0.0.0", "ipv4:127.0.0.1:5"),
        ("0.0.0.0", "unix:/a"),
        ("192.0.2.2", "ipv4:192.0.2.2:5"),
        ("192.0.2.2", "ipv6:%5B::ffff:192.0.2.2%5D:5"),
        ("[2001:db8::2]", "ipv6:%5B2001:db8:0::2%5D:5"),
    ):
        assert is_own_machine(peer, host=host), (host, peer)
    for host, peer in (
        ("192.0.2.2", "ipv4:192.0.2.22:5"),
        ("0.0.0.0", "ipv4:192.0.2.2:5"),
        ("a-name", "ipv4:192.0.2.2:5"),
        ("a-name", "a-name:5"),
    ):
        assert not is_own_machine(peer, host=host), (host, peer)
    everybody = Access(ServerConfig(host="192.0.2.2", insecure=True))
    assert everybody.admit(METRICS, None, peer="ipv4:192.0.2.2:5", subject="") is RULES
    assert everybody.admit(METRICS, None, peer="ipv4:192.0.2.3:5", subject="") is WORKS


def test_a_refusal_for_the_caller_s_machine_names_the_address_that_is_taken_for_the_server_s():
    for host, place in (
        ("0.0.0.0", "run it there, by 127.0.0.1,"),
        ("192.0.2.2", "run it there, by 192.0.2.2,"),
        ("a-name", "an address as --host in place of a name"),
    ):
        access = Access(ServerConfig(host=host, insecure=True))
        with pytest.raises(NotAllowed, match=re.escape(place)):
            access.admit(f"/{INSPECTOR}/Stop", None, peer="ipv4:192.0.2.3:5", subject="")
