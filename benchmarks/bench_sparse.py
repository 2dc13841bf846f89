"""Products of sparse weights on the C backend, against our dense product, SciPy, torch.sparse and OpenVINO.

``python benchmarks/bench_sparse.py [columns ...]``: microseconds of process time on one thread, the least of
interleaved rounds in one process, each with its ratio to our dense product, and the bytes of the packed weights of
those of dense ones. Peers that are not installed are left out. OpenVINO has sparse weights for 8-bit products on CPUs
with AMX only: its rows are a dense float32 product, a dense one of bytes, and one of bytes with sparse weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import harness
import numpy as np
import scipy.sparse
import torch
from peers import openvino_call

import mithril as ml
from mithril.models import Linear

torch.set_num_threads(1)
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
Call = Callable[[], Any]
Array = np.ndarray[Any, Any]
ROWS = (1, 8, 16, 64)
COLUMNS = (1024, 2048, 4096)
FORMATS: dict[str, Any] = {"block1x16": 0.9, "csr": 0.95}


def ours(columns: int, x: Array, params: Any) -> tuple[Call, Any]:
    model = ml.Model()
    model += Linear(columns, name="linear")
    compiled = ml.compile(model, "c", shapes={"input": list(x.shape)}, static_inference=True, num_threads=1)
    compiled.bind(params)
    return lambda: compiled({"input": x}), compiled


def of_scipy(weights: Array, x: Array, bias: Array) -> Call:
    matrix = scipy.sparse.csr_array(weights)
    return lambda: (matrix @ x.T).T + bias


def of_torch(weights: Array, x: Array, bias: Array) -> dict[str, Call]:
    dense, rows, b = (torch.from_numpy(a) for a in (weights, x, bias))
    sparse = dense.to_sparse_csr()
    return {
        "torch": lambda: torch.nn.functional.linear(rows, dense, b),
        "torch.sparse": lambda: (sparse @ rows.T).T + b,
    }


def of_openvino(weights: Array, x: Array, bias: Array) -> dict[str, Call]:
    import openvino
    from openvino import opset13 as ops

    def rounded(value: Any, top: float) -> Any:
        limits = [ops.constant(np.float32(end)) for end in (-top, top, -top, top)]
        return ops.fake_quantize(value, *limits, 255)

    def request(is_rounded: bool, rate: float) -> Call:
        node = parameter = ops.parameter(x.shape, np.float32)
        right = ops.constant(weights)
        if is_rounded:
            node, right = rounded(node, float(np.abs(x).max())), rounded(right, float(np.abs(weights).max()))
        product = ops.matmul(node, right, False, True) + ops.constant(bias[None])
        settings = {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": rate}
        return openvino_call(openvino.Model([product], [parameter]), [x], **settings)

    return {
        "openvino f32": request(False, 1.0),
        "openvino int8": request(True, 1.0),
        "openvino sparse int8": request(True, 0.5),
    }


def main() -> None:
    rng = np.random.default_rng(0)
    for format, sparsity in FORMATS.items():
        rows: dict[str, dict[str, float]] = {}
        for columns in map(int, harness.arguments(__doc__, "COLUMNS").words or COLUMNS):
            weights = rng.standard_normal((columns, columns)).astype(np.float32)
            params = {"linear.weight": weights, "linear.bias": rng.standard_normal(columns).astype(np.float32)}
            packed = ml.sparsify(params, sparsity=sparsity, format=format)
            pruned = np.asarray(packed["linear.weight"])
            share = packed["linear.weight"].nbytes / weights.nbytes
            for count in ROWS:
                x = rng.standard_normal((count, columns)).astype(np.float32)
                dense, _ = ours(columns, x, {**params, "linear.weight": pruned})
                sparse, _ = ours(columns, x, packed)
                calls = {"dense": dense, format: sparse, "scipy": of_scipy(pruned, x, params["linear.bias"])}
                calls |= of_torch(pruned, x, params["linear.bias"])
                if find_spec("openvino") is not None:
                    calls |= of_openvino(pruned, x, params["linear.bias"])
                expected = dense()["output"]
                for name in (format, "scipy", "torch.sparse"):
                    result = calls[name]()
                    y = np.asarray(result["output"] if isinstance(result, dict) else result)
                    assert np.abs(y - expected).max() < 1e-3 * np.abs(expected).max(), name
                title = f"{count} x {columns}, {share:.3f} of the bytes"
                rows[title] = harness.interleaved(calls, 0.5, 7)
        harness.table(f"{format}, {sparsity:.0%} zeros", rows, "dense")


if __name__ == "__main__":
    main()
