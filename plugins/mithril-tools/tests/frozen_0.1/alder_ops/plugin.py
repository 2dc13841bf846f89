# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""Hooks of alder-ops."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from mithril import Lowering, OpsSpec, Option, PassSpec, hookimpl


@hookimpl
def mithril_ops():
    return [OpsSpec("alder_ops.operations", names=("alder.bump", "alder.order", "alder.soft_clip"))]


@hookimpl
def mithril_lowerings(backend):
    rows = {
        "numpy": [Lowering("alder.bump", "alder_ops.kernels:TEMPLATE")],
        "alder": [
            Lowering("alder.bump", "alder_ops.kernels:written", when="alder_ops.kernels:is_single"),
            Lowering("alder.soft_clip", "alder_ops.kernels:soft_clip"),
        ],
    }
    return rows.get(backend, [])


@hookimpl
def mithril_passes():
    return [
        PassSpec(
            "alder-bump",
            "alder_ops.passes:fold_bump",
            "fuse",
            level=None,
            aliases=("alder-fold",),
            groups=("alder-all",),
            options=("alder_fold",),
            before=("fusion",),
            version=2,
            summary="exp(-x * x) becomes alder.bump",
        ),
        PassSpec("alder-double", "alder_ops.passes:double", "canonical", level="low", groups=("alder-all",)),
        PassSpec("alder-trim", "alder_ops.passes:trim", "final", level=None),
        PassSpec("alder-count", "alder_ops.passes:count", "final", level=None, favors="latency", after=("alder-trim",)),
    ]


@hookimpl
def mithril_options():
    return [
        Option("alder_fold", bool, False, "Fold bumps.", aliases=("alder.fold",), example="True"),
        Option(
            "alder",
            Mapping[str, bool],
            MappingProxyType({}),
            "Settings of alder.",
            keys={"fold": bool},
            affects="program",
        ),
        Option("alder_mode", Literal["calm", "eager"], "calm", "A mode.", backends=("alder",), affects="shown"),
    ]
