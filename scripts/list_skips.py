"""Lists every skipped test of pytest's JUnit reports by name, with the reason.

python scripts/list_skips.py REPORT.xml ...
"""

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
                file = case.get("classname", "").replace(".", "/")
                skips.append(f"{file}::{case.get('name')}: {skipped.get('message')}")
    print("\n".join(skips) if skips else "none")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
