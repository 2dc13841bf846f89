"""Capabilities of backends, which the compiler, passes and tools query instead of backend names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from mithril.graph import Op


class Form(StrEnum):
    """Equivalent forms of an operation; the fastest one depends on backend, sizes and machine."""

    MATVEC = "matvec"  # a matrix product with one row as matrix times vector
    TRANSPOSED_WEIGHT = "transposed-weight"
    FLAT_LINEAR = "flat-linear"  # all rows flattened to one matrix
    OUTER_PRODUCTS = "outer-products"
    POINTWISE_MATMUL = "pointwise-matmul"  # a 1x1 convolution as matrix product
    DEPTHWISE_SHIFTS = "depthwise-shifts"  # a depthwise convolution as a sum of shifted images
    WRITTEN_OUT = "written-out"  # a composite decomposed


# The forms of operations that are always faster on a backend, best first.
Prefers = Mapping[Op, tuple[Form, ...]]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities that a backend claims on its device; the defaults claim none.

    The conformance kit tests each claim by its effect. Properties that depend on a node or on options are methods of
    ``Backend``: ``lowers``, ``branches``, ``is_view``, ``workspace``.
    """

    family: str  # the kind of its device: "cpu", "gpu", ...
    families: tuple[str, ...]  # the kinds of hardware that it compiles for, including ``family``
    local: bool = True  # programs run on this machine
    symbolic: bool = True  # one executable runs several sizes
    recompiles: bool = False  # each new size triggers a slow recompilation
    donates: bool = False  # results overwrite inputs that are tagged ``donated``
    checks_indices: bool = False  # ``checks=True`` raises for indices out of range that a program computes
    autodiff: Literal["none", "native"] = "none"  # "native": ``build_with_gradients`` uses the framework's autodiff
    keeps: Literal["nothing", "graph", "source", "binary"] = "nothing"  # the format of ``dump``
    threads: bool = False  # ``num_threads`` takes effect
    # Memory of values: planned in an arena, freed by the framework at the last use or after the call, or by a compiler;
    # "replayed": freed after the call, and ``exact_memory`` replays how the framework allocates.
    memory: Literal["arena", "frees", "holds", "library", "replayed"] = "holds"
    # Smallest and largest relative error of inexact memory figures, measured on small networks.
    estimate_error: tuple[float, float] | None = None
    channels_last: frozenset[Op] = frozenset()  # operations that it computes between transposes of their images
    # Images in memory: planes of channels, the order of ``channels_last``, either one, or the choice of a compiler.
    images: Literal["planes", "channels", "either", "compiler"] = "planes"
    prefers: Prefers = field(default_factory=lambda: MappingProxyType({}))  # forms that are always faster

    @property
    def is_lazy(self) -> bool:
        """Whether values live until the end of a call."""
        return self.memory in ("holds", "replayed")

    @property
    def knows_memory(self) -> bool:
        """Whether ``exact_memory`` has a figure of each program."""
        return self.memory in ("arena", "library", "replayed")
