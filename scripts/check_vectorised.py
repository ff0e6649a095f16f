"""Checks that the compiler vectorised every kernel loop, for every instruction set.

The kernels are plain loops: nothing but the compiler's own report says that they became SIMD code. The
loops concerned are marked "// Vectorised." in csrc/kernels.cpp and the kernel_*.h that it includes; each must
be reported at the full width of its instruction set, as often as the compiler makes it. Needs CMake and GCC.

    python scripts/check_vectorised.py
"""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc" / "kernels.cpp"
BUILD = ROOT / "build" / "vectorised"
MARK = "// Vectorised."

NUM_RULES = len(re.findall(r"^    entry\(", (SOURCE.parent / "kernel_rules.h").read_text(encoding="utf-8"), re.M))

# How many loops the compiler makes of each: one per codec, twice where pieces and rest are separate. From
# float32 to float32 it may call memcpy instead, and float32's sixteen lanes it unrolls first.
INSTANTIATIONS = {
    # Each with and without decay, for three codecs and for a sum.
    "update_loop": NUM_RULES * 2 * 4 * 2,
    # The first gradient of a sum, and those that are added.
    "sum_loop": 2 * 3 * 2,
    # In memory and in a private copy.
    "exponent_carries": 9,
    "decode_loop": 2,
    "encode_loop": 3,
    # Over one, two and three arrays.
    "bandwidth_loop": 3,
    "move_vector": 1,
    # Products and magnitudes.
    "lane_loop": 2,
    "norm_inf": 1,
    "add_term": 1,
    "store_quotients": 1,
    "widen": 1,
    "add_products": 1,
    # Each with and without decay, for three codecs and for a sum.
    "gradient_loop": 2 * 4,
    "quotient_loop": 1,
    "initial_row": 1,
    "round_row": 1,
}
# Those that become two vectors or so are unrolled first, and then vectorised as straight code.
UNROLLED = {("avx512", "update_loop"): 3}
VECTOR_BYTES = {"baseline": 16, "avx2": 32, "avx512": 64}


def main() -> int:
    loops = {name: place for source in sources() for name, place in marked_loops(source).items()}
    if set(loops) != set(INSTANTIATIONS):
        print(f"marked loops {sorted(loops)}; expected {sorted(INSTANTIATIONS)}")
        return 1
    missing = 0
    commands = compile_commands()
    with ThreadPoolExecutor() as pool:
        reports = list(pool.map(vectorised_lines, commands.values()))
    for isa, widths in zip(commands, reports, strict=True):
        for name, (file, line) in loops.items():
            expected = INSTANTIATIONS[name] - UNROLLED.get((isa, name), 0)
            found = widths[file, line, VECTOR_BYTES[isa]]
            verdict = "ok" if found >= expected else "NOT VECTORISED"
            missing += found < expected
            print(f"{isa:9} {name:19} {found:3} loops of {expected}, {VECTOR_BYTES[isa]} bytes: {verdict}")
    return 1 if missing else 0


def sources() -> list[Path]:
    return [SOURCE, *sorted(SOURCE.parent.glob("kernel_*.h"))]


def marked_loops(source: Path) -> dict[str, tuple[str, int]]:
    """Maps the name of the function around each marked loop to the loop's file and line."""
    loops = {}
    function = ""
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if match := re.match(r"\w.*?(\w+)\(", line):
            function = match[1]
        if line.endswith(MARK):
            loops[function] = (source.name, number)
    return loops


def compile_commands() -> dict[str, list[str]]:
    """Maps each instruction set to the command that the build compiles the kernels with."""
    subprocess.run(
        ["cmake", "-S", ROOT, "-B", BUILD, "-DPYPS_BINDINGS=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    commands = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8")):
        if Path(entry["file"]) == SOURCE:
            command = shlex.split(entry["command"])
            isa = re.search(r"PYPS_ISA_NAME=\W*(\w+)", entry["command"])
            assert isa, entry
            commands[isa[1]] = command
    return commands


def vectorised_lines(command: list[str]) -> Counter[tuple[str, int, int]]:
    """Counts the loops that the compiler reports, by file, line and bytes of a vector."""
    output = command.index("-o")
    command = [*command[:output], *command[output + 2 :], "-o", "/dev/null", "-fopt-info-vec-optimized"]
    process = subprocess.run(command, cwd=BUILD, stderr=subprocess.PIPE, text=True)
    if process.returncode != 0:
        sys.exit(f"{process.stderr}\nThe report needs GCC; the compiler here is {command[0]}.")
    found = re.findall(r"(\w+\.\w+):(\d+):\d+: optimized: +loop vectorized using (\d+) byte", process.stderr)
    return Counter((file, int(line), int(width)) for file, line, width in found)


if __name__ == "__main__":
    sys.exit(main())
