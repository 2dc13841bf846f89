"""Wrappers: layers around another layer whose parameters keep their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mithril.graph import ModelError, Value
from mithril.models.language.layer import Layer


class Wrapper(Layer):
    """A layer around another one, with the same terminals: by default it does what the other one does.

    The parameters of ``inner`` keep their names, so weights load as before: ``model.replace("*.query", MyWrapper)``.
    A subclass extends ``build``, for example by parameters of its own.
    """

    def __init__(self, inner: Layer) -> None:
        self.inner = inner
        self._children[inner] = ""

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.inputs

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.outputs

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.optional

    @property
    def weights(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.weights

    def expects(self, terminal: str) -> Any:
        return self.inner.expects(terminal)

    @property
    def scalars(self) -> bool:  # type: ignore[override]
        return self.inner.scalars

    def build(self, *inputs: Any) -> Any:
        return self.inner(*inputs)

    def shared(self, name: str, stored: Value) -> Value:
        """Return a parameter as the layer uses it, for a layer elsewhere that shares it: by default the stored one."""
        return stored


class Hooked(Wrapper):
    """A layer whose results a function reads or changes; ``hook`` creates it."""

    def __init__(self, inner: Layer, function: Callable[..., Any]) -> None:
        super().__init__(inner)
        self.function = function

    def build(self, *inputs: Any) -> Any:
        results = self.inner(*inputs)
        changed = self.function(*results) if isinstance(results, (tuple, list)) else self.function(results)
        return results if changed is None else changed


def hook(function: Callable[..., Any]) -> Callable[[Layer], Layer]:
    """Return a replacement that passes results of layers to a function: ``model.replace("*.attention", hook(clip))``.

    ``function`` receives the results as graph values in every trace. It returns their replacements, or None to leave
    them unchanged.
    """
    if not callable(function):
        raise ModelError(f"hook requires a function, got {function!r}", hint="write hook(lambda y: ops.clip(y, low=0))")
    return lambda layer: Hooked(layer, function)


class Reparametrization(Wrapper):
    """Base class of wrappers that compute a parameter of a layer from the stored one: define ``parameter``.

    The stored parameter keeps its name and initial value; ``target`` is its name.
    """

    def __init__(self, inner: Layer, target: str = "weight") -> None:
        super().__init__(inner)
        self.parameter_name = target

    def parameter(self, stored: Value) -> Any:
        """Return the parameter that the layer uses, of the same shape."""
        raise ModelError(
            f"{type(self).__name__} has no method 'parameter'", hint="define parameter(self, stored), which returns it"
        )

    def shared(self, name: str, stored: Value) -> Value:
        return self.parameter(stored) if name == self.parameter_name else stored

    def build(self, *inputs: Any) -> Any:
        layer, used = self.inner, False
        while isinstance(layer, Wrapper):
            layer = layer.inner

        def replaced(stored: Value) -> Any:
            nonlocal used
            used = True
            return self.parameter(stored)

        with self.context.reparametrize(layer, self.parameter_name, replaced):
            results = self.inner(*inputs)
        if not used:
            raise ModelError(
                f"{layer!r} has no parameter '{self.parameter_name}'",
                hint="replace layers that have it: replace(Linear, ...), or name another parameter by target='...'",
            )
        return results


def shared_parameter(layer: Layer, name: str, shape: Iterable[Any], init: str = "zeros", dtype: Any = None) -> Value:
    """Return a parameter of a layer as its wrappers compute it, for another layer that uses it, too.

    A head that shares the table of an embedding includes the product that LoRA adds to the table.
    """
    if not isinstance(layer, Wrapper):
        return layer.param(name, shape, init, dtype)
    return layer.shared(name, shared_parameter(layer.inner, name, shape, init, dtype))
