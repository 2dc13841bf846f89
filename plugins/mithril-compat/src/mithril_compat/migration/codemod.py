"""The rewriting of a program, by LibCST: comments and layout stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from mithril_compat.migration.layer_calls import (
    LOSSES,
    SPELLINGS,
    Unchanged,
    argument_of,
    rewritten,
    separated,
)
from mithril_compat.spellings import METHODS, SPELLINGS as ADVICE

RENAMED_METHODS = {"rename_key": "rename", "merge_connections": "merge", "expose_keys": "set_outputs"}
RENAMED_KEYS = {"constant_keys": "constants", "trainable_keys": "trainable"}
DROPPED_KEYS = ("data_keys", "safe_shapes", "safe_names", "use_short_namings")
DECLARATIONS = {"set_shapes": "shape", "set_types": "dtype"}
IOKEY = {"differentiable": "trainable", "value": "default", "shape": "shape", "expose": "expose", "name": "name"}
DTYPES = {"float": "float32", "double": "float64", "int": "int32", "short": "int16", "bool": "bool_"}
KEPT_METHODS = ("cin", "cout", "set_cin", "set_cout", "bind_state_keys", "add_constraint", "set_differentiability",
                "set_values", "add_regularization", "add_metric", "add_loss", "discard_keys")  # fmt: skip


@dataclass
class Remainder:
    """A place that stays unchanged, with the reason and today's way."""

    line: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.line}: '{self.name}': {self.reason}"


@dataclass
class Result:
    """The new source, and the places that a person decides."""

    source: str
    remaining: list[Remainder] = field(default_factory=list)


