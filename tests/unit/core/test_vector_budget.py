"""A plan that needs more than the memory is refused with settings that fit."""

import math
import re
from dataclasses import replace

import pytest

from pyps.core.vectors.machine import Plan, require_plan_fits
from pyps_wire.errors import InvalidArgument, LimitExceeded
from shards import refusal

PARAMETERS = 1000
PLAN = Plan(history_pairs=10, vectors=6, stages=80, num_portions=80, num_workers=8)


def cost(plan: Plan) -> int:
    return PARAMETERS * 4 * (2 * plan.history_pairs + plan.vectors + plan.stages)


def refused(plan: Plan, bytes_max: int, **more: int) -> str:
    more |= {"num_parameters": PARAMETERS, "bytes_max": bytes_max}
    return refusal(require_plan_fits, plan, error=LimitExceeded, **more)


def test_a_plan_that_just_fits_is_taken_and_costs_what_it_says():
    for plan in (PLAN, replace(PLAN, stages=0), replace(PLAN, history_pairs=0, vectors=0)):
        assert require_plan_fits(plan, num_parameters=PARAMETERS, bytes_max=cost(plan)) == cost(plan)


def test_every_setting_that_a_refusal_names_fits_then():
    for bytes_max in (cost(PLAN) - 1, 400_000, 300_000, 150_000, 90_000, 70_000, 50_000):
        message = refused(PLAN, bytes_max)
        ways = message.split("this would fit: ")[1].split("; or ")

        for way in ways[:-1]:
            plan = PLAN
            if found := re.search(r"--history (\d+)", way):
                plan = replace(plan, history_pairs=int(found[1]))
            if found := re.search(r"--portions (\d+)", way):
                require_plan_fits(replace(plan, stages=int(found[1])), num_parameters=PARAMETERS, bytes_max=bytes_max)
            if found := re.search(r"group:k=(\d+)", way):
                stages = math.ceil(plan.num_portions / int(found[1])) + plan.num_workers
                require_plan_fits(replace(plan, stages=stages), num_parameters=PARAMETERS, bytes_max=bytes_max)
            if "staged" not in way:
                require_plan_fits(plan, num_parameters=PARAMETERS, bytes_max=bytes_max)

        needed = int(re.search(r"--max-vector-bytes (\d+)", ways[-1])[1])
        assert require_plan_fits(PLAN, num_parameters=PARAMETERS, bytes_max=needed) == needed


def test_a_refusal_names_the_bytes_and_what_they_are_for():
    message = refused(PLAN, 400_000)

    assert message == (
        "10 pairs of history, 6 further vectors and 80 staged sums of gradients take 424000 bytes for the 1000"
        " parameters of this server, which keeps 400000 at the most: this would fit: --history 7; or --portions 74 or"
        " --fold group:k=2 (74 staged sums at once); or more servers, or servers started with --max-vector-bytes 424000"
    )


def test_where_nothing_would_do_only_more_memory_is_named():
    message = refused(PLAN, 30_000)

    assert "--history" not in message and "--portions" not in message
    assert "this would fit: more servers, or servers started with --max-vector-bytes 424000" in message


def test_a_count_that_cannot_be_is_refused():
    with pytest.raises(InvalidArgument, match="the plan has stages 4294967296; expected 0 to 4294967295"):
        require_plan_fits(replace(PLAN, stages=2**32), num_parameters=1, bytes_max=1)
    assert require_plan_fits(PLAN, num_parameters=0, bytes_max=1) == 0, "without parameters any plan will do"


def test_no_history_is_offered_that_is_shorter_than_what_lies_there():
    message = refused(PLAN, 400_000, existing_pairs=8)

    # Seven pairs would fit with 80 stages.
    assert "--history" not in message and "--portions 74" in message
