"""GGUF files: round trips, other readers, and clear errors for damaged or hostile files."""

import struct
from functools import partial

import numpy as np
import pytest

import mithril as ml
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import InputError, MithrilError, OptionError
from mithril.models import BatchNorm2d, Conv2d, Embedding, Linear, Relu, TransformerEncoderLayer
from mithril_gguf.reader import read_gguf
from mithril_testing.constants import EveryRole, difference
from mithril_testing.damaged_files import attempts, check, flipped

rng = np.random.default_rng(0)


def classifier(backend="ggml", **options):
    model = ml.Model()
    model += Embedding(50, 32)
    model += TransformerEncoderLayer(32, 4, 64)
    model += Linear(5)
    return ml.compile(model, backend, inference=True, shapes={"input": ["B", 6]}, **options)


TOKENS = rng.integers(0, 50, (3, 6)).astype(np.int32)


def relative(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


KINDS = [None, "f16", "q8_0", "q4_k", {"*linear*": "q4_0", "*": "q8_0"}]


def bound(quantize):
    """Return the allowed relative error of outputs with quantized weights."""
    return {None: 1e-6, "f16": 2e-3, "q8_0": 0.03}.get(quantize if not isinstance(quantize, dict) else 1, 0.3)


@pytest.mark.parametrize("quantize", KINDS)
def test_a_model_runs_from_its_file(tmp_path, quantize):
    compiled = classifier()
    params = compiled.randomize_params(seed=0)
    expected = compiled.evaluate(params, {"input": TOKENS})["output"]
    path = tmp_path / "model.gguf"
    compiled.export(path, params=params, quantize=quantize)
    loaded = ml.load(path)
    assert relative(loaded({"input": TOKENS})["output"], expected) < bound(quantize)
    assert loaded({"input": TOKENS[:1]})["output"].shape == (1, 6, 5)  # the batch stays open


@pytest.mark.parametrize("quantize", KINDS)
def test_a_file_comes_from_other_backends_and_runs_on_them(tmp_path, quantize, numpy_backend):
    compiled = classifier(numpy_backend)
    params = compiled.randomize_params(seed=0)
    expected = compiled.evaluate(params, {"input": TOKENS})["output"]
    path = tmp_path / "model.gguf"
    compiled.export(path, params=params, quantize=quantize)
    on_ggml, elsewhere = ml.load(path), ml.load(path, backend=numpy_backend)
    assert relative(on_ggml({"input": TOKENS})["output"], expected) < bound(quantize)
    assert relative(elsewhere({"input": TOKENS})["output"], on_ggml({"input": TOKENS})["output"]) < 0.05


def test_a_convolution_with_state(tmp_path):
    model = ml.Model()
    model += Conv2d(3, 4, 3)
    model += BatchNorm2d(4)
    model += Relu()
    compiled = ml.compile(model, "ggml", inference=True, shapes={"input": [2, 3, 8, 8]})
    params = compiled.randomize_params(seed=0)
    state = compiled.initial_state()
    state = {n: a + 0.5 for n, a in state.items()} if state else {}
    x = {"input": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    result = compiled.evaluate(params, x, state=state)
    compiled.export(tmp_path / "c.gguf", params=params, state=state)
    loaded = ml.load(tmp_path / "c.gguf")
    assert relative(loaded(x)["output"], result[0]["output"]) < 1e-6


def test_the_gguf_package_reads_it(tmp_path):
    import gguf

    compiled = classifier()
    path = tmp_path / "model.gguf"
    metadata = {
        "name": "tiny",
        "license": "MIT",
        "author": "me",
        "shop.number": 7,
        "shop.list": ["a", "b"],
        "shop.x": 0.5,
    }
    compiled.export(path, params=compiled.randomize_params(seed=0), quantize="q8_0", metadata=metadata)
    reader = gguf.GGUFReader(path)
    texts = {n: f.contents() for n, f in reader.fields.items()}
    assert texts["general.name"] == "tiny"
    assert texts["general.license"] == "MIT"
    assert texts["general.architecture"] == "mithril"
    assert texts["shop.number"] == 7
    assert texts["shop.list"] == ["a", "b"]
    assert texts["mithril.inputs"] == ["input"]
    assert texts["mithril.outputs"] == ["output"]
    assert texts["mithril.quantization"] == "q8_0"
    assert texts["mithril.graph"].startswith("graph ")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["linear.weight"] == "Q8_0"
    assert kinds["linear.bias"] == "F32"
    contents = read_gguf(path)
    for t in reader.tensors:
        assert contents.tensors[t.name].data.tobytes() == t.data.tobytes()
    assert contents.metadata["shop.x"] == 0.5


def test_long_names_and_odd_values(tmp_path):
    """Names beyond ggml's limit, scalars, many axes, empty arrays, every dtype, large constants."""
    from mithril.compiler import make_backend, resolve_options
    from mithril.compiler.compiled_model import CompiledModel
    from mithril.compiler.signature import InputSpec
    from mithril.graph import Builder
    from mithril.graph.registry import operation as op
    from mithril_ggml.gguf.load import GraphCompiler

    kinds = (
        "float16",
        "bfloat16",
        "float64",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "bool",
    )
    values = {"x" * 80: rng.standard_normal(()).astype(np.float32)}
    values["deep"] = rng.standard_normal((1, 2, 1, 3, 2, 1)).astype(np.float32)
    values["empty"] = np.zeros((0, 3), np.float32)
    with Builder() as b:
        x = b.input("x", (2, 3))
        outputs = {n: op("mul")(b.param(n, a.shape), 1.0) for n, a in values.items()}
        for k in kinds:
            from mithril.graph.dtypes import dtype as as_dtype

            values[k] = np.arange(6).reshape(2, 3).astype(as_dtype(k).numpy)
            outputs[k] = op("reshape")(b.param(k, (2, 3), k), shape=(6,))
        table = b.constant(rng.standard_normal((20, 3)).astype(np.float32))
        outputs["y"] = x + op("sum")(table, axis=0)
    graph = b.build(outputs)
    settings = resolve_options({"inference": True})
    backend = make_backend("ggml", settings)
    compiler = GraphCompiler(graph, backend, settings)
    specs = {"x": InputSpec("x", (2, 3), as_dtype("float32"), "", True)}
    compiled = CompiledModel(backend, specs, compiler, decisions=compiler.decisions, options=settings.as_dict())
    inputs = {"x": np.ones((2, 3), np.float32)}
    expected = compiled.evaluate(values, inputs)
    compiled.export(tmp_path / "odd.gguf", params=values)
    loaded_outputs = ml.load(tmp_path / "odd.gguf")(inputs)
    for name, value in expected.items():
        assert loaded_outputs[name].dtype == value.dtype
        np.testing.assert_array_equal(loaded_outputs[name], value)


def test_ternary_weights_are_stored_unchanged(tmp_path, numpy_backend):
    model = ml.Model()
    model += ml.TernaryLinear(256, 16)
    compiled = ml.compile(model, ml.GGMLBackend(quantize="q4_0"), inference=True, shapes={"input": [2, 256]})
    params = compiled.randomize_params(seed=0)
    x = {"input": rng.standard_normal((2, 256)).astype(np.float32)}
    path = tmp_path / "t.gguf"
    compiled.export(path, params=params)
    expected_output = compiled.evaluate(params, x)["output"]
    assert (ml.load(path)(x)["output"] == expected_output).all()
    assert relative(ml.load(path, backend=numpy_backend)(x)["output"], expected_output) < 0.02
    assert path.stat().st_size < 16 * 66 + 4096


def test_sizes_open_in_any_program_stay_open_in_the_file(tmp_path):
    from mithril.graph.dims import Dim, TensorType
    from mithril.graph.dtypes import float32

    model = ml.Model()
    model += Linear(8, 3)
    compiled = ml.compile(model, "ggml")
    params = compiled.randomize_params(seed=0)
    compiled.prepare({"input": TensorType(float32, (Dim("B"), 8))})
    compiled.evaluate(params, {"input": np.ones((2, 8), np.float32)})
    assert len(compiled.programs) == 2
    compiled.export(tmp_path / "a.gguf", params=params)
    assert ml.load(tmp_path / "a.gguf")({"input": np.ones((5, 8), np.float32)})["output"].shape == (5, 3)


@pytest.mark.parametrize("shapes", [{}, {"x": ["B", 4]}])
def test_sizes_the_user_left_open_stay_open_for_exact_programs(tmp_path, shapes):
    """GGML represents such a backend here by its programs."""
    model = ml.Model()
    model += Linear(3)(input="x", output="y")
    compiled = ml.compile(model, "ggml", shapes=shapes)
    params = compiled.randomize_params(0, {"x": np.ones((5, 4), np.float32)})
    compiled.evaluate(params, {"x": np.ones((5, 4), np.float32)})
    compiled.export(tmp_path / "m.gguf", params=params)
    loaded = ml.load(tmp_path / "m.gguf")
    for n in (1, 7):
        x = np.ones((n, 4), np.float32)
        np.testing.assert_allclose(loaded.evaluate({"x": x})["y"], compiled.evaluate(params, {"x": x})["y"], rtol=1e-5)


def test_uncalled_models_are_written_with_the_types_of_their_layers(tmp_path):
    model = ml.Model()
    model += Linear(64, 3)
    compiled = ml.compile(model, "ggml")
    params = compiled.randomize_params(seed=0)
    compiled.export(tmp_path / "a.gguf", params=params, quantize="q8_0")
    assert not compiled.programs
    x = {"input": rng.standard_normal((5, 64)).astype(np.float32)}
    assert relative(ml.load(tmp_path / "a.gguf")(x)["output"], compiled.evaluate(params, x)["output"]) < bound("q8_0")


def test_a_loaded_model_has_no_gradients_and_can_be_written_again(tmp_path):
    compiled = classifier()
    path = tmp_path / "a.gguf"
    compiled.export(path, params=compiled.randomize_params(seed=0), quantize="q8_0")
    loaded = ml.load(path)
    first = loaded({"input": TOKENS})["output"]
    with pytest.raises(InputError):
        loaded.evaluate(loaded.params, {"input": TOKENS}, np.ones((3, 6, 5), np.float32))
    loaded.export(tmp_path / "b.gguf")
    assert (ml.load(tmp_path / "b.gguf")({"input": TOKENS})["output"] == first).all()


def test_export_rejects_invalid_requests(tmp_path):
    compiled = classifier()
    params = compiled.randomize_params(seed=0)
    path = tmp_path / "x.gguf"
    with pytest.raises(InputError, match="there are no parameters to export"):
        compiled.export(path)
    with pytest.raises(InputError, match="is missing"):
        compiled.export(path, params=dict(list(params.items())[1:]))
    with pytest.raises(OptionError, match="metadata 'color' has no place"):
        compiled.export(path, params=params, metadata={"color": "red"})
    with pytest.raises(OptionError):
        compiled.export(path, params=params, metadata={"a.b": object()})
    model = ml.Model()
    model += Linear(3)
    with pytest.raises(InputError, match="nothing has been compiled yet"):
        ml.compile(model, "ggml").export(path, params={})
    assert list(tmp_path.iterdir()) == []  # not even half a file


# -- damaged and hostile files ------------------------------------------------------------------------------------
@pytest.fixture
def good(tmp_path):
    compiled = classifier()
    path = tmp_path / "good.gguf"
    compiled.export(path, params=compiled.randomize_params(seed=0), quantize="q8_0")
    return path


def refused(path, data, match):
    path.write_bytes(data)
    with pytest.raises(InputError, match=match):
        ml.load(path)


def test_no_file_and_no_gguf(tmp_path, good):
    with pytest.raises(InputError, match="there is no file"):
        ml.load(tmp_path / "nothing.gguf")
    refused(good, b"", "shorter than a header")
    refused(good, b"x" * 100, "does not begin with 'GGUF'")
    refused(good, b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99 is unknown")
    refused(good, b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims to have 1152921504606846976 tensors")
    refused(good, b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "claims to have 1099511627776 entries")
    refused(good, b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds no mithril model")


def test_a_copy_without_room(tmp_path, good, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path / "cache" / "folder"))
    with pytest.raises(InputError, match=r"good.gguf' cannot be copied to .*folder'(\n|.)*MITHRIL_CACHE_DIR"):
        ml.load(good, mapped=False)
    ml.load(good)


def test_every_truncation_is_an_error(good):
    data = good.read_bytes()
    for end in [*range(24, 400, 7), *range(400, len(data) - 40, 997), len(data) - 40]:
        good.write_bytes(data[:end])
        with pytest.raises(InputError):
            ml.load(good, mapped=False)


def test_changed_headers_give_errors_of_mithril(good):
    def read(content):
        good.write_bytes(content)
        ml.load(good, mapped=False)

    changes = {"flipped": partial(flipped, first=3000)}
    check(list(attempts([good.read_bytes()], changes, read, seed=0, count=100)), refused=60)


def entry(key, kind, payload):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


def text(value):
    return struct.pack("<Q", len(value)) + value


def test_hostile_metadata(good):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    pad = b"\0" * 64
    refused(good, head + entry(b"a", 8, struct.pack("<Q", 1 << 62)) + pad, "ends inside")
    refused(good, head + entry(b"a", 9, struct.pack("<IQ", 8, 1 << 61)) + pad, "more than the file can hold")
    refused(good, head + entry(b"a", 9, struct.pack("<IQ", 4, 1 << 61)) + pad, "more than the file can hold")
    refused(good, head + entry(b"a", 9, struct.pack("<IQ", 9, 1)) + pad, "unknown type 9")
    refused(good, head + entry(b"a", 77, b"") + pad, "unknown type 77")
    refused(good, head + entry(b"\xff\xfe", 4, b"\0" * 4) + pad, "no UTF-8 text")
    refused(good, head + struct.pack("<Q", 1 << 20) + b"a" * 2000, "at most 1024 are allowed")
    twice = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry(b"a", 4, b"\0" * 4) * 2 + pad
    refused(good, twice, "given twice")
    refused(good, head + entry(b"general.alignment", 4, struct.pack("<I", 3)) + pad, "an alignment of 3")


def with_tensor(name, sizes, code, offset, room=64, count=1):
    info = text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    info += struct.pack("<IQ", code, offset)
    data = b"GGUF" + struct.pack("<IQQ", 3, count, 0) + info * count
    return data + b"\0" * (-len(data) % 32 + room)


def test_hostile_tensors(good):
    refused(good, with_tensor(b"t", (4,), 0, 1 << 62), "outside of the file")
    refused(good, with_tensor(b"t", (4,), 0, 8), "outside of the file, or in another tensor")
    refused(good, with_tensor(b"t", (1 << 40,), 0, 0), "outside of the file")
    refused(good, with_tensor(b"t", (1 << 62, 1 << 62), 0, 0), "has the sizes")
    refused(good, with_tensor(b"t", (0,), 0, 0), "has the sizes")
    refused(good, with_tensor(b"t", (1, 1, 1, 1, 1), 0, 0), "has rank 5")
    refused(good, with_tensor(b"t", (33,), 8, 0), "cannot be q8_0")
    refused(good, with_tensor(b"t", (4,), 1234, 0), "unknown type 1234")
    refused(good, with_tensor(b"t" * 64, (4,), 0, 0), "at most 63 are allowed")
    refused(good, with_tensor(b"t", (4,), 0, 0, count=2), "is there twice")


def rewritten(good, change):
    """Replace the graph text of the valid file and adjust string sizes."""
    data = good.read_bytes()
    key = b"mithril.graph"
    offset = data.index(key) + len(key) + 4
    (length,) = struct.unpack_from("<Q", data, offset)
    old = data[offset + 8 : offset + 8 + length].decode()
    new = change(old).encode()
    assert new != old.encode()
    head = data[:offset] + text(new)
    tail = data[offset + 8 + length :]
    before = len(data) - len(tail)
    shift = (before - len(head)) % 32  # keep the tensors where they are relative to the alignment
    filler = b" " * shift
    return data[:offset] + text(new + filler) + tail


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.replace("softmax", "system"), "cannot be read"),
        (lambda t: t[: len(t) // 2], "cannot be read"),
        (lambda t: t.replace("f32[50, 32]", "f32[51, 32]", 1), "does not fit|cannot be read|is \\["),
        (
            lambda t: t.replace("%linear.bias: f32[5]", "%linear.bias: f32[500000000000]", 1),
            "cannot be read|its graph says",
        ),
        (lambda t: t.replace("return output=", "return other="), "names of inputs and outputs"),
        (lambda t: t.replace("embedding.weight", "embedding.other"), "does not know|lacks"),
        (lambda t: "graph a {\n" * 200 + t, "cannot be read"),
    ],
)
def test_hostile_graphs(good, change, match):
    data = rewritten(good, change)
    good.write_bytes(data)
    with pytest.raises((InputError, MithrilError), match=match):
        ml.load(good)


def test_the_cache_stores_compiled_programs(tmp_path):
    first = classifier("ggml", cache=True, cache_dir=tmp_path)
    params = first.randomize_params(seed=0)
    expected = first.evaluate(params, {"input": TOKENS})["output"]
    again = classifier("ggml", cache=True, cache_dir=tmp_path)
    assert (again.evaluate(params, {"input": TOKENS})["output"] == expected).all()
    assert "cannot keep" not in str(again.decisions)
    quantized = classifier(ml.GGMLBackend(quantize="q4_0"), cache=True, cache_dir=tmp_path)
    assert relative(quantized.evaluate(params, {"input": TOKENS})["output"], expected) > 1e-3


@pytest.mark.parametrize("kind", ["bool", "int32", "int64", "float16", "bfloat16", "float32"])
def test_constants_and_weights_keep_dtype_and_rank(kind, tmp_path):
    layer = EveryRole(as_dtype(kind))
    model = ml.Model()
    model |= layer(x="x", **{name: name for name in layer.outputs})
    compiled = ml.compile(model, "ggml", shapes={"x": [2]}, inference=True)
    arguments = {"x": np.zeros(2, np.float32)}
    before, _ = compiled.evaluate(layer.params, arguments, state=layer.states)
    compiled.export(tmp_path / "model.gguf", params=layer.params)
    after, _ = ml.load(tmp_path / "model.gguf").evaluate(arguments, state=layer.states)
    assert [difference(n, np.asarray(after[n]), np.asarray(before[n])) for n in before] == [""] * len(before)
