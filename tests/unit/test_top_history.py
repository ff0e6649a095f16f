"""What `pyps top` makes of servers' answers: rates, bands of staleness, lives of servers, pictures."""

import dataclasses
import math

from rich.console import Console

from pyps.cli.top import pictures
from pyps.cli.top.history import BANDS, Answer, History, Point, band_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work


def answer(address: str, *, uptime: float, version: int, clock: int = 0, stale: int = 0, loss: float = 1.0) -> Answer:
    """A server's, with one worker, of whom so many gradients came 3 updates late and all others in time."""
    counts = {0: clock - stale, 3: stale}
    buckets = [pb.StalenessHistogram.Bucket(staleness=staleness, count=count) for staleness, count in counts.items()]
    status = pb.Status(uptime_seconds=uptime, version_max=version)
    worker = pb.WorkerInfo(worker_id="w", clock=clock, scalars={"loss": loss})
    histogram = pb.StalenessHistogram(buckets=buckets)
    return Answer(address, status, [worker], (), [], work.WorkProgress(), histogram)


def test_every_staleness_has_the_band_that_names_it():
    for staleness in range(200):
        low, _, high = BANDS[band_of(staleness)].replace("33+", "33-999").partition("-")
        assert int(low) <= staleness <= int(high or low)


def test_rates_go_by_the_servers_own_clock_and_a_new_life_of_it_begins_anew():
    history = History(["a", "b"])
    for address in ("a", "b"):
        history.take(address, answer(address, uptime=10, version=100, clock=50))
        history.take(address, answer(address, uptime=12, version=140, clock=60, stale=4))
    history.tick()
    # Of both servers: each took a part of every gradient.
    assert history.points[-1] == Point(5, 20, 0, 0, 0, {0: 12, 3: 8})

    history.take("b", "gone")
    history.take("a", answer("a", uptime=1, version=130, clock=5))
    history.tick()
    assert history.points[-1] == Point(0, 0, 0, 0, 0, {})
    assert [event[1:] for event in history.events] == [("b", "no answer: gone")]


def test_a_loss_that_has_no_height_is_drawn_as_none():
    for loss in (math.nan, math.inf, -1.0, 0.0):
        history = History(["a"])
        history.take("a", answer("a", uptime=1, version=1, loss=loss))
        history.tick()
        assert not pictures.trend([loss], 10).strip()
        assert pictures.workers(history, sorted_by="loss", reverse=False).row_count == 1


def test_the_codecs_of_workers_stand_below_the_table():
    history, reply = History(["a"]), answer("a", uptime=1, version=1)
    reply.workers[0].MergeFrom(pb.WorkerInfo(gradient_codec="int4", parameter_codec="int8"))
    history.take("a", reply)
    with (console := Console(width=300)).capture() as shown:
        console.print(pictures.workers(history, sorted_by="worker", reverse=False))
    assert "codecs up, down: int4, int8 (1 worker)" in shown.get()


def test_what_others_chose_is_no_command_to_the_terminal():
    words = "\x1b[2J[red]<b>\x07\u202e"
    reply = answer("a", uptime=1, version=1)
    reply.status.MergeFrom(pb.Status(run_id=words, protocol=words, waiting_for=[words], warnings=[words]))
    reply.workers[0].MergeFrom(pb.WorkerInfo(worker_id=words, state=words, waits_for=[words]))
    history = History(["a", "b"])
    history.take("a", dataclasses.replace(reply, events=[pb.Event(message=words)]))
    history.take("b", words)
    tabs = [draw(history) for draw in (pictures.servers, pictures.waits, pictures.events)]
    workers = pictures.workers(history, sorted_by="worker", reverse=False)
    for picture in (pictures.headline(history, paused=False), workers, *tabs):
        with (console := Console(width=300)).capture() as shown:
            console.print(picture)
        assert "?[2J[red]<b>??" in shown.get()
        assert all(character.isprintable() or character == "\n" for character in shown.get())


def test_a_column_of_the_stream_is_filled_by_shares_from_fresh_to_stale():
    fresh, late = pictures.COLOURS[0], pictures.COLOURS[3]
    top, bottom, legend = pictures.stream([Point(0, 0, 0, 0, 0, {0: 3, 3: 1})], width=4, height=3).split("\n")
    assert (str(top.spans[0].style), str(bottom.spans[0].style)) == (f"{late} on {fresh}", f"{fresh} on {fresh}")
    assert legend.plain.split() == ["■", "0:", "75%", "■", "3-4:", "25%"]
