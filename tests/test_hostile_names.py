"""Names are data: whatever they hold, no generator, export or picture takes them for code, and all results build."""

from __future__ import annotations

import builtins
import re
import shutil
import subprocess
import xml.etree.ElementTree

import numpy as np
import pytest

import mithril as ml
from mithril import Model, ops
from mithril.graph import parse, to_text
from mithril.graph.errors import MithrilError
from mithril.models import Layer, Linear
from mithril_tools.show.graph_formats import to_dot, to_json
from mithril_tools.visualization.observer import html
from mithril_tools.visualization.picture import svg

RUN = "__import__('builtins').hostile.append(1)"
CODE = [
    f'" + str({RUN}) + "',
    f"' + str({RUN}) + '",
    f'"]; {RUN}; x = ["',
    f"\n{RUN}\n#",
    f"\r{RUN}\r#",
    f"\x0c{RUN}",
    f'"""\n{RUN}\n"""',
    f"\\\n{RUN}",
    f"{{{{{RUN}}}}}",
    f"\u2028{RUN}\u2029",
    f"\x85{RUN}",
    '*/ int hostile = system("exit 3"); /*',
    '"); int hostile = 3; ("',
    "</text><script>hostile</script>",
    '"]; hostile [label="',
    "%x: f32[3] = hostile(",
]
AWKWARD = [
    *("", " ", ".", "..", "/", "../../up", "a b", "a=b", "a,b", "a:b", "%", "%s %d {}", "{0}", "#", "//", "\\", "\\n"),
    *("/*", "*/", "*\u00e9/", "??/", "???/", "??=", "\t", "\n", "\x00", "\x1b[31m", "\x7f"),
    *("\\N", "'", '"', "`", "$(x)", "${x}", "a'1", "\ud83d\ude00"),
    *("\u202eabc", "\u2066x\u2069", "\u200b", "\ufeff", "gro\u00df", "\ufb01", "\U0001f600", "\ud800", "\udfff x"),
    *("class", "lambda", "None", "int8", "int8_t", "int", "main", "run", "self", "at", "turn", "table", "float", "NAN"),
    *("EOF", "NULL", "bool", "sqrtf", "memset", "system", "np", "jnp", "torch", "mx", "numpy"),
    *("ml_dtypes", "inputs", "params", "outputs", "forward", "base64", "_array", "_arrays", "len", "tuple", "x" * 3000),
]  # fmt: skip
NAMES = CODE + AWKWARD
SOME = [*CODE[::4], *AWKWARD[::12]]  # where compiling takes long
UNFIT = re.compile("[\x00\ud800-\udfff]")
PLACES = ("input", "output", "layer", "parameter", "state", "class", "file", "attribute")
BACKENDS = ("numpy", "torch", "jax", "mlx", "c", "ggml")
X = np.array([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]], np.float32)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """Run in a directory where code in the names would leave a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "hostile", [], raising=False)
    yield
    assert not builtins.hostile


def model_named(name: str, places=PLACES) -> tuple[Model, str, str]:
    """Build a model with the name in these places; return it with the names of its input and output."""
    names = {place: name if place in places else f"plain_{place}" for place in PLACES}

    class Own(Layer):
        def build(self, input):
            weight = self.param(names["parameter"], (3,), "normal")
            before = self.state(names["state"], (3,))
            self.update_state(names["state"], before + 1)
            return input * weight + before

    if not UNFIT.search(names["class"]):  # Python itself refuses these for classes
        Own.__name__ = Own.__qualname__ = names["class"] or "C"
    layer = Own(name=names["layer"])
    if "attribute" in places:
        layer.set_attribute("note", name)
    model = Model()
    output = names["output"] + "_" if names["output"] == names["input"] else names["output"]
    space = {"Linear": Linear, "model": model, "own": layer, "a": names["input"], "b": output}
    text = "model |= Linear(3)(input=a, output='inner h')\nmodel |= own(input='inner h', output=b)\n"
    exec(compile(text, "plain.py" if "\x00" in names["file"] else names["file"], "exec"), space)
    return model, names["input"], output


def check_runs(backend: str, name: str, places=PLACES) -> None:
    """Run the model forward and backward, or expect an error of mithril."""
    try:
        model, input_name, output_name = model_named(name, places)
        compiled = ml.compile(model, backend, shapes={input_name: [2, 3]})
        params = compiled.randomize_params(seed=0)
        outputs = compiled.evaluate(params, {input_name: X}, state=compiled.initial_state())
        values, gradients = compiled.evaluate(params, {input_name: X}, output_gradients={output_name: X})
    except MithrilError as error:
        assert refusable(name), error
        return
    assert np.shape(compiled.backend.to_numpy(values[output_name])) == (2, 3)
    assert outputs and gradients


def refusable(name: str) -> bool:
    """Names that may be refused: there are none of length 0, and no file holds half of a surrogate pair."""
    return not name or any("\ud800" <= c <= "\udfff" for c in name)


@pytest.mark.parametrize("place", PLACES)
def test_no_place_of_a_name_is_code(place):
    for name in CODE:
        check_runs("numpy", name, (place,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_takes_names_for_code(backend):
    for name in SOME if backend in ("jax", "c") else NAMES:
        check_runs(backend, name)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_no_place_of_any_name_is_code_on_any_backend(place, backend):
    for name in NAMES:
        check_runs(backend, name, (place,))


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_graphs_are_read_back_with_their_names(name):
    try:
        model, input_name, _ = model_named(name)
        graph = ml.compile(model, "numpy", shapes={input_name: [2, 3]}).graph
    except MithrilError:
        assert refusable(name)
        return
    again = parse(to_text(graph))
    assert [i.name for i in again.inputs] == [i.name for i in graph.inputs]
    assert again.output_names == graph.output_names
    assert {n.origin.path for n in again.nodes} == {n.origin.path for n in graph.nodes}
    assert to_text(again) == to_text(graph)
    to_json(graph)
    dot = to_dot(graph)
    assert "\n" not in dot.replace("\n  ", "").replace("\n}", "")
    drawn = svg(graph)
    assert [e.tag.rpartition("}")[2] for e in xml.etree.ElementTree.fromstring(drawn).iter()].count("script") == 0
    assert "<script>" not in html(graph)
    assert "<script>" not in graph._repr_html_() + model._repr_html_()


ACCEPTED = [name for name in NAMES if not refusable(name)]
CROWD = {"shapes": {name: [2, 3] for name in ACCEPTED}, "outputs": [name + "'" for name in ACCEPTED]}


@pytest.fixture(scope="module")
def crowd():
    """Build one model with every accepted name as an input, an output, a layer, a class and a parameter."""
    model = Model()
    for name in ACCEPTED:
        layer = type("".join(c for c in name if c != "\x00") or "C", (Scaled,), {})(name)
        model |= layer(input=name, output=name + "'")
    return model


class Scaled(Layer):
    """The input times a parameter of any name."""

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter
        self.name = parameter

    def build(self, input):
        return input * self.param(self.parameter, (3,), "normal")


def compiled_crowd(model: Model, backend: str):
    return ml.compile(model, backend, inference=True, **CROWD)


def check_crowd(compiled, params=None) -> None:
    """Check that every output is its input times its parameter."""
    inputs = {name: X + k for k, name in enumerate(ACCEPTED)}
    if params is None:
        outputs, params = compiled(inputs), compiled.params
    else:
        outputs = compiled.evaluate(params, inputs)
    to_numpy = compiled.backend.to_numpy
    for key, x in params.items():
        name = next(n for n in ACCEPTED if key == f"{n}.{n}")
        np.testing.assert_allclose(to_numpy(outputs[name + "'"]), inputs[name] * to_numpy(x), rtol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_names_together_run(backend, crowd):
    compiled = compiled_crowd(crowd, backend)
    check_crowd(compiled, compiled.randomize_params(seed=0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_generated_files_and_templates_run(backend, crowd, tmp_path):
    """The written file is Python that defines the same function."""
    if backend in ("c", "ggml"):
        pytest.skip("writes no Python")
    (tmp_path / "t.j2").write_text(TEMPLATE)
    files = {"file.py": {}, "template.py": {"template_path": tmp_path / "t.j2"}}
    for file, more in files.items():
        compiled = ml.compile(crowd, backend, **CROWD, file_path=tmp_path / file, **more)
        compile((tmp_path / file).read_text(encoding="utf-8"), file, "exec")
        check_crowd(compiled, compiled.randomize_params(seed=0))


TEMPLATE = """{{ ('made of ' ~ graph.name) | quoted }}
{% for line in imports %}{{ line }}
{% endfor %}{% for text in helpers %}{{ text }}

