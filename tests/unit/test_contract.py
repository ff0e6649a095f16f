"""The contract: every part is explained, names agree. `make check` sees that generated code is fresh."""

import re
from pathlib import Path

from pyps_wire import contract

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
    for number, line in enumerate(proto.read_text().splitlines(), start=1):
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


def test_the_paths_of_the_methods_are_those_of_the_generated_stubs():
    stubs = "".join(path.read_text() for path in (ROOT / "client" / "pyps_wire").glob("*_pb2_grpc.py"))
    assert set(re.findall(r"'(/pyps\.v1\.\w+/\w+)'", stubs)) == set(contract.METHODS.values())
    assert contract.METHODS["Push"] == "/pyps.v1.ParameterServer/Push"
    assert all(path.endswith(f"/{name}") for name, path in contract.METHODS.items())
