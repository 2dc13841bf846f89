"""Ensembles of decision trees from ONNX files: milliseconds per call on every backend, onnxruntime and scikit-learn.

python benchmarks/bench_trees.py [BACKEND ...]

Each file is written by skl2onnx. The engines alternate in one process with one thread (OMP_NUM_THREADS=1); the figure
is the minimum of the processor's time, and the largest difference is that to onnxruntime on the same file.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import skl2onnx
from interleaved import interleaved
from sklearn import ensemble, tree

import mithril as ml

ROWS, COLUMNS = 1000, 20
MODELS: dict[str, Callable[[], Any]] = {
    "tree, depth 12": lambda: tree.DecisionTreeClassifier(max_depth=12, random_state=0),
    "forest, 100 trees": lambda: ensemble.RandomForestClassifier(100, random_state=0),
    "forest, 100 regressors": lambda: ensemble.RandomForestRegressor(100, max_depth=10, random_state=0),
    "boosting, 100 trees": lambda: ensemble.GradientBoostingClassifier(n_estimators=100, random_state=0),
}


def session(proto: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main(*backends: str) -> None:
    """Print a row per model and number of rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * ROWS, COLUMNS)).astype(np.float32)
    target = (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * rng.normal(size=len(x)) > 0).astype(int)
    names = backends or ("c", "jax", "torch", "numpy")
    print(f"{'model':24} {'rows':>5} {'depth':>5}", *(f"{n:>8}" for n in (*names, "ORT", "sklearn")), " difference")
    for title, make in MODELS.items():
        fitted = make().fit(x, target)
        members = np.ravel(getattr(fitted, "estimators_", [fitted]))
        depth = max(m.get_depth() for m in members)
        kind = [("x", skl2onnx.common.data_types.FloatTensorType([None, COLUMNS]))]
        options = {"zipmap": False} if hasattr(fitted, "classes_") else None
        proto = skl2onnx.to_onnx(fitted, initial_types=kind, options={id(fitted): options} if options else None)
        reference = session(proto)
        for rows in (1, ROWS):
            feed = {"x": x[:rows]}
            ways: dict[str, Any] = {}
            difference = 0.0
            theirs = reference.run(None, feed)[-1]
            for name in names:
                shapes = {"x": [rows, COLUMNS]}
                compiled = ml.compile(ml.from_onnx(proto), name, static_inference=True, shapes=shapes)
                result = compiled.backend.to_numpy(list(compiled(feed).values())[-1])
                difference = max(difference, float(np.abs(np.asarray(result).reshape(theirs.shape) - theirs).max()))
                ways[name] = lambda compiled=compiled, feed=feed: _finish(compiled(feed))
            ways["ORT"] = lambda feed=feed: reference.run(None, feed)
            ways["sklearn"] = lambda rows=rows: fitted.predict(x[:rows])
            seconds = interleaved(ways, seconds=4.0, min_rounds=6, clock=time.process_time)
            figures = [f"{seconds[n] * 1e3:8.3f}" for n in ways]
            print(f"{title:24} {rows:5} {depth:5}", *figures, f" {difference:.1e}", flush=True)


def _finish(results: Any) -> None:
    for y in results.values():
        if hasattr(y, "block_until_ready"):
            y.block_until_ready()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
