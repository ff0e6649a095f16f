"""pyps_wire.errors: the tree, and the way of an error across the wire."""

import subprocess
import sys

import grpc
import pytest

from pyps_wire import errors
from pyps_wire.errors import BadRequest, MalformedFrame, PypsError, from_status

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PypsError)]


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.__name__)
def test_an_error_named_in_the_metadata_comes_back_as_itself(error_class):
    error = from_status(error_class.status, "no", error_class.__name__)
    if error_class is PypsError:
        assert error.status == "UNKNOWN"
    assert type(error) is error_class
    assert str(error) == "no"


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.__name__)
def test_every_error_has_a_grpc_status_and_stands_in_the_drawn_tree(error_class):
    assert error_class.status in grpc.StatusCode.__members__
    tree = errors.__doc__ or ""
    assert f" {error_class.__name__} " in tree or f" {error_class.__name__}\n" in tree
    assert error_class.__doc__


@pytest.mark.parametrize("line", [line for line in (errors.__doc__ or "").splitlines() if "──" in line])
def test_the_drawn_tree_tells_the_real_statuses(line):
    name, *rest = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
    status = getattr(errors, name).status
    assert status in rest or getattr(errors, name).__mro__[1].status == status


@pytest.mark.parametrize("status", list(grpc.StatusCode.__members__))
def test_an_error_without_a_name_keeps_its_status_and_message(status):
    error = from_status(status, "what happened")
    assert str(error) == "what happened"
    assert error.status == status or status == "UNIMPLEMENTED"


@pytest.mark.parametrize("name", ["SystemExit", "object", "_all_below", ""])
def test_a_name_that_is_no_error_of_ours_is_passed_over(name):
    assert type(from_status("INVALID_ARGUMENT", "no", name)) is BadRequest


def test_an_unknown_status_does_not_leak_into_the_class():
    assert from_status("CANCELLED", "gone").status == "CANCELLED"
    assert PypsError.status == "UNKNOWN"


def test_catching_the_parent_catches_the_child():
    with pytest.raises(BadRequest):
        raise from_status("INVALID_ARGUMENT", "at byte 3", MalformedFrame.__name__)


def test_the_errors_need_neither_grpc_nor_protobuf():
    code = "import sys, pyps_wire.errors; print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
