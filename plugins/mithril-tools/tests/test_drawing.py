"""Pictures: every box has a label, boxes do not overlap, edges go down, and many layers are folded."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

import mithril as ml
from mithril.backend import format_bytes
from mithril.models import Conv2d, Flatten, Linear, Model, Relu, Softmax, TransformerEncoderLayer
from mithril_tools.visualization.layout import Box, place
from mithril_tools.visualization.observer import html
from mithril_tools.visualization.picture import DrawingStyle, svg


def net():
    model = Model()
    model |= Linear(8, name="first")(input="x", output="h")
    model |= Relu(name="act")(input="h", output="a")
    model |= Linear(2, name="last")(input="a", output="output")
    return model


def graph(**options):
    return ml.compile(net(), "numpy", shapes={"x": [3, 4]}, optimization_level="none", **options).graph


def words(text):
    return [t.text for t in ET.fromstring(text).iter() if t.text and t.text.strip()]


def test_every_operation_layer_and_output_is_named():
    labels = words(svg(graph()))
    for word in ("x", "input", "linear", "first", "act", "last", "output", "float32 [3, 8]"):
        assert word in labels


def test_the_look_decides_what_is_written():
    plain = words(svg(graph(), DrawingStyle(show_shapes=False, show_types=False)))
    assert not any("float32" in w or "[" in w for w in plain)


def memory_words(compiled, **look):
    """Return the labels of a drawing of the latest program with its memory."""
    memory = compiled.programs[-1].memory
    return words(svg(memory.graph, DrawingStyle(memory=memory, **look)))


def test_memory_in_pictures_is_that_of_the_report():
    compiled = ml.compile(net(), "numpy", shapes={"x": [3, 4]})
    report = compiled.memory_report()
    layers = [word for word in memory_words(compiled, depth=1) if word.startswith("values")]
    assert layers == [f"values {format_bytes(row.activations)}" for row in report.layers]
    sizes = [int(word.split()[0]) for word in memory_words(compiled) if word.endswith(" B")]
    assert sum(sizes) == report.values == sum(row.activations for row in report.layers)
    caption = next(word for word in memory_words(compiled) if word.startswith("memory"))
    assert f"values {format_bytes(report.workspace)}, peak {format_bytes(report.peak)}, {report.use.label}" in caption


def test_views_take_no_memory_in_pictures():
    model = Model()
    model |= Flatten()(input="x", output="flat")
    model |= Relu()(input="flat", output="output")
    assert "view" in memory_words(ml.compile(model, "numpy", shapes={"x": [2, 3, 4]}))


def test_memory_of_open_sizes_is_drawn_at_their_bound():
    bounded = ml.compile(net(), "numpy", shapes={"x": [ml.Dim("B", high=32), 4]})
    assert any(word.startswith("memory at B=32: values") for word in memory_words(bounded))
    free = ml.compile(net(), "numpy", shapes={"x": ["B", 4]})
    assert "memory: depends on a size without a bound" in memory_words(free)


def test_boxes_do_not_overlap_and_edges_go_down():
    boxes = [Box(40 + 7 * (k % 5), 20) for k in range(40)]
    edges = [(k, j) for k in range(40) for j in (k + 1, k + 3, 2 * k + 5) if j < 40]
    layout = place(boxes, edges)
    for a, b in edges:
        assert boxes[a].y + boxes[a].height <= boxes[b].y
    for k, one in enumerate(boxes):
        assert 0 <= one.x - one.width / 2 and one.x + one.width / 2 <= layout.width + 1e-6
        for other in boxes[k + 1 :]:
            if one.y == other.y:
                assert abs(one.x - other.x) >= (one.width + other.width) / 2 - 1e-6


def test_many_operations_are_folded_into_layers():
    model = Model()
    for k in range(8):
        model += TransformerEncoderLayer(8, 2, 16, name=f"block{k}")
    compiled_graph = ml.compile(model, "numpy", shapes={"input": [2, 4, 8]}, optimization_level="none").graph
    labels = words(svg(compiled_graph))
    assert "block3" in labels and "linear" not in labels
    assert "linear" in words(svg(compiled_graph, DrawingStyle(depth=99)))
    page = html(compiled_graph)
    assert page.count("<details>") == page.count("</details>") > 8


def test_deep_models_fit_on_a_page():
    stack = Model(name="h")
    for k in range(12):
        stack += TransformerEncoderLayer(8, 2, 16, name=str(k))
    model = Model()
    model += stack
    compiled_graph = ml.compile(model, "numpy", shapes={"input": [2, 4, 8]}, inference=True).graph
    for labels in (words(svg(compiled_graph)), words(html(compiled_graph).partition("<svg")[2].join(["<svg", ""])
                   .partition("</svg>")[0] + "</svg>")):  # fmt: skip
        assert {f"h.{k}" for k in range(12)} <= set(labels)
        assert "h.0.linear1" not in labels
        assert any("layer_norm" in label and "linear" in label for label in labels)


def fills(text):
    """Return the kind of each box by its title."""
    groups = [g for g in ET.fromstring(text).iter() if g.tag.endswith("}g") and len(g) > 1 and g[0].get("rx")]
    return {g[1].text: g[0].get("class") for g in groups}


def test_operations_are_colored_by_kind_and_show_attributes():
    model = Model()
    model += Conv2d(4, kernel_size=3, stride=2)(input="x")
    model += Relu()
    model += Flatten()
    model += Linear(3)
    model += Softmax()
    drawn = svg(ml.compile(model, "numpy", shapes={"x": [1, 3, 9, 9]}, inference=True).graph)
    kinds = fills(drawn)
    conv = next(title for title in kinds if title.startswith("conv"))
    assert kinds[conv] == kinds["linear"] == "product"
    assert kinds["reshape"] == "movement"
    assert kinds["softmax"] == "reduction"
    assert any("stride=(2, 2)" in word for word in words(drawn))
    assert {"product", "movement", "reduction", "input", "output"} <= set(words(drawn))  # the legend
    assert "prefers-color-scheme:dark" in drawn


def test_activations_and_gradients_are_named():
    compiled = ml.compile(net(), "numpy", shapes={"x": [3, 4]})
    assert "linear, relu" in words(svg(compiled.graph))
    params, gradient = compiled.randomize_params(), {"output": np.ones((3, 2), np.float32)}
    compiled.evaluate(params, {"x": np.ones((3, 4), np.float32)}, output_gradients=gradient)
    assert ET.fromstring(svg(compiled.programs[-1].executable.graph))[0].text == "model: gradients"
    assert "<title>model: gradients</title>" in html(compiled.programs[-1].executable.graph)


def test_an_empty_graph_and_a_huge_one_are_drawn():
    model = Model()
    model |= Relu()(input="x", output="output")
    assert "relu" in words(svg(ml.compile(model, "numpy", shapes={"x": [2]}).graph))


@pytest.mark.parametrize("form", ["svg", "html", "dot"])
def test_visualize_writes_the_file(tmp_path, form):
    path = tmp_path / f"deep/net.{form}"
    options = {"format": form, "show_shapes": True, "show_types": True, "show_memory": True, "output_path": str(path)}
    compiled = ml.compile(net(), "numpy", shapes={"x": [3, 4]}, visualize=True, viz_options=options)
    assert "first" in path.read_text()
    assert f"peak {format_bytes(compiled.memory_report().peak)}" in path.read_text()
    assert str(path) in str(compiled.decisions)


def test_mistakes_in_viz_options_are_the_users(tmp_path):
    with pytest.raises(ml.OptionError, match="unknown key 'formt' of viz_options"):
        ml.compile(net(), "numpy", shapes={"x": [3, 4]}, visualize=True, viz_options={"formt": "svg"})
    with pytest.raises(ml.OptionError, match="unknown picture format 'png'"):
        ml.compile(net(), "numpy", shapes={"x": [3, 4]}, visualize=True, viz_options={"format": "png"})
