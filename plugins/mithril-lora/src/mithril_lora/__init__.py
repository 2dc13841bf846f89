"""LoRA and adapters for mithril models, written with public interfaces only."""

from mithril_lora.adapters import Adapter, LoRA, adapter_parameters, adapter_patterns, merge

__all__ = ["Adapter", "LoRA", "adapter_parameters", "adapter_patterns", "merge"]
