"""The first parameters on their way in: memory is for one model, whoever begins how often."""

from __future__ import annotations

import pytest

from pyps.core.gradient import Codec
from pyps.run.handshake import Greeting
from pyps.run.initialization import Opening
from pyps_wire.errors import Superseded
from pyps_wire.partition import partition
from shards import MODEL, make_run


def test_an_initialisation_begun_anew_takes_the_place_of_the_one_before() -> None:
    run = make_run()
    term = run.hello(Greeting("r", "a", 1, 1, "test", False, 0, 1, MODEL, None, "", "", 0, "")).term
    opening = Opening("r", "a", 1, term, MODEL, None, 0, 1)
    first, anew = run.begin_initialize(opening), run.begin_initialize(opening)
    assert first is not None and anew is not None
    with pytest.raises(Superseded, match="'b' is not"):
        run.begin_initialize(Opening("r", "b", 1, term, MODEL, None, 0, 1))
    for shard in partition(MODEL, num_servers=1).of_server(0):
        payload = memoryview(bytes(4 * shard.length))
        with pytest.raises(Superseded, match="anew"):
            first.add(shard.shard_id, Codec.FLOAT32, payload)
        anew.add(shard.shard_id, Codec.FLOAT32, payload)
    run.commit(anew)
    assert run.shards
