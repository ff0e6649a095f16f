"""The `pyps` command from its first import on; `python -m pyps` is the same."""

import os
import sys


def main() -> None:
    """Runs the command line; Ctrl-C amid its imports ends it with nothing but the status."""
    # What a command uses of the client may do as with a worker's process: this one is ours.
    os.environ.setdefault("PYPS_PROCESS_HOOKS", "1")
    try:
        from pyps.cli.main import app
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="pyps")


if __name__ == "__main__":
    main()
