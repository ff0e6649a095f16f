"""Instructions as values: the protocol's numbers, and the way through JSON."""

import json

from pyps.core.instructions import Instruction, Operation, Precision
from pyps_wire import vector_machine_pb2 as wire


def test_operations_and_precisions_have_the_numbers_of_the_protocol():
    assert {f"OPERATION_{operation.name}": int(operation) for operation in Operation} == {
        name: number for name, number in wire.Instruction.Operation.items() if number
    }
    assert {f"PRECISION_{precision.name}": int(precision) for precision in Precision} == {
        name: number for name, number in wire.Precision.items() if number
    }


def test_an_instruction_is_the_same_after_its_way_through_json():
    instruction = Instruction(
        Operation.COMBINE,
        target="d",
        precision=Precision.FLOAT64,
        names=("g", "s1"),
        scalars=(-0.1, 1 / 3),
        stage_ids=(2**63 + 1,),
        count=7,
    )

    again = Instruction.from_plain(json.loads(json.dumps(instruction.to_plain())))

    assert again == instruction
