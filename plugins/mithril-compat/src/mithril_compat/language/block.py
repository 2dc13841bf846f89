"""Layers of the predecessor: terminals, how they are connected, and a function of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, NoReturn

from mithril import ModelError
from mithril.graph import closest
from mithril_compat.language.connection import TBD, Connection, Targets
from mithril_compat.notices import is_called_by_program, old_name

# Positional arguments of connect, where they are not ``input``, the other inputs, and the outputs.
POSITIONS = {
    "Linear": "input weight output", "LayerNorm": "input output eps", "GroupNorm": "input output eps",
    "Convolution1D": "input weight stride padding dilation output", "Split": "input output",
    "Convolution2D": "input weight stride padding dilation groups output", "Trapezoid": "y x output",
    "LinearSVM": "input weight bias output decision_output", "QuantileLoss": "input target quantile output",
    "LogisticRegression": "input weight bias output probs_output", "Log": "input output", "Sqrt": "input output",
    "RNNCell": "input prev_hidden w_ih w_hh w_ho bias_h bias_o hidden hidden_compl output",
    "LSTMCell": "input prev_hidden prev_cell w_i w_f w_c w_o w_out bias_f bias_i bias_c bias_o bias_out"
                " hidden cell hidden_compl output",
    "Metric": "pred label output pred_formatted label_formatted", "Power": "base exponent output",
    "Randn": "shape dtype output", "RandInt": "shape low high dtype output",
    "CrossEntropy": "input target weights categorical threshold robust output",
    "BinaryCrossEntropy": "input target pos_weight threshold robust output",
    "ScaledDotProduct": "query key value dropout_p is_causal scale output",
    "GaussProcessRegressionCore": "label s k k_star mu loss prediction confidence",
}  # fmt: skip
ABSENT = {"use_bias": "bias", "use_scale": "weight"}  # setting -> terminal that the layer lacks if it is False
WEIGHT = object()  # the default of terminals that are parameters unless they are connected


class Joining:
    """A layer with the targets of its terminals, to be added to a model."""

    def __init__(self, block: Block, targets: Targets) -> None:
        self.model, self.connections = block, dict(targets)


class Block:
    """Base of layers and models. ``edges`` holds the terminals by name; ``cins`` and ``couts`` are the usual ones."""

    kind = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.parent: Block | None = None
        self.pending: Targets | None = None  # targets of a call that no model has adopted yet
        self.edges: dict[str, Connection] = {}
        self.cins: list[Connection] = []
        self.couts: list[Connection] = []
        if is_called_by_program(self):
            old_name(type(self).__name__)

    # -- terminals ---------------------------------------------------------------------------------------------------
    def terminal_names(self) -> tuple[str, ...]:
        return tuple(self.edges)

    def positional(self) -> tuple[str, ...]:
        """Return the terminals that ``connect`` and calls take by position."""
        return self.terminal_names()

    @property
    def default_name(self) -> str:
        return type(self).__name__.lower()

    def __getattr__(self, name: str) -> Any:
        edges = self.__dict__.get("edges", {})
        if name in edges:
            return edges[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or terminal '{name}'", name=name, obj=self)

    def connect(self, *args: Any, **targets: Any) -> Joining:
        """Return the layer with targets: names, connections or values, by terminal."""
        old_name("connect")
        return Joining(self, self._targets(args, targets))

    def __call__(self, *args: Any, **targets: Any) -> Any:
        """Connect the layer outside of a model, and return its outputs; the model that uses them adopts it."""
        self.pending = self._targets(args, targets)
        outputs = self.outputs_in_order()
        return outputs[0] if len(outputs) == 1 else outputs

    def outputs_in_order(self) -> list[Connection]:
        return list(self.couts)

    def _targets(self, args: Iterable[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        args = tuple(args)
        names = self.positional()
        if len(args) > len(names):
            self._refuse(f"takes {len(names)} connections, got {len(args)}")
        targets = dict(zip(names, args, strict=False))
        for name, target in keywords.items():
            if name not in self.terminal_names():
                similar = closest(name, self.terminal_names(), 1)
                self._refuse(f"has no terminal '{name}'", f"did you mean '{similar[0]}'?" if similar else None)
            if name in targets:
                self._refuse(f"got '{name}' twice")
            targets[name] = target
        return targets

    def _refuse(self, problem: str, hint: str | None = None) -> NoReturn:
        facts = [f"terminals: {', '.join(self.terminal_names()) or 'none'}"]
        raise ModelError(f"{type(self).__name__} {problem}", facts=facts, hint=hint)

    # -- canonical terminals -----------------------------------------------------------------------------------------
    @property
    def cin(self) -> Connection:
        old_name("cin")
        return self._single("cin", self.cins)

    @property
    def cout(self) -> Connection:
        old_name("cout")
        return self._single("cout", self.couts)

    def _single(self, which: str, connections: list[Connection]) -> Connection:
        connections = list({id(c.edge): c.edge for c in connections}.values())
        if len(connections) != 1:
            names = ", ".join(repr(c) for c in connections) or "none"
            self._refuse(f"has not exactly one {which}: {names}", f"call set_{which}(...)")
        return connections[0]

    def outermost(self) -> Block:
        block: Block = self
        while block.parent is not None:
            block = block.parent
        return block

    def leaves(self) -> Iterable[tuple[tuple[str, ...], Leaf]]:
        """Yield the layers within this one, with the names of the models around them."""
        raise NotImplementedError

    def edge_of(self, terminal: str | Connection) -> Connection:
        """Return the edge of a terminal."""
        if isinstance(terminal, Connection):
            return terminal.edge
        if terminal not in self.edges:
            self._refuse(f"has no terminal '{terminal}'")
        return self.edges[terminal].edge

    def set_shapes(self, *shapes: Mapping[Any, Any], **named: Any) -> None:
        old_name("set_shapes")
        for terminal, shape in _pairs(shapes, named):
            self.edge_of(terminal).set_shapes(shape)

    def set_types(self, *types: Mapping[Any, Any], **named: Any) -> None:
        old_name("set_types")
        for terminal, kind in _pairs(types, named):
            self.edge_of(terminal).set_type(kind)

    def set_values(self, *values: Mapping[Any, Any], **named: Any) -> None:
        old_name("set_values")
        for terminal, value in _pairs(values, named):
            self.edge_of(terminal).set_value(value)

    def set_differentiability(self, *flags: Mapping[Any, bool], **named: bool) -> None:
        old_name("set_differentiability")
        for terminal, flag in _pairs(flags, named):
            self.edge_of(terminal).set_differentiability(flag)

    def set_cin(self, *connections: str | Connection, safe: bool = True) -> None:
        old_name("set_cin")
        self.cins = [self.edge_of(c) for c in connections]

    def set_cout(self, *connections: str | Connection, safe: bool = True) -> None:
        old_name("set_cout")
        self.couts = [self.edge_of(c) for c in connections]


def _pairs(groups: Iterable[Mapping[Any, Any]], keywords: Mapping[str, Any]) -> Iterable[tuple[Any, Any]]:
    for group in groups:
        yield from group.items()
    yield from keywords.items()


class Leaf(Block):
    """A layer that computes by a function of its terminals' values.

    The parameters of ``function`` are the constructor's, in its order: the names in ``options`` are settings, the
    others terminals, whose defaults are values. ``program`` receives the layer of mithril that is traced.
    """

    function: Callable[..., Any]
    options: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("output",)
    usual: tuple[str, ...] | None = None  # terminals that ``+=`` connects; None: the first one without a default
    usual_outputs: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()  # inputs that get their shape from the layer, as weights do
    integers: tuple[str, ...] = ()  # inputs that are integers unless declared otherwise

    def __init__(self, *args: Any, name: str | None = None, **given: Any) -> None:
        super().__init__(name)
        parameters = [p for p in signature(self.function).parameters.values() if p.name != "program"]
        if len(args) > len(parameters):
            self._refuse(f"takes {len(parameters)} arguments, got {len(args)}")
        values = {p.name: TBD if p.default is p.empty else p.default for p in parameters}
        values |= dict(zip(values, args, strict=False))
        for key, value in given.items():
            if key not in values:
                similar = closest(key, list(values), 1)
                raise ModelError(
                    f"{type(self).__name__} has no argument '{key}'",
                    facts=[f"accepted: {', '.join(values)}, name"],
                    hint=f"did you mean '{similar[0]}'?" if similar else None,
                )
            values[key] = value
        self.settings = {key: values.pop(key) for key in self.options}
        missing = [key for key, value in self.settings.items() if value is TBD]
        if missing:
            self._refuse(f"needs the argument '{missing[0]}'")
        self.absent = tuple(key for flag, key in ABSENT.items() if self.settings.get(flag) is False)
        if self.has_states:
            self.absent += self.statistics
        values = {key: value for key, value in values.items() if key not in self.absent}
        self._declare(values)

    def _declare(self, values: Mapping[str, Any]) -> None:
        """Make the terminals: inputs with their values, then outputs."""
        free = []
        for key, value in values.items():
            self.edges[key] = edge = self._terminal(value)
            edge.origin_name = edge.origin_name or key
            if value is TBD:
                free.append(key)
        self.input_names = tuple(values)
        for key in self.outputs:
            self.edges[key] = edge = Connection()
            edge.origin_name, edge.producer = key, self
        first = ("input",) if "input" in free else tuple(free[:1])
        usual = self.usual if self.usual is not None else first
        self.cins = [self.edges[key] for key in usual if not self.edges[key].is_valued]
        self.couts = [self.edges[key] for key in self.usual_outputs or self.outputs[-1:]]

    def _terminal(self, value: Any) -> Connection:
        if value is WEIGHT:
            return Connection(differentiable=True)
        if isinstance(value, Connection):
            return value
        return Connection(value=value)

    @property
    def has_states(self) -> bool:
        """Whether the layer has states of its own: running statistics in training."""
        return self.settings.get("inference") is False

    def outputs_in_order(self) -> list[Connection]:
        return [self.edges[key] for key in self.outputs]

    def positional(self) -> tuple[str, ...]:
        ordered = POSITIONS.get(type(self).__name__)
        if ordered is not None:
            return tuple(ordered.split())
        first = ("input",) if "input" in self.input_names else ()
        return (*first, *(key for key in self.input_names if key not in first), *self.outputs)

    def leaves(self) -> Iterable[tuple[tuple[str, ...], Leaf]]:
        yield (), self

    def run(self, program: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name, from the values of the inputs."""
        extra = {"program": program} if "program" in signature(self.function).parameters else {}
        result = type(self).function(**self.settings, **values, **dict.fromkeys(self.absent), **extra)
        if len(self.outputs) == 1:
            return {self.outputs[0]: result}
        return dict(zip(self.outputs, result, strict=True))


def leaf(
    name: str,
    function: Callable[..., Any],
    *,
    options: str = "",
    outputs: str = "output",
    cins: str | None = None,
    couts: str = "",
    integers: str = "",
    statistics: str = "",
) -> type[Leaf]:
    """Return the class of a layer that computes by this function."""
    body: dict[str, Any] = {
        "function": staticmethod(function),
        "options": tuple(options.split()),
        "outputs": tuple(outputs.split()),
        "usual": None if cins is None else tuple(cins.split()),
        "usual_outputs": tuple(couts.split()) or None,
        "integers": tuple(integers.split()),
        "statistics": tuple(statistics.split()),
        "__doc__": function.__doc__,
        "__module__": function.__module__,
    }
    return type(name, (Leaf,), body)


def block(**settings: Any) -> Callable[[Callable[..., Any]], type[Leaf]]:
    """Declare a layer by the function that computes it; the function's name is the layer's."""
    return lambda function: leaf(function.__name__, function, **settings)
