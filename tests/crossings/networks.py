"""The networks of the rows: each as a list of layers or a model, with its input, and as a module of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mithril as ml
from mithril.models import (
    GRU,
    LSTM,
    Add,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Gelu,
    GlobalAvgPool2d,
    If,
    Layer,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    Model,
    Relu,
    Residual,
    Tanh,
    TransformerEncoder,
    While,
)


@dataclass(frozen=True)
class Network:
    """``layers`` or ``model`` builds it; ``axes`` are those of its input, ``tokens`` counts its tokens, if any.

    The layer that surgery changes is named ``last``, the one that it freezes ``first``.
    """

    axes: tuple[str | int, ...]
    layers: Callable[[], Sequence[Layer]] | None = None
    model: Callable[[], Model] | None = None
    module: Callable[[], Any] | None = None
    tokens: int = 0
    features: int = 3  # of the output


def mlp() -> list[Layer]:
    return [Linear(8, name="first"), Tanh(), Linear(3, name="last")]


def dropped() -> list[Layer]:
    return [Linear(8, name="first"), Gelu(), Dropout(0.25), Linear(3, name="last")]


def convolutions() -> list[Layer]:
    inner = Model(Conv2d(4, 4, 3, padding=1), Relu(), name="inner")
    first = Conv2d(2, 4, 3, padding=1, name="first")
    return [first, BatchNorm2d(4), Relu(), Residual(inner), GlobalAvgPool2d(), Linear(3, name="last")]


def encoder() -> list[Layer]:
    layers = TransformerEncoder(1, 8, heads=2, feedforward=8, dropout=0.0, activation="gelu")
    return [Linear(8, name="first"), layers, Linear(3, name="last")]


def recurrent() -> list[Layer]:
    return [Linear(4, name="first"), LSTM(5), Linear(3, name="last")]


def gated() -> list[Layer]:
    return [Linear(4, name="first"), GRU(5), LayerNorm(), Linear(3, name="last")]


def experts() -> list[Layer]:
    return [Linear(8, name="first"), MixtureOfExperts(3, 8, active=2, balance=0.0), Linear(3, name="last")]


def tied() -> Model:
    model = Model()
    table = ml.IOKey("table", trainable=True)
    model |= Embedding(11, 8, name="first")(input="input", weight=table, output="x")
    model |= Tanh()(input="x", output="h")
    model |= Linear(11, bias=False, name="last")(input="h", weight="table", output="output")
    return model


def loop() -> Model:
    block = Model()
    block |= Linear(6, name="inner")(input="state", output="linear")
    block |= Tanh()(input="linear", output="new")
    block |= Add()(left="new", right="input", output="next")
    model = Model()
    model |= Linear(6, name="first")(input="input", output="begin")
    model |= While(
        condition="step < 3",
        body=block,
        initial_state={"state": "begin", "step": 0},
        loop_vars={"state": "next", "step": "step + 1"},
        output_vars={"final": "state"},
        max_trips=3,
    )(output="final")
    model |= Linear(3, name="last")(input="final", output="output")
    return model


def branch() -> Model:
    model = Model()
    model |= Linear(6, name="first")(input="input", output="h")
    model |= If(
        condition="is_training",
        then_branch=Tanh()(input="h", output="kept"),
        else_branch=Relu()(input="h", output="kept"),
    )
    model |= Linear(3, name="last")(input="kept", output="output")
    return model


def module_of(*, conv: bool = False, recurrent: bool = False) -> Any:
    """Return a small module of PyTorch, with the same weights each time."""
    import torch
    from torch import nn

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if conv:
                self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
                self.last = nn.Linear(4, 3)
            elif recurrent:
                self.first, self.lstm, self.last = nn.Linear(6, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
            else:
                self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, input: Any) -> Any:
            h = self.first(input)
            if conv:
                h = torch.relu(self.norm(h)).mean((2, 3))
            elif recurrent:
                h = self.lstm(h)[0]
            else:
                h = torch.tanh(h)
            return self.last(h)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Twin().eval()


NETWORKS = {
    "mlp": Network(("B", 6), mlp, module=module_of),
    "dropout": Network(("B", 6), dropped),
    "convolutions": Network(("B", 2, 5, 5), convolutions, module=lambda: module_of(conv=True)),
    "encoder": Network(("B", "T", 6), encoder),
    "lstm": Network(("B", "T", 6), recurrent, module=lambda: module_of(recurrent=True)),
    "gru": Network(("B", "T", 6), gated),
    "experts": Network(("B", 6), experts),
    "tied": Network(("B", "T"), model=tied, tokens=11),
    "loop": Network(("B", 6), model=loop),
    "branch": Network(("B", 6), model=branch),
    "decoder": Network(("B", "T"), tokens=97, features=97),
}
