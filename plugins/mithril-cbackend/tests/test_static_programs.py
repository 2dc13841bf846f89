"""Programs with embedded weights: no slower than those with bound weights, in every family of models."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import (
    LSTM,
    BatchNorm2d,
    Conv2d,
    Gelu,
    LayerNorm,
    Linear,
    Model,
    Silu,
    TransformerEncoderLayer,
)
from mithril_cbackend import tir as t
from mithril_cbackend.program.executable import executables


def chain(*layers: Any) -> Model:
    model = Model()
    for layer in layers:
        model += layer
    return model


FAMILIES: dict[str, tuple[Callable[[], Model], list[int]]] = {
    "rows of one sequence": (lambda: chain(Linear(384, 1536), Gelu(), Linear(1536, 384)), [1, 128, 384]),
    "rows of a batch": (lambda: chain(LayerNorm(64), Linear(64, 256), Gelu(), Linear(256, 64)), [2, 32, 64]),
    "encoder": (lambda: chain(TransformerEncoderLayer(64, 4, 128, activation="gelu")), [2, 32, 64]),
    "recurrent": (lambda: chain(LSTM(128, 128)), [1, 16, 128]),
    "images": (lambda: chain(Conv2d(8, 16, 3, padding=1), BatchNorm2d(16), Silu()), [1, 8, 24, 24]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_embedded_weights_take_the_time_of_bound_ones(family: str) -> None:
    build, shape = FAMILIES[family]
    x = {"input": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    programs = []
    for is_static in (False, True):
        backend = ml.CBackend(num_threads=1)
        compiled = ml.compile(build(), backend, shapes={"input": shape}, inference=True, static_inference=is_static)
        compiled.bind(compiled.randomize_params(seed=0))
        compiled(x)
        compiled(x)
        programs.append(compiled)
    (executable,) = executables(programs[1])
    assert {array.ctypes.data % 64 for array in executable.layout.constants.values()} <= {0}
    ratios = []
    for _ in range(9):
        seconds = []
        for compiled in programs:
            start = time.process_time()
            for _ in range(3):
                compiled(x)
            seconds.append(time.process_time() - start)
        ratios.append(seconds[1] / seconds[0])
    assert np.median(ratios) < 1.3


def test_positions_that_all_lanes_share_are_numbers() -> None:
    code = t.Code()
    _, target = t.pointer("target", "float32")
    with code.loop("row", 6) as row, code.loop("lane", 16, t.VECTORIZED) as lane:
        shared = code.let(row % 4, "shared")
        differs = code.let((lane + shared) % 3, "differs")
        code.store(target, code.let(shared * 16, "start") + lane + differs, t.const(0, "float32"))
    sizes = {name: buffer.shape[0] for name, buffer in code.names.items()}
    assert sizes == {"shared": 1, "differs": 16, "start": 1}
