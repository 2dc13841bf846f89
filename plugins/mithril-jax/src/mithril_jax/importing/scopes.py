"""The equations of a jaxpr, nested by named scopes and by the paths of the parameters that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from jax.extend import core

from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.regions import Operation, Param, Read, Region, Scope, nested
from mithril_jax.importing.interpreter import Interpreter


class Names:
    """The names of the variables of a jaxpr; those of ``parameters`` come first among its arguments."""

    def __init__(self, jaxpr: Any, parameters: Sequence[str]) -> None:
        variables = [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
        self.by_variable = {v: f"v{k}" for k, v in enumerate(variables) if not isinstance(v, core.DropVar)}
        self.parameters = {self.by_variable[v]: n for v, n in zip(jaxpr.invars, parameters, strict=False)}

    def of(self, atom: Any) -> str:
        """Return the name of a variable, or an empty string for a literal."""
        return "" if isinstance(atom, core.Literal) else self.by_variable.get(atom, "")


def region_of(jaxpr: Any, names: Names) -> Region:
    """Return the equations of a jaxpr, nested by the modules that ran them."""
    inputs = [names.of(v) for v in jaxpr.invars]
    computed = {name for name in inputs if name not in names.parameters}
    sources = dict(names.parameters)  # values that depend on one parameter only -> the parameter
    operations: list[Operation] = []
    for equation in jaxpr.eqns:
        operands = [names.of(v) for v in equation.invars]
        read = [sources[name] for name in operands if name in sources]
        results = tuple(name for v in equation.outvars if (name := names.of(v)))
        if len(read) == len([n for n in operands if n]) == 1:
            sources.update(dict.fromkeys(results, read[0]))
        computed.update(results)
        shown = tuple(Param(names.parameters[n]) if n in names.parameters else Read(n) for n in operands)
        scopes = _scopes(equation, read, names.parameters.values())
        reads = tuple(dict.fromkeys(n for n in operands if n in computed))
        operations.append(Operation(equation, scopes, reads, results, _kind(equation), shown))
    return nested(operations, [name for v in jaxpr.outvars if (name := names.of(v))])


def _scopes(equation: Any, read: Sequence[str], parameters: Any) -> tuple[Scope, ...]:
    """Return the named scopes of an equation, else the path of the parameters that it reads."""
    stack = [part for scope in equation.source_info.name_stack.stack if (part := getattr(scope, "name", ""))]
    is_scoped = all(type(scope).__name__ == "Scope" for scope in equation.source_info.name_stack.stack)
    if stack and is_scoped:
        parts = [part for name in stack for part in name.split("/")]
        heads = {name.partition(".")[0] for name in parameters}
        if len(heads) == 1 and parts[0] not in heads and all("." in name for name in parameters):
            # Flax names the outermost scope by the class, and parameters by 'params'.
            parts[0] = next(iter(heads))
    else:
        owners = {name.rpartition(".")[0] for name in read}
        parts = owners.pop().split(".") if len(owners) == 1 else []
    return tuple(Scope(path) for path in accumulate(parts, lambda outer, name: f"{outer}.{name}") if path)


def _kind(equation: Any) -> str:
    name = equation.primitive.name
    if name == "dot_general":
        x, w = (v.aval.ndim for v in equation.invars)
        return "matmul" if equation.params["dimension_numbers"] == (((x - 1,), (0,)), ((), ())) and w == 2 else ""
    return {"add": "add", "broadcast_in_dim": "broadcast", "reshape": "broadcast"}.get(name, "")


class JaxprRun(Run):
    """One run over a jaxpr."""

    def __init__(
        self,
        root: ImportedLayer,
        values: dict[str, Any],
        interpreter: Interpreter,
        names: Names,
        arrays: Mapping[str, Any],
    ) -> None:
        super().__init__(root, values)
        self.interpreter, self.names, self.arrays = interpreter, names, arrays

    def execute(self, source: Any) -> None:
        self.interpreter.path = self.root.context.path
        results = self.interpreter.results_of(source, [self.read(a) for a in source.invars], checks=not self.is_changed)
        for variable, result in zip(source.outvars, results, strict=True):
            self.values[self.names.of(variable)] = result

    def read(self, atom: Any) -> Any:
        """Return the value of a variable or literal; parameters are declared where an equation reads them."""
        if isinstance(atom, core.Literal):
            return self.interpreter.literal(atom)
        name = self.names.of(atom)
        return self.tensor(self.names.parameters[name]) if name in self.names.parameters else self.values[name]

    def tensor(self, name: str) -> Any:
        """Return a parameter by its path in the tree of parameters."""
        return self.parameter(name, self.arrays[name].shape, str(self.arrays[name].dtype))
