"""The hooks of mithril-tpu; importing this module imports no framework."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mithril import CompileContext, Option, hookimpl


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options for TPU targets."""
    nothing: Mapping[str, Any] = MappingProxyType({})
    return [
        Option(
            "tpu_options",
            Mapping[str, Any],
            nothing,
            "Options of TPU targets; effort is 0 to 3.",
            keys={
                "model_parallelism": int | None,
                "precision": str | None,
                "topology": str | None,
                "effort": int | None,
                "simulate": bool | None,
            },
            example='{"topology": "v5e:2x2"}',
        ),
        Option(
            "tpu_replicas",
            int | None,
            None,
            "Number of TPU devices to compile for; None means 1.",
            aliases=("tpu_options.replicas",),
            example="4",
        ),
    ]


@hookimpl
def mithril_compile_begin(context: CompileContext) -> None:
    """Replace the JAX backend by the ahead-of-time backend if the target is a TPU or a GPU of another machine.

    The check of the target against the backend's device follows; it fails for every other backend.
    """
    name = context.options["target_hardware"]
    family = _family(name) if name is not None and "mithril_jax.backend" in sys.modules else None
    if family not in ("tpu", "nvidia") or (family in context.backend.capabilities.families and family == "nvidia"):
        return
    from mithril_jax.backend import JaxBackend
    from mithril_tpu.backend import AheadBackend

    if type(context.backend) is JaxBackend and context.backend.capabilities.family in AheadBackend.devices:
        context.backend = AheadBackend.in_place_of(context.backend, context.options)


def _family(name: str) -> str | None:
    from mithril_targets.catalog import all_targets

    return next((t.family for t in all_targets() if name == t.name or name in t.aliases), None)
