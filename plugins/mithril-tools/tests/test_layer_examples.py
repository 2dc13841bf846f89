"""Every layer of the library by its example: its JSON, and the figures of its summary, which NumPy confirms."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mithril as ml
from mithril.models import Model
from mithril_tools.reference.layers import construction, layer_classes, layer_with_inputs

CLASSES = [cls for cls in layer_classes().values() if construction(cls)]


def model_of(layer, shapes):
    model = Model()
    model |= layer(**{name: name for name in shapes}, **{name: name for name in layer.outputs})
    return model


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_json_returns_the_layer(cls):
    layer, shapes, types = layer_with_inputs(cls)
    model = model_of(layer, shapes)
    text = model.to_json()
    again = Model.from_json(text)
    assert again.to_json() == text
    assert again.summary(shapes=shapes, types=types) == model.summary(shapes=shapes, types=types)
    assert again.to_json() == model.to_json() == text  # building a layer does not change it


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_summary_agrees_with_a_call(cls):
    layer, shapes, types = layer_with_inputs(cls)
    model = model_of(layer, shapes)
    text = model.summary(shapes=shapes, types=types, width=300)
    compiled = ml.compile(model, "numpy", shapes=shapes, types=types, inference=True)
    params = compiled.randomize_params()
    inputs = {name: np.ones(shape, types.get(name, "float32")) for name, shape in shapes.items()}
    results = compiled.evaluate(params, inputs, state=compiled.initial_state())
    results = results[0] if isinstance(results, tuple) else results
    array = np.asarray(results.get(layer.outputs[0], next(iter(results.values()))))
    count = sum(np.asarray(p).size for p in params.values())
    assert f"\n{count:,} parameters" in text
    assert f": {count:,} parameters" in compiled.summary()
    row = next(line for line in text.splitlines() if line.strip().startswith(model.steps[0].name))
    shape = str(ml.TensorType(ml.dtype(array.dtype.name), array.shape))
    assert re.search(r"\w+\[[\d, ]*\]", row)[0] == shape
    if cls.__name__ not in ("Dropout", "Identity"):  # their programs have no operations
        assert shape in compiled.summary()
