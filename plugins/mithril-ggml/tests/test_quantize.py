"""Quantized weights: kinds, fall-backs, patterns, sharing, the report, weights of three values."""

import numpy as np
import pytest

import mithril as ml
from mithril.backend.base import BuildOptions
from mithril.graph import Builder
from mithril.graph.decisions import Decisions
from mithril.graph.errors import InputError, OptionError, StrictError
from mithril.graph.registry import operation as op
from mithril_ggml.library.quant_types import by_code, compatible_type, kind, kinds
from mithril_ggml.library.repack import is_supported
from mithril_ggml.weights.packed_weights import PackedArray, Store, pack, unpack
from mithril_gguf.formats import FORMATS

rng = np.random.default_rng(0)
ERRORS = {"f32": 0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 0.01, "q6_k": 0.03, "q5_k": 0.05, "q5_1": 0.05, "q5_0": 0.06,
          "q4_k": 0.1, "q4_1": 0.1, "q4_0": 0.12, "iq4_nl": 0.1, "iq4_xs": 0.1, "mxfp4": 0.15, "q3_k": 0.2,
          "q2_k": 0.4, "tq2_0": 1.2, "tq1_0": 1.2}  # fmt: skip


def relative(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_of_other_backends_have_the_numbers_of_ggml(name):
    packed = pack(rng.standard_normal((5, 512)).astype(np.float32) * 3, kind(name))
    form, stored = FORMATS[name], kind(name)
    assert (form.code, form.block, form.bytes) == (stored.code, stored.block, stored.bytes)
    np.testing.assert_allclose(form.decoded(packed.data), np.asarray(packed), rtol=1e-6, atol=1e-6)  # ggml may fuse


@pytest.mark.parametrize("name", list(ERRORS))
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_and_look_ups(name, rows):
    """Weights as rows, as columns, through a transpose, and as a table."""
    w, v, t = (rng.standard_normal(s).astype(np.float32) for s in ((64, 512), (64, 256), (30, 256)))
    with Builder() as b:
        x, i = b.input("x", (rows, 512)), b.input("i", (3,), "int32")
        y = op("linear")(x, b.param("w", w.shape))
        z = op("matmul")(y, b.param("v", v.shape))
        e = op("embedding")(i, b.param("t", t.shape))
        q = op("matmul")(x, op("transpose")(b.param("u", w.shape)))
    graph = b.build({"y": y, "z": z, "e": e, "q": q})
    weights = rng.standard_normal((rows, 512)).astype(np.float32)
    decisions = Decisions()
    executable = ml.GGMLBackend(quantize=name).build(graph, BuildOptions(decisions=decisions))
    out = executable({"w": w, "v": v, "t": t, "u": w}, {"x": weights, "i": np.array([1, 0, -1], np.int32)})
    bound = ERRORS[name] + 1e-6
    assert relative(out["y"], weights @ w.T) < bound
    assert relative(out["q"], weights @ w.T) < bound
    assert relative(out["e"], t[[1, 0, -1]]) < bound
    assert relative(out["z"], weights @ w.T @ v) < 2 * bound + 0.02
    assert all(e.kind.name in (name, "q4_0", "f16", "iq4_nl", "q5_0", "q8_0") for e in executable.packing.entries)


def test_blocks_that_do_not_fit_fall_back_and_say_so():
    assert compatible_type(kind("q4_k"), 256).name == "q4_k"
    assert compatible_type(kind("q4_k"), 96).name == "q4_0"
    assert compatible_type(kind("q4_k"), 30).name == "f16"
    assert compatible_type(kind("q6_k"), 96).name == "q8_0"
    with Builder() as b:
        y = op("linear")(b.input("x", (2, 30)), b.param("w", (4, 30)))
    graph, decisions = b.build({"y": y}), Decisions()
    ml.GGMLBackend(quantize="q4_k").build(graph, BuildOptions(decisions=decisions))
    assert str(decisions) == "downgrade: 'w' is f16: q4_k needs rows of a multiple of 256 elements, these have 30"
    with pytest.raises(StrictError):
        ml.GGMLBackend(quantize="q4_k").build(graph, BuildOptions(decisions=Decisions(strict=True)))


def test_weights_of_other_dtypes_are_said_to_stay():
    with Builder() as b:
        y = op("matmul")(b.input("x", (2, 32), "float16"), b.param("w", (32, 4), "float16"))
    decisions = Decisions()
    executable = ml.GGMLBackend(quantize="q8_0").build(b.build({"y": y}), BuildOptions(decisions=decisions))
    assert "ignored: 'w' is float16: only float32 weights are quantized" in str(decisions)
    w = rng.standard_normal((32, 4)).astype(np.float16)
    x = rng.standard_normal((2, 32)).astype(np.float16)
    assert relative(executable({"w": w}, {"x": x})["y"], x.astype(np.float32) @ w.astype(np.float32)) < 2e-3


def test_patterns_choose_per_layer():
    with Builder() as b:
        x = b.input("x", (2, 64))
        for name in ("body.0", "body.1", "head"):
            x = op("linear")(x, b.param(f"{name}.weight", (64, 64)))
    graph = b.build({"y": x})
    backend = ml.GGMLBackend(quantize={"*.0.*": "q8_0", "head*": None, "*": "q4_0"})
    types = {e.input.name: e.kind.name for e in backend.build(graph).packing.entries}
    assert types == {"body.0.weight": "q8_0", "body.1.weight": "q4_0"}
    with pytest.raises(OptionError, match="unknown quantization 'q4'"):
        ml.GGMLBackend(quantize={"*": "q4"})


def test_int8_is_q8_0():
    assert kind("int8") is kind("Q8_0") is kinds()["q8_0"] is by_code()[8]


@pytest.mark.parametrize("name", [n for n in ERRORS if n != "f32"])
def test_packing_and_unpacking(name):
    w = rng.standard_normal((5, 512)).astype(np.float32)
    packed = pack(w, kind(name))
    assert packed.data.shape == (5, kind(name).row(512))
    again = np.asarray(packed)
    assert relative(again, w) < ERRORS[name]
    if name not in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q5_1", "q4_1", "iq4_xs", "iq4_nl"):
        np.testing.assert_allclose(np.asarray(pack(again, kind(name))), again, rtol=2e-3, atol=1e-6)
    transposed = pack(np.asarray(w.T, order="C"), kind(name), transposed=True)
    assert transposed.shape == (512, 5)
    assert (np.asarray(transposed).T == again).all()
    assert (unpack(packed.data, packed.kind, (5, 512)) == again).all()


def test_weights_are_packed_once_for_all_programs():
    from mithril.graph.dims import Dim

    with Builder() as b:
        y = op("linear")(b.input("x", (Dim("B"), 64)), b.param("w", (32, 64)))
    backend = ml.GGMLBackend(quantize="q8_0")
    executable = backend.build(b.build({"y": y}))
    w = rng.standard_normal((32, 64)).astype(np.float32)
    for n in (1, 2, 3):
        executable({"w": w}, {"x": np.ones((n, 64), np.float32)})
    packed_bytes = {
        id(g.source[0] if isinstance(g.source, tuple) else g.source)
        for p in executable.programs
        for g in p.inputs
        if g.convert
    }
    assert len(packed_bytes) == 1
    assert len(backend.store._arrays) == 1
    del w, executable
    assert len(backend.store._arrays) <= 1


def test_packed_rows_are_dropped_next_to_interleaved_ones():
    if not is_supported(kind("q4_0"), 64, 256):
        pytest.skip("this build of ggml interleaves nothing")
    w = rng.standard_normal((64, 256)).astype(np.float32)
    store = Store()
    rows = pack(w, kind("q4_0")).data
    packed = store.packed(w, kind("q4_0"), False, False, "'w'")
    store.repacked(packed)
    assert packed.bytes_in_memory == 0
    assert packed.nbytes == rows.nbytes
    assert (packed.data == rows).all()
    assert packed.bytes_in_memory == 0
    assert packed.pinned() is packed.data  # of a program that reads the address
    assert packed.bytes_in_memory == rows.nbytes
    packed.drop_rows()
    assert packed.pinned() is packed.data
    other = store.packed(w, kind("iq4_nl"), False, False, "'w'")
    store.repacked(other)
    del w
    with pytest.raises(InputError, match=r"the packed rows of 'w' are gone(?s:.)*hint: hold the array that was bound"):
        np.asarray(other)
    assert np.isfinite(np.asarray(packed)).all()


def test_memory_report_counts_packed_weights(tmp_path):
    model = ml.Model()
    model += ml.models.Linear(64, bias=False)
    compiled = ml.compile(model, ml.GGMLBackend(quantize="q4_0"), inference=True, shapes={"input": [1, 256]})
    params = compiled.randomize_params(seed=0)
    compiled.bind(params)({"input": np.ones((1, 256), np.float32)})
    floats, packed = 64 * 256 * 4, 64 * 256 // 32 * 18
    assert compiled.memory_report().parameters == floats + packed
    compiled.export(tmp_path / "m.gguf")
    loaded = ml.load(tmp_path / "m.gguf")
    loaded({"input": np.ones((1, 256), np.float32)})
    assert loaded.memory_report().parameters == packed


def test_interleaved_weights_compute_the_same():
    if not is_supported(kind("q4_0"), 64, 256):
        pytest.skip("this build of ggml interleaves nothing")
    w = rng.standard_normal((64, 256)).astype(np.float32)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    for name in ("q4_0", "q4_k", "iq4_nl"):
        with Builder() as b:
            y = op("linear")(b.input("x", x.shape), b.param("w", w.shape))
        executable = ml.GGMLBackend(quantize=name).build(b.build({"y": y}))
        assert executable.packing.entries[0].repacked
        assert relative(executable({"w": w}, {"x": x})["y"], x @ np.asarray(pack(w, kind(name))).T) < 0.012


def test_gradients_are_of_float32_weights():
    from mithril.models import Linear

    model = ml.Model()
    model += Linear(4)
    compiled = ml.compile(model, ml.GGMLBackend(quantize="q4_0"), shapes={"input": [2, 32]})
    params = compiled.randomize_params(seed=0)
    x = rng.standard_normal((2, 32)).astype(np.float32)
    out, grads = compiled.evaluate(params, {"input": x}, np.ones((2, 4), np.float32))
    expected = x @ params["linear.weight"].T + params["linear.bias"]
    assert np.abs(out["output"] - expected).max() < 1e-5
    assert np.abs(grads["linear.weight"] - x.sum(0)).max() < 1e-5
    assert "not quantized in programs with gradients" in str(compiled.decisions)


def test_the_report_names_size_and_error():
    from mithril.models import Linear

    model = ml.Model()
    model += Linear(64, name="wide")
    compiled = ml.compile(model, ml.GGMLBackend(quantize="q8_0"), inference=True, shapes={"input": [2, 128]})
    params = compiled.randomize_params(seed=0)
    report = ml.quantization_report(compiled, params)
    (row,) = report.rows
    assert (row.name, row.shape, row.kind, row.bytes) == ("wide.weight", (64, 128), "q8_0", 64 * 4 * 34)
    assert 1e-3 < row.error < 1e-2
    assert report.bytes == row.bytes + 64 * 4
    assert "wide.weight" in str(report)


def test_ternary_weights_train_and_deploy_to_two_bits():
    model = ml.Model()
    model += ml.TernaryLinear(256, 8)
    ternary = ml.compile(model, ml.GGMLBackend(quantize="q8_0"), shapes={"input": [64, 256]})
    x = rng.standard_normal((64, 256)).astype(np.float32)
    target = x @ np.sign(rng.standard_normal((8, 256))).astype(np.float32).T
    params = ternary.randomize_params(seed=0)
    losses = []
    for _ in range(100):
        out, grads = ternary.evaluate(params, {"input": x}, np.ones((64, 8), np.float32))
        losses.append(float(((out["output"] - target) ** 2).mean()))
        _, grads = ternary.evaluate(params, {"input": x}, 2 * (out["output"] - target) / 64)
        params = {n: p - 0.02 * grads[n] for n, p in params.items()}
    assert losses[-1] < 0.3 * losses[0]
    deployed = ternary.evaluate(params, {"input": x})["output"]
    row = ml.quantization_report(ternary, params).rows[0]
    assert (row.kind, row.bytes) == ("tq2_0", 8 * 66)
    assert row.error < 1e-3
    trained = ternary.evaluate(params, {"input": x}, training=True)["output"]
    assert relative(deployed, trained) < 0.02


def test_a_packed_array_is_an_array():
    backend = ml.GGMLBackend()
    packed = pack(np.eye(32, dtype=np.float32), kind("q8_0"))
    assert isinstance(packed, PackedArray)
    assert backend.is_array(packed)
    assert backend.array(packed) is packed
    np.testing.assert_allclose(backend.to_numpy(packed), np.eye(32), atol=1e-3)
    assert "q8_0" in repr(packed)


@pytest.mark.parametrize("name", ["f16", "q8_0", "q4_0"])
def test_weights_that_only_loops_read(name, tmp_path):
    """Weights of a recurrent layer are packed in the scan, in the file, and after loading."""
    from mithril.models import LSTM

    model = ml.Model()
    model += LSTM(64)
    x = {"input": rng.standard_normal((2, 5, 96)).astype(np.float32)}
    exact = ml.compile(model, "ggml", inference=True, shapes={"input": [2, 5, 96]})
    params = exact.randomize_params(seed=0)
    expected = exact.evaluate(params, x)["output"]
    compiled = ml.compile(model, ml.GGMLBackend(quantize=name), inference=True, shapes={"input": [2, 5, 96]})
    actual = compiled.evaluate(params, x)["output"]
    assert relative(actual, expected) < ERRORS[name]
    assert relative(compiled.evaluate(params, x)["output"], actual) == 0
    report = {r.name: r.kind for r in ml.quantization_report(compiled, params).rows}
    assert report == {"lstm.weight_ih_l0": name, "lstm.weight_hh_l0": name}
    compiled.export(tmp_path / "l.gguf", params=params)
    loaded = ml.load(tmp_path / "l.gguf")
    for _ in range(2):
        assert (loaded(x)["output"] == actual).all()
    assert all(isinstance(p, PackedArray) == ("weight" in n) for n, p in loaded.params.items())
    again = ml.compile(
        model, ml.GGMLBackend(quantize=name, mem_size="1MiB"), inference=True, shapes={"input": [2, 5, 96]}
    )
    assert again.programs[-1].executable.memory.regions > 0


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("view", [False, True])
def test_a_weight_changed_in_place_is_refused_or_noticed(kind, view):
    """Every program of every backend notices it, for any memory layout."""
    with Builder() as b:
        y = op("linear")(b.input("x", (2, 64)), b.param("w", (32, 64)))
    graph = b.build({"y": y})
    programs = [ml.GGMLBackend(quantize=kind).build(graph) for _ in range(2)]
    memory = rng.standard_normal((2, 32, 64)).astype(np.float32)
    params = {"w": memory[1] if view else memory[1].copy()}
    x = {"x": rng.standard_normal((2, 64)).astype(np.float32)}
    first = [np.array(p(params, x)["y"]) for p in programs]
    for array in (params["w"], memory) if view else (params["w"],):
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    (memory if view else params["w"]).flags.writeable = True
    params["w"].flags.writeable = True
    params["w"][3] *= 2  # one row: a sample of the values would not see it
    for program, before in zip(programs, first):
        after = np.array(program(params, x)["y"])
        np.testing.assert_allclose(after[:, 3], 2 * before[:, 3], rtol=1e-5)
        np.testing.assert_array_equal(np.delete(after, 3, 1), np.delete(before, 3, 1))
    assert not params["w"].flags.writeable


def test_views_of_one_memory_are_packed_again_together():
    with Builder() as b:
        x = b.input("x", (2, 64))
        outputs = {f"y{k}": op("linear")(x, b.param(f"w{k}", (32, 64))) for k in range(2)}
    program = ml.GGMLBackend(quantize="q8_0").build(b.build(outputs))
    memory = rng.standard_normal((2, 32, 64)).astype(np.float32)
    params, x = {"w0": memory[0], "w1": memory[1]}, {"x": rng.standard_normal((2, 64)).astype(np.float32)}
    before = {k: np.array(v) for k, v in program(params, x).items()}
    memory.flags.writeable = True
    memory *= 2
    for name, y in program(params, x).items():
        np.testing.assert_allclose(y, 2 * before[name], rtol=1e-5)
