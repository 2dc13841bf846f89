"""A program that runs: ggml graphs and NumPy calls in turn, on memory planned once."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mithril.backend import LazyGraph, format_bytes, numpy_threads
from mithril.graph import BackendError, Graph, InputError, MemoryLimitError, visible
from mithril_ggml.library.abort_guard import guarded
from mithril_ggml.library.library import compute, ggml, machine_memory
from mithril_ggml.library.quant_types import stored
from mithril_ggml.library.repack import prepare
from mithril_ggml.program.arena_planner import Plan
from mithril_ggml.program.memory import Memory, aligned, check_limit
from mithril_ggml.program.program_builder import ProgramBuilder, Step, copy_array
from mithril_ggml.program.result_buffers import Result
from mithril_ggml.program.strided_tensor import Storage, Tensor
from mithril_ggml.weights.packed_weights import PackedArray, outdated

STAGED = 1 << 15  # bytes up to which inputs are copied into the arena; larger ones are read in place
Array = np.ndarray[Any, Any]
_UNBOUND = object()
_SPARE = 1  # tensors that a ggml function may create in addition to its result


class Segment:
    """Steps of ggml that follow each other: one ggml graph."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.headers: dict[Any, Any] = {}  # by place
        self.owners: list[tuple[Storage, int, Any]] = []  # storage, offset in it, address of the header's data field
        self.context: Any = None
        self.bytes = 0

    def build(self, threads: int) -> None:
        """Make the graph. Runs guarded: whatever ggml does not like becomes an error."""
        places = {t.place for step in self.steps for t in (*step.reads, *step.writes)}
        count = len(places) + len(self.steps) * (1 + _SPARE)
        nodes = len(self.steps) * (1 + _SPARE) + len(places) + 1
        size = count * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(nodes, False)
        self.bytes = size
        self.context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
        if not self.context:
            raise MemoryLimitError(f"no memory for the description of {len(self.steps)} operations")
        self.graph = ggml.ggml_new_graph_custom(self.context, nodes, False)
        for step in self.steps:
            self._node(step)
        # More nodes would be operations whose memory is not planned.
        if ggml.ggml_graph_n_nodes(self.graph) != len(self.steps):
            raise BackendError(
                "ggml built unexpected nodes (mithril bug)", hint="please report it with str(compiled.graph)"
            )
        self.plan = ggml.ggml_graph_plan(self.graph, threads, None)
        # Converted once, since the binding's conversions cost as much as a small graph.
        self.arguments = (
            ctypes.c_void_p(ctypes.cast(self.graph, ctypes.c_void_p).value),
            ctypes.c_void_p(ctypes.addressof(self.plan)),
        )

    def _node(self, step: Step) -> None:
        (result,) = step.writes
        tensor = step.run(self.context, *[self.header(t) for t in step.reads])
        node = tensor.contents
        shape = tuple(node.ne[k] for k in range(4))
        # ggml infers shapes by itself; a difference means that a lowering and ggml disagree, and the
        # result would be written beyond its buffer.
        if math.prod(shape) != result.size or node.type != _code(result):
            raise BackendError(
                f"ggml's '{step.name}' gives {list(reversed(shape))} of type {node.type}, expected {result.shape}",
                facts=[str(step.node.origin)] if step.node is not None else [],
                hint="please report this graph",
            )
        self._bind(node, result)
        ggml.ggml_build_forward_expand(self.graph, tensor)

    def header(self, t: Tensor) -> Any:
        """ggml's description of a view."""
        header = self.headers.get(t.place)
        if header is None:
            header = self.headers[t.place] = describe(self.context, t)
            self._bind(header.contents, t)
        return header

    def _bind(self, struct: Any, t: Tensor) -> None:
        root = t.storage.root
        field = ctypes.c_void_p.from_address(ctypes.addressof(struct) + ggml.ggml_tensor.data.offset)
        field.value = root.address + t.offset
        self.owners.append((root, t.offset, field))

    def free(self) -> None:
        if self.context:
            ggml.ggml_free(self.context)
            self.context = None


def _code(t: Tensor) -> int:
    return t.packed.code if t.packed is not None else stored(t.dtype)


def describe(context: Any, t: Tensor) -> Any:
    """Create a tensor without an operation, of this view's sizes and strides."""
    ne = [*reversed(t.shape), 1, 1, 1, 1][:4]
    header = ggml.ggml_new_tensor_4d(context, _code(t), *ne)
    if t.repacked:
        prepare(header)
    if t.packed is None:
        nb = header.contents.nb
        for k, stride in enumerate(reversed(t.strides)):
            if ne[k] != 1 or k == 0:
                nb[k] = stride if ne[k] != 1 else t.dtype.itemsize
        for k in range(t.rank, 4):
            nb[k] = nb[k - 1] * ne[k - 1] if k else nb[0]
        # Axes of size 1 have arbitrary strides here; ggml's own tensors have those of contiguous ones.
        for k in range(1, t.rank):
            if ne[k] == 1:
                nb[k] = nb[k - 1] * ne[k - 1]
    return header


