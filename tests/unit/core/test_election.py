"""One initialiser at a time; another takes over when it falls silent."""

from __future__ import annotations

import pytest

from pyps.core.election import Election


@pytest.fixture
def election() -> Election:
    """An election that "a" won at time 0."""
    election = Election(lease_seconds=10.0)
    assert not election.is_current(0)
    term = election.elect("a", 1, now=0.0)
    assert term is not None and (term.number, term.worker_id) == (1, "a")
    return election


def elected(election: Election, worker_id: str, incarnation: int, now: float, **more: object) -> tuple[int, str] | None:
    term = election.elect(worker_id, incarnation, now=now, **more)  # type: ignore[arg-type]
    return term and (term.number, term.worker_id)


def test_nobody_else_is_elected_while_the_lease_holds_and_another_once_it_has_run_out(election: Election) -> None:
    assert elected(election, "b", 1, 10.0) is None
    assert elected(election, "a", 2, 10.0) is None, "a new process of the elected worker is another"
    assert elected(election, "b", 1, 10.1) == (2, "b")


def test_the_elected_worker_keeps_its_term_when_it_asks_again_or_renews(election: Election) -> None:
    term = election.elect("a", 1, now=8.0)
    assert term is not None and (term.number, term.expires_at) == (1, 18.0)
    assert election.renew(1, now=9.0)
    assert elected(election, "b", 1, 18.5) is None
    assert elected(election, "b", 1, 19.1) == (2, "b")


def test_another_takes_over_at_once_where_the_elected_life_is_over(election: Election) -> None:
    assert elected(election, "b", 1, 1.0, is_over=lambda name, life: (name, life) == ("a", 2)) is None
    assert elected(election, "b", 1, 1.0, is_over=lambda name, life: (name, life) == ("a", 1)) == (2, "b")


def test_a_term_is_longer_by_the_time_in_which_nobody_could_be_heard(election: Election) -> None:
    election.stood_still(36.0)
    assert elected(election, "b", 1, 46.0) is None
    assert elected(election, "b", 1, 46.1) == (2, "b")
    Election(lease_seconds=10.0).stood_still(36.0)  # nobody was elected: nothing to prolong


def test_a_term_that_has_run_out_is_current_until_another_follows(election: Election) -> None:
    assert election.renew(1, now=100.0)
    assert elected(election, "b", 1, 111.0) == (2, "b")
    assert (election.is_current(1), election.renew(1, now=112.0), election.is_current(2)) == (False, False, True)


def test_nobody_is_elected_when_all_is_done(election: Election) -> None:
    election.done()
    assert elected(election, "b", 1, 100.0) is None
    assert not election.is_current(1)


def test_a_server_that_starts_anew_continues_above_its_former_terms(election: Election) -> None:
    former = elected(election, "b", 1, 100.0)
    assert former == (2, "b")
    assert elected(Election(lease_seconds=10.0, first_term=former[0] + 1), "a", 1, 0.0) == (3, "a")
