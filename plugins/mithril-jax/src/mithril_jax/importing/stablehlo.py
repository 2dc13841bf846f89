"""``ml.from_stablehlo``: programs of StableHLO as models, and ``compiled.export("model.mlir")``."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as dialect

from mithril import ops
from mithril.compiler import Exported, manifest_of
from mithril.graph import (
    Builder,
    InputError,
    MithrilError,
    OperationError,
    Origin,
    ShapeError,
    UnsupportedError,
    check_memory,
    is_static,
)
from mithril.models import Layer, Model
from mithril_importing.arrays import arrays_of, as_value, is_sizes
from mithril_importing.damage import MISTAKES
from mithril_importing.model import model_of
from mithril_importing.names import identifier, unique_name, unique_names
from mithril_importing.support import counted, missing_lines
from mithril_jax.importing import interpreter as _rows, stablehlo_sizes  # noqa: F401  (registers rows)
from mithril_jax.importing.stablehlo_rows import ASSERTION, HLO, NO_EFFECT, type_of

CONTROL = ("while", "if", "case", "composite")
RETURNS = ("stablehlo.return", "func.return")
BYTECODE = b"ML\xefR"  # the first bytes of a portable artifact, such as those of jax.export
PLUGINS = "mithril.plugins"  # attribute of the module
DEEPEST = 100  # calls inside calls
OPERATION = 512  # bytes of memory for each parsed operation


def from_stablehlo(source: Any, *, params: Mapping[str, Any] | None = None) -> Model:
    """Return a program of StableHLO as a model: a path, text, bytecode, or ``jax.jit(f).lower(...)``.

    Inputs and outputs have the names that ``compiled.export`` or JAX wrote; otherwise ``arg0``, ``output0``.
    ``params`` gives arrays to inputs by name, which become trainable parameters.
    """
    return _model(Program(_content(source)), params)


def _model(program: Program, params: Mapping[str, Any] | None) -> Model:
    unknown = [name for name in params or {} if name not in program.inputs]
    if unknown:
        raise InputError(
            f"the program has no input '{unknown[0]}'", facts=[f"inputs: {', '.join(list(program.inputs)[:16])}"]
        )
    layer = StableHLO(program, {n: np.asarray(a) for n, a in (params or {}).items()})
    types = {name: program.inputs[source] for source, name in layer.input_names.items()}
    return model_of(layer, {name: (_open_sizes(name, shape), kind) for name, (shape, kind) in types.items()})


def _open_sizes(name: str, shape: Sequence[int | None]) -> list[int | str]:
    """Return a shape with a symbol for each open size."""
    return [f"{name}_{axis}" if n is None else n for axis, n in enumerate(shape)]


def load(path: str | os.PathLike[str], *, backend: Any = None, **options: Any) -> Any:
    """Load a StableHLO file as a compiled model for inference."""
    from mithril.compiler import compare_plugins, compile

    program = Program(_content(path))
    compiled = compile(_model(program, None), backend, **{"inference": True, **options})
    saved = program.module.operation.attributes
    compare_plugins(compiled, ir.StringAttr(saved[PLUGINS]).value if PLUGINS in saved else None, path)
    return compiled


def _content(source: Any) -> str | bytes:
    if hasattr(source, "compiler_ir"):
        return str(source.as_text())
    if isinstance(source, bytes) or (isinstance(source, str) and "\n" in source):
        return source
    if isinstance(source, (str, os.PathLike)):
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise InputError(f"'{os.fspath(source)}' cannot be read: {error.strerror}") from None
    raise InputError(
        f"a program of StableHLO cannot be a {type(source).__name__}",
        facts=["accepted: a path, text, bytecode, jax.jit(f).lower(...)"],
    )


class Program:
    """A parsed module with the names and types of its main function."""

    def __init__(self, content: str | bytes) -> None:
        self.digest = hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
        context = mlir.make_ir_context()
        is_binary = isinstance(content, bytes) and content.startswith(BYTECODE)
        if not is_binary:
            count = content.count("=") if isinstance(content, str) else content.count(b"=")
            check_memory(OPERATION * count, len(content), "the program of StableHLO")
        try:
            if is_binary:
                self.module = dialect.deserialize_portable_artifact(context, content)
            else:
                self.module = ir.Module.parse(content, context)
        except (ir.MLIRError, UnicodeDecodeError, ValueError) as error:
            lines = str(error).strip().splitlines()
            raise InputError("this is not a program of StableHLO", facts=lines[:3]) from None
        self.functions = {
            ir.StringAttr(f.attributes["sym_name"]).value: f.operation
            for f in self.module.body.operations
            if f.operation.name == "func.func"
        }
        self.main = self.functions.get("main") or next(iter(self.functions.values()), None)
        if self.main is None:
            raise InputError("the program has no function")
        _require_supported(self.functions)
        block = self.main.regions[0].blocks[0]
        arguments = [_named(self.main, "arg_attrs", k, f"arg{k}") for k in range(len(block.arguments))]
        self.inputs = dict(zip(_numbered(arguments), [type_of(a.type) for a in block.arguments], strict=True))
        results = block.operations[len(block.operations) - 1].operands
        self.outputs = _numbered([_named(self.main, "res_attrs", k, f"output{k}") for k in range(len(results))])

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self  # nothing modifies it


def _named(function: Any, attribute: str, position: int, default: str) -> str:
    """Return the name of an argument or result: mithril's, or the last key of JAX's path to it."""
    if attribute not in function.attributes:
        return default
    described = ir.ArrayAttr(function.attributes[attribute])[position]
    if "mithril.name" in described:
        return str(ir.StringAttr(described["mithril.name"]).value)
    for key in ("jax.result_info", "jax.arg_info"):
        if key in described:
            words = re.findall(r"[A-Za-z_]\w*", ir.StringAttr(described[key]).value)
            if words and words[-1] != "result":
                return str(words[-1])
    return default


def _require_supported(functions: Mapping[str, Any]) -> None:
    """Raise UnsupportedError with all operations without a meaning, and the number of their uses."""
    missing: dict[str, list[str]] = {}
    for function in functions.values():
        for op in _operations(function):
            name = op.name
            if name == "stablehlo.custom_call":
                target = stablehlo_sizes.target_of(op)
                if target not in (*NO_EFFECT, ASSERTION):
                    missing.setdefault(f"custom_call @{target}", []).append(str(op.location))
            elif name not in HLO and name not in (*RETURNS, "func.call", *(f"stablehlo.{c}" for c in CONTROL)):
                missing.setdefault(name, []).append(str(op.location))
    if missing:
        raise UnsupportedError(
            f"{counted(len(missing), 'operation')} of this program cannot be expressed: {', '.join(sorted(missing))}",
            facts=missing_lines(missing),
            hint="import the function itself, if you have it: ml.from_jax(function, *examples)",
        )


INNER = ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.sort", "stablehlo.scatter")  # regions as a whole


def _operations(operation: Any) -> Any:
    """Yield the operations inside another one."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                if op.operation.name not in INNER:
                    yield from _operations(op.operation)


