"""The one run that a server holds: its state, its shards, its workers. No gRPC in here."""

from pyps.run.handshake import Greeting
from pyps.run.run import Run
from pyps.run.settings import RuleSettings
from pyps.run.state import RunState

__all__ = ["Greeting", "RuleSettings", "Run", "RunState"]
