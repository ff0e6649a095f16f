import math
from typing import Any

import pytest

from pyps.cli.coordination.coordinator import RemoteMachine, memory_plan
from pyps.cli.coordination.link import Traffic
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.cli.sandblaster import worker_command
from pyps.config import ConfigError
from pyps.core.vectors.program import Instruction, Operation
from pyps.service.vector_machine import instruction_from
from pyps_wire import vector_machine_pb2 as pb
from pyps_wire.common_pb2 import Sender
from shards import refusal


def test_folds_are_read_and_what_is_none_is_named_with_what_is_expected():
    folds = {"portion": 1, "group": 4, "group:k=7": 7, "group:k=1": 1}
    assert {text: CoordinationSettings(fold=text).portions_per_stage for text in folds} == folds
    for text in ("", "portions", "group:7", "group:k=0", "group:k=-1", "group:k=x", "portion:k=2"):
        words = refusal(CoordinationSettings, fold=text)
        assert repr(text) in words and "expected portion, or group:k=4" in words


def test_a_plan_has_a_stage_a_portion_or_one_a_group_and_worker():
    assert memory_plan(CoordinationSettings(), 80, num_workers=4).stages == 80
    assert memory_plan(CoordinationSettings(fold="group:k=9"), 80, num_workers=4).stages == math.ceil(80 / 9) + 4
    # Workers stage no more sums than there are portions.
    assert CoordinationSettings(fold="group:k=2").num_stages(8, num_workers=100) == 8


def test_settings_are_spelled_as_the_flags_that_give_them():
    chosen = {"history": 3, "line_search": "wolfe", "tolerance": 1e-7, "portions": 40, "fold": "group:k=2"}

    flags = CoordinationSettings(**chosen, copies=3, save_every=5).as_flags()

    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs.pop("--iterations") == "20" and pairs.pop("--loss-tolerance") == "1e-07"
    expected = {"--history": "3", "--line-search": "wolfe", "--tolerance": "1e-07", "--portions": "40"}
    assert pairs == expected | {"--fold": "group:k=2", "--copies": "3", "--save-every": "5"}


class AnsweringLink:
    """A link to servers that answer each program with numbers of their own, and that keeps what they were sent."""

    def __init__(self, *answers: list[float]) -> None:
        self.answers = answers
        self.sender = Sender(worker_id="coordinator")
        self.num_servers = len(answers)
        self.executed: list[pb.ExecuteRequest] = []

    def machine(self) -> RemoteMachine:
        link: Any = self
        return RemoteMachine(link, pb.AttachRequest())

    def note_epochs(self) -> None:
        pass

    def ask(self, *_: Any) -> pb.AttachReply:
        return pb.AttachReply(num_parameters=10)

    def ask_all(self, method: str, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        if method == "Attach":
            return [self.ask() for request in requests if request is not None]
        self.executed += requests
        return [pb.ExecuteReply(scalars=numbers) for numbers in self.answers]


def test_an_instruction_becomes_its_message():
    lists = {"names": ("a",), "others": ("b",), "scalars": (0.5,), "stage_ids": (7,)}
    for operation in Operation:
        instruction = Instruction(operation, target="z", left="x", right="y", scalar=2.0, count=9, **lists)
        link = AnsweringLink([0.0] * instruction.num_answers)
        link.machine().execute(instruction)
        [[message]] = [request.instructions for request in link.executed]
        assert pb.Instruction.Operation.Name(message.operation) == f"OPERATION_{operation.name}"
        assert instruction_from(message) == instruction


def test_servers_numbers_are_summed_in_their_order_but_the_largest_is_taken_of_norms():
    program = [
        Instruction(Operation.DOT, left="x", right="y"),
        Instruction(Operation.COPY, target="x", left="y"),
        Instruction(Operation.NORM_INF, left="x"),
        Instruction(Operation.GRAM, names=("x",), others=("x", "y")),
    ]

    machine = AnsweringLink([1.0, 4.0, 1e16, 1.0], [2.0, 3.0, 1.0, 2.0], [3.0, 2.0, -1e16, 3.0]).machine()

    assert machine.execute(*program) == [6.0, 4.0, (1e16 + 1.0) - 1e16, 6.0]
    # A norm that is no number somewhere is none.
    (norm,) = AnsweringLink([1.0], [math.nan]).machine().execute(Instruction(Operation.NORM_INF, left="x"))
    assert math.isnan(norm)


def test_traffic_counts_requests_and_replies_apart_for_instructions_and_passes():
    request, reply = Sender(run_id="a-run"), Sender(worker_id="coordinator")
    traffic = Traffic.of("Execute", request, reply) + Traffic.of("AwaitPass", reply, reply)
    assert traffic.instruction_bytes == request.ByteSize() + reply.ByteSize()
    assert traffic.pass_bytes == 2 * reply.ByteSize()
    assert (traffic.messages, traffic.bytes) == (2, request.ByteSize() + 3 * reply.ByteSize())


def test_a_script_is_run_by_python_and_any_other_command_as_it_is(tmp_path):
    script = tmp_path / "train.py"
    script.touch()

    assert worker_command([str(script), "--lr", "1"]) == ("python", str(script), "--lr", "1")
    assert worker_command(["python", "train.py"]) == ("python", "train.py")
    with pytest.raises(ConfigError, match="there is no script nowhere"):
        worker_command(["nowhere.py"])
