"""The decoder of an encoder: its cache of keys and values, and those of the encoder's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.graph import Builder
from mithril.models import Layer
from mithril_hub.decoder.places import Places


@dataclass(frozen=True)
class Memory:
    """Keys and values that a decoder attends to.

    Without a cache both follow from the call. With a cache, a call with an encoder's input writes the keys and values
    of its result as states of ``size`` positions, and other calls read them.
    """

    layer: Layer
    places: Places
    size: int | None = None  # positions of the encoder in the cache; None without a cache
    encodes: bool = True  # whether the call has the input of the encoder

    def own(self, path: str, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the keys and values of the decoder's tokens so far."""
        places = self.places
        return places.cached(self.layer, f"{path}key_cache", k), places.cached(self.layer, f"{path}value_cache", v)

    def of_encoder(self, name: str, shape: tuple[Any, ...], axis: int, compute: Callable[[], Any], dtype: str) -> Any:
        """Return the result of ``compute`` for the encoder's result, or its cached state of the shape."""
        if self.size is None:
            return compute()
        full = (*shape[:axis], self.size, *shape[axis + 1 :])
        state = self.layer.state(name, full, "zeros", dtype=dtype)
        new = compute()  # without an input, too: all programs of a model have the same parameters
        if not self.encodes:
            return state
        zero = Builder.current().constant(0, "int32")
        blank = ops.full(shape=full, value=0, dtype=dtype)
        updated = ops.dynamic_update_slice(blank, ops.cast(new, dtype=dtype), ops.stack(*[zero] * len(full), axis=0))
        self.layer.update_state(name, updated)
        return updated
