"""Checks that the compiler vectorised every kernel loop, for every instruction set.

The kernels are plain loops: nothing but the compiler's own report says that they became SIMD code. The
loops concerned are marked "// Vectorised." in csrc/kernels.cpp; each must be reported at the full width of
its instruction set, once per codec. Needs CMake and GCC.

    python scripts/check_vectorised.py
"""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc" / "kernels.cpp"
BUILD = ROOT / "build" / "vectorised"
MARK = "// Vectorised."

# How many loops the compiler makes of each: one per codec, twice where pieces and rest are separate. From
# float32 to float32 it may call memcpy instead.
INSTANTIATIONS = {
    "sgd_loop": 6,
    "adagrad_loop": 6,
    "exponent_carries": 6,
    "decode_loop": 2,
    "encode_loop": 2,
    "bandwidth_loop": 1,
}
VECTOR_BYTES = {"baseline": 16, "avx2": 32}


def main() -> int:
    loops = marked_loops(SOURCE.read_text().splitlines())
    if set(loops) != set(INSTANTIATIONS):
        print(f"marked loops {sorted(loops)}; expected {sorted(INSTANTIATIONS)}")
        return 1
    missing = 0
    for isa, command in compile_commands().items():
        widths = vectorised_lines(command)
        for name, line in loops.items():
            expected, found = INSTANTIATIONS[name], widths[line, VECTOR_BYTES[isa]]
            verdict = "ok" if found >= expected else "NOT VECTORISED"
            missing += found < expected
            print(f"{isa:9} {name:15} {found} loops of {expected}, {VECTOR_BYTES[isa]} bytes: {verdict}")
    return 1 if missing else 0


def marked_loops(lines: list[str]) -> dict[str, int]:
    """Maps the name of the function around each marked loop to the loop's line."""
    loops = {}
    function = ""
    for number, line in enumerate(lines, start=1):
        if match := re.match(r"\w.*?(\w+)\(", line):
            function = match[1]
        if line.endswith(MARK):
            loops[function] = number
    return loops


def compile_commands() -> dict[str, list[str]]:
    """Maps each instruction set to the command that the build compiles the kernels with."""
    subprocess.run(
        ["cmake", "-S", ROOT, "-B", BUILD, "-DPYPS_BINDINGS=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    commands = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if Path(entry["file"]) == SOURCE:
            command = shlex.split(entry["command"])
            isa = re.search(r"PYPS_ISA_NAME=\W*(\w+)", entry["command"])
            assert isa, entry
            commands[isa[1]] = command
    return commands


def vectorised_lines(command: list[str]) -> Counter[tuple[int, int]]:
    """Counts the loops that the compiler reports, by line and bytes of a vector."""
    output = command.index("-o")
    command = [*command[:output], *command[output + 2 :], "-o", "/dev/null", "-fopt-info-vec-optimized"]
    process = subprocess.run(command, cwd=BUILD, stderr=subprocess.PIPE, text=True)
    if process.returncode != 0:
        sys.exit(f"{process.stderr}\nThe report needs GCC; the compiler here is {command[0]}.")
    found = re.findall(r"kernels\.cpp:(\d+):\d+: optimized: +loop vectorized using (\d+) byte", process.stderr)
    return Counter((int(line), int(width)) for line, width in found)


if __name__ == "__main__":
    sys.exit(main())
