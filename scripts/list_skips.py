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
                # A file that is skipped whole has no class, and its reason stands behind place and line.
                if not case.get("classname"):
                    reason = ast.literal_eval(skipped.text)[2].removeprefix("Skipped: ")
                    skips.append(f"{case.get('name').replace('.', '/')}: {reason}")
                    continue
                file = case.get("classname").replace(".", "/")
                skips.append(f"{file}::{case.get('name')}: {skipped.get('message')}")
    print("\n".join(skips) if skips else "none")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