def migrated(source: str) -> Result:
    """Return a program of the predecessor in today's spelling."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    names = _Names()
    wrapper.visit(names)
    if not names.is_old:
        return Result(source)
    rewriter = _Rewriter(names)
    module = wrapper.visit(rewriter)
    module = module.visit(_Imports(_used_names(module)))
    return Result(module.code, sorted(rewriter.remaining, key=lambda r: r.line))


class _Names(cst.CSTVisitor):
    """The names that the program gives mithril and its layers, and the models of TrainModel."""

    def __init__(self) -> None:
        self.is_old = False
        self.modules: dict[str, str] = {}  # name in the program -> dotted module
        self.imported: dict[str, str] = {}  # name in the program -> name in mithril.models
        self.losses: dict[str, int] = {}  # TrainModel variable -> its calls of add_loss
        self.exposed: dict[str, int] = {}

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            name = _dotted(alias.name)
            if name.split(".")[0] == "mithril":
                self.is_old = True
                bound = alias.evaluated_alias
                self.modules[bound or "mithril"] = name if bound else "mithril"

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = _dotted(node.module) if node.module is not None else ""
        if node.relative or module.split(".")[0] != "mithril" or isinstance(node.names, cst.ImportStar):
            return
        self.is_old = True
        for alias in node.names:
            name = cast("cst.Name", alias.name).value
            bound = alias.evaluated_alias or name
            if module == "mithril" and name in ("models", "types"):
                self.modules[bound] = f"mithril.{name}"
            else:
                self.imported[bound] = name

    def visit_Call(self, node: cst.Call) -> None:
        if isinstance(node.func, cst.Attribute) and isinstance(node.func.value, cst.Name):
            owner, method = node.func.value.value, node.func.attr.value
            if method == "add_loss":
                self.losses[owner] = self.losses.get(owner, 0) + 1
            if method == "expose_keys":
                self.exposed[owner] = self.exposed.get(owner, 0) + 1

    def layer_of(self, function: cst.BaseExpression) -> str | None:
        """Return the name in mithril.models that an expression names, or None."""
        if isinstance(function, cst.Name):
            return self.imported.get(function.value)
        if isinstance(function, cst.Attribute):
            owner = _dotted(function.value)
            home = (
                self.modules.get(owner) or self.modules.get(owner.split(".")[0], "") + owner[len(owner.split(".")[0]) :]
            )
            if home in ("mithril.models", "mithril"):
                return function.attr.value
        return None


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, names: _Names) -> None:
        super().__init__()
        self.names = names
        self.remaining: list[Remainder] = []
        self.trained: dict[str, str] = {}  # TrainModel variable that became a model -> the name of its prediction

    def keep(self, node: cst.CSTNode, name: str, reason: str) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.remaining.append(Remainder(line, name, reason))

    # -- names -------------------------------------------------------------------------------------------------------
    def leave_Attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        owner = _dotted(original.value)
        if self.names.modules.get(owner) == "mithril" and original.attr.value in DTYPES:
            return updated.with_changes(attr=cst.Name(DTYPES[original.attr.value]))
        if original.attr.value in ("cin", "cout"):
            self.keep(original, original.attr.value, METHODS[original.attr.value])
        return updated

    # -- calls -------------------------------------------------------------------------------------------------------
    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        layer = self.names.layer_of(original.func)
        if layer in ("IOKey", "Connection"):
            return self._iokey(original, updated)
        if layer == "MLP":
            return self._mlp(original, updated)
        if layer is not None and layer not in ("Model", "TrainModel", "Tensor", "compile") and layer[:1].isupper():
            return self._layer(layer, original, updated)
        if isinstance(original.func, cst.Attribute):
            return self._method(original.func.attr.value, original, updated)
        return updated

    def _layer(self, layer: str, original: cst.Call, updated: cst.Call) -> cst.Call:
        if layer in LOSSES or layer.endswith("Backend"):
            return updated
        try:
            call = rewritten(layer, updated)
        except Unchanged as reason:
            advice = ADVICE.get(layer)
            self.keep(original, layer, f"{reason}{f'; today, {advice}' if advice else ''}")
            return updated
        return call.with_changes(func=_renamed(call.func, SPELLINGS[layer].name))

    def _mlp(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        values = dict(
            zip(("activations", "dimensions"), (a.value for a in updated.args if a.keyword is None), strict=False)
        )
        values |= {a.keyword.value: a.value for a in updated.args if a.keyword is not None}
        name = [a for a in updated.args if a.keyword is not None and a.keyword.value == "name"]
        activations = values.get("activations")
        names = []
        for element in activations.elements if isinstance(activations, cst.List) else ():
            function = element.value.func if isinstance(element.value, cst.Call) and not element.value.args else None
            names.append(function.value if isinstance(function, cst.Name) else "")
        if names and names[-1] in ("Identity", "Buffer"):
            names.pop()
        if (
            "dimensions" not in values
            or not names
            or "" in names
            or values.keys() - {"activations", "dimensions", "name"}
        ):
            self.keep(original, "MLP", "today, MLP(sizes, activation=[names])")
            return updated
        listed = cst.List([cst.Element(cst.SimpleString(f'"{_snake(n)}"')) for n in names])
        arguments = [argument_of(values["dimensions"]), argument_of(listed, "activation"), *name]
        return updated.with_changes(args=separated(arguments))

    def _iokey(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        arguments = []
        for position, argument in enumerate(updated.args):
            key = (
                argument.keyword.value if argument.keyword is not None else ("name", "value", "shape", "type")[position]
            )
            if key == "type":
                continue  # today infers it, except a dtype, which is declared as dtype=
            if key == "differentiable" and isinstance(argument.value, cst.Name) and argument.value.value == "False":
                continue
            if key not in IOKEY:
                self.keep(original, f"IOKey({key}=)", "today has no such argument")
                return updated
            arguments.append(argument_of(argument.value, None if key == "name" else IOKEY[key]))
        return updated.with_changes(func=_renamed(updated.func, "IOKey"), args=separated(arguments))

    def _method(self, method: str, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        function = cast("cst.Attribute", updated.func)
        if method == "connect":
            return self._connected(original, updated, function)
        if method in RENAMED_METHODS:
            owner = _dotted(function.value)
            if method == "expose_keys" and self.names.exposed.get(owner, 0) > 1:
                self.keep(original, method, "several calls add outputs: today, one set_outputs names all of them")
                return updated
            return updated.with_changes(func=function.with_changes(attr=cst.Name(RENAMED_METHODS[method])))
        if method == "compile":
            return self._compiled(original, updated)
        if method == "evaluate":
            return self._evaluated(updated)
        if method in ("ones", "zeros", "randn", "rand") and "backend" in _dotted(function.value):
            sizes = [a.value for a in original.args if a.keyword is None and not a.star]
            literals = (cst.Integer, cst.Tuple, cst.List)
            if len(sizes) == 1 and not isinstance(sizes[0], literals) and not _code(sizes[0]).endswith(".shape"):
                self.keep(original, method, f"today, {method}(shape) takes a tuple: is '{_code(sizes[0])}' one?")
                return updated
            return _shaped(updated) if original.args else updated
        if method in KEPT_METHODS and method not in ("cin", "cout", "add_loss"):
            self.keep(original, method, METHODS.get(method, "today, ml.Trainer adds regularizers= and metrics="))
        return updated

    def _connected(self, original: cst.Call, updated: cst.Call, function: cst.Attribute) -> cst.Call:
        owner = cast("cst.Attribute", original.func).value
        layer = self.names.layer_of(owner.func) if isinstance(owner, cst.Call) else None
        renamed = SPELLINGS[layer].terminals if layer in SPELLINGS else {}
        if layer == "Concat" or (layer is not None and layer not in SPELLINGS and layer not in ("MLP", "Model")):
            return updated  # reported with the layer
        arguments = []
        for argument in updated.args:
            key = argument.keyword.value if argument.keyword is not None else ""
            arguments.append(argument_of(argument.value, renamed[key]) if key in renamed else argument)
        return updated.with_changes(func=function.value, args=arguments)

    def _compiled(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        arguments = []
        for argument in updated.args:
            key = argument.keyword.value if argument.keyword is not None else ""
            if key in DROPPED_KEYS:
                continue
            if key == "discard_keys":
                self.keep(original, key, "today, outputs= lists the outputs to return")
            value = argument.value
            if key == "trainable_keys" and isinstance(value, cst.Set):
                value = cst.List(value.elements)
            if key in RENAMED_KEYS:
                argument = argument.with_changes(keyword=cst.Name(RENAMED_KEYS[key]), value=value)
            arguments.append(argument)
        return updated.with_changes(args=_without_trailing_comma(arguments, updated.args))

    def _evaluated(self, updated: cst.Call) -> cst.Call:
        arguments = []
        for argument in updated.args:
            key = argument.keyword.value if argument.keyword is not None else ""
            if key == "data":
                argument = argument.with_changes(keyword=cst.Name("inputs"))
            if key == "output_gradients" and isinstance(argument.value, cst.Name) and argument.value.value == "True":
                argument = argument.with_changes(value=cst.SimpleString('"final_cost"'))
            arguments.append(argument)
        keys = [a.keyword.value if a.keyword is not None else "" for a in arguments]
        if keys[:1] in ([""], ["params"]) and keys[1:2] != [""] and "inputs" not in keys:
            # One argument alone would be the inputs.
            arguments.insert(1, argument_of(cst.Dict([]), "inputs"))
        return updated.with_changes(args=separated(arguments) if len(arguments) > len(updated.args) else arguments)

    # -- statements --------------------------------------------------------------------------------------------------
    def leave_SimpleStatementLine(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine] | cst.RemovalSentinel:
        if len(original.body) != 1:
            return updated
        statement = original.body[0]
        lines = None
        if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call):
            lines = self._statement_call(statement.value, cast("Any", updated.body[0]).value)
        elif isinstance(statement, cst.Assign) and isinstance(statement.value, cst.Call):
            lines = self._train_model(statement)
        if lines is None:
            return updated
        if not lines:
            return cst.RemoveFromParent()
        parsed = [cast("cst.SimpleStatementLine", cst.parse_statement(line)) for line in lines]
        parsed[0] = parsed[0].with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel(parsed)

    def _statement_call(self, original: cst.Call, updated: cst.Call) -> list[str] | None:
        if not isinstance(original.func, cst.Attribute):
            return None
        method, owner = original.func.attr.value, _dotted(original.func.value)
        if method == "freeze" and not original.args:
            return []
        if method in DECLARATIONS:
            if any(a.keyword is None or a.star for a in updated.args):
                self.keep(original, method, METHODS[method])
                return None
            kind = DECLARATIONS[method]
            values = [(cast("cst.Name", a.keyword).value, _code(a.value)) for a in updated.args]
            if kind == "dtype" and any("Tensor" in value for _, value in values):
                return []  # a tensor of unknown dtype, as every input of today
            return [f'{owner}.input("{key}", {kind}={value})' for key, value in values]
        if method == "add_loss" and owner in self.trained:
            return self._loss(original, owner)
        if method == "add_loss":
            self.keep(original, method, "today, ml.Trainer(model, optimizer, loss=...), or a layer of the loss")
        return None

    def _train_model(self, statement: cst.Assign) -> list[str] | None:
        call = cast("cst.Call", statement.value)
        target = statement.targets[0].target
        if self.names.layer_of(call.func) != "TrainModel" or not isinstance(target, cst.Name):
            return None
        if self.names.losses.get(target.value) != 1 or len(call.args) != 1:
            self.keep(call, "TrainModel", "today, ml.Trainer(model, optimizer, loss=...)")
            return None
        self.trained[target.value] = _code(call.args[0].value)
        return [f"{target.value} = Model()"]

    def _loss(self, call: cst.Call, owner: str) -> list[str] | None:
        """Return the layers of a TrainModel with one loss that is a mean."""
        keywords = {a.keyword.value: a.value for a in call.args if a.keyword is not None}
        first = [a.value for a in call.args if a.keyword is None]
        loss = first[0] if first else keywords.pop("loss_model", None)
        kind = self.names.layer_of(loss.func) if isinstance(loss, cst.Call) else None
        steps = keywords.pop("reduce_steps", first[1] if len(first) > 1 else None)
        mean = steps is None or _code(steps).replace(" ", "") in ("[Mean()]", "[models.Mean()]")
        prediction, target = keywords.pop("input", None), keywords.pop("target", None)
        if kind not in LOSSES or not mean or keywords or not isinstance(prediction, cst.SimpleString) or target is None:
            self.keep(call, "add_loss", "today, ml.Trainer(model, optimizer, loss=...), or a layer of the loss")
            return None
        name = str(prediction.evaluated_value)
        return [
            f'{owner} |= {self.trained[owner]}({name}="{name}")',
            f'{owner} |= {LOSSES[kind]}()(predictions="{name}", targets={_code(target)}, output="final_cost")',
            f'{owner}.set_outputs("{name}", "final_cost")',
        ]


class _Imports(cst.CSTTransformer):
    """The imports of the names that the new program uses."""

    def __init__(self, used: set[str]) -> None:
        super().__init__()
        self.used = used

    def leave_ImportFrom(
        self, original: cst.ImportFrom, updated: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        module = _dotted(updated.module) if updated.module is not None else ""
        if updated.relative or isinstance(updated.names, cst.ImportStar) or module not in ("mithril.models", "mithril"):
            return updated
        aliases: dict[str, cst.ImportAlias] = {}
        for alias in updated.names:
            name = cast("cst.Name", alias.name).value
            today = name
            if name not in self.used:
                today = SPELLINGS[name].name if name in SPELLINGS else LOSSES.get(name, name)
                today = "Model" if name == "TrainModel" else today
            if alias.evaluated_alias is not None or today in self.used:
                aliases.setdefault(today, alias.with_changes(name=cst.Name(today)))
        if not aliases:
            return cst.RemoveFromParent()
        names = sorted(aliases.values(), key=lambda a: cast("cst.Name", a.name).value)
        if updated.lpar is None:
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            last = len(names) - 1
            names = [
                a.with_changes(comma=comma if k < last else cst.MaybeSentinel.DEFAULT) for k, a in enumerate(names)
            ]
        else:
            example = updated.names[0].comma
            names = [a.with_changes(comma=example) for a in names[:-1]] + [
                names[-1].with_changes(comma=updated.names[-1].comma)
            ]
        return updated.with_changes(names=names)


def _used_names(module: cst.Module) -> set[str]:
    """Return the names that a module reads outside of its imports."""
    names: set[str] = set()

    class Reader(cst.CSTVisitor):
        def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
            return False

        def visit_Import(self, node: cst.Import) -> bool:
            return False

        def visit_Name(self, node: cst.Name) -> None:
            names.add(node.value)

    module.visit(Reader())
    return names


def _dotted(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return ""


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _renamed(function: cst.BaseExpression, name: str) -> cst.BaseExpression:
    return function.with_changes(attr=cst.Name(name)) if isinstance(function, cst.Attribute) else cst.Name(name)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and k else c.lower() for k, c in enumerate(name))


def _without_trailing_comma(arguments: Sequence[cst.Arg], before: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Return the arguments; the last one has the comma that the last one had."""
    if not arguments:
        return []
    return [*arguments[:-1], arguments[-1].with_changes(comma=before[-1].comma)]


def _shaped(call: cst.Call) -> cst.Call:
    """Return a call of a backend's function with its shape as a tuple, and without a mesh."""
    keywords = [a for a in call.args if a.keyword is not None and a.keyword.value not in ("device_mesh", "key")]
    sizes = [a.value for a in call.args if a.keyword is None]
    shape: cst.BaseExpression
    if (len(sizes) == 1 and isinstance(sizes[0], (cst.Tuple, cst.List))) or _code(sizes[0]).endswith(".shape"):
        shape = sizes[0]
    elif any(a.star for a in call.args):
        shape = next(a.value for a in call.args if a.star)
    else:
        shape = cst.Tuple([cst.Element(s) for s in sizes])
    return call.with_changes(args=separated([cst.Arg(shape), *keywords]))
