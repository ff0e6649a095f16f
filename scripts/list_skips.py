"""Lists every skipped test of pytest's JUnit reports by name, with the reason.

python scripts/list_skips.py REPORT.xml ...
"""

import ast
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main(paths: list[str]) -> int:
    skips: list[str] = []
    for path in paths:
        if not Path(path).exists():
            print(f"there is no report {path}: its tests did not run to their end")
            continue
        for case in ElementTree.parse(path).iter("testcase"):
            skipped = case.find("skipped")
            if skipped is not None:
                name, file = case.get("name", ""), case.get("classname", "").replace(".", "/")
                # A file that is skipped whole has no class, and its reason stands behind place and line.
                where = f"{file}::{name}" if file else name.replace(".", "/")
                reason = skipped.get("message") if file else ast.literal_eval(skipped.text or "")[2]
                skips.append(f"{where}: {reason}")
    print("\n".join(skips) if skips else "none")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
