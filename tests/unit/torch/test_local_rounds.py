"""How many steps a round of local training has, in virtual time; and what its shadow of a model is."""

import torch

from pyps_client.torch.layout import _name_of
from pyps_client.torch.local_rounds import AUTO_STEPS, FASTER_MAX, Pace, Shadow


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
