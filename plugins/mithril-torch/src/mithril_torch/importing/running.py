"""Exported programs run by PyTorch itself, for comparison with the imported model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mithril.graph import InputError
from mithril_torch.importing.program import Exported, output_names, returning
from mithril_torch.importing.table import array_of, tensor_of

Arrays = Mapping[str, np.ndarray[Any, Any]]


def run_module(
    module: torch.nn.Module, program: Exported, inputs: Arrays
) -> tuple[Iterator[tuple[str, np.ndarray[Any, Any]]], Arrays]:
    """Return the tensors of the program with the weights of a module, by node, and the outputs of the module."""
    tensors = {name: tensor_of(inputs[name]) for name in program.inputs}
    modes = {m: m.training for m in module.modules()}
    try:
        with torch.no_grad(), returning(module, program.selected):
            result = module.eval()(**tensors)
    finally:
        for m, mode in modes.items():
            m.training = mode
    leaves, spec = pytree.tree_flatten(result)
    names = output_names(spec)
    outputs = {name: array_of(x) for name, x in zip(names, leaves, strict=True) if isinstance(x, torch.Tensor)}
    return _nodes(module, program, tensors), outputs


def _nodes(
    module: torch.nn.Module, program: Exported, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    weights = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    names = {**program.params, **program.buffers}
    missing = [name for name in names.values() if name not in weights]
    if missing:
        raise InputError(
            f"the module has no parameter '{missing[0]}', which the imported model has",
            hint="give the module that ml.from_torch imported",
        )
    run = torch.fx.Interpreter(program.module, garbage_collect_values=False)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = node.name
            tensor = tensors[name] if name in tensors else weights[names[name]] if name in names else None
            constant = program.constants.get(name)
            run.env[node] = tensor if constant is None else tensor_of(constant)
        elif node.op != "output":
            with torch.no_grad():
                args, kwargs = run.fetch_args_kwargs_from_env(node)
                run.env[node] = getattr(run, node.op)(node.target, args, kwargs)
            if isinstance(run.env[node], torch.Tensor):
                yield node.name, array_of(run.env[node])
