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


def test_the_search_for_comments_finds_what_lacks_one(tmp_path):
    proto = tmp_path / "bad.proto"
    proto.write_text(
        "// Said.\nmessage A {\n  int32 a = 1;\n}\nmessage B {\n  int32 b = 1;\n  // Said.\n  int32 c = 2;\n"
        "  int32 d = 3;\n\n  int32 e = 4;\n}\n// Said.\nenum E {\n  E_UNSPECIFIED = 0;\n  E_ONE = 1;\n}\n"
        "// Said.\nservice S {\n  rpc Call(A) returns (B);\n}\n"
    )
    names = [line.split(": ", 1)[1] for line in unexplained(proto)]
    assert names == ["message B", "int32 b = 1;", "int32 e = 4;", "E_ONE = 1;", "rpc Call"]


def test_the_paths_of_the_methods_are_those_of_the_generated_stubs():
    stubs = "".join(path.read_text() for path in (ROOT / "client" / "pyps_wire").glob("*_pb2_grpc.py"))
    assert set(re.findall(r"'(/pyps\.v1\.\w+/\w+)'", stubs)) == set(contract.METHODS.values())
    assert contract.METHODS["Push"] == "/pyps.v1.ParameterServer/Push"
    assert all(path.endswith(f"/{name}") for name, path in contract.METHODS.items())


def test_the_ports_are_neighbours_and_the_contract_is_the_first():
    assert (contract.DATA_PORT, contract.CONTROL_PORT, contract.METRICS_PORT) == (7610, 7611, 7612)
    assert contract.PROTOCOL_VERSION == 1