@dataclass(eq=False)
class BoundInput:
    """An input, and the fields to update when another array is bound to it."""

    name: str
    role: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: Any
    staged: Tensor | None = None  # its place in the arena
    convert: Callable[[Any], tuple[Any, int]] | None = None  # to packed rows: their owner and address
    value: Any = None  # of a constant
    raw: bool = False  # passed to a region unchanged, packed or not
    last: Any = _UNBOUND  # the object that is bound
    source: Any = None  # the memory that is read
    fields: tuple[tuple[Any, int], ...] = ()  # headers' data fields and offsets
    views: tuple[tuple[str, Tensor], ...] = ()  # names in the generated function, and the tensors they view


class GGMLExecutable:
    """One program: a function that computes on the arena; ``listing`` shows it. Calls are serialized."""

    # The listing cannot run without the arena and the graphs, so it is not stored as source.
    source = None

    def __init__(
        self,
        graph: Graph,
        draft: ProgramBuilder,
        inputs: Sequence[BoundInput],
        outputs: Sequence[Tensor],
        plan: Plan,
        *,
        threads: int | None,
        limit: int | None,
        lowered: frozenset[str],
        safe: bool,
        packing: Any = None,
        regions: int = 0,
    ) -> None:
        self._graph = LazyGraph(graph)
        self._arguments = [(i.name, i.role) for i in graph.arguments]
        self._names = graph.output_names
        owners = set(draft.in_place.values())
        self._updated = {i.name for i in graph.inputs if i.value in owners}
        self.lowered = lowered
        self.plan = plan
        self.steps = draft.steps
        self.lock = threading.Lock()
        self.threads = threads
        self.result_bytes = sum(math.prod(t.shape) * t.dtype.itemsize for t in outputs)
        self.safe = safe
        self.inputs = list(inputs)
        self._storages = draft.storages
        self.packing = packing
        self.segments: list[Segment] = []
        self._results = [Result(t) for t in outputs if t.storage.role == "result"]
        self._make(outputs, threads, limit, regions)

    # -- making ------------------------------------------------------------------------------------------------------
    def _make(self, outputs: Sequence[Tensor], threads: int | None, limit: int | None, regions: int) -> None:
        parts = _parts(self.steps)
        self.segments = [Segment(part) for part in parts if part[0].native]
        fixed = sum(s.size for s in self._storages if s.role == "fixed")
        fixed += sum(g.tensor.storage.size for g in self.inputs if g.convert is not None)
        check_limit(limit, Memory(self.plan.size, 0, 0, fixed, regions))
        if self.plan.size > machine_memory():
            raise MemoryLimitError(
                f"this program needs {format_bytes(self.plan.size)}, "
                f"more than this machine's {format_bytes(machine_memory())}"
            )
        self.arena = aligned(self.plan.size)
        self._addresses()
        if self.segments:
            guarded(lambda: self._build(threads or 1))
        work = max((s.plan.work_size for s in self.segments), default=0)
        self._memory = Memory(self.plan.size, work, sum(s.bytes for s in self.segments), fixed, regions)
        check_limit(limit, self._memory)
        self.work = aligned(work)
        pointer = ctypes.cast(self.work.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        for s in self.segments:
            s.plan.work_data = pointer
        self._write(parts, outputs)

    def _build(self, threads: int) -> None:
        for s in self.segments:
            s.build(threads)

    def _addresses(self) -> None:
        base = self.arena.ctypes.data
        for s in self._storages:
            if s.merged is None:
                if s.role == "planned":
                    s.address = base + s.offset
                elif s.array is not None:
                    s.address = s.array.ctypes.data

    def _write(self, parts: Sequence[Sequence[Step]], outputs: Sequence[Tensor]) -> None:
        """Generate the function, and find out what each input must be told to."""
        names: dict[Any, str] = {}
        space: dict[str, Any] = {"compute": compute, "failed": failed, "copied": copied}
        views: dict[Storage, list[tuple[str, Tensor]]] = {}
        functions: dict[Any, str] = {}

        def name(t: Tensor) -> str:
            name = names.get(t.place)
            if name is None:
                name = names[t.place] = f"t{len(names)}"
                root = t.storage.root
                if root.role in ("given", "result"):
                    space[name] = None
                    views.setdefault(root, []).append((name, t))
                else:
                    space[name] = self._array(t)
            return name

        lines = ["def run():"]
        count = 0
        for part in parts:
            if part[0].native:
                segment = self.segments[count]
                space[f"graph{count}"], space[f"plan{count}"] = segment.arguments
                lines.append(f"    if compute(graph{count}, plan{count}):  # {visible(_listed(part))}")
                lines.append(f"        failed({count})")
                count += 1
                continue
            (step,) = part
            key = _identity(step.run)
            if key not in functions:
                functions[key] = f"{_identifier(step.name)}_{len(functions)}"
                space[functions[key]] = step.run
            comment = f"  # {visible(step.node.origin.path)}" if step.node is not None and step.node.origin.path else ""
            lines.append(f"    {functions[key]}({', '.join(map(name, (*step.reads, *step.writes)))}){comment}")
        result_names = []
        updated = [bound.tensor for bound in self.inputs if bound.name in self._updated]
        for t in outputs:
            # The caller's memory needs no copy; planned memory is overwritten by the next call.
            if t.storage.role == "result" or (t.storage.role == "given" and t in updated):
                result_names.append(name(t))
            elif t.dense:
                result_names.append(f"{name(t)}.copy()")
            else:
                result_names.append(f"copied({name(t)})")
        lines.append(f"    return [{', '.join(result_names)}]")
        self.listing = "\n".join(lines) + "\n"
        exec(compile(self.listing, "<ggml program>", "exec"), space)
        self._space, self._run = space, space["run"]
        self._numpy = any(not part[0].native for part in parts)
        reached: list[BoundInput | Result] = [*self.inputs, *self._results]
        for bound in reached:
            root = bound.tensor.storage
            bound.fields = tuple(
                (field, offset) for s in self.segments for owner, offset, field in s.owners if owner is root
            )
            bound.views = tuple(views.get(root, ()))
        self._staged = [(g, self._array(g.staged)) for g in self.inputs if g.staged is not None]
        for input_ in self.inputs:
            if input_.role == "constant":
                self._rebind(input_, input_.value)
        self._direct = [g for g in self.inputs if g.staged is None and g.role != "constant"]
        positions = {name: k for k, (name, _) in enumerate(self._arguments)}
        self._direct_at = [(g, positions[g.name]) for g in self._direct]
        self._staged_at = [(place, positions[g.name]) for g, place in self._staged]

    def _array(self, t: Tensor, base: Array | None = None) -> Array:
        """Return a NumPy view of planned or fixed memory, or of ``base`` for an input."""
        root = t.storage.root
        memory = base if base is not None else root.array if root.role == "fixed" else self.arena
        assert memory is not None, root.role
        start = t.offset + (root.offset if root.role == "planned" else 0)
        if t.size == 0:
            return np.empty(t.shape, t.dtype.numpy)
        flat = memory.reshape(-1).view(np.uint8)
        low = start + sum(s * (n - 1) for n, s in zip(t.shape, t.strides) if s < 0)
        part = flat[low : low + _byte_extent(t)]
        if low < 0 or part.size != _byte_extent(t) or not _whole_elements(t, low):
            raise BackendError(f"a view of {t.dtype}{list(t.shape)} exceeds its buffer")
        view = part.view(t.dtype.numpy)
        first = (start - low) // t.dtype.itemsize
        return np.lib.stride_tricks.as_strided(view[first:], t.shape, t.strides)

    @property
    def graph(self) -> Graph:
        return self._graph.get()

    @property
    def memory(self) -> Memory:
        """Return the bytes that the program holds, with packed rows that are in memory next to interleaved ones."""
        spare = sum(rows[0].bytes_in_memory for g in self.inputs if isinstance(rows := g.source, tuple))
        return replace(self._memory, constants=self._memory.constants + spare)

    def weight_bytes(self) -> dict[str, int]:
        """Return the bytes of packed weights in memory, with those of float parameters that the caller holds."""
        sizes: dict[str, int] = self.packing.sizes() if self.packing is not None else {}
        for bound in self.inputs:
            if bound.name in sizes and bound.role == "param" and type(bound.last) is not PackedArray:
                sizes[bound.name] += math.prod(bound.shape) * bound.dtype.itemsize
            if bound.name in sizes and isinstance(bound.source, tuple):
                sizes[bound.name] += bound.source[0].bytes_in_memory
        return sizes

    def release(self, graph: Callable[[], Graph]) -> None:
        """Release the original weights: the program has them packed, or among its constants."""
        self._graph = LazyGraph(graph)
        for bound in self.inputs:
            bound.value = None
            if bound.role == "constant":
                bound.last = None  # it is never bound again
        if self.packing is not None:
            self.packing.release()

    # -- running -----------------------------------------------------------------------------------------------------
    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            try:
                for bound in self._direct:
                    x = (params if bound.role == "param" else inputs)[bound.name]
                    if x is not bound.last or (bound.convert is not None and outdated(x, bound.source)):
                        self._rebind(bound, x)
                arrays = [inputs[bound.name] for bound, _ in self._staged]
            except KeyError:
                raise _missing(self._arguments, params, inputs) from None
            for (bound, place), x in zip(self._staged, arrays):
                if type(x) is not np.ndarray or x.shape != bound.shape or x.dtype != bound.dtype:
                    x = _checked(bound, x)
                place[...] = x
            if self.safe:
                results = guarded(self._compute)
            else:
                results = self._compute()
            return dict(zip(self._names, results))

    def _compute(self) -> list[Array]:
        self._replace_escaped()
        if not self._numpy:
            return self._run()  # type: ignore[no-any-return]
        # Infinities and nan are results like others.
        with np.errstate(all="ignore"), numpy_threads(self.threads):
            return self._run()  # type: ignore[no-any-return]

    def _replace_escaped(self) -> None:
        """New arrays for large results that the caller has kept."""
        for result in self._results:
            if not result.free:
                self._rebind_views(result, result.replace_if_escaped())
                result.count_references()

    def run(self, arguments: Sequence[Any]) -> list[Array]:
        """Compute the outputs for arrays in argument order; called by the program that contains this region."""
        for bound, k in self._direct_at:
            x = arguments[k]
            if x is not bound.last or (bound.convert is not None and outdated(x, bound.source)):
                self._rebind(bound, x)
        for place, k in self._staged_at:
            place[...] = arguments[k]
        self._replace_escaped()
        return self._run()  # type: ignore[no-any-return]

    def _rebind(self, bound: BoundInput, x: Any) -> None:
        """Read this array from now on, where it is."""
        # First, so that a failed check does not leave an array as bound that the fields do not address.
        bound.last = _UNBOUND
        if bound.convert is not None:
            owner, address = bound.convert(_checked_array(bound, x))
            keep = True
            for field, offset in bound.fields:
                field.value = address + offset
        elif bound.raw:
            owner, keep = _checked_array(bound, x), True
            for name, _ in bound.views:
                self._space[name] = owner
        else:
            array = _checked(bound, x)
            owner = array if array.flags.c_contiguous else np.asarray(array, order="C")
            # A converted copy is not the caller's array: it has to be made again when the same object
            # comes, changed or not.
            keep = owner is x
            self._rebind_views(bound, owner)
        bound.source = owner
        bound.last = x if keep else _UNBOUND

    def _rebind_views(self, bound: BoundInput | Result, array: Array) -> None:
        """Let everything that shows an input or result show this array."""
        address = array.__array_interface__["data"][0]
        for field, offset in bound.fields:
            field.value = address + offset
        for name, t in bound.views:
            self._space[name] = array if t.covers_storage and t.shape == array.shape else self._array(t, array)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # the process gives all memory back, and ggml's functions are gone
            return
        for s in getattr(self, "segments", ()):
            s.free()


def _checked_array(bound: BoundInput, x: Any) -> Any:
    """Return an array or packed array after checking its shape."""
    return x if getattr(x, "shape", None) == bound.shape and hasattr(x, "transposed") else _checked(bound, x)


def _checked(bound: BoundInput, x: Any) -> Array:
    array = np.asarray(x)
    if array.shape != bound.shape or array.dtype != bound.dtype:
        raise InputError(
            f"'{bound.name}' is {array.dtype}{list(array.shape)}, but this program was made for "
            f"{bound.dtype}{list(bound.shape)}"
        )
    return array


def _missing(arguments: Sequence[tuple[str, str]], params: Mapping[str, Any], inputs: Mapping[str, Any]) -> InputError:
    names = [name for name, role in arguments if name not in (params if role == "param" else inputs)]
    return InputError(f"missing: {', '.join(repr(n) for n in names)}")


def copied(array: Array) -> Array:
    """Copy a non-contiguous result."""
    out = np.empty(array.shape, array.dtype)
    copy_array(array, out)
    return out


def failed(number: int) -> None:
    raise BackendError(f"ggml stopped in graph {number}: out of memory, or a kernel that this build lacks")


def _parts(steps: Sequence[Step]) -> list[list[Step]]:
    """Runs of ggml steps, and NumPy steps one by one."""
    parts: list[list[Step]] = []
    for step in steps:
        if step.native and parts and parts[-1][0].native:
            parts[-1].append(step)
        else:
            parts.append([step])
    return parts


def _listed(steps: Sequence[Step]) -> str:
    names = [s.name for s in steps]
    return ", ".join(names) if len(names) <= 12 else ", ".join([*names[:10], f"... ({len(names)} operations)"])


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)


def _identity(function: Any) -> Any:
    return id(function)


def _byte_extent(t: Tensor) -> int:
    """Bytes from the first to after the last element."""
    return sum(abs(s) * (n - 1) for n, s in zip(t.shape, t.strides)) + t.dtype.itemsize


def _whole_elements(t: Tensor, low: int) -> bool:
    size = t.dtype.itemsize
    return low % size == 0 and all(s % size == 0 for s in t.strides)
