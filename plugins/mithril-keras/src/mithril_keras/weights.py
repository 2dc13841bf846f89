"""The variables of one layer: parameters and states by name, with the arrays of the archive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mithril import ops
from mithril.graph import InputError, MithrilError, UnsupportedError, dtype as as_dtype
from mithril_importing.names import path_name
from mithril_keras.archive import Archive

COMPUTE = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


class Owner(Protocol):
    """The layer that holds the parameters of a whole archive, or its stand-in while the archive is read."""

    training: bool

    def weight(self, name: str, array: Any, state: bool) -> Any: ...
    def update_state(self, name: str, value: Any) -> None: ...
    def key(self) -> Any: ...


@dataclass
class Weights:
    """The variables of a layer, in the order in which it creates them."""

    owner: Owner
    archive: Archive
    group: str  # in the file
    path: str  # of parameter names
    label: str  # for messages
    policy: str = "float32"
    trainable: bool = True
    training: bool = False
    arrays: dict[tuple[str, str], Any] = field(default_factory=dict)  # by group and name: layers are called repeatedly
    next: int = 0

    def below(self, group: str, name: str) -> Weights:
        """Return the variables of a layer within this one, whose attribute may begin with an underscore."""
        if not self.archive.count(f"{self.group}/{group}") and self.archive.count(f"{self.group}/_{group}"):
            group = f"_{group}"
        inner = layer_path(name) if name else ""
        path = ".".join(part for part in (self.path, inner) if part)
        return replace(self, group=f"{self.group}/{group}" if self.group else group, path=path, next=0)

    def param(self, name: str, shape: Sequence[Any], perm: Sequence[int] = (), reshape: Sequence[Any] = ()) -> Any:
        """Return the next variable, which has this shape, as a parameter in the dtype of the computation.

        With ``perm`` and ``reshape`` the parameter has the layout that the operation reads.
        """
        return self.cast(self._variable(name, shape, perm, reshape, state=False))

    def state(self, name: str, shape: Sequence[Any]) -> Any:
        """Return the next variable as a state."""
        return self._variable(name, shape, (), (), state=True)

    def constant(self, shape: Sequence[Any]) -> Any:
        """Return the next variable as an array."""
        array = self.archive.variable(self.group, self.next)
        self.next += 1
        return self._checked(array, shape)

    def update(self, name: str, value: Any) -> None:
        """Set a state after a call in training."""
        self.owner.update_state(f"{self.path}.{name}", value)

    def _variable(self, name: str, shape: Any, perm: Any, reshape: Any, *, state: bool) -> Any:
        key = (self.group, name)
        if key not in self.arrays:
            array = self._checked(self.archive.variable(self.group, self.next), shape)
            if perm:
                array = np.transpose(array, perm)
            if reshape:
                array = np.reshape(array, reshape)
            self.arrays[key] = array
        self.next += 1
        return self.owner.weight(f"{self.path}.{name}", self.arrays[key], state)

    def _checked(self, array: Any, shape: Sequence[Any]) -> Any:
        expected = tuple(shape)
        if array.shape != expected:
            raise InputError(
                f"variable {self.next} of {self.label} has shape {list(array.shape)}, expected {list(expected)}",
                facts=[f"'{self.archive.name}', group '{self.group}'"],
            )
        return array

    @property
    def dtype(self) -> str:
        """The dtype of computations."""
        name = COMPUTE.get(self.policy, self.policy)
        try:
            policy_dtype = as_dtype(name)
        except MithrilError:
            policy_dtype = None
        if policy_dtype is None or not (policy_dtype.is_float or policy_dtype.is_integer or name == "bool"):
            raise UnsupportedError(
                f"the dtype policy '{self.policy}' of {self.label} is not supported",
                facts=["read: float32, float16, bfloat16, float64, mixed_float16, mixed_bfloat16"],
            )
        return name

    def cast(self, x: Any) -> Any:
        """Return a value in the dtype of computations; integers and conditions stay."""
        return x if not x.dtype.is_float or x.dtype.name == self.dtype else ops.cast(x, dtype=self.dtype)

    def key(self) -> Any:
        """Return a new random key."""
        return self.owner.key()

    def unsupported(self, setting: str, remedy: str | None = None) -> UnsupportedError:
        """Return the error for a setting without a counterpart."""
        return UnsupportedError(f"{setting} of {self.label} is not supported", hint=remedy)


def layer_path(name: str) -> str:
    """Return the name of a layer as a part of parameter names."""
    return path_name(name.replace("/", "."))
