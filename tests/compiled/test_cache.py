"""``cache=True``: hits, misses, and equality of programs loaded from disk."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import BatchNorm1d, Layer, Linear, Model, MultiHeadAttention, Relu
from mithril.system.disk_cache import Store

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def net(size=8):
    model = Model()
    model |= Linear(size, name="first")(input="x", output="h")
    model |= BatchNorm1d(size, name="norm")(input="h", output="n")
    model |= Relu(name="act")(input="n", output="a")
    model |= Linear(2, name="last")(input="a", output="output")
    return model


def stages(monkeypatch):
    """Names of the stages of every compilation from now on."""
    from mithril import plugins

    seen = []
    monkeypatch.setattr(plugins, "compile_stage", lambda context, stage, graph: seen.append(stage))
    return seen


def made(backend, folder, model=None, **options):
    options = {"shapes": {"x": ["B", 4]}, **options}
    return ml.compile(model if model is not None else net(), backend, cache=True, cache_dir=str(folder), **options)


def same(a, b):
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def arrays(compiled, results):
    return {n: compiled.backend.to_numpy(v) for n, v in results.items()}


def keeps(backend):
    return type(made_backend(backend)).dump is not ml.Backend.dump


def made_backend(backend):
    from mithril import plugins

    return plugins.backend_class(backend)()


SCRIPT = """
import sys
{comments}
import mithril as ml
from mithril.models import Layer, Linear, Model

class Twice(Layer):
    def build(self, x):
        return x * 2.0

