"""Common parts of composites are computed once, although composites are decomposed after the passes."""

from __future__ import annotations

import numpy as np

import mithril as ml
from mithril.models import Gelu, Linear, Model


def test_the_error_function_of_gelu_is_computed_once(backend):
    """The gradient needs it as well."""
    model = Model()
    model += Linear(4)
    model += Gelu()
    compiled = ml.compile(model, backend, shapes={"input": [3, 4]})
    compiled.evaluate(compiled.randomize_params(0), {"input": np.ones((3, 4), np.float32)}, np.ones((3, 4), np.float32))
    ran = [node.op.name for node in compiled.programs[-1].executable.graph.nodes]
    assert ran.count("erf") <= 1, str(compiled.programs[-1].executable.graph)
