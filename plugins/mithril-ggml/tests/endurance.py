"""One thousand random and malformed graphs, files and inputs in one process, which must not die. Run by a test.

Prints how many ended in which way; whatever is neither a result nor a mithril error is printed with its seed.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from random_graphs import Maker

import mithril as ml
from mithril.graph import Graph, Value, to_text
from mithril.graph.dims import TensorType
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import MithrilError
from mithril_ggml.gguf.load import read_graph
from mithril_testing.damaged_files import flipped, truncated

QUANTIZE = (None, "q8_0", "q4_k", "q4_0", "tq2_0", "q2_k", "iq4_nl", "f16")
HUGE = ("0", "1", "-1", "3", "17", "255", "65536", "2147483648", "9223372036854775807", "1e400", "nan", "B")


def arrays_of(maker: Maker, graph: Graph, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments, some of them with wrong types or shapes."""
    values = {i.name: maker.arrays.get(i.name, np.zeros(2, np.float32)) for i in graph.arguments}
    for name in values:
        if rng.random() < 0.05:
            values[name] = rng.choice(["shape", "dtype", "text", "none", "nan", "object"])
    bad: dict[str, Any] = {
        "shape": np.zeros((2, 9), np.float32),
        "dtype": np.zeros(3, np.int64),
        "text": "abc",
        "none": None,
        "nan": np.full((3, 3), np.nan, np.float32),
        "object": np.array([object()]),
    }
    values = {n: bad[str(v)] if isinstance(v, str) else v for n, v in values.items()}
    if values and rng.random() < 0.05:
        values.pop(next(iter(values)))
    params = {i.name: values[i.name] for i in graph.arguments if i.role == "param" and i.name in values}
    return params, {n: v for n, v in values.items() if n not in params}


def random_run(seed: int, rng: np.random.Generator) -> None:
    """Run a random graph on a backend with random settings."""
    maker = Maker(seed)
    graph = maker.graph(int(rng.integers(1, 30)))
    backend = ml.GGMLBackend(
        quantize=QUANTIZE[int(rng.integers(0, len(QUANTIZE)))],
        num_threads=int(rng.integers(1, 3)),
        mem_size=None if rng.random() < 0.7 else int(rng.integers(1, 200000)),
    )
    executable = backend.build(graph)
    for _ in range(2):
        executable(*arrays_of(maker, graph, rng))


def mutated_text(seed: int, rng: np.random.Generator) -> None:
    """Parse and, if possible, run a damaged graph text."""
    maker = Maker(seed)
    graph = maker.graph(12)
    lines = to_text(graph).splitlines()
    for _ in range(int(rng.integers(1, 4))):
        k = int(rng.integers(0, len(lines)))
        how = int(rng.integers(0, 5))
        if how == 0:
            del lines[k]
        elif how == 1:
            j = int(rng.integers(0, len(lines)))
            lines[k], lines[j] = lines[j], lines[k]
        elif how == 2:
            numbers = list(re.finditer(r"-?\d+", lines[k]))
            if numbers:
                m = numbers[int(rng.integers(0, len(numbers)))]
                lines[k] = lines[k][: m.start()] + str(rng.choice(HUGE)) + lines[k][m.end() :]
        elif how == 3:
            column = int(rng.integers(0, len(lines[k]) + 1))
            lines[k] = lines[k][:column] + chr(int(rng.integers(32, 1000))) + lines[k][column + 1 :]
        else:
            words = ("f32", "i8", "f16", "bool", "u64", "bf16")
            lines[k] = lines[k].replace(str(rng.choice(words)), str(rng.choice(words)))
        if not lines:
            return
    damaged = read_graph("\n".join(lines))
    if sum(np.prod([int(d) for d in i.type.shape], dtype=float) for i in damaged.inputs if i.type.is_static) > 1e6:
        return  # the arrays for it would be the test's, not the backend's, problem
    for i in damaged.arguments:
        if i.type.is_static:
            maker.arrays[i.name] = np.zeros([int(d) for d in i.type.shape], i.type.dtype.numpy)
    ml.GGMLBackend(mem_size="256MiB").build(damaged)(*arrays_of(maker, damaged, rng))


def lying_types(seed: int, rng: np.random.Generator) -> None:
    """Run a graph whose values declare wrong types."""
    maker = Maker(seed)
    graph = maker.graph(8)
    for value in [v for n in graph.nodes for v in n.results] + [i.value for i in graph.inputs]:
        if rng.random() < 0.1:
            shape = tuple(int(n) for n in rng.integers(0, 9, int(rng.integers(0, 6))))
            value.type = TensorType(as_dtype(str(rng.choice(["float32", "int8", "float64", "bool"]))), shape)
    if rng.random() < 0.2:
        graph = graph.replaced(outputs=(*graph.outputs[:-1], Value("nothing", TensorType(as_dtype("float32"), (2,)))))
    ml.GGMLBackend().build(graph)(*arrays_of(maker, graph, rng))


_FILE = Path(tempfile.mkdtemp()) / "model.gguf"


def _good_file() -> bytes:
    from mithril.models import Embedding, Linear

    model = ml.Model()
    model += Embedding(40, 32)
    model += Linear(32)
    compiled = ml.compile(model, "ggml", inference=True, shapes={"input": [3]})
    compiled.export(_FILE, params=compiled.randomize_params(seed=0), quantize="q8_0")
    return _FILE.read_bytes()


GOOD: list[bytes] = []


def damaged_file(seed: int, rng: np.random.Generator) -> None:
    """Load a file with wrong bytes, mostly in its header, or truncated."""
    GOOD or GOOD.append(_good_file())
    generator = random.Random(seed)
    data = truncated(GOOD[0], generator) if rng.random() < 0.2 else GOOD[0]
    _FILE.write_bytes(flipped(data, generator, first=3000) if data else data)
    loaded = ml.load(_FILE, mapped=False)
    loaded({"input": rng.integers(-100, 100, 3).astype(np.int32)})


def main(count: int) -> int:
    kinds = (random_run, mutated_text, lying_types, damaged_file)
    ends: Counter[str] = Counter()
    wrong = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        kind = kinds[seed % len(kinds)]
        try:
            with np.errstate(all="ignore"):
                kind(seed, rng)
            ends[f"{kind.__name__}: result"] += 1
        except MithrilError:
            ends[f"{kind.__name__}: mithril error"] += 1
        except Exception as error:
            wrong += 1
            print(f"seed {seed}, {kind.__name__}: {type(error).__name__}: {str(error)[:300]}")
            import traceback

            traceback.print_exc(limit=-3, file=sys.stdout)
    for end, n in sorted(ends.items()):
        print(f"{n:5d} {end}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
