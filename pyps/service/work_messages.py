"""Between the work queue's values and the wire's messages."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from pyps.service.convert import for_people
from pyps.work import DataSpec, Ended, LeaseAnswer, Leased, NothingNow, PassDone, Portion, Progress
from pyps_wire import work_pb2 as wire

# The fields of a progress that are called alike on both sides.
FIGURES = (
    *("num_portions", "done", "running", "pending", "ahead"),
    *("passes_done", "copies", "stolen", "lost", "wasted", "ended", "scalars"),
)


def spec_from(message: wire.DataSpec) -> DataSpec:
    """A data set as a worker describes it."""
    told: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(DataSpec)}
    return DataSpec(**told | {"name": for_people(message.name)})


def spec_to(spec: DataSpec) -> wire.DataSpec:
    """A data set as it travels."""
    return wire.DataSpec(**asdict(spec))


def portion_to(portion: Portion) -> wire.Portion:
    """A portion as it travels."""
    return wire.Portion(**asdict(portion))


def lease_reply(answer: LeaseAnswer) -> wire.LeaseReply:
    """What a free worker is told."""
    reply = wire.LeaseReply()
    # The field's name is a keyword of Python's.
    setattr(reply, "pass", answer.pass_)
    match answer:
        case Leased():
            reply.outcome = wire.LeaseReply.OUTCOME_LEASED
            reply.portion.CopyFrom(portion_to(answer.portion))
            if answer.next is not None:
                reply.next.CopyFrom(portion_to(answer.next))
            reply.batch_size, reply.portions_per_stage = answer.batch_size, answer.portions_per_stage
        case NothingNow():
            reply.outcome = wire.LeaseReply.OUTCOME_NOTHING_NOW
        case PassDone():
            reply.outcome = wire.LeaseReply.OUTCOME_PASS_DONE
        case Ended():
            reply.outcome, reply.message = wire.LeaseReply.OUTCOME_ENDED, answer.message
    return reply


def progress_to(progress: Progress) -> wire.WorkProgress:
    """Where the work stands, as it travels."""
    # A keyword of Python's.
    figures: dict[str, Any] = {"pass": progress.pass_} | {name: getattr(progress, name) for name in FIGURES}
    return wire.WorkProgress(
        data=spec_to(progress.spec) if progress.spec is not None else None,
        workers=[wire.WorkProgress.Worker(**asdict(worker)) for worker in progress.workers],
        deliveries=[
            wire.WorkProgress.Delivery(
                portion=portion_to(delivered.portion),
                worker_id=delivered.worker_id,
                incarnation=delivered.incarnation,
                **{"pass": delivered.pass_},
            )
            for delivered in progress.deliveries
        ],
        **figures,
    )