{% endfor %}{% for line in constants %}{{ line }}
{% endfor %}NAMES = [{% for i in graph.inputs %}{{ i.name | quoted }}, {% endfor %}]
{{ signature }}
{% for line in body %}    {{ line }}
{% endfor %}    {{ closing }}
"""


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("cc") is None, reason="needs make and a C compiler")
def test_exported_c_builds_and_agrees(crowd, tmp_path):
    compiled = compiled_crowd(crowd, "c")
    compiled.bind(compiled.randomize_params(seed=0))
    compiled.export(tmp_path / "bundle")
    done = subprocess.run(["make", "check"], cwd=tmp_path / "bundle", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    symbols = subprocess.run(["nm", tmp_path / "bundle" / "model.o"], capture_output=True, text=True, check=True).stdout
    assert "hostile" not in symbols


def test_gguf_files_are_loaded_again(crowd, tmp_path):
    compiled = compiled_crowd(crowd, "ggml")
    compiled.bind(compiled.randomize_params(seed=0))
    compiled.export(tmp_path / "model.gguf")
    check_crowd(ml.load(tmp_path / "model.gguf"))
    check_crowd(ml.load(tmp_path / "model.gguf", backend="numpy"))


def test_saved_parameters_are_loaded_again(crowd, tmp_path):
    compiled = compiled_crowd(crowd, "numpy")
    params = compiled.randomize_params(seed=0)
    compiled.save(tmp_path / "w.safetensors", params)
    check_crowd(compiled.load(tmp_path / "w.safetensors"))


def test_cached_programs_are_read_back(crowd, tmp_path):
    for _ in range(2):
        compiled = ml.compile(crowd, "numpy", cache=True, cache_dir=tmp_path / "cache", **CROWD)
        check_crowd(compiled, compiled.randomize_params(seed=0))


@pytest.mark.parametrize("name", ["torch", "np", "len", "class", "inputs", "float", "tuple", "B", "gro\u00df"])
@pytest.mark.parametrize("backend", ["numpy", "torch", "jax", "mlx"])
def test_sizes_may_have_any_name_that_a_dimension_may_have(backend, name):
    model = Model()
    model |= Linear(3)(input="input", output="h")
    model |= Mean()(input="h", output="output")
    compiled = ml.compile(model, backend, shapes={"input": [name, 3]})
    params = compiled.randomize_params(seed=0)
    assert np.shape(compiled.evaluate(params, {"input": X})["output"]) == (2, 6)


class Mean(Layer):
    """Something that needs the size of the batch."""

    def build(self, input):
        size = input.shape[0]
        joined_input = ops.concat(input, input, axis=1)
        return ops.reshape(ops.reshape(joined_input, shape=(size * 2, 3)), shape=(size, 6)) * 1.0


def test_names_that_no_file_can_hold_are_refused(tmp_path):
    model, input_name, _ = model_named("\ud800")
    compiled = ml.compile(model, "numpy", shapes={input_name: [2, 3]}, inference=True)
    compiled.bind(compiled.randomize_params(seed=0))
    with pytest.raises(MithrilError, match="cannot be saved"):
        compiled.save(tmp_path / "w.safetensors")
    with pytest.raises(MithrilError, match="cannot hold the name"):
        compiled.export(tmp_path / "m.gguf")


# -- texts for people -----------------------------------------------------------------------------------------------
FORGED = "\x1b]0;pwned\x07\r\x9bx\u202eabc\u2066\nhint: forged\u2028y\x85z\x00"
CONTROLS = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]"
RAW = re.compile(CONTROLS + "|(?m:^hint: forged)")  # facts of errors are indented


def shown_by_calls() -> dict[str, object]:
    """Return calls whose results, prints, warnings or errors hold the name."""
    model, input_name, _ = model_named(FORGED, PLACES[:5])
    shapes = {input_name: [2, 3]}
    compiled = ml.compile(model, "numpy", shapes=shapes)
    params = compiled.randomize_params(seed=0)
    state = compiled.initial_state()
    compiled.bind(params)
    graph = compiled.graph

    def profiled():
        with ml.profile() as profile:
            compiled.evaluate(params, {input_name: X}, state=state)
        return profile

    return {
        **{f"compiled.{n}": getattr(compiled, n) for n in ("summary", "memory_report", "explain")},
        **{n: lambda n=n: getattr(compiled, n) for n in ("decisions", "programs", "graph", "source")},
        "model.summary": model.summary,
        "model.summary(shapes)": lambda: model.summary(shapes),
        "reprs": lambda: [model, compiled, graph, *graph.nodes, *graph.inputs, *(n.results for n in graph.nodes)],
        "layers": lambda: [layer for _, layer in model.walk()],
        "verbose": lambda: ml.compile(model, "numpy", shapes=shapes, verbose=True),
        "trace": lambda: ml.compile(model, "numpy", shapes=shapes, trace_shapes=True),
        "profile": profiled,
        "missing": lambda: compiled.evaluate(params, {}, state=state),
        "unknown": lambda: compiled.evaluate(params, {input_name: X, FORGED + "2": X}, state=state),
        "shape": lambda: compiled.evaluate(params, {input_name: X[:, :2]}, state=state),
        "dtype": lambda: compiled.evaluate(params, {input_name: X.astype(np.int64)}, state=state),
        "parameters": lambda: compiled.evaluate({FORGED: X}, {input_name: X}, state=state),
        "wrong shapes": lambda: ml.compile(model, "numpy", shapes={input_name: [2, 4]}),
        "backend": lambda: ml.compile(model, FORGED, shapes=shapes),
        "option": lambda: ml.compile(model, "numpy", shapes=shapes, **{FORGED: 1}),
        "file": lambda: ml.load(FORGED),
        "warning": lambda: compiled.decisions.record("ignored", FORGED, FORGED),
        "strict": lambda: ml.compile(model, "numpy", shapes=shapes, strict=True, num_threads=3),
        "text": lambda: ml.parse(f"graph g {{\n input %x: f32[{FORGED}]\n}}"),
        "device": lambda: ml.compile(model, "torch", shapes=shapes, device=FORGED),
    }


@pytest.mark.parametrize("name", list(shown_by_calls()))
def test_no_text_for_people_holds_raw_control_characters(name, capfd, recwarn):
    try:
        shown = shown_by_calls()[name]()
        texts = [str(shown), repr(shown)]
    except Exception as error:
        assert isinstance(error, MithrilError), error
        texts = [str(error)]
    printed = capfd.readouterr()
    texts += [printed.out, printed.err, *(str(w.message) for w in recwarn)]
    for text in texts:
        raw = RAW.search(text)
        assert raw is None, ascii(text[max(0, raw.start() - 80) : raw.end() + 20])


def test_the_check_notices_raw_names():
    assert RAW.search(FORGED)
    assert RAW.search("a\nhint: forged")
    assert not RAW.search(ascii(FORGED))
