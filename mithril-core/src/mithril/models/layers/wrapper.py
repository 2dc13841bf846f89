"""Wrappers: layers around another layer whose parameters keep their names."""

from __future__ import annotations

from typing import Any

from mithril.models.language.layer import Layer


class Wrapper(Layer):
    """A layer around another one, with the same terminals: by default it does what the other one does.

    The parameters of ``inner`` keep their names, so weights load as before: ``model.replace("*.query", MyWrapper)``.
    A subclass extends ``build``, for example by parameters of its own.
    """

    def __init__(self, inner: Layer) -> None:
        self.inner = inner
        self._children[id(inner)] = ""

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.inputs

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.outputs

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.optional

    def expects(self, terminal: str) -> Any:
        return self.inner.expects(terminal)

    def build(self, *inputs: Any) -> Any:
        return self.inner(*inputs)
