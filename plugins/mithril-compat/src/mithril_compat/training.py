"""``TrainModel``: losses, regularizations and metrics around a model, with the output ``final_cost``."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any, Self

from mithril import ModelError
from mithril_compat.language.block import Block, Leaf
from mithril_compat.language.connection import Connection
from mithril_compat.language.model import Model
from mithril_compat.layers.elementwise import Buffer, Max, Mean, Min, Multiply, Sum
from mithril_compat.layers.reducing import Combined, Divided, GeometricSize
from mithril_compat.naming import free_inputs, short_names

LOSS = "final_cost"


class TrainModel(Model):
    """A model with losses; ``compile`` adds them up."""

    def __init__(self, model: Block) -> None:
        super().__init__()
        names = inner_names(model)
        clashes = [name for name in (LOSS, "loss") if name in names]
        if clashes:
            raise ModelError(f"'{clashes[0]}' cannot be a terminal of a model in TrainModel")
        self._model = model
        exposed = model.exposed if isinstance(model, Model) else model.outputs if isinstance(model, Leaf) else ()
        for name, edge in names.items():
            if name not in model.edges:
                model.edges[name] = edge
        self.join(model, {name: name for name in (*names, *exposed)})
        for name in exposed:
            self._expose(self.edges[name].edge, name)
        self._usual = list(self.cins), list(self.couts)
        self._losses: list[tuple[Connection, list[tuple[Connection, Any]]]] = []  # cost, reduced inputs with axes
        self._penalties: list[tuple[Connection, float, Connection]] = []  # output, coefficient, regularized edge
        self._combiner: Block = Sum()
        self._is_finalized = False

    def __iadd__(self, other: Any) -> Self:
        raise ModelError("a TrainModel is not extended", hint="extend the model in it, then call add_loss")

    __add__ = __iadd__

    def _open(self) -> None:
        if self._is_finalized:
            raise ModelError("the TrainModel is compiled already and cannot change")

    def add_loss(
        self,
        loss_model: Block,
        reduce_steps: list[Block] | None = None,
        key_name: str | None = None,
        coef: float | None = None,
        **targets: Any,
    ) -> None:
        """Add a loss of outputs of the model, reduced by ``reduce_steps`` (by default their mean)."""
        self._open()
        self._check_loss(loss_model, targets)
        self.join(loss_model, targets)
        cost = loss_model.couts[0].edge
        reduced: list[tuple[Connection, Any]] = []
        for step in reduce_steps or [Mean()]:
            if isinstance(step, (Mean, Max, Min)):
                reduced.append((cost, step.edges["axis"]))
            cost = self._then(step, cost)
        if coef is not None:
            scaled = Multiply()
            self.join(scaled, {"left": cost, "right": coef})
            cost = scaled.edges["output"].edge
        if key_name is not None:
            self._expose(cost, key_name)
        self._losses.append((cost, reduced))
        self.cins, self.couts = self._usual

    def _check_loss(self, loss: Block, targets: dict[str, Any]) -> None:
        inputs = [k for k, e in loss.edges.items() if e.edge.producer is None and not e.is_valued]
        missing = [key for key in inputs if key not in targets]
        if missing:
            raise ModelError(
                f"the loss {type(loss).__name__} lacks its input '{missing[0]}'", facts=[f"inputs: {', '.join(inputs)}"]
            )
        sources = [t for t in targets.values() if isinstance(t, Connection) or t in self.edges]
        if not sources:
            raise ModelError(
                f"the loss {type(loss).__name__} reads no output of the model",
                facts=[f"outputs: {', '.join(self.exposed) or 'none'}"],
            )

    def _then(self, step: Block, source: Connection) -> Connection:
        (terminal,) = (key for key, edge in step.edges.items() if edge.edge is step.cins[0].edge)
        self.join(step, {terminal: source})
        return step.couts[0].edge

    def add_regularization(
        self,
        model: Block,
        coef: float,
        reg_key: str | Connection | None = None,
        key_name: str | None = None,
        **targets: Any,
    ) -> None:
        """Add ``coef`` times a penalty of parameters; a pattern of ``re`` selects them by name."""
        self._open()
        free = {k for k, e in model.edges.items() if e.edge.producer is None and not e.is_valued}
        if set(targets) != free:
            raise ModelError(
                f"the regularization {type(model).__name__} needs the keys {', '.join(sorted(free))}",
                facts=[f"passed: {', '.join(targets) or 'none'}"],
            )
        for key, target in targets.items():
            if isinstance(target, re.Pattern):
                if len(targets) > 1:
                    raise ModelError("a pattern requires a regularization of one input")
                for name in [n for n in self.input_keys if target.search(n) and self._is_parameter(n)]:
                    self._penalize(deepcopy(model), coef, key, key_name, {key: name})
                return
        first = reg_key.key if isinstance(reg_key, Connection) else reg_key
        self._penalize(model, coef, first or next(k for k, e in model.edges.items() if e.edge is model.cins[0].edge),
                       key_name, targets)  # fmt: skip

    def _is_parameter(self, name: str) -> bool:
        return self.edges[name].edge.differentiable is not False

    def _penalize(
        self, model: Block, coef: float, key: str | None, key_name: str | None, targets: dict[str, Any]
    ) -> None:
        unknown = [t for t in targets.values() if isinstance(t, str) and t not in self.edges]
        if unknown:
            raise ModelError(f"the model has no key '{unknown[0]}'", facts=[f"keys: {', '.join(self.input_keys)}"])
        self.join(model, targets)
        output = model.couts[0].edge
        if key_name is not None:
            self._expose(output, key_name)
        self._penalties.append((output, coef, model.edges[str(key)].edge))
        self.cins, self.couts = self._usual

    def add_metric(
        self, model: Block, reduce_steps: list[Block] | None = None, key_name: str | None = None, **targets: Any
    ) -> None:
        """Add an output that is not trained."""
        self._open()
        self.join(model, targets)
        value = model.couts[-1].edge
        for step in reduce_steps or [Buffer()]:
            value = self._then(step, value)
        if key_name is not None:
            self._expose(value, key_name)
        self.cins, self.couts = self._usual

    def set_loss_combiner(self, loss_combiner: Block) -> None:
        """Replace the sum of several losses by another layer."""
        self._open()
        self._combiner = loss_combiner

    def finalize(self) -> None:
        """Add up losses and regularizations; ``compile`` calls it."""
        if self._is_finalized:
            return
        if not self._losses:
            raise ModelError("a TrainModel needs a loss", hint="call add_loss(...)")
        costs = [cost for cost, _ in self._losses]
        if len(costs) == 1:
            total = costs[0]
        else:
            vector = Combined(len(costs))
            self.join(vector, {f"input{k + 1}": cost for k, cost in enumerate(costs)})
            total = self._then(self._combiner, vector.edges["output"])
        penalties = [self._normalized(*penalty) for penalty in self._penalties]
        if penalties:
            vector = Combined(1 + len(penalties))
            parts = [total, *penalties]
            self.join(vector, {f"input{k + 1}": part for k, part in enumerate(parts)})
            total = self._then(Sum(), vector.edges["output"])
        result = Buffer()
        self.join(result, {"input": total, "output": LOSS})
        self._expose(result.edges["output"].edge, LOSS)
        self._is_finalized = True
        self._freeze()

    def _normalized(self, output: Connection, coef: float, edge: Connection) -> Connection:
        """Return the penalty times its coefficient, over the sizes that the losses of its edge were averaged over."""
        averaged = [reduced for cost, reduced in self._losses if self._depends(cost, edge)]
        scaled = Multiply()
        self.join(scaled, {"left": output, "right": coef})
        result = scaled.edges["output"].edge
        if averaged:
            flat = [pair for reduced in averaged for pair in reduced]
            size = GeometricSize(tuple(map(len, averaged)))
            targets = {f"x{k}": x for k, (x, _) in enumerate(flat)} | {f"axis{k}": a for k, (_, a) in enumerate(flat)}
            self.join(size, targets)
            divided = Divided()
            self.join(divided, {"input": result, "size": size.edges["output"]})
            result = divided.edges["output"].edge
        return result

    def _depends(self, cost: Connection, edge: Connection) -> bool:
        pending, seen = [cost.edge], set[int]()
        while pending:
            current = pending.pop()
            if current is edge.edge:
                return True
            if id(current) not in seen and isinstance(current.producer, Leaf):
                seen.add(id(current))
                pending += [current.producer.edges[key].edge for key in current.producer.input_names]
        return False


def inner_names(model: Block) -> dict[str, Connection]:
    """Return the names of the inputs of a model within a TrainModel."""
    if isinstance(model, Leaf):
        return {k: model.edges[k] for k in model.input_names if not model.edges[k].is_valued}
    assert isinstance(model, Model)
    names = short_names(model)
    inputs = free_inputs(model)
    labeled = {id(edge.edge) for edge in model.edges.values()}
    if len(model.cins) == 1 and "input" not in model.edges and id(model.cins[0].edge) not in labeled:
        names[id(model.cins[0].edge)] = "input"
    return {names[id(edge)]: edge for edge in inputs}
