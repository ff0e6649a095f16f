"""Replicas of several processes, which live and end as one (Dean et al. 2012, section 3)."""

import pytest

from pyps.core.effects import NONE
from pyps.core.membership import GONE_FACTOR, Member, Membership, WorkerState
from pyps_wire.errors import InvalidArgument, LimitExceeded, ReplicaLost, Superseded, UnknownWorker


@pytest.fixture
def members() -> Membership:
    return Membership(lease_seconds=30.0, workers_max=6, expected_workers=2)


def join(members: Membership, replica: str, *parts: int, incarnation: int = 1, now: float = 0.0) -> list[Member]:
    for part in parts:
        members.join(f"{replica}/{part}", incarnation, now=now, replica=replica, parts=(part,))
    return [member for member in members.all() if member.replica == replica]


def push(members: Membership, *worker_ids: str, incarnation: int = 1, now: float = 1.0) -> None:
    for worker_id in worker_ids:
        members.pushed(worker_id, incarnation, now=now)


def alive(members: Membership) -> list[str]:
    return [member.worker_id for member in members.alive()]


def test_processes_of_a_replica_are_members_each_and_one_worker(members: Membership) -> None:
    [leader, _] = join(members, "r", 0, 1)

    assert (leader.name, leader.parts, members.num_alive) == ("r", (0,), 2)
    assert (members.names(), members.name_of("r/1"), members.name_of("a")) == (["r"], "r", "a")


def test_a_process_that_fails_takes_its_replica_along(members: Membership) -> None:
    join(members, "r", 0, 1)
    join(members, "s", 0, 1)
    push(members, "r/0", "r/1", "s/0", "s/1")

    effects = members.leave("r/1", 1, now=2.0, failed=True, message="out of memory")

    assert (effects.gone, effects.departed) == ((("r/1", True), ("r/0", True)), ("r",))
    assert effects.notices[-1].what == "replica r is out: its process r/1 failed (out of memory)"
    states = {member.worker_id: member.state for member in members.all() if member.replica == "r"}
    assert states == {"r/0": WorkerState.EXPIRED, "r/1": WorkerState.FAILED}
    assert alive(members) == ["s/0", "s/1"]
    assert [members.roster.of_part(part).workers for part in (0, 1)] == [("s/0",), ("s/1",)]
    require_lost(members, "r", r"'r/1' failed \(out of memory\)")


def test_a_process_that_falls_silent_takes_its_replica_along(members: Membership) -> None:
    join(members, "r", 0, 1)
    members.heard("r/0", 1, now=29.0)

    assert members.expire(31.0).gone == (("r/1", True), ("r/0", True))
    assert members.num_alive == 0
    require_lost(members, "r", "'r/1' was silent for longer than its lease")


def require_lost(members: Membership, replica: str, how: str) -> None:
    """Every call of each process of the replica must fail with the name of the lost process and how it was lost."""
    for call in (members.heard, members.pushed, members.join):
        extra = {"replica": replica, "parts": (0,)} if call == members.join else {}
        for process in (f"{replica}/0", f"{replica}/1"):
            words = f"replica '{replica}' is out of the run: its process {how}.*start it again"
            with pytest.raises(ReplicaLost, match=words):
                call(process, 1, now=32.0, **extra)


def test_a_process_that_finishes_leaves_the_others_alone(members: Membership) -> None:
    join(members, "r", 0, 1)

    effects = members.leave("r/0", 1, now=1.0, failed=False)

    assert (effects.gone, effects.departed, alive(members)) == ((("r/0", False),), (), ["r/1"])
    assert members.heard("r/1", 1, now=2.0) is NONE


def test_a_later_life_takes_the_whole_replica_over(members: Membership) -> None:
    join(members, "r", 0, 1)
    push(members, "r/0", "r/1")

    join(members, "r", 0, incarnation=2, now=2.0)

    assert (alive(members), members.roster.workers) == (["r/0"], ())
    with pytest.raises(Superseded, match="a later life of replica 'r' has begun"):
        members.heard("r/1", 1, now=3.0)
    with pytest.raises(Superseded, match="later process"):
        members.heard("r/0", 1, now=3.0)
    join(members, "r", 1, incarnation=2, now=3.0)
    assert (alive(members), members.roster.coming) == (["r/0", "r/1"], ("r",))


