"""Protocols by name; what each decides is in test_protocol_*.py, how a shard obeys in test_shard_protocols.py."""

from __future__ import annotations

import pytest

from pyps.core.aggregation import PROTOCOLS, Asgd, Async, Backup, Hardsync, Serial, Softsync, Ssp, parse
from pyps_wire.errors import BadRequest

TEXTS = (
    *("async", "softsync:n=4", "hardsync", "hardsync:weighting=equal", "backup:b=0", "backup:b=2", "ssp:s=3"),
    *("ssp:s=0,strict_bsp=true", "serial", "asgd", "asgd:mutex=shard,accumulate=4"),
)


def test_every_protocol_is_found_under_its_own_name() -> None:
    assert {name: kind.name for name, kind in PROTOCOLS.items()} == {name: name for name in PROTOCOLS}


@pytest.mark.parametrize("text", TEXTS)
def test_a_protocols_text_makes_an_equal_protocol(text: str) -> None:
    protocol = parse(text)
    assert protocol.text == text
    assert parse(protocol.text) == protocol


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("Downpour", Async()),
        ("asynchronous", Async()),
        ("synchronous", Serial()),
        ("hybrid:weighting=equal", Hardsync("equal")),
        ("BSP", Hardsync()),
        ("1-softsync", Softsync(1)),
        ("30-softsync", Softsync(30)),
        (" softsync:n=4 ", Softsync(4)),
        ("ssp: s=3", Ssp(3)),
        ("asgd:mutex=shard", Asgd("shard")),
        ("backup:b=2", Backup(2)),
    ],
)
def test_other_peoples_words_are_understood(text: str, protocol: object) -> None:
    assert parse(text) == protocol


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gossip", "protocol 'gossip' is unknown; expected one of asgd, async, backup, hardsync, sandblaster, serial"),
        ("softsync", "softsync's n is 0; expected at least 1, as in softsync:n=4"),
        ("softsync:n=0", "softsync's n is 0; expected at least 1"),
        ("softsync:n=x", "protocol 'softsync': n is 'x'; expected a whole number"),
        ("softsync:m=3", "protocol 'softsync' has no setting 'm=3'; it has n="),
        ("hardsync:weighting=count", "hardsync's weighting is 'count'; expected one of by_count, equal"),
        ("backup", "backup's b is -1; expected the workers that no update waits for, as in backup:b=2"),
        ("ssp", "ssp's s is -1; expected the clocks that a worker may be ahead of the slowest, as in ssp:s=3"),
        ("ssp:s=2,strict_bsp=true", "ssp's strict_bsp needs s=0, and s is 2"),
        ("asgd:mutex=none", "asgd's mutex is 'none'; expected one of whole, shard"),
        ("asgd:accumulate=-1", "asgd's accumulate is -1; expected the minibatches summed in a push, or 0"),
        ("async:n=1", "protocol 'async' has no setting 'n=1'; it has no settings"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text: str, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", TEXTS)
def test_a_protocol_says_whether_it_takes_gradients_of_the_present_version_only(text: str) -> None:
    takes_only_present = text.startswith(("hardsync", "backup")) or "strict_bsp" in text
    assert parse(text).barrier is takes_only_present


def test_only_asgd_asks_for_one_mutex_and_for_sums_of_minibatches() -> None:
    wanted = {text: (parse(text).whole_model, parse(text).accumulate) for text in TEXTS}
    assert {text: wish for text, wish in wanted.items() if wish != (False, 0)} == {
        "asgd": (True, 0),
        "asgd:mutex=shard,accumulate=4": (False, 4),
    }
