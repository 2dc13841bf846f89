"""Displays in notebooks: well-formed HTML that shows the content and escapes names."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model, Relu, Sequential, TransformerEncoder, Wrapper

VOID = {"polyline", "rect", "br"}


class Parser(HTMLParser):
    """Collects the text, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.content = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        assert tag != "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.content += data


def text(shown: Any) -> str:
    parser = Parser()
    parser.feed(shown._repr_html_())
    assert parser.open == []
    return parser.content


@pytest.fixture(scope="module")
def compiled() -> Any:
    model = Model(Linear(4), Relu(), Linear(2))
    compiled = ml.compile(model, "numpy", shapes={"input": ["B", 3]}, profile=True)
    params = compiled.randomize_params()
    compiled.evaluate(
        params, {"input": np.ones((5, 3), np.float32)}, output_gradients={"output": np.ones((5, 2), np.float32)}
    )
    return compiled


def test_models_show_their_layers_folded() -> None:
    encoder = Model(TransformerEncoder(12, 8, heads=2))
    content = text(encoder)
    assert content.count("self_attn: MultiHeadAttention") == 12
    assert encoder._repr_html_().count("<details>") == 1 + 12 * 2  # the stack, its layers, their attention


def test_names_are_escaped() -> None:
    model = Model()
    layer = Linear(2)
    layer.name = "a<script>"
    model |= layer(input="x", output="<b>")
    assert "a<script>" in text(model)


def test_compiled_models_show_layers_and_programs(compiled: Any) -> None:
    content = text(compiled)
    assert "linear_1" in content
    assert "gradient program (" in content


def test_symbolic_models_without_sizes_are_shown() -> None:
    assert "CompiledModel 'model' on numpy" in text(ml.compile(Model(Linear(4)), "numpy"))


def test_layers_show_their_layers() -> None:
    assert "0: Linear(4)" in text(Sequential(Linear(4), Relu()))
    assert "Linear(4)" in text(Wrapper(Linear(4)))


def test_explanations_are_tables_and_text(compiled: Any) -> None:
    content = text(compiled.explain())
    assert isinstance(compiled.explain(), str) and "linear-activation" in content
    assert "program for input: f32[B, 3]" in content
    assert "kinddecisionplacespecialized" in content
    assert "no decisions were needed" in text(ml.compile(Model(Linear(4)), "numpy").explain())


def test_displays_fit_a_narrow_cell(compiled: Any) -> None:
    """Tables and preformatted text scroll within the cell, and prose is broken; nothing else has a fixed width."""
    for shown in (compiled, compiled.memory_report(), compiled.explain(), compiled.get_profile_stats()):
        content = shown._repr_html_()
        assert content.count("<table") == content.count('<div style="overflow-x:auto;max-width:100%"><table')
        assert all("overflow-x:auto" in tag or "pre-wrap" in tag for tag in re.findall("<pre[^>]*>", content))


def test_reports(compiled: Any) -> None:
    assert "linear_1" in text(compiled.memory_report())
    assert "1 calls" in text(compiled.get_profile_stats())
    text(compiled.decisions)


def test_training() -> None:
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    trainer = ml.Trainer(Model(Linear(1)), ml.SGD(0.1), loss="mse_loss", backend="numpy", progress=False)
    assert "0 epochs" in text(trainer)
    trainer.fit(ml.DataLoader((x, x[:, :1]), batch_size=4), 3)
    assert trainer.history._repr_html_().count("<polyline") >= 2
    assert "3 epochs" in text(trainer)