def test_a_process_that_was_taken_over_does_not_come_back_by_itself(members: Membership) -> None:
    join(members, "r", 0, 1)
    join(members, "r", 0, incarnation=2)
    members.leave("r/0", 2, now=1.0, failed=False)

    with pytest.raises(Superseded, match="a later life"):
        members.heard("r/1", 1, now=2.0)
    with pytest.raises(UnknownWorker, match="say Hello"):
        members.heard("r/0", 1, now=2.0)
    for part in (0, 1):
        with pytest.raises(Superseded, match="incarnation 2, this process is of 1"):
            join(members, "r", part, incarnation=1)
    assert alive(members) == []


def test_no_life_comes_back_after_a_later_one_was_lost(members: Membership) -> None:
    for life in (1, 2):
        join(members, "r", 0, 1, incarnation=life)
        members.leave("r/1", life, now=1.0, failed=True)

    with pytest.raises(Superseded, match="incarnation 2, this process is of 1"):
        join(members, "r", 0, incarnation=1)
    with pytest.raises(ReplicaLost, match="'r/1' failed"):
        join(members, "r", 0, incarnation=2)
    assert alive(members) == []
    join(members, "r", 0, incarnation=3)


def test_a_takeover_needs_no_more_room_than_the_life_before(members: Membership) -> None:
    full = Membership(lease_seconds=30.0, workers_max=2)
    join(full, "r", 0, 1)

    join(full, "r", 2, incarnation=2)

    assert alive(full) == ["r/2"]
    join(full, "r", 1, incarnation=2)
    with pytest.raises(LimitExceeded, match="2 workers are alive"):
        join(full, "s", 0)


def test_a_part_is_held_by_one_process_of_a_replica(members: Membership) -> None:
    join(members, "r", 0)
    message = r"'r/9' declares parts 0, 1 of the model, and 'r/0' of the same replica part 0"
    with pytest.raises(InvalidArgument, match=message):
        members.join("r/9", 1, now=0.0, replica="r", parts=(0, 1))
    with pytest.raises(InvalidArgument, match="'r/9' declares all parts"):
        members.join("r/9", 1, now=0.0, replica="r")
    join(members, "s", 0)


def test_workers_replicas_and_processes_of_replicas_cannot_share_a_name(members: Membership) -> None:
    join(members, "r", 0, 1)
    members.join("w", 5, now=0.0)
    for name in ("r", "w"):
        with pytest.raises(InvalidArgument, match="give one of them another name"):
            members.join("r", 5, now=0.0) if name == "r" else join(members, "w", 0)
    members.leave("w", 5, now=0.0, failed=False)
    with pytest.raises(
        InvalidArgument, match="'r/0' is the name of a worker of one process and of a replica, or of a pro"
    ):
        members.join("r/0", 5, now=0.0)
    members.join("a/0", 5, now=0.0)
    with pytest.raises(InvalidArgument, match="'a/0' is the name"):
        join(members, "a", 0, incarnation=6)
    assert alive(members) == ["r/0", "r/1", "a/0"]


def test_a_process_that_went_for_anothers_sake_or_peoples_is_not_called_lost(members: Membership) -> None:
    for replica, (message, how) in {
        "r": ("ReplicaLost: another process is gone", "says that it lost another of them;"),
        "s": ("KeyboardInterrupt: ", r"was interrupted \(KeyboardInterrupt\);"),
        "t": ("Terminated: SIGTERM", r"was interrupted \(Terminated: SIGTERM\);"),
    }.items():
        join(members, replica, 0, 1)
        effects = members.leave(f"{replica}/0", 1, now=1.0, failed=True, message=message)
        assert effects.gone == ((f"{replica}/0", True), (f"{replica}/1", True))
        assert effects.notices[-1].warning == (replica == "r")
        require_lost(members, replica, f"'{replica}/0' {how}")


def test_leases_are_prolonged_by_the_time_of_a_standstill(members: Membership) -> None:
    join(members, "r", 0, 1)
    members.heard("r/0", 1, now=20.0)

    members.stood_still(36.0, now=57.0)

    assert members.expire(65.9) is NONE
    assert [member.heard_at for member in members.all()] == [56.0, 36.0]
    assert members.expire(66.1).gone == (("r/1", True), ("r/0", True))
    # Nobody was heard later than now.
    join(members, "s", 0, now=66.0)
    members.stood_still(36.0, now=67.0)
    assert members.get("s/0").heard_at == 67.0  # type: ignore[union-attr]


