"""Rounds of local training: their steps in virtual time, what they push, what comes beside them, the model's shadow."""

import numpy as np
import pytest
import torch

from client_support import RecordingSession
from pyps_client.torch.layout import _name_of
from pyps_client.torch.local_training import AUTO_STEPS, FASTER_MAX, Pace, Rounds, Shadow, _outer_of
from pyps_wire.errors import ServerUnavailable
from support import wait_until
from training import started_steps


def make_rounds(steps: int, *, overlaps: bool = False) -> tuple[Rounds, RecordingSession, torch.nn.Parameter]:
    """Rounds of a model of one number, 0, whose servers take deltas at rate 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    session = RecordingSession([np.zeros(1, np.float32)], rate=1.0)
    twins = {model.weight: torch.nn.Parameter(torch.zeros(1, 1))}
    rounds = Rounds(Pace(steps), overlaps=overlaps)
    rounds.begin(started_steps(session, Shadow(model, twins, {})), twins)
    return rounds, session, model.weight


def step(rounds: Rounds, weight: torch.nn.Parameter, change: float = 1.0) -> None:
    with torch.no_grad():
        weight += change
    rounds.stepped()


def test_a_push_states_the_steps_and_the_examples_of_its_delta():
    rounds, session, weight = make_rounds(3)
    for examples in (8, 8, 4, 8):
        rounds.tell_examples(examples)
        step(rounds, weight)
    rounds.sync()
    first, last = session.pushes
    assert (float(first.vectors[0][0]), first.minibatch_count, first.example_count) == (-3.0, 3, 20)
    assert (float(last.vectors[0][0]), last.minibatch_count, last.example_count) == (-1.0, 1, 8)
    assert (weight.item(), rounds.steps_answered, rounds.steps_left) == (4.0, 4, 3)


def test_a_number_that_is_not_finite_leaves_the_model_with_the_next_exchange_beside_its_steps():
    rounds, session, weight = make_rounds(1, overlaps=True)
    step(rounds, weight)
    rounds.wait()
    step(rounds, weight, float("nan"))
    rounds.wait()
    assert (len(session.pushes), weight.item()) == (1, 1.0)
    step(rounds, weight)
    rounds.wait()
    assert (len(session.pushes), weight.item()) == (2, 2.0)


def test_what_comes_beside_the_next_steps_moves_the_model_and_leaves_their_delta():
    rounds, session, weight = make_rounds(2, overlaps=True)
    session.gate.clear()
    for _ in range(2):
        step(rounds, weight)
    step(rounds, weight, 0.25)
    assert (session.pushes, weight.item(), rounds.steps_answered) == ([], 2.25, 0)
    # Another worker's work.
    session.parameters[0] += 100
    session.gate.set()
    wait_until(lambda: session.held == session.version > 0, what="the new parameters")
    assert weight.item() == 2.25, "the model changes within steps only"
    rounds.wait()
    assert (weight.item(), rounds.steps_answered) == (102.25, 2)
    step(rounds, weight, 0.25)
    rounds.wait()
    assert [float(pushed.vectors[0][0]) for pushed in session.pushes] == [-2.0, -0.5]
    assert weight.item() == session.parameters[0][0] == 102.5


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_whose_push_fails_is_lost_and_the_next_begins_with_the_servers_parameters(overlaps):
    rounds, session, weight = make_rounds(2, overlaps=overlaps)
    session.failure = ServerUnavailable("gone")
    step(rounds, weight)
    with pytest.raises(ServerUnavailable):
        step(rounds, weight)
        rounds.wait()
    assert weight.item() == 0.0
    session.failure = None
    for _ in range(2):
        step(rounds, weight, 0.5)
    rounds.wait()
    assert weight.item() == session.parameters[0][0] == 1.0


def paces_after(
    rounds: int, *step_seconds: float, transfer_seconds: float, sync_every: int | str = "auto"
) -> list[int]:
    """Workers whose rounds end together, once the slowest has pushed: the steps in a round of each in the end."""
    paces = [Pace(sync_every) for _ in step_seconds]
    for _ in range(rounds):
        ready = [pace.steps * seconds for pace, seconds in zip(paces, step_seconds, strict=True)]
        for pace, own, seconds in zip(paces, ready, step_seconds, strict=True):
            pace.note(
                step_seconds=seconds,
                exchange_seconds=max(ready) - own + transfer_seconds,
                came_last=own == max(ready),
            )
    return [pace.steps for pace in paces]


def test_a_workers_steps_grow_in_proportion_to_its_speed_and_the_slowest_keeps_its_own():
    for transfer_seconds in (0.0, 0.2, 20.0):
        fast, middle, slow = paces_after(100, 0.1, 0.15, 0.3, transfer_seconds=transfer_seconds)
        assert slow == AUTO_STEPS
        assert 0.85 * 3 * AUTO_STEPS <= fast <= 3 * AUTO_STEPS + 1, transfer_seconds
        assert 0.85 * 2 * AUTO_STEPS <= middle <= 2 * AUTO_STEPS + 1, transfer_seconds


def test_equal_workers_stay_at_the_first_number_however_long_the_transfer_takes():
    for transfer_seconds in (0.0, 20.0):
        paces = paces_after(200, 0.1, 0.1001, transfer_seconds=transfer_seconds)
        assert max(paces) <= AUTO_STEPS + 2, transfer_seconds


def test_a_far_faster_worker_is_limited_and_a_stated_number_stays():
    assert paces_after(100, 0.001, 1.0, transfer_seconds=0.1) == [FASTER_MAX * AUTO_STEPS, AUTO_STEPS]
    assert paces_after(100, 0.1, 0.3, transfer_seconds=0.1, sync_every=7) == [7, 7]


def test_a_wait_is_what_an_exchange_takes_beyond_the_quickest():
    pace = Pace("auto")
    pace.note(step_seconds=1.0, exchange_seconds=9.0, came_last=True)
    for seconds in (1.0, 5.0):
        pace.note(step_seconds=1.0, exchange_seconds=seconds, came_last=False)
    assert pace.steps == AUTO_STEPS + 2


def test_outer_rules_have_the_settings_of_diloco_and_the_delayed_one_looks_ahead():
    diloco = {"learning_rate": 0.7, "momentum": 0.9}
    assert _outer_of("nesterov") == ("nesterov", diloco)
    assert _outer_of("delayed_nesterov:n=2") == ("delayed_nesterov", diloco | {"lookahead": 1.0, "n": 2.0})


def test_a_shadow_has_the_models_names_and_takes_part_in_its_ties():
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head, torch.nn.BatchNorm1d(5), head)
    twin = torch.nn.Parameter(torch.zeros(5, 3))
    for whole in (model, torch.compile(model, backend="eager")):
        shadow = Shadow(whole, {embedding.weight: twin}, {})
        assert [name for name, _ in shadow.named_parameters()] == [name for name, _ in whole.named_parameters()]
        assert list(shadow.state_dict()) == list(whole.state_dict())
        assert _name_of(shadow) == _name_of(model)
        assert dict(shadow.named_parameters(remove_duplicate=False)).popitem()[1] is head.bias
    assert shadow.get_parameter("_orig_mod.0.weight") is shadow.get_parameter("_orig_mod.1.weight") is twin
