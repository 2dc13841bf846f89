"""OpenVINO and tinygrad through mithril against programs that are written in them by hand, interleaved.

``python benchmarks/bench_engines.py openvino`` or ``tinygrad``: microseconds of the processor, and the ratio to the
program by hand. Weights are inputs of both, as in a program of mithril; "constant weights" is the model of OpenVINO by
hand that holds them. OpenVINO runs on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import harness
import numpy as np

import mithril as ml
from mithril.models import Conv2d, Flatten, Linear, MaxPool2d, Relu, Sequential, TransformerEncoderLayer

WIDTH, HEADS, LAYERS = 64, 4, 2
Weights = dict[str, Any]
Run = Callable[[], Any]


def models() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return models and the shapes of their inputs, by the name of the function that computes them by hand."""
    layers = [TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0) for _ in range(LAYERS)]
    return {
        "mlp": (Sequential(Linear(512), Relu(), Linear(512), Relu(), Linear(10)), (32, 256)),
        "cnn": (
            Sequential(
                Conv2d(16, kernel_size=3, padding=1), Relu(), MaxPool2d(2),
                Conv2d(32, kernel_size=3, padding=1), Relu(), MaxPool2d(2), Flatten(),
                Linear(10),
            ),
            (8, 3, 32, 32),
        ),
        "encoder": (Sequential(*layers), (2, 16, WIDTH)),
    }  # fmt: skip


class OpenVINO:
    """Models of OpenVINO; a call returns new arrays, as mithril's does."""

    options: ClassVar[dict[str, Any]] = {"num_threads": 1}

    @staticmethod
    def mlp(x: Any, w: Weights) -> Any:
        import openvino.opset15 as ov

        for k in (0, 2, 4):
            x = ov.add(ov.matmul(x, w[f"{k}.weight"], False, True), w[f"{k}.bias"])
            x = ov.relu(x) if k < 4 else x
        return x

    @staticmethod
    def cnn(x: Any, w: Weights) -> Any:
        import openvino.opset15 as ov

        for k in (0, 3):
            x = ov.convolution(x, w[f"{k}.weight"], [1, 1], [1, 1], [1, 1], [1, 1])
            bias = ov.reshape(w[f"{k}.bias"], np.array([1, -1, 1, 1], np.int64), False)
            x = ov.relu(ov.add(x, bias))
            x = ov.max_pool(x, [2, 2], [1, 1], [0, 0], [0, 0], [2, 2]).output(0)
        x = ov.reshape(x, np.array([x.get_shape()[0], -1], np.int64), False)
        return ov.add(ov.matmul(x, w["7.weight"], False, True), w["7.bias"])

    @classmethod
    def ways(cls, function: Callable[[Any, Weights], Any], x: Any, weights: Weights) -> dict[str, Run]:
        import openvino
        import openvino.opset15 as ov

        def request(constant: bool) -> Run:
            parameters = [ov.parameter(x.shape, np.float32)]
            values = {n: ov.constant(w) if constant else ov.parameter(w.shape, np.float32) for n, w in weights.items()}
            parameters += [] if constant else list(values.values())
            model = openvino.Model([ov.result(function(parameters[0], values))], parameters)
            settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
            run = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
            arrays = [x] if constant else [x, *weights.values()]
            return lambda: run.infer(arrays, share_inputs=True)[0]

        return {"by hand": request(constant=False), "constant weights": request(constant=True)}


class Tinygrad:
    """TinyJits, whose results are overwritten by the next call."""

    options: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def mlp(x: Any, w: Weights) -> Any:
        for k in (0, 2, 4):
            x = x.linear(w[f"{k}.weight"].T, w[f"{k}.bias"])
            x = x.relu() if k < 4 else x
        return x

    @staticmethod
    def cnn(x: Any, w: Weights) -> Any:
        for k in (0, 3):
            x = x.conv2d(w[f"{k}.weight"], w[f"{k}.bias"], padding=1).relu().max_pool2d(2)
        return x.flatten(1).linear(w["7.weight"].T, w["7.bias"])

    @staticmethod
    def encoder(x: Any, w: Weights) -> Any:
        for k in range(LAYERS):

            def linear(x: Any, name: str, k: int = k) -> Any:
                return x.linear(w[f"{k}.{name}.weight"].T, w[f"{k}.{name}.bias"])

            def norm(x: Any, name: str, k: int = k) -> Any:
                return x.layernorm() * w[f"{k}.{name}.weight"] + w[f"{k}.{name}.bias"]

            q, v, kv = (
                linear(x, f"self_attn.{name}").reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)
                for name in ("query", "value", "key")
            )
            y = q.scaled_dot_product_attention(kv, v).transpose(1, 2).reshape(x.shape)
            x = norm(x + linear(y, "self_attn.output"), "norm1")
            x = norm(x + linear(linear(x, "linear1").relu(), "linear2"), "norm2")
        return x

    @classmethod
    def ways(cls, function: Callable[[Any, Weights], Any], x: Any, weights: Weights) -> dict[str, Run]:
        from tinygrad import Context, TinyJit

        jit = TinyJit(lambda x, **w: function(x, w).realize())
        with Context(PARALLEL=0):
            jit(x, **weights), jit(x, **weights)  # captures the second call
        return {"by hand": lambda: jit(x, **weights)}


def main() -> None:
    engines = {"openvino": OpenVINO, "tinygrad": Tinygrad}
    for name in harness.arguments(__doc__, "ENGINE").words or engines:
        engine, rows = engines[name], {}
        for kind, (model, shape) in models().items():
            if not hasattr(engine, kind):
                continue
            options = {"shapes": {"input": list(shape)}, "inference": True, **engine.options}
            compiled = [ml.compile(model, name, semantics=s, **options) for s in ("portable", "native")]
            backend, params = compiled[0].backend, compiled[0].randomize_params(seed=0)
            x = backend.array(np.random.default_rng(0).normal(size=shape).astype(np.float32))
            calls = [lambda c=c, p=params, x=x: c.evaluate(p, {"input": x})["output"] for c in compiled]
            by_hand, *more = engine.ways(getattr(engine, kind), x, dict(params)).items()
            ways = dict([by_hand, ("mithril", calls[0]), ('semantics="native"', calls[1]), *more])
            for _ in range(3):
                results = [backend.to_numpy(way()) for way in ways.values()]
            for result in results[1:]:
                np.testing.assert_allclose(result, results[0], rtol=1e-3, atol=1e-4)
            rows[f"{kind} {'x'.join(map(str, shape))}"] = harness.interleaved(ways, seconds=8.0)
        harness.table(f"{name}, us", rows, "by hand")


if __name__ == "__main__":
    main()
