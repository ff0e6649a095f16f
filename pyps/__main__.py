"""`python -m pyps` is `pyps`."""

from pyps.cli.main import app

if __name__ == "__main__":
    app(prog_name="pyps")
