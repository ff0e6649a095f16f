"""What a run was joined with, and must stay so while it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyps_client.torch.translate import Translation, refuse_changes
from pyps_wire.common_pb2 import OptimizerSettings

# Settings that do not belong to the agreement: which parameters a group holds is fixed otherwise.
_FREE = frozenset({"lr", "params"})


class Agreement:
    """The settings of an optimizer's groups that all workers of a run share: all but rates and momenta."""

    def __init__(self, translation: Translation, settings: OptimizerSettings) -> None:
        self._translation = translation
        self._settings = settings
        # The values that were found in order, which are looked at again only when they are others.
        self._checked: list[list[Any]] | None = None

    def check(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises SettingsChanged where a group no longer says what the run was joined with."""
        now = [[value for name, value in group.items() if name not in _FREE] for group in param_groups]
        if now == self._checked:
            return
        refuse_changes(self._translation, self._settings, param_groups)
        # A list may be changed in its place, and would be compared with itself.
        changeable = any(isinstance(value, list) for values in now for value in values)
        self._checked = None if changeable else now
