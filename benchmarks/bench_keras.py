"""Compare Keras archives on the backends with Keras itself: layers, applications with random weights, malformed files.

KERAS_BACKEND=jax python benchmarks/bench_keras.py [layers|applications|malformed] [BACKEND...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril_testing.damaged_files import attempts

TESTS = Path(__file__).parents[1] / "plugins/mithril-keras/tests"
sys.path.insert(0, str(TESTS))
BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
APPLICATIONS = [
    "ResNet50",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
    "ConvNeXtTiny",
    "DenseNet121",
    "Xception",
]


def difference(path: Path, backend: str, inputs: dict[str, Any], expected: list[Any]) -> float:
    """Return the largest difference, relative to the largest element of an output."""
    compiled = ml.load(path, backend=backend, shapes={n: a.shape for n, a in inputs.items()})
    results = compiled(inputs)
    return max(
        float(np.abs(np.asarray(r, np.float64) - e).max() / max(1e-30, np.abs(e).max()))
        for r, e in zip(results.values(), expected, strict=True)
    )


def draw_weights(net: Any) -> None:
    """Give the variables of a deep network random values that keep the size of its activations."""
    rng = np.random.default_rng(0)
    for v in net.weights:
        if "seed" in v.path:
            continue
        if v.path.endswith(("variance", "gamma")):
            v.assign(rng.uniform(0.8, 1.2, v.shape).astype(np.float32))
        else:
            shape = v.shape[:2] if "depthwise" in v.path else v.shape[:-1]
            deviation = (2 / np.prod(shape)) ** 0.5 if len(v.shape) > 1 else 0.1
            v.assign(rng.normal(0.0, deviation, v.shape).astype(np.float32))


def compare(name: str, net: Any, inputs: dict[str, Any], backends: list[str]) -> None:
    from record_archives import outputs_of

    expected = [np.asarray(e, np.float64) for e in outputs_of(net, inputs)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        net.save(path)
        for backend in backends:
            start = time.perf_counter()
            error = difference(path, backend, inputs, expected)
            print(f"{name:18} {backend:6} {error:8.1e}  {time.perf_counter() - start:6.1f} s", flush=True)


def malformed(count: int) -> None:
    from archives import NAMES, RECORDS
    from damaged_archives import CHANGES

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.keras"

        def read(content: bytes) -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            ml.from_keras(path)

        sources = [(RECORDS / f"{n}.keras").read_bytes() for n in NAMES]
        tried = list(attempts(sources, CHANGES, read, seed=1, count=count))
    foreign = [a for a in tried if a.is_foreign]
    refused = sum(a.error is not None for a in tried)
    print(f"{len(tried)} malformed archives, {refused} refused, {len(foreign)} foreign errors")
    for a in foreign[:10]:
        print(f"  {a}")


def main() -> None:
    part, *backends = sys.argv[1:] or ["layers"]
    backends = backends or BACKENDS
    if part == "malformed":
        malformed(int(backends[0]) if sys.argv[2:] else 2000)
        return
    import keras
    from keras_models import MODELS, randomize

    keras.utils.set_random_seed(0)
    if part == "layers":
        for name, build in MODELS.items():
            keras.backend.clear_session()
            net, inputs = build()
            randomize(net)
            compare(name, net, inputs, backends)
        return
    for name in APPLICATIONS:
        keras.backend.clear_session()
        build = getattr(keras.applications, name)
        net = build(weights=None, input_shape=(96, 96, 3), classes=10, classifier_activation=None)
        draw_weights(net)
        x = np.random.default_rng(0).uniform(0, 255, (1, 96, 96, 3)).astype(np.float32)
        compare(name, net, {net.layers[0].name: x}, backends)


if __name__ == "__main__":
    main()
