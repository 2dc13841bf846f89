"""Running models by the reference interpreter, for tests of wiring and layers."""

import numpy as np

from mithril.compiler.initializers import initialize
from mithril.graph import verify
from mithril.graph.dims import TensorType
from mithril.graph.dtypes import dtype
from mithril.graph.evaluation import evaluate
from mithril.models.language.flatten import flatten
from mithril.models.language.trace import trace_model


def graph_of(model, inputs, outputs=None, inference=False, **options):
    flat = flatten(model, outputs, inference)
    types = {n: TensorType(dtype(a.dtype), a.shape) for n, a in arrays(inputs).items()}
    return verify(trace_model(flat, types, **options))


def arrays(inputs):
    return {n: np.asarray(a) for n, a in inputs.items()}


def run(model, inputs, params=None, **options):
    """Outputs, and the parameters and states they were made with."""
    graph = graph_of(model, inputs, **options)
    start = initialize(graph.with_role("param", "state"), 0) | (params or {})
    arguments = {n: a for n, a in arrays(inputs).items() if n in {i.name for i in graph.inputs}}
    return evaluate(graph, {**start, **arguments}), start


def line_of(function, text):
    """Return the line number of a function's source that contains a text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


def f32(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
