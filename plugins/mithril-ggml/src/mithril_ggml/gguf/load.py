"""``ml.load("model.gguf")``: a model that runs from its file, without the Python code that defined it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Never

import numpy as np

from mithril.backend import Backend, BuildOptions, LazyGraph
from mithril.compiler import (
    CompiledModel,
    IndexCheckedExecutable,
    InputSpec,
    Interface,
    Program,
    ProgramKey,
    Results,
    Unused,
    compare_plugins,
    compile,
    initialize,
    make_backend,
    resolve_options,
    with_bounds,
)
from mithril.graph import Decisions, Graph, Input, InputError, MithrilError, OptionError, TensorType, parse
from mithril.passes import PassContext, PassManager
from mithril_ggml.backend import GGMLBackend
from mithril_ggml.gguf.architectures import load_architecture, model_of_architecture
from mithril_ggml.gguf.export import ARCHITECTURE, FORMAT
from mithril_ggml.library.quant_types import by_code, stored
from mithril_ggml.weights.packed_weights import PackedArray
from mithril_ggml.weights.quantize_recipe import QuantizationRecipe
from mithril_gguf.formats import FORMATS
from mithril_gguf.matrix import BlockMatrix
from mithril_gguf.reader import PLAIN, GGUFFile, StoredTensor, read_gguf

MAX_TEXT = 1 << 28  # characters of a graph


def load_gguf(
    path: str | os.PathLike[str],
    backend: Backend | type[Backend] | str | None = None,
    *,
    mapped: bool = True,
    context: int | None = None,
    **options: Any,
) -> CompiledModel:
    """Load the model from a file that ``compiled.export`` wrote, with bound parameters: call it with inputs.

    Without ``backend`` it runs on GGML with the weights as they are in the file (``mapped``: read from the disk as they
    are needed; the file must then not be changed; otherwise a copy of it is read). On other backends they are unpacked,
    and compiled with ``options``. With ``static_inference=True``, backend 'c' multiplies the quantized values of the
    file by rows of float32, or with ``quantization={"weights": "stored", "activations": "dynamic"}`` by rows of bytes.
    A file that is damaged, or made to do harm, is an ``InputError``. Files of llama.cpp load if a plugin (mithril-hub)
    provides their family; ``context`` is the number of positions in their cache, for ``ml.generate``.
    """
    file = read_gguf(path, mapped=mapped, types=by_code())
    if file.metadata.get("general.architecture", ARCHITECTURE) != ARCHITECTURE:
        return load_architecture(file, backend, context, options)
    graph = _graph(file)
    settings = resolve_options({"inference": True, **options})
    runner: Backend = GGMLBackend() if backend is None else make_backend(backend, settings)
    values = _values(file, graph)
    if isinstance(runner, GGMLBackend):
        packed = {name: x.kind for name, x in values.items() if isinstance(x, PackedArray)}
        runner.recipe = QuantizationRecipe(None, exact=packed)
        compiled = _as_in_the_file(file, graph, runner, settings, options)
    else:
        compiled = compile(graph, runner, **{"inference": True, **options})
    compare_plugins(compiled, _plugins(file), file.path, compiles=not isinstance(runner, GGMLBackend))
    roles = {i.name: i.role for i in graph.arguments}
    arrays = {name: _array(runner, x, settings["static_inference"]) for name, x in values.items()}
    params = {name: x for name, x in arrays.items() if roles[name] == "param"}
    state = {name: x for name, x in arrays.items() if roles[name] == "state"}
    return compiled.bind(params, state or None)


def from_gguf(path: str | os.PathLike[str]) -> Any:
    """Return the model of a file of llama.cpp, for ``ml.compile("model.gguf", backend)``."""
    file = read_gguf(path, types=by_code())
    if file.metadata.get("general.architecture", ARCHITECTURE) == ARCHITECTURE:
        text = os.fspath(path)
        raise InputError(f"'{text}' holds a compiled program", hint=f"ml.load({text!r}, backend=...) runs it")
    return model_of_architecture(file)


def _array(runner: Backend, x: Any, is_static: bool) -> Any:
    """Return an array of a backend; quantized values that it reads stay in the file."""
    if isinstance(x, PackedArray) and not isinstance(runner, GGMLBackend) and is_static:
        kind = FORMATS.get(x.kind.name)
        blocks = None if kind is None else BlockMatrix(x.data, kind, x.shape, None, x.transposed)
        if blocks is not None and runner.reading_quantized(blocks) is not None:
            return blocks
    return runner.array(x if runner.is_array(x) else np.asarray(x))


def _as_in_the_file(
    file: GGUFFile, graph: Graph, runner: GGMLBackend, settings: Any, options: Mapping[str, Any]
) -> CompiledModel:
    """Return the model without passes: the file names the packed weights of the graph that it has."""
    for name in ("static_inference", "quantization"):
        if options.get(name):
            raise OptionError(
                f"{name}={options[name]!r} changes weights that GGML runs as they are in the file",
                hint=f"omit it, or load the file for another backend: ml.load(path, backend='c', {name}=...)",
            )
    compiler = GraphCompiler(graph, runner, settings)
    specs = {i.name: InputSpec(i.name, i.type.shape, i.type.dtype, "the file", True) for i in graph.with_role("input")}
    return CompiledModel(
        runner,
        specs,
        compiler,
        decisions=compiler.decisions,
        options={**settings.as_dict(), "inference": True},
        name=str(file.metadata.get("general.name", "model")),
    )


class GraphCompiler:
    """Makes programs of a graph that is known: only the sizes that it leaves open may differ."""

    def __init__(self, graph: Graph, backend: Backend, settings: Any) -> None:
        self.graph = graph
        self.checked, self.checks = with_bounds(graph)
        self.backend = backend
        self.settings = settings
        self.decisions = Decisions(strict=settings["strict"])

    def specialize(self, request: ProgramKey) -> Program:
        """Return the program; the file contains no gradients."""
        if request.kind.of or request.kind.training:
            raise InputError("a model loaded from a file is for inference only: it has no gradients")
        executable: Any = self.backend.build(self.lowered(request), self._options())
        graph = LazyGraph(self.graph)
        interface = Interface.of(self.graph, self.graph)
        results = Results.of(self.graph)
        program = Program(request, graph, graph, interface, executable, results, backend=self.backend)
        if self.checks:
            program.checked = IndexCheckedExecutable(executable, self.checks, program.types, self.backend)
        return program

    def differentiable(self, request: ProgramKey) -> Never:
        """Raise InputError: quantized weights have no gradients."""
        raise InputError("a model loaded from a GGUF file is for inference only: it has no gradients")

    def learn(self, shapes: Mapping[str, Any]) -> bool:
        """Return False: all sizes are in the file."""
        return False

    def folds(self, request: ProgramKey) -> bool:
        """Return False: the graph runs as it is in the file."""
        return False

    def check_call(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Files carry no limit."""

    def lowered(self, request: ProgramKey) -> Graph:
        options = self._options()
        return self.backend.decomposed(self.checked, options)

    def _options(self) -> BuildOptions:
        return BuildOptions(self.settings, inference=True, decisions=self.decisions)

    def probe(self, types: Mapping[str, TensorType] | None, *, training: bool = True) -> Graph:
        return self.graph

    @property
    def model(self) -> Graph:
        """The graph of the file."""
        return self.graph

    @property
    def unused(self) -> Unused:
        """Nothing: files have no such part."""
        return Unused()

    @property
    def pretrained(self) -> Mapping[str, Any]:
        """Empty: the loader binds the arrays of the file."""
        return {}

    def initial(
        self, inputs: Iterable[Input], seed: int, index: tuple[slice, ...] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Initial states; parameters come from the file."""
        return initialize(inputs, seed, index=index)

    def buckets(self, training: bool, *, recompiles: bool) -> None:
        """Return sizes unchanged: the file declares which are open."""

    def passes(self) -> tuple[PassManager, PassContext]:
        return PassManager([]), PassContext(backend=self.backend, options=self.settings, decisions=self.decisions)


# -- what the file says -------------------------------------------------------------------------------------------
def _graph(file: GGUFFile) -> Graph:
    """Parse and verify the graph: every type must be the inferred one."""
    version = file.metadata.get("mithril.format")
    if version != FORMAT:
        raise InputError(
            f"'{file.path}' holds no mithril model of format {FORMAT}",
            facts=[f"mithril.format: {version!r}", f"architecture: {file.metadata.get('general.architecture')!r}"],
            hint="only files written by compiled.export carry their graph",
        )
    try:
        graph = read_graph(file.text("mithril.graph"))
    except InputError as error:
        raise error.with_facts(f"in '{file.path}'") from None
    terminal_names = file.texts("mithril.inputs"), file.texts("mithril.outputs")
    if terminal_names != ([i.name for i in graph.with_role("input")], list(graph.output_names)):
        raise InputError(f"'{file.path}': the names of inputs and outputs are not those of its graph")
    return graph


def _plugins(file: GGUFFile) -> str | None:
    """Return the list of plugins of the file; files of earlier versions have none."""
    return file.text("mithril.plugins") if "mithril.plugins" in file.metadata else None


def read_graph(text: str) -> Graph:
    """Parse a graph from an untrusted text; any defect raises ``InputError``."""
    if len(text) > MAX_TEXT:
        raise InputError(f"a graph of {len(text)} characters is too long")
    try:
        return parse(text)
    except MithrilError as error:
        raise InputError(f"the graph cannot be read: {error.what}", facts=error.facts) from error
    except Exception as error:  # rules of operations may stumble over attributes that no builder would have written
        raise InputError("the graph cannot be read", facts=[f"{type(error).__name__}: {error}"]) from error


def _values(file: GGUFFile, graph: Graph) -> dict[str, Any]:
    """Return an array for each parameter and state: packed, or a view of the file."""
    full, short = file.texts("mithril.names"), file.texts("mithril.tensors")
    if len(full) != len(short) or len(set(full)) != len(full):
        raise InputError(f"'{file.path}': the names of its tensors do not fit each other")
    tensors = {name: file.tensors.get(alias) for name, alias in zip(full, short)}
    transposed_names = set(file.texts("mithril.turned"))
    stored_inputs = graph.with_role("param", "state")
    extra = set(tensors) - {i.name for i in stored_inputs}
    if extra:
        raise InputError(f"'{file.path}' has tensors that its graph does not know: {', '.join(sorted(extra)[:5])}")
    return {i.name: _value(file, i, tensors.get(i.name), i.name in transposed_names) for i in stored_inputs}


def _value(file: GGUFFile, i: Input, t: StoredTensor | None, is_transposed: bool) -> Any:
    if not i.type.is_static:
        raise InputError(f"'{file.path}': the {i.role} '{i.name}' has no fixed shape: {i.type}")
    shape: tuple[int, ...] = i.type.shape  # type: ignore[assignment]
    if 0 in shape:
        return np.zeros(shape, i.type.dtype.numpy)
    if t is None:
        raise InputError(f"'{file.path}' lacks the tensor of '{i.name}'")
    if t.code == stored(i.type.dtype) and not is_transposed:
        return _plain(file, i, t, shape)
    kind = by_code().get(t.code)
    rows = tuple(reversed(shape)) if is_transposed else shape
    if kind is None or i.type.dtype.name != "float32" or len(shape) != 2 or t.shape != rows:
        raise InputError(
            f"'{file.path}': the tensor of '{i.name}' does not fit {i.type}",
            facts=[f"it is {kind or t.code}{list(t.shape)}" + (", transposed" if is_transposed else "")],
        )
    data = t.data.reshape(rows[0], kind.row(rows[1]))
    return PackedArray(data, kind, (shape[0], shape[1]), is_transposed)


def _plain(file: GGUFFile, i: Input, t: StoredTensor, shape: tuple[int, ...]) -> Any:
    dtype = i.type.dtype.numpy
    expected = shape if 1 <= len(shape) <= 4 else (t.data.size // dtype.itemsize,)
    count = 1
    for n in shape:
        count *= n
    if t.code not in PLAIN or t.shape != expected or t.data.size != count * dtype.itemsize:
        raise InputError(
            f"'{file.path}': the tensor of '{i.name}' is {list(t.shape)}, but its graph says {i.type}",
        )
    return np.asarray(t.data, order="C").view(dtype).reshape(shape)