def _numbered(names: Sequence[str]) -> list[str]:
    used: set[str] = set()
    return [unique_name(name, used) for name in names]


class StableHLO(Layer):
    """A program of StableHLO: it runs the operations on values of the graph."""

    def __init__(self, program: Program, arrays: dict[str, Any]) -> None:
        self.program = program
        self.pretrained = arrays
        # Parameters that no array was supplied for are inputs, too, and have the paths of layers.
        self.input_names = unique_names((n for n in program.inputs if n not in arrays), identifier, arrays)

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.input_names.values())

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.program.outputs)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return self.program.digest, tuple(self.pretrained)

    def build(self, *values: Any) -> Any:
        by_name = dict(zip(self.inputs, values, strict=True))
        for name, array in self.pretrained.items():
            by_name[name] = self.param(name, array.shape, dtype=str(array.dtype))
        arguments = [by_name[self.input_names.get(n, n)] for n in self.program.inputs]
        results = Interpreter(self.program, self.context.path).call(self.program.main, arguments)
        return tuple(as_value(y) for y in results)


class Interpreter:
    """A run over a program."""

    def __init__(self, program: Program, path: str) -> None:
        self.program, self.path = program, path
        self.depth = 0

    def call(self, function: Any, arguments: Sequence[Any]) -> list[Any]:
        if self.depth > DEEPEST:
            raise InputError("a function of the program calls itself")
        self.depth += 1
        try:
            return self.block(function.regions[0].blocks[0], arguments, {})
        finally:
            self.depth -= 1

    def block(self, block: Any, arguments: Sequence[Any], outer: Mapping[Any, Any]) -> list[Any]:
        """Return the results of a block; it may read the values of the blocks around it."""
        env = {**outer, **dict(zip(block.arguments, arguments, strict=True))}
        builder = Builder.current()
        for op in block.operations:
            operation = op.operation
            operands = [env[v] for v in operation.operands]
            if operation.name in RETURNS:
                return operands
            with builder.at(Origin(self.path), builder.tags):
                results = self._results(operation, operands, env)
            env.update(zip(operation.results, results, strict=True))
        raise InputError("a block of the program returns nothing")

    def _results(self, operation: Any, operands: list[Any], env: Mapping[Any, Any]) -> Sequence[Any]:
        name = operation.name.removeprefix("stablehlo.")
        try:
            if operation.name == "func.call" or name == "composite":
                callee = operation.attributes["callee" if operation.name == "func.call" else "decomposition"]
                return self.call(self.program.functions[ir.FlatSymbolRefAttr(callee).value], operands)
            if name == "while":
                return self._while(operation, operands, env)
            if name in ("if", "case"):
                return self._branches(operation, operands[0], env)
            if name == "custom_call" and stablehlo_sizes.target_of(operation) == ASSERTION:
                stablehlo_sizes.require(operation, env)
                return ()
            if any(is_sizes(x) for x in operands):
                result = arrays_of(stablehlo_sizes.apply(operation, operands))
            else:
                result = arrays_of(HLO[operation.name](operation, *operands))
        except MithrilError as error:
            raise error.with_facts(f"in {operation.name} at {operation.location}") from None
        except MISTAKES as cause:
            raise OperationError(
                f"{operation.name} cannot be imported",
                facts=[f"{type(cause).__name__}: {cause}", f"at {operation.location}"],
            ) from cause
        return result if isinstance(result, tuple) else (result,)

    def _while(self, operation: Any, operands: list[Any], env: Mapping[Any, Any]) -> Sequence[Any]:
        condition, body = (region.blocks[0] for region in operation.regions)
        results = ops.while_loop(
            lambda *s: as_value(self.block(condition, _state(s), env)[0]),
            lambda *s: tuple(as_value(y) for y in self.block(body, _state(s), env)),
            tuple(as_value(x) for x in operands),
        )
        return tuple(results)

    def _branches(self, operation: Any, which: Any, env: Mapping[Any, Any]) -> Sequence[Any]:
        """Select a branch: the first of two for true, or by a number, the last one for numbers outside."""
        blocks = [region.blocks[0] for region in operation.regions]
        is_case = operation.name.endswith("case")

        def branch(k: int) -> Callable[..., Any]:
            return lambda: tuple(as_value(y) for y in self.block(blocks[k], (), env))

        if isinstance(which, np.ndarray):
            number = int(which) if is_case else int(not which)
            return self.block(blocks[number if 0 <= number < len(blocks) else -1], (), env)
        if not is_case:
            return tuple(ops.cond(as_value(which), branch(0), branch(1)))

        def choose(k: int) -> Callable[..., Any]:
            if k == len(blocks) - 1:
                return branch(k)
            return lambda: ops.cond(ops.equal(which, np.int32(k)), branch(k), choose(k + 1))

        return tuple(choose(0)())


