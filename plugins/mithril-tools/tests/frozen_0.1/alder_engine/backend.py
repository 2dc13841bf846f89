# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""The backend: a table of rows, array helpers, and a function around each program."""

from dataclasses import replace

import numpy as np

from mithril.backend import (
    NUMPY_NAMES,
    UNARY,
    Lowerings,
    SourceBackend,
    as_numpy,
    corrections,
    functions,
    operators,
    python_control,
)
from mithril.graph import bool_, dtype as as_dtype, float32, float64, int32, int64


def on_host(function, types, *arrays):
    """Call a reference of NumPy, which returns a list of results; ``types`` are their dtypes and shapes."""
    return [np.asarray(result) for result in function(*arrays)]


def has_elements(node):
    return 0 not in node.operands[0].type.shape


table = Lowerings("alder", imports=["import numpy as np"], host=on_host, copy="np.array({x})")
operators(table)
functions(table, "np", (*UNARY, "sign", "maximum", "minimum", "logical_or", "logical_and"), called=NUMPY_NAMES)
table.rows(
    {
        "cast": "{x}.astype({dtype})",
        "neg": "-{x}",
        "full": "np.full({shape}, {value}, {dtype})",
        "sum": "np.sum({x}, axis={axis}, keepdims={keepdims}, dtype={dtype})",
        "where": "np.where({condition}, {a}, {b})",
        "concat": "np.concatenate([{xs}], axis={axis})",
    }
)
table.row("matmul", "np.matmul({a}, {b})", when=lambda node: node.result.dtype.is_float)
table.row("broadcast_to", "np.broadcast_to({x}, {shape})", view=True)
table.row("reshape", "np.reshape({x}, {shape})", view=True)
table.row("transpose", "np.transpose({x}, {perm})", view=True)
table.correct(corrections.cast)
python_control(table, stack="np.stack({rows})", empty="np.empty({shape}, {dtype})")


@table.function("max", when=has_elements)
def _(call):
    """Write a line before the expression."""
    name = call.temp("largest")
    call.line(f"{name} = np.max({call.x}, axis={call.axis}, keepdims={call.keepdims})")
    return f"np.asarray({name}, {call.dtype()})"


class AlderBackend(SourceBackend):
    """NumPy; ``calls`` counts the programs that ran."""

    name = "alder"
    dtypes = frozenset({bool_, int32, int64, float32, float64})
    tables = {"portable": table}

    def __init__(self, *, tag="plain", **settings):
        super().__init__(**settings)
        self.tag, self.calls = tag, 0

    @property
    def capabilities(self):
        return replace(super().capabilities, recompiles=False)

    def finish(self, forward, graph, options):
        def call(params, inputs):
            self.calls += 1
            with np.errstate(all="ignore"):
                return forward(params, inputs)

        return call

    def array(self, data, dtype=None):
        return np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)

    def to_numpy(self, array):
        return np.asarray(array)

    def is_array(self, x):
        return isinstance(x, np.ndarray | np.generic)

    @classmethod
    def diagnose(cls):
        return {"numpy": np.__version__}


class BoardBackend(AlderBackend):
    """The same on a board."""