model = Model(Linear(3), Twice())
compiled = ml.compile(model, sys.argv[1], shapes={{"input": [2, 4]}}, cache=True, cache_dir=sys.argv[2])
print(str(compiled.graph.nodes[-1].origin).rpartition("/")[2])
"""


def test_the_key_holds_no_line_of_the_user(tmp_path):
    places = []
    for k, name in enumerate(("first.py", "second.py")):
        path = tmp_path / name
        path.write_text(SCRIPT.format(comments="# a comment\n" * k))
        command = [sys.executable, str(path), "numpy", str(tmp_path / "cache")]
        places.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert places == ["first.py:11", "second.py:12"]  # messages name the lines of the running program
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "key" not in path.name]
    assert len(entries) == 1


def test_entries_whose_messages_name_moved_lines_are_not_used(tmp_path, monkeypatch):
    shapes = {"query": [1, 4, 16], "position": []}
    seen = stages(monkeypatch)
    attention, copy = Model(), Model()  # the check of the cache's size names a line
    attention |= MultiHeadAttention(16, 2, cache=8)(query="query", position="position", output="output")
    copy |= MultiHeadAttention(16, 2, cache=8)(query="query", position="position", output="output")
    for model, is_cached in ((attention, False), (attention, True), (copy, False), (copy, True)):
        seen.clear()
        compiled = made("numpy", tmp_path, model, shapes=shapes)
        assert ("cached" in seen) is is_cached
        assert ("lines that moved" in str(compiled.decisions)) is (model is copy and not is_cached)


def test_a_second_compile_finds_the_program_and_it_is_the_same(backend, rows, tmp_path, monkeypatch):
    first = made(backend, tmp_path, shapes={"x": [rows, 4]})
    seen = stages(monkeypatch)
    second = made(backend, tmp_path, shapes={"x": [rows, 4]})
    if not keeps(backend):
        assert "cannot save this program" in str(first.decisions)
        return
    assert seen == ["flatten", "resolve", "cached"]
    assert second.source == first.source
    assert str(second.graph) == str(first.graph)
    assert second.explain().splitlines()[-3:] == first.explain().splitlines()[-3:]
    params = first.randomize_params(0)
    same(arrays(first, first.evaluate(params, {"x": X})), arrays(second, second.evaluate(params, {"x": X})))
    with pytest.raises(ml.InputError, match="expected"):
        second.evaluate(params, {"x": X[:, :3]})
    with pytest.raises(ml.InputError, match="first.weight"):
        second.evaluate({**params, "first.weight": params["last.weight"]}, {"x": X})


def test_gradients_and_state_come_from_disk_too(backend, tmp_path):
    ones = {"output": np.ones((3, 2), np.float32)}
    results = []
    for _ in range(2):
        compiled = made(backend, tmp_path)
        params, state = compiled.randomize_params(0), compiled.initial_state()
        outputs, gradients, new = compiled.evaluate(params, {"x": X}, ones, state=state)
        results.append([arrays(compiled, part) for part in (outputs, gradients, new)])
    for a, b in zip(*results, strict=True):
        same(a, b)


def test_another_process_finds_it(tmp_path):
    code = (
        "import sys, mithril as ml; from mithril.models import Linear, Model; m = Model();"
        "m |= Linear(3)(input='x', output='output');"
        "c = ml.compile(m, 'numpy', shapes={'x': ['B', 4]}, cache=True, cache_dir=sys.argv[1], verbose=True)"
    )
    texts = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert "optimize" in texts[0] and "cached" not in texts[0]
    assert "cached" in texts[1] and "optimize" not in texts[1]


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": {"x": [3, 4]}},
        {"shapes": {"x": [ml.Dim("B", 1, 8), 4]}},
        {"optimization_level": "none"},
        {"optimizations": {"simplify": False}},
        {"inference": True},
        {"custom_passes": [lambda graph: graph]},
        {"code_transformers": [lambda text: text]},
        {"constants": {"x": X}, "shapes": {}},
    ],
    ids=lambda c: next(iter(c)) + str(len(str(c))),
)
def test_whatever_changes_the_program_changes_the_key(tmp_path, monkeypatch, change):
    made("numpy", tmp_path)
    seen = stages(monkeypatch)
    assert made("numpy", tmp_path, **change).programs
    assert "cached" not in seen
    seen.clear()
    assert made("numpy", tmp_path, **change).programs
    assert "cached" in seen


def test_another_model_is_another_key(tmp_path, monkeypatch):
    made("numpy", tmp_path)
    seen = stages(monkeypatch)
    made("numpy", tmp_path, net(16))
    assert "cached" not in seen


def layer_with(function):
    class Scaled(Layer):
        def build(self, x):
            return function(x)

    model = Model()
    model |= Scaled()(input="x", output="output")
    return model


def test_a_users_layer_is_known_by_its_code(tmp_path, monkeypatch):
    made("numpy", tmp_path, layer_with(lambda x: ops.mul(x, 2.0)))
    seen = stages(monkeypatch)
    made("numpy", tmp_path, layer_with(lambda x: ops.mul(x, 3.0)))
    assert "cached" not in seen


FACTOR = 2.0


def by_factor(x):
    return ops.mul(x, FACTOR)


def test_globals_of_user_functions_are_part_of_the_key(tmp_path, monkeypatch):
    made("numpy", tmp_path, layer_with(lambda x: by_factor(x)))
    seen = stages(monkeypatch)
    made("numpy", tmp_path, layer_with(lambda x: by_factor(x)))
    assert "cached" in seen
    seen.clear()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    made("numpy", tmp_path, layer_with(lambda x: by_factor(x)))
    assert "cached" not in seen


def test_models_without_fingerprint_are_not_cached(tmp_path):
    class Opaque:
        __module__ = "somewhere"

    class Odd(Layer):
        def __init__(self, thing):
            self.thing = thing

        def build(self, x):
            return ops.relu(x)

    model = Model()
    model |= Odd(Opaque())(input="x", output="output")
    compiled = made("numpy", tmp_path, model)
    assert "cache: an object of the class 'somewhere" in str(compiled.decisions)
    assert Store(tmp_path).info().entries == 0


def test_a_damaged_entry_is_rebuilt(tmp_path):
    first = made("numpy", tmp_path)
    (file,) = tmp_path.rglob("*.mithril")
    file.write_bytes(file.read_bytes()[:-100])
    second = made("numpy", tmp_path)
    params = first.randomize_params(0)
    same(first.evaluate(params, {"x": X}), second.evaluate(params, {"x": X}))
    assert Store(tmp_path).info().entries == 1


def test_showing_graphs_goes_through_all_steps(tmp_path, monkeypatch):
    made("numpy", tmp_path)
    seen = stages(monkeypatch)
    made("numpy", tmp_path, dump_graph=str(tmp_path / "d"))
    assert "optimize" in seen
    assert list((tmp_path / "d").iterdir())


def test_a_file_path_is_written_from_the_cache_as_well(tmp_path):
    made("numpy", tmp_path / "c")
    made("numpy", tmp_path / "c", file_path=str(tmp_path / "made.py"))
    assert "def forward(params, inputs):" in (tmp_path / "made.py").read_text()
