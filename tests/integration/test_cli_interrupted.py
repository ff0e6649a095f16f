"""Ctrl-C before a command has begun: amid its imports."""

# Runs `pyps`, and has Ctrl-C come when the module named first is imported.
INTERRUPTED = """
import runpy, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupter())
runpy.run_module("pyps", run_name="__main__")
"""


def test_ctrl_c_amid_imports_ends_with_its_status_alone(start_python):
    command = ("serve", "--port", "0", "--control-port", "0", "--metrics-port", "0")
    modules = ("typer", "pyps_wire.errors", "pyps.cli.serve")
    processes = [start_python("-c", INTERRUPTED, module, *command, fresh=True) for module in modules]
    for module, process in zip(modules, processes, strict=True):
        assert (process.wait(60), process.output().strip()) == (130, ""), module
