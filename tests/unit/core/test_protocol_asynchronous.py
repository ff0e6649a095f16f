"""Protocols under which every gradient is an update: async, asgd, and on the shard serial and ssp."""

from __future__ import annotations

import pytest

from pyps.core.aggregation import Acknowledge, Aggregation, Apply, Async, Park, Part, parse
from pyps.core.gradient import PayloadKind
from pyps.core.pacing import ClockBound, TurnTaking
from shards import arrival, contribution, crew, roster

EAGER = ("async", "asgd", "asgd:mutex=shard", "serial", "ssp:s=0", "ssp:s=3")


@pytest.fixture(params=EAGER)
def protocol(request: pytest.FixtureRequest) -> Aggregation:
    return parse(request.param)


def test_each_gradient_is_applied_alone_and_whole_however_old(protocol: Aggregation) -> None:
    arrived = arrival("a", workers=crew(4), version=9, base_version=2)
    assert protocol.decide(arrived) == Apply((Part(arrived.contribution, share=1.0),))


def test_nothing_is_acknowledged(protocol: Aggregation) -> None:
    assert protocol.decide(arrival("a", workers=crew(4), kind=PayloadKind.NOTHING)) == Acknowledge()


def test_no_gradient_waits(protocol: Aggregation) -> None:
    assert protocol.complete((), version=0, roster=crew(4)) is None
    assert protocol.settle(()) is None
    assert protocol.waiting_for((), crew(4)) == ()


def test_any_number_of_workers_will_do(protocol: Aggregation) -> None:
    protocol.check(1)
    assert protocol.warnings(1) == ()


def test_the_papers_n_is_l_with_those_still_expected_and_1_where_one_computes_at_a_time() -> None:
    splits = {text: parse(text).split(roster("a", "b", missing=2)) for text in EAGER}
    assert splits == {text: 1.0 if text == "serial" else 4.0 for text in EAGER}
    assert Async().split(roster(missing=0)) == 1.0


def test_who_may_compute_is_judged_under_serial_and_ssp_alone() -> None:
    pacers = {text: type(parse(text).pacer()) for text in EAGER}
    none = type(None)
    assert pacers == dict.fromkeys(EAGER, none) | {
        "serial": TurnTaking,
        "ssp:s=0": ClockBound,
        "ssp:s=3": ClockBound,
    }


def test_each_run_of_a_protocol_gets_a_pacer_of_its_own() -> None:
    assert parse("serial").pacer() is not parse("serial").pacer()


def test_strict_bsp_is_a_barrier_without_a_pacer() -> None:
    strict = parse("ssp:s=0,strict_bsp=true")
    assert strict.pacer() is None
    assert strict.decide(arrival("a", workers=crew(2))) == Park(min_version=1)
    assert strict.waiting_for((contribution("w00"),), crew(2)) == ("w01",)
    assert strict.split(crew(2)) == 1.0
