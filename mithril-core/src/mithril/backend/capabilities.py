"""Facts about a backend that the compiler, passes and tools act upon, so that nobody asks for its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from mithril.ir import Op


class Form(StrEnum):
    """Ways to write an operation in others; which is fastest depends on backend, sizes and machine."""

    MATVEC = "matvec"  # one row: the matrix times a vector
    TRANSPOSED_WEIGHT = "transposed-weight"
    FLAT_LINEAR = "flat-linear"  # all rows as one matrix
    OUTER_PRODUCTS = "outer-products"
    POINTWISE_MATMUL = "pointwise-matmul"  # a convolution of one-pixel kernels
    DEPTHWISE_SHIFTS = "depthwise-shifts"  # a convolution for each channel: a sum of shifted images
    WRITTEN_OUT = "written-out"  # the parts of a composite


Prefers = Mapping[Op, tuple[Form, ...]]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """A backend's claims about itself on its device; the defaults promise nothing.

    The conformance kit tests each claim by its effect. Facts that depend on a node or on options are methods of
    ``Backend``: ``lowers``, ``branches``, ``is_view``, ``workspace``.
    """

    family: str  # the kind of its device: "cpu", "gpu", ...
    families: tuple[str, ...]  # kinds of hardware that it compiles for, its own among them
    local: bool = True  # programs run on this machine
    symbolic: bool = True  # one executable serves several sizes
    recompiles: bool = False  # each new size is compiled anew, which takes long
    donates: bool = False  # results are written over inputs that are tagged ``donated``
    checks_indices: bool = False  # ``checks=True`` raises for indices that a program computes, in any program
    autodiff: Literal["none", "native"] = "none"  # "native": ``build_with_gradients`` leaves them to a framework
    keeps: Literal["nothing", "graph", "source", "binary"] = "nothing"  # the form in which ``dump`` gives a program
    threads: bool = False  # ``num_threads`` is followed
    # Who places values: a plan, the framework until their last use, the framework until the call ends, a compiler.
    memory: Literal["arena", "frees", "holds", "library"] = "holds"
    # Least and most of inexact memory figures over measurements of small networks, less 1.
    estimate_error: tuple[float, float] | None = None
    prefers: Prefers = field(default_factory=lambda: MappingProxyType({}))  # forms that it always gains from
