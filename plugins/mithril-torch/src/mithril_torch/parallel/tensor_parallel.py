"""Tensor parallelism by ``DTensor``: parameters split as ``ml.placement`` says, PyTorch derives everything else."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication, register_sharding

import mithril as ml
from mithril.ir import Graph

MODEL = "model"
_replicating = ExitStack()  # open until the process ends


def model_splits(graph: Graph, devices: int) -> dict[str, int]:
    """Return the axis along which each parameter is split over the devices of a model axis."""
    splits, _ = ml.placement(graph, {MODEL: devices})
    params = {i.name for i in graph.with_role("param")}
    return {name: split.index(MODEL) for name, split in splits.items() if name in params and MODEL in split}


def distribute_parameters(module: torch.nn.Module, mesh: DeviceMesh, splits: Mapping[str, int]) -> None:
    """Replace the parameters of a module by ``DTensor``; those without a split are replicated."""
    prepare()
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        owner, _, name = path.rpartition(".")
        placement = Shard(splits[path]) if path in splits else Replicate()
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        setattr(module.get_submodule(owner), name, torch.nn.Parameter(split, requires_grad=parameter.requires_grad))


@cache
def prepare() -> None:
    """Configure DTensor for generated code, once per process.

    Tensors that the code creates, such as masks and positions, count as replicated, forward and backward; PyTorch has
    no rule for the attention kernel of CPUs. Each process has its own cache of compiled code: programs of ranks differ
    in constants, which the keys of the cache do not contain.
    """
    rank = f"rank-{dist.get_rank()}-of-{dist.get_world_size()}"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, rank)
    _replicating.enter_context(implicit_replication())
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def along(places: Any, tensors: int, rest: int, results: int) -> tuple[list[Any], list[Any]]:
        return [places] * results, [places] * tensors + [None] * rest

    @register_sharding(forward)
    def _(q, k, v, *rest, **named):  # type: ignore[no-untyped-def]
        return [along(p, 3, len(rest), 2) for p in (Replicate(), Shard(0), Shard(1))]

    @register_sharding(backward)
    def _(g, q, k, v, out, logsumexp, *rest, **named):  # type: ignore[no-untyped-def]
        return [along(p, 6, len(rest), 3) for p in (Replicate(), Shard(0), Shard(1))]
