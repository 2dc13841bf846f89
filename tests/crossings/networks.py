"""The networks of the rows: each as a list of layers or a model, with its input, and as a module of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mithril as ml
from mithril import ops
from mithril.models import (
    GRU,
    LSTM,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
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

from . import third_party


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
    last: Callable[[], Layer] = lambda: Linear(3, bias=False)  # a layer that takes the place of the last one


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


class Decaying(Layer):
    """A state that decays along the second axis, by a factor of each feature: a scan with a parameter."""

    def build(self, input: Any) -> Any:
        rows = ops.transpose(input, perm=(1, 0, 2))
        factors = ops.sigmoid(self.param("factors", (input.shape[-1],), "normal"))
        _, states = ops.scan(lambda state, row: (state * factors + row,) * 2, ops.sum(rows, axis=0) * 0.1, rows)
        return ops.transpose(states, perm=(1, 0, 2))


def scanned() -> list[Layer]:
    return [Linear(4, name="first"), Decaying(), Linear(3, name="last")]


class Masked(Layer):
    """An encoder whose mask depends on the input: rows with a negative sum are attended to by no row."""

    def __init__(self) -> None:
        self.encoder = TransformerEncoder(2, 8, heads=2, feedforward=8, dropout=0.0, activation="gelu", causal=True)

    def build(self, input: Any) -> Any:
        return self.encoder(input, mask=ops.sum(input, axis=-1)[:, None, None, :] > -100.0)


def masked() -> list[Layer]:
    return [Linear(8, name="first"), Masked(), Linear(3, name="last")]


class Heads(Layer):
    """A branch and a loop of two results each, of which a model reads the first ones only."""

    outputs = ("read", "unread")

    def __init__(self) -> None:
        self.other = Linear(6)

    def build(self, input: Any) -> Any:
        first, second = ops.cond(
            ops.sum(input) > 0.5,
            lambda x: (ops.tanh(x), self.other(x)),
            lambda x: (ops.sin(x), x),
            input,
        )
        return ops.while_loop(
            lambda s: s[2] < 2,
            lambda s: (ops.tanh(s[0] + 0.5), self.other(s[1]), s[2] + 1),
            (first, second, 0),
            max_trips=2,
        )[:2]


def bent() -> list[Layer]:
    return [Linear(8, name="first"), third_party.Bend(), Linear(3, name="last")]


def unread() -> Model:
    model = Model()
    model |= Linear(6, name="first")(input="input", output="h")
    model |= Heads(name="heads")(input="h", read="y", unread="z")
    model |= Linear(3, name="last")(input="y", output="output")
    return model.set_outputs("output")


def unet() -> Model:
    model = Model()
    model |= Conv2d(2, 3, 3, padding=1, name="first")(input="input", output="fine")
    model |= AvgPool2d(2)(input="fine", output="small")
    model |= Conv2d(3, 4, 3, padding=1)(input="small", output="coarse")
    model |= Tanh()(input="coarse", output="active")
    model |= ConvTranspose2d(4, 3, 2, stride=2)(input="active", output="large")
    model |= Concat(axis=1)(input0="fine", input1="large", output="both")
    model |= Conv2d(6, 3, 1, name="last")(input="both", output="output")
    return model


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


CUSTOM = (Decaying, Masked, Heads, third_party.Bend)  # layers that files of models need


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
    "scan": Network(("B", "T", 6), scanned),
    "masked": Network(("B", "T", 6), masked),
    "foreign": Network(("B", 6), bent),
    "unread": Network(("B", 6), model=unread),
    "unet": Network(("B", 2, 4, 4), model=unet, last=lambda: Conv2d(6, 3, 1, bias=False)),
    "decoder": Network(("B", "T"), tokens=97, last=lambda: Linear(97, bias=False)),
}
