"""Modules exported by ``torch.export``, in operators that ``mithril.ops`` has whole where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch._decomp import decomposition_table
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from mithril.graph import Dim, UnsupportedError
from mithril_importing.names import result_names
from mithril_torch.importing import packed
from mithril_torch.importing.gradients import mark_stopped
from mithril_torch.importing.table import array_of
from mithril_torch.importing.whole import kept_whole, of_composites

WHOLE = (
    *("scaled_dot_product_attention", "layer_norm", "group_norm", "instance_norm", "rms_norm", "linear", "matmul"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("conv1d.padding", "conv2d.padding", "conv3d.padding", "gelu", "softmax.int", "log_softmax.int", "silu", "mish"),
    *("hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus", "glu", "grid_sampler"),
    *("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec"),
    *("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec", "upsample_bicubic2d.vec"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "pixel_shuffle", "pixel_unshuffle", "einsum", "embedding"),
    *("var.correction", "std.correction", "std_mean.correction", "dropout", "repeat_interleave.self_int", "bilinear"),
    *("channel_shuffle", "_euclidean_dist"),
    *("prelu", "hardshrink", "softshrink", "tril", "triu", "logsumexp", "roll", "_safe_softmax", "special_log_ndtr"),
    *("masked_scatter", "_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec", "_upsample_nearest_exact1d.vec"),
    *("_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec", "max_unpool2d", "max_unpool3d"),
)


@dataclass(frozen=True, eq=False)
class Exported:
    """One mode of a module: the FX graph, and the roles of its placeholders and results."""

    graph: torch.fx.Graph
    module: torch.fx.GraphModule
    params: Mapping[str, str]  # placeholder -> name in the module
    buffers: Mapping[str, str]
    constants: Mapping[str, np.ndarray[Any, Any]]  # placeholder -> array
    inputs: Mapping[str, tuple[tuple[Any, ...], torch.dtype]]  # placeholder -> shape of ints, Dims and None, dtype
    outputs: tuple[str, ...]  # names of the results
    results: tuple[Any, ...]  # node names, or constants
    updates: Mapping[str, str]  # buffer -> node name of its new value
    selected: tuple[str, ...]  # submodules whose results replace those of the module

    def __deepcopy__(self, memo: dict[int, Any]) -> Exported:
        return self  # nothing modifies it


def decompositions() -> dict[Any, Any]:
    """Return the default table of ``torch.export`` without the operators that stay whole."""
    table = torch.export.default_decompositions()
    for name in WHOLE:
        packet, _, overload = name.partition(".")
        table.pop(getattr(getattr(torch.ops.aten, packet), overload or "default"), None)
    return dict(table)


Meaning = Callable[[Any], bool]  # whether an operator can be expressed


def own_decompositions(program: Any, has_meaning: Meaning) -> Any:
    """Return a program whose operators without a meaning are PyTorch's own decompositions, if these have one."""
    tables = {**decomposition_table, **of_composites()}
    for target in _without_meaning(program, has_meaning):
        candidate, parts = program, {target}
        for _ in range(DEPTH):
            table = {t: tables[t] for t in parts if t in tables}
            if len(table) < len(parts):
                break
            candidate = candidate.run_decompositions({**decompositions(), **table})
            parts = _without_meaning(candidate, has_meaning) - _without_meaning(program, has_meaning)
            if not parts:
                program = candidate
                break
    return program


def _without_meaning(program: Any, has_meaning: Meaning) -> set[Any]:
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = {n.target for graph in graphs for n in graph.nodes if n.op == "call_function"}
    return {t for t in targets if isinstance(t, torch._ops.OpOverload) and not has_meaning(t)}


DEPTH = 4  # decompositions within decompositions
ROOT = "mithril_root."


