"""Tensor parallelism by ``DTensor``: parameters split as ``ml.placement`` says, PyTorch derives everything else."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication, register_sharding

import mithril as ml
from mithril import ops
from mithril.graph import Decisions, Graph, Node, UnsupportedError, Value, is_layout, operation, operation_names
from mithril_torch.parallel.layout import MODEL

DIVISIBLE = frozenset(
    {ops.dot, ops.linear, ops.matmul, ops.take}
)  # operations with weights that DTensor computes on parts
# Operations of whose kernels, or their gradients, DTensor cannot compute parts (PyTorch 2.13).
WITHOUT_RULE = frozenset(
    map(
        operation,
        operation_names(
            *("avg_pool", "avg_pool_grad", "conv_input_grad", "conv_weight_grad", "ctc_loss", "ctc_loss_grad"),
            *("hard_sigmoid", "hard_swish", "log_sigmoid", "scatter_nd", "sparse_matmul", "sparse_matmul_transposed"),
        ),
    )
)
_replicating = ExitStack()  # open until the process ends


def model_splits(graph: Graph, devices: int) -> dict[str, int]:
    """Return the axis along which each parameter is split over the devices of a model axis."""
    splits, _ = ml.placement(graph, {MODEL: devices})
    split = {i.name for i in graph.with_role("param") if MODEL in splits.get(i.name, ())}
    return {name: splits[name].index(MODEL) for name in split - set(unsupported(graph, split))}


def unsupported(graph: Graph, split: Set[str]) -> dict[str, str]:
    """Return which of these parameters DTensor cannot split, with the operation that reads them.

    It computes products, lookups and element-wise operations on parts; kernels for images and their normalization
    receive sizes of complete tensors.
    """
    values = {i.value: i.name for i in graph.with_role("param") if i.name in split}
    reasons: dict[str, str] = {}
    for v, name in values.items():
        for node in _readers(graph, v):
            if not (node.op in DIVISIBLE or (node.op.elementwise and _follows_product(graph, node))):
                reasons[name] = node.op.name
    return reasons


def needs_complete(node: Node) -> bool:
    """Whether an operation computes with complete tensors: its kernel has no rule, or its product no element."""
    is_empty = any(0 in v.type.shape for v in node.results)
    return (node.op in WITHOUT_RULE and not node.op.elementwise) or (node.op in DIVISIBLE and is_empty)


def record_complete_sequences(graphs: Iterable[Graph], parts: int, decisions: Decisions) -> None:
    """Record that ``parallelism="sequence"`` has no effect, if these graphs split no activation."""
    op = operation("mesh.constrain")
    layouts = (node.attributes["split"] for graph in graphs for node in graph.nodes if node.op is op)
    if not any(MODEL in split.split() for split in layouts):
        decisions.record(
            "choice",
            "parallelism='sequence' splits no activation: no product with split weights has results of three or more "
            f"axes of which {parts} processes can divide the second one, that of positions",
        )


def layout_error(error: Exception, parts: int) -> UnsupportedError:
    """Return a readable error for an operation that DTensor cannot compute, as those that route tokens to experts."""
    has_no_rule = isinstance(error, NotImplementedError) and "sharding strategy" in str(error)
    problem = "has no rule for" if has_no_rule else "cannot compute"
    return UnsupportedError(
        f"DTensor {problem} an operation of this model, on a mesh with a model axis of {parts} processes",
        facts=[(str(error).splitlines() or [type(error).__name__])[0]],
        hint='omit the second number of device_mesh, and use parallelism="fsdp", or "expert" for a mixture of experts',
    )


def _readers(graph: Graph, v: Value) -> Iterator[Node]:
    """Yield the operations that compute with a value, in any layout."""
    for node in graph.users.get(v, ()):
        if is_layout(node) or node.op is ops.cast:
            yield from _readers(graph, node.result)
        else:
            yield node


def _follows_product(graph: Graph, node: Node) -> bool:
    """Whether an operand of an element-wise operation comes from a product with a matrix."""
    waiting, seen = [node], {node}
    while waiting:
        for v in waiting.pop().operands:
            producer = graph.producers.get(v) if v is not None else None
            if producer is None or producer in seen:
                continue
            if producer.op in DIVISIBLE:
                return True
            if producer.op.elementwise or is_layout(producer):
                seen.add(producer)
                waiting.append(producer)
    return False


def distribute_parameters(module: torch.nn.Module, mesh: DeviceMesh, splits: Mapping[str, int]) -> None:
    """Replace the parameters of a module by ``DTensor``; those without a split are replicated."""
    prepare()
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        owner, _, name = path.rpartition(".")
        placement = Shard(splits[path]) if path in splits else Replicate()
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        setattr(module.get_submodule(owner), name, torch.nn.Parameter(split, requires_grad=parameter.requires_grad))


@cache
def use_own_cache() -> None:
    """Let this process have its own cache of compiled code.

    Programs of ranks differ in constants, which the keys of the cache do not contain.
    """
    rank = f"rank-{dist.get_rank()}-of-{dist.get_world_size()}"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, rank)


@cache
def prepare() -> None:
    """Configure DTensor for generated code, once per process.

    Tensors that the code creates, such as masks and positions, count as replicated, forward and backward; PyTorch has
    no rule for the attention kernel of CPUs.
    """
    use_own_cache()
    _replicating.enter_context(implicit_replication())
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def along(places: Any, tensors: int, rest: int, results: int, options: Mapping[str, Any]) -> tuple[Any, Any]:
        mask = options.get("attn_mask")
        is_broadcast = mask is None or not places.is_shard() or mask.shape[places.dim] == 1
        masks = [] if mask is None else [Replicate() if is_broadcast else places]
        return [places] * results, [places] * tensors + [None] * rest + masks

    def choices(q: Any, k: Any) -> list[Any]:
        """Return the axes along which devices divide attention; each has all queries of its heads."""
        heads = [Shard(1)] if q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0 else []
        return [Replicate(), Shard(0), *heads]

    @register_sharding(forward)
    def _(q, k, v, *rest, **options):  # type: ignore[no-untyped-def]
        return [along(p, 3, len(rest), 2, options) for p in choices(q, k)]

    @register_sharding(backward)
    def _(g, q, k, v, out, logsumexp, *rest, **options):  # type: ignore[no-untyped-def]
        return [along(p, 6, len(rest), 3, options) for p in choices(q, k)]
