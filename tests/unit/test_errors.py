"""pyps_wire.errors: the tree, and the way of an error across the wire."""

import grpc

from pyps_wire import errors
from pyps_wire.errors import BadRequest, PypsError, from_status

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PypsError)]


def test_every_error_has_a_status_stands_in_the_drawn_tree_and_comes_back_as_itself():
    tree = errors.__doc__ or ""
    for error_class in CLASSES:
        name = error_class.__name__
        assert error_class.status in grpc.StatusCode.__members__, name
        assert f" {name} " in tree or f" {name}\n" in tree, name
        assert error_class.__doc__, name
        error = from_status(error_class.status, "no", name)
        assert (type(error), str(error)) == (error_class, "no")
        assert error.status == error_class.status


def test_the_drawn_tree_tells_the_real_statuses():
    lines = [line for line in (errors.__doc__ or "").splitlines() if "──" in line]
    assert len(lines) == len(CLASSES) - 1
    for line in lines:
        name, *rest = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        status = getattr(errors, name).status
        assert status in rest or getattr(errors, name).__mro__[1].status == status, line


def test_an_error_without_a_name_of_ours_keeps_its_status_and_message():
    for status in grpc.StatusCode.__members__:
        error = from_status(status, "what happened")
        assert str(error) == "what happened"
        assert error.status == status or status == "UNIMPLEMENTED"
    for name in ("SystemExit", "object", "_all_below", ""):
        assert type(from_status("INVALID_ARGUMENT", "no", name)) is BadRequest, name
    # Of an instance alone: the class keeps its own.
    assert PypsError.status == "UNKNOWN"


def test_the_errors_need_neither_grpc_nor_protobuf(start_python):
    code = "import sys, pyps_wire.errors; print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    python = start_python("-c", code, fresh=True)
    assert python.wait() == 0
    assert python.output().strip() == "[]"
