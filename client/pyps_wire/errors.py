"""The errors of pyps, each with the gRPC status under which it crosses the wire.

    PypsError
    ├── ConfigurationError          FAILED_PRECONDITION  change the program or its settings: another try fails alike
    │   ├── InvalidArgument         INVALID_ARGUMENT     an argument, or a field of a request, is wrong
    │   │   ├── MalformedFrame                           its bytes are no message of the contract
    │   │   └── WrongSize                                its payload has another length than it should
    │   ├── ModelMismatch           FAILED_PRECONDITION  another model than the run's
    │   ├── OptimizerMismatch       FAILED_PRECONDITION  other optimizer settings than those in force
    │   ├── UnsupportedOptimizer    FAILED_PRECONDITION  a rule or setting that servers lack
    │   ├── RunMismatch             FAILED_PRECONDITION  another run than the server's
    │   ├── ScheduleOwned           FAILED_PRECONDITION  a learning rate from somebody who does not own the schedule
    │   ├── ProtocolMismatch        FAILED_PRECONDITION  the ends speak different contracts
    │   ├── NotAuthenticated        UNAUTHENTICATED      no token, or certificates, or wrong ones
    │   ├── NotAllowed              PERMISSION_DENIED    a call that this caller may not make
    │   │   └── NameHeld                                 a worker's name that a live process holds: waiting may help
    │   ├── LimitExceeded           RESOURCE_EXHAUSTED   beyond a bound that the server enforces
    │   │   └── NoRoom                                   for as long as things stand: waiting does not help
    │   ├── SettingsChanged         FAILED_PRECONDITION  optimizer settings changed after the start
    │   └── ForkedClient            FAILED_PRECONDITION  a client used in a forked child
    ├── ConnectionFailed            UNAVAILABLE          see to the servers or the network, then start again
    │   ├── ServerUnavailable       UNAVAILABLE          the server cannot be reached
    │   ├── WaitTimedOut            DEADLINE_EXCEEDED    what was waited for did not come in time
    │   ├── NotInitialized          FAILED_PRECONDITION  the server holds no parameters yet
    │   └── UnknownWorker           FAILED_PRECONDITION  a worker that has not said Hello
    ├── RunEnded                    FAILED_PRECONDITION  leave the loop: this worker's part is over
    │   ├── RunFinished             FAILED_PRECONDITION  the run has come to its end
    │   ├── Superseded              ABORTED              a newer process took the worker's name
    │   ├── ReplicaLost             ABORTED              another process of the worker's replica is gone
    │   └── StateLost               DATA_LOSS            updates that had been acknowledged are gone
    └── NotFinite                   INVALID_ARGUMENT     too many gradients with NaN or infinity

The kinds, ConfigurationError (a ValueError too), ConnectionFailed and RunEnded, say what a caller does about an error.
Of those that end a worker's part RunFinished alone is a good end.
A server ends a call with `status` and the message, and names the class in trailing metadata under
METADATA_KEY; `from_status` makes the same error again at the other end.
"""

from __future__ import annotations

METADATA_KEY = "pyps-error"


class PypsError(Exception):
    """Anything that pyps refuses or cannot do; catch this to catch them all."""

    status: str = "UNKNOWN"  # a grpc.StatusCode's name


class ConfigurationError(PypsError, ValueError):
    """The program or its settings are wrong: another try fails alike. The message says what to change."""

    status = "FAILED_PRECONDITION"


class InvalidArgument(ConfigurationError):
    """Raised for an argument, or a field of a request, that is wrong. Correct it; a retry fails alike."""

    status = "INVALID_ARGUMENT"


class MalformedFrame(InvalidArgument):
    """Raised when bytes are no message of the contract. Look for a foreign sender or a rewriting proxy."""


class WrongSize(InvalidArgument):
    """Raised when a payload or vector has another length than its shard. Send exactly that length."""


class ModelMismatch(ConfigurationError):
    """Raised when a worker's model is not the run's. Give all workers one model, or start another run."""


class OptimizerMismatch(ConfigurationError):
    """Raised when a worker states other settings than those in force. Align those that are listed."""


class UnsupportedOptimizer(ConfigurationError):
    """Raised for a rule or a setting that servers lack. Choose one that the message lists."""


