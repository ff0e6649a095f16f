"""The growing minibatch (Zhang et al. 2013), with invariant A4 of the algorithm notes, 2.2."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.core.schedule import LR_SCALINGS, BatchGrowth
from shards import refusal

EPOCH = 1000

growths = st.builds(
    BatchGrowth,
    start=st.integers(1, 100),
    maximum=st.integers(100, 10**6),
    every=st.floats(0.01, 100),
    lr_scaling=st.sampled_from(LR_SCALINGS),
    epoch_examples=st.integers(1, 10**6),
)


def parse(text: str) -> BatchGrowth:
    return BatchGrowth.parse(text, epoch_examples=EPOCH)


def test_the_minibatch_doubles_every_so_many_epochs_up_to_its_maximum():
    growth = parse("start=8,maximum=64,every=2")
    assert [growth.size(epoch * EPOCH) for epoch in range(10)] == [8, 8, 16, 16, 32, 32, 64, 64, 64, 64]
    assert growth.size(2 * EPOCH - 1) == 8
    # A maximum that is no double is kept.
    assert [parse("start=10,maximum=25,every=1").size(epoch * EPOCH) for epoch in range(4)] == [10, 20, 25, 25]


def test_the_rate_follows_the_growth_by_its_lr_scaling():
    for scaling, factors in {"none": [1, 1], "sqrt": [1, 2], "linear": [1, 4]}.items():
        growth = parse(f"start=4,maximum=16,every=1,lr_scaling={scaling}")
        assert [growth.rate_factor(epoch * EPOCH) for epoch in (0, 2)] == factors, scaling


@settings(max_examples=50)
@given(growth=growths, examples=st.integers(0, 10**18), more=st.integers(0, 10**18))
def test_the_minibatch_never_shrinks_and_its_text_is_exact(growth, examples, more):
    """A4: b(e) is non-decreasing."""
    assert growth.start <= growth.size(examples) <= growth.size(examples + more) <= growth.maximum
    assert BatchGrowth.parse(growth.text) == growth
    assert BatchGrowth.parse(growth.text).text == growth.text


def test_a_growths_text_leaves_out_defaults_and_has_the_last_word_on_how_long_an_epoch_is():
    assert parse("start=8,maximum=64,every=2,lr_scaling=none").text == "start=8,maximum=64,every=2,epoch_examples=1000"
    assert parse("start=8,maximum=64,epoch_examples=7").epoch_examples == 7


def test_a_wrong_setting_is_refused_in_one_sentence():
    for text, words in {
        "": "batch_growth: start is 0; expected a minibatch of at least 1 example",
        "start=8,maximum=99999999999": "batch_growth: maximum is 99999999999; expected at least the start, 8, and",
        "start=8": "batch_growth: maximum is 0; expected at least the start, 8",
        "start=8,maximum=64,every=0": "batch_growth: every is 0.0; expected a finite number of epochs above 0",
        "start=8,maximum=64,every=nan": "batch_growth: every is nan; expected a finite number of epochs above 0",
        "start=8,maximum=64,lr_scaling=cube": "lr_scaling is cube; expected one of none, sqrt, linear",
        "start=8,max=64": "batch_growth has no setting 'max=64'; it has start=, maximum=, every=",
    }.items():
        assert words in refusal(parse, text)
    assert "is not known; set --epoch-examples" in refusal(BatchGrowth.parse, "start=8,maximum=64")
