"""Kernels as launches: each parallel loop at the top of a kernel runs as threads of the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mithril_cbackend import tir as t
from mithril_cbackend.devices.languages import CUDA, OPENCL, Language
from mithril_cbackend.devices.model import DeviceModel
from mithril_cbackend.devices.portable import portable
from mithril_cbackend.devices.wgsl import WEBGPU
from mithril_cbackend.tir.tvm_api import nodes as n, stmt, tirx, tvm, undefined_vars

GROUP = "group"  # annotation of a loop whose iterations are workgroups of this many threads
DEVICE_KERNEL = 2  # TVM's calling convention of functions that are launched
LANGUAGES = {language.name: language for language in (CUDA, OPENCL, WEBGPU)}
LANE = "lane"  # the variable of a thread in its workgroup


@dataclass(frozen=True)
class Launch:
    """A function of the device: its text, the parameters of the kernel that it takes, and its size."""

    name: str
    text: str
    arguments: tuple[int, ...]  # positions in the parameters of the kernel
    groups: int
    threads: int  # of a group


def launches(name: str, function: t.Function, model: DeviceModel) -> list[Launch]:
    """Return the launches of a kernel, in order."""
    if function.helpers or function.pieces:
        raise NotImplementedError(f"functions of the CPU: {', '.join([*function.helpers, *function.pieces])}")
    language = LANGUAGES[model.text]
    statements, parameters = portable(function, language)
    declared = [s for s in statements if isinstance(s, n.DeclBuffer)]
    rest = [s for s in statements if not isinstance(s, n.DeclBuffer)]
    # Statements that share a local value must run in one thread.
    is_shared = any(isinstance(s, (n.AllocBuffer, n.Bind)) for s in rest)
    parts = [rest] if is_shared and rest else [[s] for s in rest]
    result = []
    for k, part in enumerate(parts):
        label = name if len(parts) == 1 else f"{name}_{k}"
        body, groups, threads = _bound(part, model)
        if groups:
            text, order = _printed(label, declared, body, parameters, language)
            result.append(Launch(label, language.finished(text, groups), order, groups, threads))
    return result


def _bound(part: list[Any], model: DeviceModel) -> tuple[Any, int, int]:
    """Return statements with their loop as blocks and threads, and the numbers of these."""
    loop = part[0]
    if len(part) > 1 or not isinstance(loop, n.For) or loop.kind != t.PARALLEL:
        return _threads(_serial(t.sequence(part)), 1, 1, lambda block, thread: []), 1, 1
    count, body = int(loop.extent), _serial(loop.body)
    if GROUP in loop.annotations:
        threads = int(loop.annotations[GROUP])
        lanes = [v for v in undefined_vars(body, []) if v.name == LANE]

        def positions(block: Any, thread: Any) -> list[Any]:
            return [stmt.Bind(loop.loop_var, block), *(stmt.Bind(v, thread) for v in lanes)]

        return _threads(body, count, threads, positions), count, threads
    threads = min(model.group, max(count, 1))
    groups = -(-count // threads)
    if count % threads:
        body = stmt.IfThenElse(loop.loop_var < t.index(count).node, body, None)

    def position(block: Any, thread: Any) -> list[Any]:
        first = t.Expr(block) * threads
        return [stmt.Bind(loop.loop_var, t.index(first + t.Expr(thread)).node)]

    return _threads(body, groups, threads, position), groups, threads


def _threads(body: Any, groups: int, threads: int, definitions: Any) -> Any:
    """Return statements that each thread of each group runs."""
    block, thread = tirx.Var("blockIdx_x", "int32"), tirx.Var("threadIdx_x", "int32")
    body = t.sequence([*definitions(block, thread), body])
    for variable, extent, tag in ((thread, threads, "threadIdx.x"), (block, groups, "blockIdx.x")):
        axis = tirx.IterVar(tvm.ir.Range(0, extent), variable, 1, tag)
        body = stmt.AttrStmt(axis, "thread_extent", t.index(extent).node, body)
    return body


def _serial(s: Any) -> Any:
    """Return statements whose loops run one iteration after the other."""
    if isinstance(s, n.SeqStmt):
        return t.sequence([_serial(x) for x in s.seq])
    if isinstance(s, n.For):
        return stmt.For(s.loop_var, s.min, s.extent, t.SERIAL, _serial(s.body), None, None)
    if isinstance(s, n.IfThenElse):
        return stmt.IfThenElse(s.condition, _serial(s.then_case), None if s.else_case is None else _serial(s.else_case))
    return s


def _printed(
    name: str, declared: list[Any], body: Any, parameters: Mapping[str, Any], language: Language
) -> tuple[str, tuple[int, ...]]:
    """Return the text of a function and the order of its parameters."""
    used = {v.name for v in undefined_vars(body, [])}
    buffers = [s for s in declared if s.buffer.name in used]
    read = {s.data.name for s in buffers}
    order = tuple(k for k, p in enumerate(parameters.values()) if p.name in read)
    pointers = [p for p in parameters.values() if p.name in read]
    if language.generator:
        import_module(language.generator)
    kind = tvm.target.Target({"kind": language.name, **language.target})
    function = tirx.PrimFunc(pointers, t.sequence([*buffers, body]), None)
    # The attributes that TVM's pass sets which splits kernels from their host. That pass, and the one that lowers
    # intrinsics, substitute named values back, in exponential time; kernels have no intrinsics left.
    attributes = {
        "global_symbol": name,
        "target": kind,
        "calling_conv": DEVICE_KERNEL,
        "tirx.kernel_launch_params": ["blockIdx.x", "threadIdx.x"],
        "tirx.is_global_func": True,
        "tirx.noalias": True,
    }
    for key, value in attributes.items():
        function = function.with_attr(key, value)
    build = tvm.get_global_func(f"target.build.{language.name}")
    text = str(build(tvm.IRModule({name: function}), kind).inspect_source())
    return re.sub(r"^//.*\n", "", text, flags=re.MULTILINE).strip() + "\n", order