class _Root(torch.nn.Module):  # type: ignore[misc]
    """The exported module: torch.export rejects submodules of names that a ``GraphModule`` has, such as ``graph``."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.mithril_root = module
        self.training = module.training
        self.forward = wraps(module.forward)(lambda *args, **kwargs: module(*args, **kwargs))


@contextmanager
def returning(module: torch.nn.Module, outputs: Sequence[str]) -> Iterator[None]:
    """Let a module return the results of its submodules of these names, if any are named."""
    if not outputs:
        yield
        return
    results: dict[str, Any] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _, inputs, result: results.update({name: result})

    forward = module.forward

    @wraps(forward)
    def selected(*args: Any, **kwargs: Any) -> dict[str, Any]:
        results.clear()
        forward(*args, **kwargs)
        missing = [name for name in outputs if name not in results]
        if missing:
            raise UnsupportedError(f"the module does not call its submodule '{missing[0]}' with these inputs")
        return {name: results[name] for name in outputs}

    handles = [module.get_submodule(name).register_forward_hook(hook(name)) for name in outputs]
    overridden = vars(module).get("forward")
    module.forward = selected
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if overridden is None:
            del module.forward
        else:
            module.forward = overridden


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Any,
    names: Mapping[Any, str],
    outputs: Sequence[str] = (),
    has_meaning: Meaning = lambda target: True,
) -> Exported:
    """Export a module in its current mode; ``names`` are those of the open sizes, by input and axis.

    ``outputs`` names submodules whose results replace those of the module. Operators that ``has_meaning`` rejects are
    decomposed further.
    """
    first = {id(p): name for name, p in reversed([*module.named_parameters(remove_duplicate=False)])}
    canonical = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    with kept_whole(), returning(module, outputs):
        program = torch.export.export(_Root(module), args, dict(kwargs), dynamic_shapes=shapes, strict=False)
    packed.require_readers(program.graph)
    mark_stopped(program)
    program = own_decompositions(program.run_decompositions(decompositions()), has_meaning)
    params, buffers, constants, inputs = {}, {}, {}, {}
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and outputs and not placeholders[name].users:
            continue  # only results that are not selected read it
        if spec.kind is InputKind.PARAMETER:
            params[name] = canonical[spec.target.removeprefix(ROOT)]  # of shared parameters the first name
        elif spec.kind is InputKind.BUFFER:
            buffers[name] = spec.target.removeprefix(ROOT)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[name] = array_of(program.constants[spec.target])
        elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
            value = placeholders[name].meta["val"]
            sizes = _shape(name, value.shape, program.range_constraints, names)
            inputs[name] = ((*sizes, 2), value.dtype.to_real()) if value.is_complex() else (sizes, value.dtype)
        elif spec.kind is InputKind.TOKEN:
            # Orders effects such as assertions, which are left out.
            constants[name] = np.zeros(0, np.float32)
        elif not isinstance(spec.arg, ConstantArgument):
            raise UnsupportedError(
                f"input '{name}' of the module is not a tensor",
                facts=[f"kind {spec.kind.name}"],
                hint="pass tensors, numbers or None as example_inputs",
            )
    updates, results = {}, []
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            updates[spec.target.removeprefix(ROOT)] = spec.arg.name
        elif spec.kind is OutputKind.USER_OUTPUT:
            results.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else spec.arg)
        elif spec.kind is not OutputKind.TOKEN:
            raise UnsupportedError(
                f"the module changes its input '{spec.target}' in place",
                hint="return the changed tensor, or keep it in a buffer",
            )
    return Exported(
        program.graph,
        program.graph_module,
        params,
        buffers,
        constants,
        inputs,
        output_names(program.call_spec.out_spec),
        tuple(results),
        updates,
        tuple(outputs),
    )


def _shape(name: str, shape: Any, ranges: Mapping[Any, Any], names: Mapping[Any, str]) -> tuple[Any, ...]:
    """Return the sizes of an input: ints, Dims with the user's names, None for sizes computed from others."""
    sizes: list[Any] = []
    for axis, size in enumerate(shape):
        wished = names.get((name, axis))
        symbol = None if isinstance(size, int) else size.node.expr
        if symbol is None or symbol.is_Integer:
            if wished is not None:
                raise UnsupportedError(
                    f"axis {axis} of input '{name}' is fixed to {size}, so '{wished}' cannot be open",
                    facts=["the module's code depends on it, or the example has the size 0 or 1"],
                    hint="use an example of size 2 or more, or leave this axis out of dynamic_shapes",
                )
            sizes.append(int(size))
            continue
        if not symbol.is_Symbol:
            sizes.append(None)
            continue
        high: Any = ranges[symbol].upper if symbol in ranges else None
        bounded = high is not None and high.is_Integer and int(high) < 2**31
        sizes.append(Dim(wished or f"{name}_{axis}", 0, int(high) if bounded else None))
    return tuple(sizes)


def output_names(spec: Any) -> tuple[str, ...]:
    """Return a name per result: ``output``, ``output0`` and so on, or its keys in dictionaries and data classes."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return result_names(path for path, _ in pytree.tree_flatten_with_path(tree)[0])
