"""ggml aborts the process on invalid graphs: the backend must never do so."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder
from mithril.graph.errors import BackendError, InputError, MemoryLimitError, MithrilError
from mithril.graph.registry import operation as op
from mithril_ggml.library.abort_guard import guarded
from mithril_ggml.library.library import ggml
from mithril_ggml.lowering.table import TABLE, emit

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_thousand_graphs_files_and_inputs():
    """Random and malformed ones, in one process."""
    command = [sys.executable, "-X", "faulthandler", str(HERE / "endurance.py"), "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for kind in ("random_run", "mutated_text", "lying_types", "damaged_file"):
        assert f"{kind}: result" in done.stdout
        assert f"{kind}: mithril error" in done.stdout


def test_a_failed_assertion_becomes_an_error_and_the_next_graph_works():
    def wrong():
        context = ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 16, mem_buffer=None, no_alloc=True))
        a, b = ggml.ggml_new_tensor_2d(context, 0, 3, 4), ggml.ggml_new_tensor_2d(context, 0, 5, 4)
        return ggml.ggml_mul_mat(context, a, b)

    for _ in range(3):
        with pytest.raises(BackendError, match="ggml refused this graph"):
            guarded(wrong)
    assert guarded(lambda: 41) == 41
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


def test_a_wrong_lowering_is_an_error_not_the_end(monkeypatch):
    """A plugin's lowering with mismatched operands."""

    def bad(draft, node, x):
        out = draft.like(node.result)
        return draft.ggml("bad", lambda ctx, a, b: ggml.ggml_add(ctx, a, b), [x, draft.new((7,))], out)

    monkeypatch.setitem(TABLE, "tanh", (bad, None))
    with Builder() as b:
        y = op("tanh")(b.input("x", (4,)))
    with pytest.raises(BackendError, match="ggml refused this graph"):
        ml.GGMLBackend().build(b.build({"y": y}))
    assert emit is not None


def doubled(draft, node, x):
    out = draft.like(node.result)
    return draft.ggml("doubled", lambda ctx, a: ggml.ggml_scale(ctx, a, 2.0), [draft.dense(x)], out)


def test_a_third_party_may_lower_better(monkeypatch):
    """A lowering receives the draft, the node and its operands, and returns the result."""
    from mithril.backend import PluginLowering
    from mithril_ggml.lowering import table

    lowering = PluginLowering("tanh", "ggml", "third 1.0", f"{__name__}:doubled")
    monkeypatch.setattr(table, "plugin_lowerings", lambda backend: {"tanh": (lowering,)})
    with Builder() as b:
        y = op("tanh")(b.input("x", (4,)))
    assert (ml.GGMLBackend().build(b.build({"y": y}))({}, {"x": np.ones(4, np.float32)})["y"] == 2).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_can_make_programs():
    with Builder() as b:
        y = op("tanh")(b.input("x", (4,)))
    graph = b.build({"y": y})
    ml.GGMLBackend().build(graph)
    command = (
        "import os, numpy as np, mithril as ml; from mithril.graph import parse; "
        f"g = parse({str(graph)!r}); ml.GGMLBackend().build(g); pid = os.fork(); "
        "r = ml.GGMLBackend().build(g)({}, {'x': np.ones(4, np.float32)})['y']; "
        "pid or os._exit(0 if abs(r[0] - np.tanh(1)) < 1e-6 else 3); "
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_indices_outside_are_moved_inside():
    """Also of packed tables, where ggml would end the process."""
    table = np.arange(10 * 32, dtype=np.float32).reshape(10, 32) / 100
    for quantize in (None, "q8_0", "q4_0", "f16"):
        with Builder() as b:
            y = op("embedding")(b.input("i", (5,), "int32"), b.param("t", table.shape))
        executable = ml.GGMLBackend(quantize=quantize).build(b.build({"y": y}))
        result = executable({"t": table}, {"i": np.array([0, 9, 10, -1, 2**31 - 1], np.int32)})["y"]
        assert np.abs(result - table[[0, 9, 9, 9, 9]]).max() < 0.4


def test_weights_without_numbers_are_refused():
    with Builder() as b:
        y = op("linear")(b.input("x", (2, 32)), b.param("w", (4, 32)))
    executable = ml.GGMLBackend(quantize="q4_k").build(b.build({"y": y}))
    for bad in (np.nan, np.inf):
        w = np.ones((4, 32), np.float32)
        w[1, 1] = bad
        with pytest.raises(InputError, match="'w' holds nan or infinity"):
            executable({"w": w}, {"x": np.ones((2, 32), np.float32)})
    w = np.full((4, 32), 1e6, np.float32)
    with pytest.raises(InputError, match="beyond the range of float16"):
        ml.GGMLBackend(quantize="f16").build(b.build({"y": y}))({"w": w}, {"x": np.ones((2, 32), np.float32)})


def test_programs_larger_than_the_machine():
    with Builder() as b:
        x = b.input("x", (4,))
        y = op("sum")(op("broadcast_to")(x, shape=(1 << 40, 4)) + 1.0)
    with pytest.raises(MemoryLimitError):
        ml.GGMLBackend().build(b.build({"y": y}))


def test_safe_mode_computes_the_same():
    from mithril.backend.base import BuildOptions

    with Builder() as b:
        y = op("softmax")(op("tanh")(b.input("x", (3, 4))))
    graph = b.build({"y": y})
    x = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    safe = ml.GGMLBackend().build(graph, BuildOptions(checks=True))
    assert (safe({}, x)["y"] == ml.GGMLBackend().build(graph)({}, x)["y"]).all()


def test_checks_name_the_index_outside():
    from mithril.backend.base import BuildOptions

    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    for name, shape in (("take", (3,)), ("gather_nd", (3, 1)), ("embedding", (3,)), ("take_along_axis", (3, 2))):
        with Builder() as b:
            i = b.input("i", shape, "int32")
            t = b.input("t", table.shape)
            y = (
                op("embedding")(i, t)
                if name == "embedding"
                else op(name)(t, i, **({} if name == "gather_nd" else {"axis": 0}))
            )
        graph = b.build({"y": y})
        for quantize in (None, "f16"):
            executable = ml.GGMLBackend(quantize=quantize).build(graph, BuildOptions(checks=True))
            good = np.zeros(shape, np.int32)
            executable({}, {"t": table, "i": good})
            for wrong in (6, -7):
                bad = good.copy()
                bad[1] = wrong
                with pytest.raises(InputError, match=f"index {wrong} of '{name}' is out of range for 6 elements"):
                    executable({}, {"t": table, "i": bad})
            ml.GGMLBackend(quantize=quantize).build(graph)({}, {"t": table, "i": bad})


def test_options_that_mean_nothing():
    for wrong in ({"quantize": "q9"}, {"quantize": 3}, {"num_threads": 0}, {"num_threads": "2"}, {"device": "gpu"}):
        with pytest.raises(MithrilError):
            ml.GGMLBackend(**wrong)