class RunMismatch(ConfigurationError):
    """Raised when the server holds another run than is meant. Join that by name, or reset the server."""


class ScheduleOwned(ConfigurationError):
    """Raised for a learning rate where another sets it. Let one worker or the server own the schedule."""


class ProtocolMismatch(ConfigurationError):
    """Raised when client and server speak different contracts. Install the same version at both ends."""


class NotAuthenticated(ConfigurationError):
    """Raised without the server's token or certificates that fit. The message names the setting."""

    status = "UNAUTHENTICATED"


class NotAllowed(ConfigurationError):
    """Raised for a call that this caller may not make. Calls that change a server come from its own host."""

    status = "PERMISSION_DENIED"


class NameHeld(NotAllowed):
    """Raised when another process, not known to have ended, holds the worker's name. It is free after its lease."""


class LimitExceeded(ConfigurationError):
    """Raised beyond a bound that a server enforces. Send less, or raise the setting in the message."""

    status = "RESOURCE_EXHAUSTED"


class NoRoom(LimitExceeded):
    """Raised where a server has no memory for data that must stay. Waiting does not help; the message names it."""


class SettingsChanged(ConfigurationError):
    """Raised when optimizer settings changed after the start. Servers keep the first; start another run."""


class ForkedClient(ConfigurationError):
    """Raised when a forked child uses its parent's client. Make a client of its own in the child."""


class ConnectionFailed(PypsError):
    """The servers or the network cannot be used for training now. See to them, then start again."""

    status = "UNAVAILABLE"


class ServerUnavailable(ConnectionFailed):
    """Raised when a server could not be reached in the time allowed. Check its address and that it runs."""


class WaitTimedOut(ConnectionFailed):
    """Raised when a wait ended at its deadline; the message says for whom or what. Look there, or wait longer."""

    status = "DEADLINE_EXCEEDED"


class NotInitialized(ConnectionFailed):
    """Raised when a server has no parameters yet. Start a worker, or wait until one has sent them."""

    status = "FAILED_PRECONDITION"


class UnknownWorker(ConnectionFailed):
    """Raised for a worker that the server does not know. Say Hello, then send the same frames again."""

    status = "FAILED_PRECONDITION"


class RunEnded(PypsError):
    """This worker can no longer train in the run. Leave the loop."""

    status = "FAILED_PRECONDITION"


class RunFinished(RunEnded):
    """Raised when a run is finished and takes no more gradients. Leave the loop; the parameters can be pulled."""


class Superseded(RunEnded):
    """Raised when a newer process goes by this worker's name. Stop this one, or give it another name."""

    status = "ABORTED"


class ReplicaLost(RunEnded):
    """Raised when another process of this worker's replica is gone. A replica ends as a whole; start it again."""

    status = "ABORTED"


class StateLost(RunEnded):
    """Raised when a server lost updates that it had acknowledged. Restore a checkpoint, or start again."""

    status = "DATA_LOSS"


class NotFinite(PypsError):
    """Raised after too many gradients in a row with NaN or infinity. Lower the rate, check the data."""

    status = "INVALID_ARGUMENT"


def from_status(status: str, message: str, name: str | None = None) -> PypsError:
    """Return a call's error: of the named class, else of the status's class."""
    error_class = _BY_NAME.get(name or "") or _BY_STATUS.get(status, PypsError)
    error = error_class(message)
    if error_class is PypsError:
        error.status = status
    return error


def _all_below(parent: type[PypsError]) -> list[type[PypsError]]:
    children = parent.__subclasses__()
    return children + [below for child in children for below in _all_below(child)]


_BY_NAME = {error_class.__name__: error_class for error_class in _all_below(PypsError)}

# For calls that end without a name: in gRPC itself, a proxy, another implementation.
_BY_STATUS: dict[str, type[PypsError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNAUTHENTICATED": NotAuthenticated,
    "PERMISSION_DENIED": NotAllowed,
    "RESOURCE_EXHAUSTED": LimitExceeded,
    "DEADLINE_EXCEEDED": WaitTimedOut,
    "UNAVAILABLE": ServerUnavailable,
    "DATA_LOSS": StateLost,
    "UNIMPLEMENTED": ProtocolMismatch,
}
