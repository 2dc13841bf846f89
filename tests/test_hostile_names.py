"""Names are data: whatever they hold, no generator, export or picture takes them for code, and all results build."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree

import numpy as np
import pytest

import mithril as ml
from mithril import Model
from mithril.base.errors import MithrilError
from mithril.ir import parse, to_text
from mithril.ir.formats import to_dot, to_json
from mithril.models import Layer, Linear
from mithril_passes.visualization.page import html
from mithril_passes.visualization.picture import svg

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
    """The code in the names would leave a mark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "hostile", [], raising=False)
    yield
    assert not builtins.hostile


def model_named(name: str, places=PLACES) -> tuple[Model, str, str]:
    """A model with the name in these places, and what its input and output are called."""
    at = {place: name if place in places else f"plain_{place}" for place in PLACES}

    class Own(Layer):
        def build(self, input):
            weight = self.param(at["parameter"], (3,), "normal")
            before = self.state(at["state"], (3,))
            self.update_state(at["state"], before + 1)
            return input * weight + before

    if not UNFIT.search(at["class"]):  # Python itself refuses these for classes
        Own.__name__ = Own.__qualname__ = at["class"] or "C"
    own = Own(name=at["layer"])
    if "attribute" in places:
        own.set_attribute("note", name)
    model = Model()
    output = at["output"] + "_" if at["output"] == at["input"] else at["output"]
    space = {"Linear": Linear, "model": model, "own": own, "a": at["input"], "b": output}
    text = "model |= Linear(3)(input=a, output='inner h')\nmodel |= own(input='inner h', output=b)\n"
    exec(compile(text, "plain.py" if "\x00" in at["file"] else at["file"], "exec"), space)
    return model, at["input"], output


def check_runs(backend: str, name: str, places=PLACES) -> None:
    """The model runs, forward and backward, or is refused in our words."""
    try:
        model, given, wanted = model_named(name, places)
        compiled = ml.compile(model, backend, shapes={given: [2, 3]})
        params = compiled.randomize_params(seed=0)
        made = compiled.evaluate(params, {given: X}, state=compiled.initial_state())
        values, gradients = compiled.evaluate(params, {given: X}, output_gradients={wanted: X})
    except MithrilError as error:
        assert refusable(name), error
        return
    assert np.shape(compiled.backend.to_numpy(values[wanted])) == (2, 3)
    assert made and gradients


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
        model, given, _ = model_named(name)
        graph = ml.compile(model, "numpy", shapes={given: [2, 3]}).graph
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
