"""One initialiser at a time; another takes over when it falls silent."""

from __future__ import annotations

import pytest

from pyps.core.election import Election


@pytest.fixture
def election() -> Election:
    return Election(lease_seconds=10.0)


def test_the_first_to_ask_is_elected(election: Election) -> None:
    term = election.elect("a", 1, now=0.0)
    assert term is not None
    assert (term.number, term.worker_id) == (1, "a")


def test_nobody_else_is_elected_while_the_lease_holds(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    assert election.elect("b", 1, now=10.0) is None


def test_the_elected_worker_keeps_its_term_when_it_asks_again(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    term = election.elect("a", 1, now=8.0)
    assert term is not None
    assert (term.number, term.expires_at) == (1, 18.0)


def test_another_takes_over_when_the_lease_has_run_out(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    term = election.elect("b", 1, now=10.1)
    assert term is not None
    assert (term.number, term.worker_id) == (2, "b")


def test_a_new_process_of_the_elected_worker_is_another(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    assert election.elect("a", 2, now=1.0) is None


def test_another_takes_over_at_once_where_the_elected_life_is_over(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    assert election.elect("b", 1, now=1.0, is_over=lambda name, life: (name, life) == ("a", 2)) is None
    term = election.elect("b", 1, now=1.0, is_over=lambda name, life: (name, life) == ("a", 1))
    assert term is not None
    assert (term.number, term.worker_id) == (2, "b")


def test_a_term_is_longer_by_the_time_in_which_nobody_could_be_heard(election: Election) -> None:
    election.stood_still(36.0)
    election.elect("a", 1, now=0.0)
    election.stood_still(36.0)
    assert election.elect("b", 1, now=46.0) is None
    assert election.elect("b", 1, now=46.1) is not None


def test_a_renewed_lease_holds_longer(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    assert election.renew(1, now=9.0)
    assert election.elect("b", 1, now=18.0) is None


def test_a_term_that_was_followed_is_not_current_and_not_renewed(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    election.elect("b", 1, now=11.0)
    assert (election.is_current(1), election.renew(1, now=12.0), election.is_current(2)) == (
        False,
        False,
        True,
    )


def test_a_term_that_has_run_out_is_current_until_another_follows(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    assert election.renew(1, now=100.0)


def test_nobody_is_elected_when_all_is_done(election: Election) -> None:
    election.elect("a", 1, now=0.0)
    election.done()
    assert election.elect("b", 1, now=100.0) is None
    assert not election.is_current(1)


def test_before_the_first_election_no_term_is_current(election: Election) -> None:
    assert not election.is_current(0)


def test_a_server_that_starts_anew_continues_above_its_former_terms() -> None:
    former = Election(lease_seconds=10.0)
    former.elect("a", 1, now=0.0)
    overtaken = former.elect("b", 1, now=100.0)
    assert overtaken is not None

    again = Election(lease_seconds=10.0, first_term=overtaken.number + 1).elect("a", 1, now=0.0)

    assert again is not None
    assert again.number > overtaken.number
