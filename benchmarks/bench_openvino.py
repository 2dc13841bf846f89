"""The OpenVINO backend against models that are written in OpenVINO by hand, interleaved, on one thread.

``python benchmarks/bench_openvino.py``: microseconds of the processor, and the ratio to the model by hand. Weights are
inputs of both, as in a program of mithril; "constant weights" is the model by hand that holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
import openvino.opset15 as ov
from interleaved import interleaved, table

import mithril as ml
from mithril.models import Conv2d, Flatten, Linear, MaxPool2d, Relu, Sequential

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def mlp(x: Any, w: dict[str, Any]) -> Any:
    for k in (0, 2, 4):
        x = ov.add(ov.matmul(x, w[f"{k}.weight"], False, True), w[f"{k}.bias"])
        x = ov.relu(x) if k < 4 else x
    return x


def cnn(x: Any, w: dict[str, Any]) -> Any:
    for k in (0, 3):
        x = ov.convolution(x, w[f"{k}.weight"], [1, 1], [1, 1], [1, 1], [1, 1])
        bias = ov.reshape(w[f"{k}.bias"], np.array([1, -1, 1, 1], np.int64), False)
        x = ov.relu(ov.add(x, bias))
        x = ov.max_pool(x, [2, 2], [1, 1], [0, 0], [0, 0], [2, 2]).output(0)
    x = ov.reshape(x, np.array([x.get_shape()[0], -1], np.int64), False)
    return ov.add(ov.matmul(x, w["7.weight"], False, True), w["7.bias"])


def request(by_hand: Callable[..., Any], x: Array, weights: dict[str, Array], constant: bool) -> Callable[[], Any]:
    """Return a call of a model by hand, which returns new arrays as mithril does."""
    parameters = [ov.parameter(x.shape, np.float32)]
    values = {n: ov.constant(w) if constant else ov.parameter(w.shape, np.float32) for n, w in weights.items()}
    parameters += [] if constant else list(values.values())
    model = openvino.Model([ov.result(by_hand(parameters[0], values))], parameters)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    run = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    arrays = [x] if constant else [x, *weights.values()]
    return lambda: run.infer(arrays, share_inputs=True)[0]


def main() -> None:
    cases = {
        "MLP 32x256": (Sequential(Linear(512), Relu(), Linear(512), Relu(), Linear(10)), mlp, (32, 256)),
        "CNN 8x3x32x32": (
            Sequential(
                Conv2d(16, kernel_size=3, padding=1), Relu(), MaxPool2d(2),
                Conv2d(32, kernel_size=3, padding=1), Relu(), MaxPool2d(2), Flatten(),
                Linear(10),
            ),
            cnn,
            (8, 3, 32, 32),
        ),
    }  # fmt: skip
    rows = {}
    for name, (model, by_hand, shape) in cases.items():
        x = RNG.normal(size=shape).astype(np.float32)
        options = {"shapes": {"input": list(shape)}, "num_threads": 1, "inference": True}
        compiled = ml.compile(model, "openvino", **options)
        native = ml.compile(model, "openvino", semantics="native", **options)
        params = compiled.randomize_params(seed=0)
        weights = dict(params)
        ways = {
            "by hand": request(by_hand, x, weights, constant=False),
            "mithril": lambda c=compiled, p=params, i={"input": x}: c.evaluate(p, i)["output"],
            'semantics="native"': lambda c=native, p=params, i={"input": x}: c.evaluate(p, i)["output"],
            "constant weights": request(by_hand, x, weights, constant=True),
        }
        np.testing.assert_allclose(ways["mithril"](), ways["by hand"](), rtol=1e-3, atol=1e-4)
        rows[name] = interleaved(ways, seconds=8.0, clock=time.process_time)
    table("us", rows, "by hand")


if __name__ == "__main__":
    main()
