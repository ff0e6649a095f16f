"""Invariant B3: no message that a coordinator sends or gets has a vector of the model.

Dean et al. 2012, section 4.2: the coordinator has no direct access to the parameters, it exchanges small messages.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pyps_wire import vector_machine_pb2, work_pb2

# All that a coordinator says and hears.
COORDINATORS = {
    "VectorMachine": ("Attach", "Execute"),
    "WorkQueue": ("BeginPass", "AwaitPass", "EndWork"),
}
# The fields of these messages that may hold many numbers or names, and what bounds each: never the model's size.
BOUNDED = {
    "AttachReply.vectors": "names: two a pair of the history, and a few",
    "ExecuteRequest.instructions": "pyps.core.program.INSTRUCTIONS_MAX",
    "Instruction.names": "pyps.core.program.LISTED_MAX; two a pair of the history, and the gradient",
    "Instruction.others": "pyps.core.program.LISTED_MAX; one a pair of the history, and the gradient",
    "Instruction.scalars": "pyps.core.program.LISTED_MAX; one for each of the names",
    "Instruction.stage_ids": "pyps.core.program.LISTED_MAX; one a stage of a pass, at most one a portion",
    "ExecuteReply.scalars": "pyps.core.program.ANSWERS_MAX; the products of the history",
    "BeginPassRequest.scalars": "pyps.service.work_queue.SCALARS_MAX: figures for people",
    "AwaitPassReply.stage_ids": "one a stage of a pass, at most one a portion",
    "WorkProgress.workers": "one a worker",
    "WorkProgress.deliveries": "empty in AwaitPass; else one a portion of the passes remembered",
    "WorkProgress.scalars": "as the coordinator itself told them",
}


def within(message: Descriptor, seen: set[str]) -> Iterator[tuple[str, FieldDescriptor]]:
    """All fields of a message and of those in it, as Message.field."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield f"{message.name}.{field.name}", field
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from within(field.message_type, seen)


def fields_of_a_coordinator() -> dict[str, FieldDescriptor]:
    found: dict[str, FieldDescriptor] = {}
    seen: set[str] = set()
    for module in (vector_machine_pb2, work_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for name in COORDINATORS[service.name]:
                method = service.methods_by_name[name]
                for message in (method.input_type, method.output_type):
                    found.update(within(message, seen))
    return found


def test_a_stage_alone_holds_bytes():
    messages = [
        message
        for module in (vector_machine_pb2, work_pb2)
        for message in module.DESCRIPTOR.message_types_by_name.values()
    ]
    holding = {
        message.name
        for message in messages
        if any(field.type == FieldDescriptor.TYPE_BYTES for _, field in within(message, set()))
    }

    assert holding == {"StageRequest"}


@pytest.mark.parametrize("service", COORDINATORS)
def test_what_is_no_coordinator_s_call_is_known_to_be_a_worker_s(service):
    calls = {
        name: module.DESCRIPTOR.services_by_name[name].methods_by_name
        for module in (vector_machine_pb2, work_pb2)
        for name in module.DESCRIPTOR.services_by_name
    }

    workers = {"VectorMachine": {"Stage"}, "WorkQueue": {"Open", "Lease", "Claim", "Deliver"}}
    assert set(calls[service]) == workers[service] | set(COORDINATORS[service])


def test_every_list_in_a_coordinator_s_messages_is_bounded_by_something_else_than_the_model():
    fields = fields_of_a_coordinator()

    assert not [name for name, field in fields.items() if field.type == FieldDescriptor.TYPE_BYTES]
    assert {name for name, field in fields.items() if field.is_repeated} == set(BOUNDED)
