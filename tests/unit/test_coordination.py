"""What a coordinator plans and how its flags are read and spelled."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyps.cli.coordination.drive import CoordinationSettings
from pyps.cli.coordination.flags import spelled_coordination
from pyps.cli.coordination.memory import Fold, MemoryPlan
from pyps.cli.coordination.progress import _in_words
from pyps.cli.coordination.remote_machine import STATE_PAGE, _filled_up, _to_proto, _together
from pyps.cli.coordination.traffic import Traffic, TrafficMeter
from pyps.cli.main import app
from pyps.cli.sandblaster import worker_command
from pyps.config import ConfigError
from pyps.core.instructions import Instruction, Operation, Precision
from pyps.work.lbfgs import LbfgsSettings
from pyps_wire import vector_machine_pb2 as pb
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import BadRequest


@pytest.mark.parametrize(("text", "portions"), [("portion", 1), ("group", 4), ("group:k=7", 7), ("group:k=1", 1)])
def test_folds_are_read(text: str, portions: int) -> None:
    assert Fold.parse(text).portions_per_stage == portions


@pytest.mark.parametrize("text", ["", "portions", "group:7", "group:k=0", "group:k=-1", "group:k=x", "portion:k=2"])
def test_a_fold_that_is_none_is_named_with_what_is_expected(text: str) -> None:
    with pytest.raises(BadRequest, match="expected portion, or group:k=4") as refusal:
        Fold.parse(text)
    assert repr(text) in str(refusal.value)


def test_a_fold_reads_back_what_it_is_written_as() -> None:
    for fold in (Fold(1), Fold(4), Fold(80)):
        assert Fold.parse(str(fold)) == fold


def test_a_plan_has_a_stage_a_portion_or_one_a_group_and_worker() -> None:
    plan = MemoryPlan(history=10, num_portions=80, num_workers=4, fold=Fold())
    assert plan.request().stages == 80

    grouped = MemoryPlan(history=10, num_portions=80, num_workers=4, fold=Fold(9))
    assert grouped.request().stages == math.ceil(80 / 9) + 4

    # Workers stage no more sums than there are portions.
    assert Fold(2).stages(8, num_workers=100) == 8


def test_settings_are_spelled_as_the_flags_that_give_them() -> None:
    settings = CoordinationSettings(
        lbfgs=LbfgsSettings(history=3, line_search="wolfe", vector_free=True, gradient_tolerance=1e-7),
        num_portions=40,
        fold=Fold(2),
        copies=3,
        save_every=5,
    )

    flags = spelled_coordination(settings)

    assert "--vector-free" in flags
    pairs = dict(itertools.pairwise(flags))
    assert pairs["--history"] == "3"
    assert pairs["--line-search"] == "wolfe"
    assert pairs["--portions"] == "40"
    assert pairs["--fold"] == "group:k=2"
    assert pairs["--copies"] == "3"
    assert pairs["--save-every"] == "5"
    assert float(pairs["--tolerance"]) == 1e-7


def test_an_instruction_becomes_its_message() -> None:
    instruction = Instruction(
        Operation.ALLOC, target="z", precision=Precision.FLOAT64, names=("a",), scalars=(0.5,), stage_ids=(7,), count=9
    )

    message = _to_proto(instruction)

    assert message.operation == pb.Instruction.OPERATION_ALLOC
    assert message.precision == pb.PRECISION_FLOAT64
    assert (message.target, list(message.names), list(message.scalars)) == ("z", ["a"], [0.5])
    assert (list(message.stage_ids), message.count) == ([7], 9)


@pytest.mark.parametrize("operation", Operation)
def test_every_operation_and_precision_has_the_protocols_name(operation: Operation) -> None:
    assert _to_proto(Instruction(operation)).operation == operation.value
    assert pb.Instruction.Operation.Name(operation.value) == f"OPERATION_{operation.name}"
    for precision in Precision:
        assert pb.Precision.Name(precision.value) == f"PRECISION_{precision.name}"


def test_servers_numbers_are_summed_in_their_order_but_the_largest_is_taken_of_norms() -> None:
    program = [
        Instruction(Operation.DOT, left="x", right="y"),
        Instruction(Operation.COPY, target="x", left="y"),
        Instruction(Operation.NORM_INF, left="x"),
        Instruction(Operation.GRAM, names=("x",), others=("x", "y")),
    ]

    numbers = _together(program, [[1.0, 4.0, 1e16, 1.0], [2.0, 3.0, 1.0, 2.0], [3.0, 2.0, -1e16, 3.0]])

    assert numbers == [6.0, 4.0, (1e16 + 1.0) - 1e16, 6.0]


def test_a_norm_that_is_no_number_somewhere_is_none() -> None:
    (norm,) = _together([Instruction(Operation.NORM_INF, left="x")], [[1.0], [math.nan]])
    assert math.isnan(norm)


def test_states_of_unequal_length_make_messages_of_one_length() -> None:
    assert len(_filled_up("x" * 10)) == len(_filled_up("x" * 2000)) == STATE_PAGE
    assert _filled_up("") == ""
    assert len(_filled_up("x" * STATE_PAGE)) == STATE_PAGE


def test_traffic_counts_requests_and_replies_apart_for_instructions_and_passes() -> None:
    meter = TrafficMeter()
    request, reply = Sender(run_id="a-run"), Sender(worker_id="coordinator")
    before = meter.total

    meter.count(request, reply, of_instructions=True)
    meter.count(reply, reply, of_instructions=False)

    said = meter.total - before
    assert said.instruction_bytes == len(request.SerializeToString()) + len(reply.SerializeToString())
    assert said.pass_bytes == 2 * len(reply.SerializeToString())
    assert (said.messages, said.bytes) == (2, said.instruction_bytes + said.pass_bytes)


def test_what_was_said_is_told_for_instructions_and_passes_apart() -> None:
    said = Traffic(instruction_messages=9, instruction_bytes=5181, pass_messages=3, pass_bytes=4000)
    assert _in_words(said) == "5,181 bytes of instructions and 4,000 of passes sent and received"


@pytest.mark.parametrize("command", ["coordinate", "sandblaster"])
def test_the_help_says_that_the_same_bits_need_the_same_portions(command: str) -> None:
    help_text = " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    assert "With the same number and --fold portion any number of workers comes to the same bits." in help_text


def test_a_script_is_run_by_python_and_any_other_command_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()

    assert worker_command([str(script), "--lr", "1"]) == ("python", str(script), "--lr", "1")
    assert worker_command(["python", "train.py"]) == ("python", "train.py")
    with pytest.raises(ConfigError, match="there is no script nowhere"):
        worker_command(["nowhere.py"])
