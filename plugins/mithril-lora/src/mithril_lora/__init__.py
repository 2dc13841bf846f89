"""LoRA and adapters for mithril models, written with public interfaces only.

Names are imported on first use, so that loading the plugin imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mithril_lora.adapters import (
        Adapted,
        Adapter,
        LoRA,
        LowRankLinear,
        LowRankWeight,
        adapter_parameters,
        adapter_patterns,
        merge,
    )

__all__ = [
    "Adapted",  # the layers are public, because files of models name them
    "Adapter",
    "LoRA",
    "LowRankLinear",
    "LowRankWeight",
    "adapter_parameters",
    "adapter_patterns",
    "merge",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mithril_lora' has no attribute '{name}'")
    from mithril_lora import adapters

    return getattr(adapters, name)
