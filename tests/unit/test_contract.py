"""The contract: every part is explained, names agree, errors cross it; `make check` sees to generated code."""

import re
from pathlib import Path

import grpc
import pytest

import pyps_client
from pyps_wire import contract, errors
from pyps_wire.errors import InvalidArgument, PypsError, from_status

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto" / "pyps_wire").glob("*.proto"))


def unexplained(proto):
    """Returns the declarations without a comment of their own.

    A comment directly above explains the fields that follow it without a blank line. A message whose fields
    speak for themselves may have one comment for all. Zero values of enums say only that nothing is set.
    """
    found = []
    explained = False  # Whether a comment stands directly above, or above the fields directly above.
    fields_may_be_bare = False
    for number, line in enumerate(proto.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text == "}":
            explained = False
            continue
        if text.startswith("//"):
            explained, fields_may_be_bare = True, False
            continue
        match = re.match(r"(message|enum|service|rpc)\s+(\w+)", text)
        if match:
            if not explained:
                found.append(f"{proto.name}:{number}: {match[1]} {match[2]}")
            fields_may_be_bare = match[1] == "message" and explained
            explained = False
        elif "=" in text and not text.startswith(("syntax", "package", "import", "option")):
            zero = text.endswith("_UNSPECIFIED = 0;")
            if not (explained or fields_may_be_bare or zero or "//" in text):
                found.append(f"{proto.name}:{number}: {text}")
    return found


def test_every_service_call_message_field_and_value_has_a_comment():
    assert len(PROTOS) > 4
    assert [line for proto in PROTOS for line in unexplained(proto)] == []


def test_the_paths_of_the_methods_are_those_of_the_services():
    services = {name for proto in PROTOS for name in re.findall(r"^service (\w+)", proto.read_text("utf-8"), re.M)}
    assert {path.split("/")[1] for path in contract.METHODS.values()} == {f"pyps.v1.{name}" for name in services}
    assert contract.METHODS["Push"] == "/pyps.v1.ParameterServer/Push"
    assert all(path.endswith(f"/{name}") for name, path in contract.METHODS.items())


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


def test_an_error_says_by_its_kind_what_its_caller_does_about_it():
    kinds = (errors.ConfigurationError, errors.ConnectionFailed, errors.RunEnded, errors.NotFinite)
    for error_class in CLASSES:
        if error_class is not PypsError:
            assert sum(issubclass(error_class, kind) for kind in kinds) == 1, error_class
    with pytest.raises(ValueError, match="port 99999"):
        pyps_client.Launch(servers=("host:99999",))


def test_an_error_without_a_name_of_ours_keeps_its_status_and_message():
    for status in grpc.StatusCode.__members__:
        error = from_status(status, "what happened")
        assert str(error) == "what happened"
        assert error.status == status or status == "UNIMPLEMENTED"
    for name in ("SystemExit", "object", "_all_below", ""):
        assert type(from_status("INVALID_ARGUMENT", "no", name)) is InvalidArgument, name
    # Of an instance alone: the class keeps its own.
    assert PypsError.status == "UNKNOWN"


def test_the_errors_need_neither_grpc_nor_protobuf(start_python):
    code = "import sys, pyps_wire.errors; print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    python = start_python("-c", code, fresh=True)
    assert python.wait() == 0
    assert python.output().strip() == "[]"
