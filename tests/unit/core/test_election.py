import pytest

from pyps.core.election import Claim, Election
from pyps_wire.errors import RunMismatch, Superseded


@pytest.fixture
def election() -> Election:
    """An election that "a" won at time 0."""
    election = Election(lease_seconds=10.0)
    assert not election.busy
    term = election.elect("a", 1, now=0.0)
    assert term is not None and (term.number, term.worker_id) == (1, "a")
    return election


def claim(worker_id: str, term: int, *, run_id: str = "r", server_index: int = 0, incarnation: int = 1) -> Claim:
    return Claim(run_id, server_index, term, worker_id, incarnation)


def opened(election: Election, claim: Claim, *, now: float = 1.0, version: int = 0, workers_alive: int = 0) -> bool:
    return election.open(claim, now=now, holding="run 'r'", version=version, workers_alive=workers_alive)


def elected(election: Election, worker_id: str, incarnation: int, now: float, **more: object) -> tuple[int, str] | None:
    term = election.elect(worker_id, incarnation, now=now, **more)  # type: ignore[arg-type]
    return term and (term.number, term.worker_id)


def test_nobody_else_is_elected_while_the_lease_holds_and_another_once_it_has_run_out(election):
    assert elected(election, "b", 1, 10.0) is None
    assert elected(election, "a", 2, 10.0) is None, "a new process of the elected worker is another"
    assert elected(election, "b", 1, 10.1) == (2, "b")


def test_the_elected_worker_keeps_its_term_when_it_asks_again_or_renews(election):
    term = election.elect("a", 1, now=8.0)
    assert term is not None and (term.number, term.expires_at) == (1, 18.0)
    election.renew(claim("a", 1), now=9.0)
    assert elected(election, "b", 1, 18.5) is None
    assert elected(election, "b", 1, 19.1) == (2, "b")


def test_another_takes_over_at_once_where_the_elected_life_is_over(election):
    assert elected(election, "b", 1, 1.0, is_over=lambda name, life: (name, life) == ("a", 2)) is None
    assert elected(election, "b", 1, 1.0, is_over=lambda name, life: (name, life) == ("a", 1)) == (2, "b")


def test_a_term_is_longer_by_the_time_in_which_nobody_could_be_heard(election):
    election.stood_still(36.0)
    assert elected(election, "b", 1, 46.0) is None
    assert elected(election, "b", 1, 46.1) == (2, "b")
    Election(lease_seconds=10.0).stood_still(36.0)  # nobody was elected: nothing to prolong


def test_a_term_that_has_run_out_is_current_until_another_follows(election):
    election.renew(claim("a", 1), now=100.0)
    assert elected(election, "b", 1, 111.0) == (2, "b")
    for not_its_turn in (claim("a", 1), claim("a", 2), claim("b", 1), claim("b", 2, incarnation=2)):
        with pytest.raises(Superseded, match="is not \\(or no longer\\) the one that initialises this run"):
            election.renew(not_its_turn, now=112.0)
    election.renew(claim("b", 2), now=112.0)


def test_nobody_is_elected_once_there_is_a_run_and_only_its_initialiser_may_retry(election):
    assert opened(election, claim("a", 1))
    election.done("r", claim("a", 1))
    assert elected(election, "b", 1, 100.0) is None
    assert not opened(election, claim("a", 1))
    with pytest.raises(Superseded, match="another worker has initialised run 'r'"):
        opened(election, claim("b", 2))
    with pytest.raises(RunMismatch, match="holds run 'r' and cannot be initialised again"):
        opened(election, claim("b", 2, run_id="other"))
    with pytest.raises(Superseded):
        election.renew(claim("b", 2, run_id="other"), now=1.0)


def test_another_server_follows_the_newest_term_until_server_0_has_made_the_run():
    election = Election(lease_seconds=10.0)
    assert opened(election, claim("a", 3, server_index=1))
    assert opened(election, claim("b", 5, server_index=1)) and election.busy
    with pytest.raises(Superseded):
        opened(election, claim("a", 3, server_index=1))
    election.done("r", claim("b", 5, server_index=1))
    assert opened(election, claim("c", 6, server_index=1)), "a later term replaces an earlier one"
    assert opened(election, claim("c", 1, run_id="other", server_index=1))
    for refused in ({"run_id": "other", "workers_alive": 1}, {"version": 1}):
        run_id = refused.pop("run_id", "r")
        with pytest.raises(RunMismatch, match="cannot be initialised again"):
            opened(election, claim("c", 7, run_id=str(run_id), server_index=1), **refused)  # type: ignore[arg-type]


def test_what_a_checkpoint_brought_back_is_initialised_by_nobody():
    election = Election(lease_seconds=10.0)
    election.done("r", None)
    for server_index, refusal in ((0, Superseded), (1, RunMismatch)):
        with pytest.raises(refusal):
            opened(election, claim("a", 1, server_index=server_index))