def _state(state: tuple[Any, ...]) -> tuple[Any, ...]:
    return state[0] if len(state) == 1 and isinstance(state[0], tuple) else state


# -- export -------------------------------------------------------------------------------------------------------
def export(compiled: Any, path: str | os.PathLike[str]) -> Exported:
    """Write the inference program of a compiled JAX model as text of StableHLO.

    Parameters and states are arguments, before the inputs; all have their names in the attribute ``mithril.name``.
    """
    from mithril.system import files

    return Exported(files.write(Path(os.fspath(path)), to_stablehlo(compiled)))


def to_stablehlo(compiled: Any) -> str:
    """Return the inference program of a compiled JAX model as text of StableHLO."""
    try:
        types = {i.name: i.type for role in ("param", "state", "input") for i in compiled.interface.with_role(role)}
        inputs = {i.name: i.type for i in compiled.interface.with_role("input")}
    except ShapeError:
        inputs = None
    if inputs is None or not all(is_static(t.shape) for t in inputs.values()):
        raise InputError(
            "a program of StableHLO has static shapes, and those of the inputs are open",
            hint="fix them: ml.compile(model, 'jax', shapes={...})",
        )
    program = compiled.to_function().program(inputs)
    if program.results.states:
        changed = program.results.states[0][0]
        raise UnsupportedError(f"a program that changes a state ('{changed}') cannot be written as StableHLO")
    params = list(program.interface.params)
    names = [*params, *program.interface.states, *inputs]

    def main(*arguments: Any) -> dict[str, Any]:
        values = dict(zip(names, arguments, strict=True))
        results = program.forward({n: values[n] for n in params}, {n: values[n] for n in names if n not in params})
        return {n: results[n] for n in program.results.outputs}

    structures = [jax.ShapeDtypeStruct(types[n].shape, types[n].dtype.numpy) for n in names]
    module = jax.jit(main, keep_unused=True).lower(*structures).compiler_ir("stablehlo")
    with module.context:
        (function,) = [f for f in module.body.operations if str(f.attributes["sym_name"]) == '"main"']
        labels = [ir.DictAttr.get({"mithril.name": ir.StringAttr.get(n)}) for n in names]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(labels)
        module.operation.attributes[PLUGINS] = ir.StringAttr.get(manifest_of(compiled))
    return str(module)
