"""Schedules: closed forms, comparison with torch's schedulers, and texts that name exactly the same schedule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from pyps.core.schedule import CURVES, Schedule, parse
from shards import refusal


def factors(text: str, *versions: int) -> list[float]:
    schedule = parse(text)
    return [schedule.factor(version, 0) for version in versions]


def test_a_curve_follows_its_formula():
    for text, versions, expected in (
        ("constant", (0, 10**9), [1, 1]),
        ("step:every=10,factor=0.5", (0, 9, 10, 19, 20), [1, 1, 0.5, 0.5, 0.25]),
        ("step:every=10", (10,), [0.1]),
        ("exponential:decay=0.25,every=10", (0, 5, 10, 20), [1, 0.5, 0.25, 0.0625]),
        ("exponential:decay=0.9", (1, 2), [0.9, 0.81]),
        ("cosine:length=100", (0, 50, 100, 101), [1, 0.5, 0, 0]),
        ("cosine:length=100,minimum=0.2", (0, 50, 100, 10**6), [1, 0.6, 0.2, 0.2]),
        ("warmup:length=10,start=0.5", (0, 5, 10, 11), [0.5, 0.75, 1, 1]),
        ("warmup:length=10", (0,), [0.1]),
        ("piecewise:1000=0.1;2000=0.01", (0, 999, 1000, 1999, 2000), [1, 1, 0.1, 0.1, 0.01]),
        ("warmup:length=10,start=0.5+step:every=4,factor=0.1", (5,), [0.75 * 0.1]),
    ):
        assert factors(text, *versions) == pytest.approx(expected, rel=1e-12, abs=1e-15), text


def test_a_curve_is_the_one_that_torch_calls_by_that_name():
    for text, scheduler_of in (
        ("step:every=7,factor=0.5", lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5)),
        ("exponential:decay=0.95", lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.95)),
        ("cosine:length=40,minimum=0.1", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40, 0.1)),
        ("warmup:length=8,start=0.25", lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 8)),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        scheduler, rates = scheduler_of(optimizer), []
        for _ in range(41):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert factors(text, *range(41)) == pytest.approx(rates, rel=1e-9), text


def test_the_constant_schedule_is_the_empty_product():
    for text in ("constant", "constant+constant"):
        assert (parse(text), parse(text).text) == (Schedule(), "constant")


def test_epochs_are_counted_in_examples_and_updates_in_updates_also_in_one_product():
    schedule = parse("step:every=2,factor=0.5,unit=epochs", epoch_examples=100)
    assert [schedule.factor(10**6, examples) for examples in (0, 199, 200, 400)] == [1, 1, 0.5, 0.25]
    both = parse("warmup:length=10,start=0+step:every=1,factor=0.5,unit=epochs", epoch_examples=100)
    assert both.factor(5, 100) == pytest.approx(0.25)


def test_a_schedules_text_is_canonical_and_complete():
    """It says how long an epoch is, so a log needs no other setting to be replayed."""
    for text, canonical in {
        "step:every=10,factor=0.1": "step:every=10",
        " warmup: length = 1e3 ,start=0.5 + cosine:length=5.5": "warmup:length=1000,start=0.5+cosine:length=5.5",
        "step:every=1e+3+exponential:decay=0.5": "step:every=1000+exponential:decay=0.5",
        "step:every=10+constant": "step:every=10",
        "piecewise:1000=0.1; 2e3 = 1e-2": "piecewise:1000=0.1;2000=0.01",
        "step:unit=updates,every=3": "step:every=3",
        "step:unit=epochs,every=3": "step:every=3,unit=epochs,epoch_examples=50",
        "piecewise:3=0.5,unit=epochs,epoch_examples=7": "piecewise:3=0.5,unit=epochs,epoch_examples=7",
    }.items():
        assert parse(text, epoch_examples=50).text == canonical
        assert parse(canonical) == parse(text, epoch_examples=50), text


lengths = st.floats(1e-6, 1e300)
fractions = st.floats(0, 1)
curves = st.one_of(
    st.builds("step:every={!r},factor={!r}".format, lengths, fractions),
    st.builds("exponential:decay={!r},every={!r}".format, st.floats(0, 1, exclude_min=True), lengths),
    st.builds("cosine:length={!r},minimum={!r},unit=epochs".format, lengths, fractions),
    st.builds("warmup:length={!r},start={!r}".format, lengths, fractions),
    st.builds("piecewise:{!r}={!r}".format, lengths, st.floats(0, 1e9)),
)


@settings(max_examples=60)
@given(st.lists(curves, min_size=1, max_size=3), st.integers(0, 10**12))
def test_a_schedules_text_names_exactly_that_schedule(texts, version):
    schedule = parse("+".join(texts), epoch_examples=1437)
    assert parse(schedule.text) == schedule
    assert schedule.factor(version, version) >= 0


def test_a_wrong_setting_is_refused_in_one_sentence():
    for text in ("", " ", "cosin", "step:every=3+linear:length=4", "warmup:length=3+"):
        assert f"is unknown; expected one of {', '.join(sorted(CURVES))}" in refusal(parse, text)
    for text, words in {
        "step": "schedule 'step' needs every=..., a finite number above 0",
        "step:every=-1": "schedule 'step': every is -1.0; expected a finite number above 0",
        "step:every=3,factor=1.5": "schedule 'step': factor is 1.5; expected a number from 0 to 1",
        "step:evry=3": "schedule 'step' has no setting 'evry=3'; it has every=, factor=",
        "exponential": "schedule 'exponential': decay is 0.0; expected a number above 0 and at most 1",
        "cosine:length=nan": "schedule 'cosine': length is nan; expected a finite number above 0",
        "cosine:length=inf": "schedule 'cosine': length is inf; expected a finite number above 0",
        "cosine:length=4,minimum=-1": "schedule 'cosine': minimum is -1.0; expected a number from 0 to 1",
        "warmup:length=4,start=2": "schedule 'warmup': start is 2.0; expected a number from 0 to 1",
        "piecewise": "schedule 'piecewise' has the points ''; expected time=factor;time=factor",
        "piecewise:5": "schedule 'piecewise' has the points '5'; expected time=factor;time=factor",
        "piecewise:2=1;1=1": "the times ascending",
        "piecewise:2=1;2=1": "the times ascending",
        "piecewise:1=-1": "not negative",
        "piecewise:1=nan": "finite",
        "piecewise:0=1e200;9=1+piecewise:0=1e200+piecewise:0=0": "multiplies the rate by up to inf; expected at most",
        "step:every=3,unit=days": "schedule 'step': unit is days; expected updates or epochs",
        "step:every=3,unit=epochs": "is not known; set --epoch-examples",
        "step:every=3,unit=epochs,epoch_examples=-5": "epoch_examples is -5; expected a number above 0",
        "step:every=3,epoch_examples=5": "schedule 'step' counts updates; epoch_examples needs unit=epochs",
    }.items():
        assert words in refusal(parse, text)
