"""Parameters that lie in the pulled vectors themselves: what a session pulls is in the model at once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.fork import at_fork
from pyps_client.torch.flat import may_lie_in_vectors, own_place
from pyps_client.torch.layout import Layout


class Aliases:
    """Those of a model's parameters whose memory is the vectors'. Used by one thread.

    A parameter that somebody else moves (`model.to`, `share_memory`) is one no longer. Where other processes see the
    vectors, a forked child would see its parent's parameters change: it gets those of the moment of the fork, as from
    any fork.
    """

    def __init__(self, layout: Layout, vectors: Sequence[npt.NDArray[np.float32]], *, private: bool) -> None:
        self._layout = layout
        self._vectors = vectors
        # Whether no other process sees the vectors.
        self._private = private
        # Tensor index -> where its memory is, and how often torch had seen it written after the newest pull.
        self._addresses: dict[int, int] = {}
        self._written: dict[int, int] = {}
        # Tensor index -> its values for children forked before the next change; and when they were copied.
        self._for_children: dict[int, torch.Tensor] = {}
        self._copied_at: list[int] = []

    @property
    def indices(self) -> Set[int]:
        """The tensors that lie in the vectors."""
        return self._addresses.keys()

    def adopt(self) -> None:
        """Moves the model's parameters into the vectors, which hold their values, where nobody would notice."""
        for index, parameter in enumerate(self._layout.parameters):
            if may_lie_in_vectors(self._layout, index) and _is_sole_owner(parameter):
                parameter.data = own_place(self._layout, self._vectors, index)
                self._addresses[index] = parameter.data_ptr()
        self.changed()
        if not self._private:
            _forked_apart.add(self)

    def written_elsewhere(self) -> bool:
        """True when torch saw parameters written since `changed`: the vectors hold something else than was pulled."""
        parameters = self._layout.parameters
        return any(parameters[index]._version != written for index, written in self._written.items())

    def changed(self) -> bool:
        """Notes that the vectors were rewritten, and tells autograd: a graph made before may not go backward.

        True when parameters were found moved elsewhere, which are left out from now on.
        """
        self._for_children = {}
        moved = self._forget_moved()
        for index in self._addresses:
            parameter = self._layout.parameters[index]
            torch.autograd.graph.increment_version(parameter)
            self._written[index] = parameter._version
        return moved

    def separate(self) -> None:
        """Moves the parameters into memory of their own, values and all."""
        self._forget_moved()
        for index in self._addresses:
            parameter = self._layout.parameters[index]
            parameter.data = parameter.data.clone()
        self._addresses, self._written = {}, {}
        self._for_children = {}

    def before_fork(self) -> None:
        """Keeps the present values for the child. Children forked in a row share one copy."""
        self._forget_moved()
        now = [self._layout.parameters[index]._version for index in self._addresses]
        if not self._for_children or now != self._copied_at:
            self._for_children = {index: self._layout.parameters[index].data.clone() for index in self._addresses}
            self._copied_at = now

    def in_child(self) -> None:
        """Moves the child's parameters into memory of its own."""
        for index, values in self._for_children.items():
            self._layout.parameters[index].data = values
        self._addresses, self._written = {}, {}
        self._for_children = {}

    def _forget_moved(self) -> bool:
        """Leaves out the parameters that somebody moved elsewhere; True when there were any."""
        parameters = self._layout.parameters
        moved = [index for index, address in self._addresses.items() if parameters[index].data_ptr() != address]
        for index in moved:
            del self._addresses[index], self._written[index]
        return bool(moved)


def _is_sole_owner(parameter: torch.Tensor) -> bool:
    """True when no other tensor or array, and no other process, is on the parameter's memory: none is left behind."""
    storage = parameter.untyped_storage()
    whole = storage.nbytes() == parameter.numel() * parameter.element_size()
    count = getattr(torch._C, "_storage_Use_Count", None)
    if not whole or count is None or parameter.is_shared():  # type: ignore[no-untyped-call]
        return False
    alone = torch.empty(1)
    its_storage = alone.untyped_storage()
    return bool(count(storage._cdata) == count(its_storage._cdata))


# Those whose vectors a forked child would share with its parent.
_forked_apart: weakref.WeakSet[Aliases] = weakref.WeakSet()


def _before_fork() -> None:
    for aliases in list(_forked_apart):
        aliases.before_fork()


def _in_child() -> None:
    for aliases in list(_forked_apart):
        aliases.in_child()


at_fork(before=_before_fork, after_in_child=_in_child)