def test_a_life_is_over_when_it_lost_a_process_left_or_was_followed(members: Membership) -> None:
    join(members, "r", 0, 1)
    members.join("a", 1, now=0.0)
    assert not members.is_over("r", 1)
    assert not members.is_over("a", 1)

    members.leave("r/1", 1, now=1.0, failed=True)
    members.leave("a", 1, now=1.0, failed=False)
    assert members.is_over("r", 1)
    assert members.is_over("a", 1)

    join(members, "r", 0, incarnation=2)
    assert (members.is_over("r", 1), members.is_over("r", 2)) == (True, False)
    # Whose lease ran out may be heard again.
    members.join("b", 1, now=0.0)
    members.expire(100.0)
    assert not members.is_over("b", 1)
    assert members.is_over("r", 2)


def test_a_worker_that_holds_the_whole_model_is_active_for_every_part(members: Membership) -> None:
    join(members, "r", 0, 1)
    members.join("a", 1, now=0.0)
    push(members, "r/0", "a")
    roster = members.roster
    assert (roster.workers, [roster.of_part(part).workers for part in (0, 1, 7)]) == (
        ("a", "r"),
        [("a", "r/0"), ("a",), ("a",)],
    )
    assert [roster.is_active(worker_id) for worker_id in ("r/0", "r/1", "a")] == [True, False, True], "by its own name"
    # The log of a shard tells rosters apart by what they list for it.
    push(members, "r/1")
    assert members.roster.of_part(0) == roster.of_part(0)
    assert members.roster.of_part(1) != roster.of_part(1)


def test_a_shard_of_an_undeclared_part_is_refused(members: Membership) -> None:
    join(members, "r", 0)
    members.join("a", 1, now=0.0)

    members.require_part("r/0", 3, 0)
    members.require_part("a", 4, 1)
    with pytest.raises(
        InvalidArgument, match=r"shard 4 belongs to part 1 of the model, and worker 'r/0' declared part 0"
    ):
        members.require_part("r/0", 4, 1)


def test_expected_workers_are_replicas(members: Membership) -> None:
    join(members, "r", 0, 1)
    push(members, "r/0", "r/1")
    assert [members.roster.missing, *(members.roster.of_part(part).missing for part in (0, 1))] == [1, 1, 1]
    assert members.roster.of_part(1).awaited == ("1 more worker that has not joined",)

    join(members, "s", 0, 1)
    push(members, "s/0")

    assert [members.roster.missing, *(members.roster.of_part(part).missing for part in (0, 1))] == [0, 0, 1]
    assert members.roster.of_part(1).coming == ("s/1",)

    # One that comes back after all have come is not missed.
    push(members, "s/1")
    join(members, "r", 0, 1, incarnation=2)
    assert [members.roster.missing, *(members.roster.of_part(part).missing for part in (0, 1))] == [0, 0, 0]


def test_expected_workers_that_have_come_are_not_missing_for_parts_that_come_later() -> None:
    members = Membership(lease_seconds=30.0, workers_max=6, expected_workers=1)
    members.join("a", 1, now=0.0)
    push(members, "a")
    assert members.roster.missing == 0
    members.join("a", 2, now=1.0)

    join(members, "r", 0)

    assert members.roster.of_part(0).missing == 0


def test_processes_of_a_replica_stall_together(members: Membership) -> None:
    join(members, "r", 0, 1)
    join(members, "s", 0, 1)
    push(members, "r/0", "r/1", "s/0", "s/1")

    assert members.stall("r/1")

    assert [members.roster.of_part(part).workers for part in (0, 1)] == [("s/0",), ("s/1",)]
    assert not members.stall("r/0")
    push(members, "r/1")
    assert [members.roster.of_part(part).workers for part in (0, 1)] == [("s/0",), ("r/1", "s/1")]


def test_replicas_that_are_gone_are_forgotten_in_the_end(members: Membership) -> None:
    for life in range(1, 100):
        join(members, f"r{life}", 0, 1, incarnation=life, now=float(life))
        members.leave(f"r{life}/0", life, now=float(life), failed=True)
    assert len(members.all()) <= GONE_FACTOR * 6
    assert len(members._lives._lives) <= GONE_FACTOR * 6
    assert members.get("r99/0") is not None
