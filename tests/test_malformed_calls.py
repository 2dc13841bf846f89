"""Wrong arguments anywhere in the outer API end in our errors: none raises a foreign one, crashes or hangs."""

from __future__ import annotations

import inspect
import random
import signal
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
import mithril.models as layers
from mithril.compiler.options import mithril_options as core_options
from mithril.graph.errors import MithrilError
from mithril.models import Linear, Model

SECONDS = 120
FAST, ALL = 250, 2000
X = np.ones((2, 3), np.float32)
Y = np.zeros(2, np.int32)
JUNK = [
    *(None, True, -1, 0, 3, 10**30, 2.5, float("nan"), float("inf"), 1 + 2j, "", "x", "3", "input", "../x", b"x"),
    *([], [None], [1, "a"], (), {}, {1: 2}, {"a": 1}, {"input": "x"}, {"input": None}, {None: X}, {"input": {"a": X}}),
    *({1}, range(3), int, object(), len, lambda: 0, lambda *a: a, Exception("x"), Path("nowhere/x"), Path("/proc/x")),
    *(X, np.zeros(()), np.zeros((0,), np.int8), np.array(["a"]), np.array([object()]), np.ones((2, 3), complex), "nan"),
]


# Calls are not wrapped, for their speed: Python itself refuses an argument given both by position and by name.
LOW = ("dtype", "frozen")  # they take one value only
UNWRAPPED = ("evaluate", "gradients", "state", "bound", "loose")


def model() -> Model:
    model = Model()
    model |= Linear(3)(input="input", output="output")
    return model


def trainer() -> ml.Trainer:
    """Return a trainer that has begun."""
    trainer = ml.Trainer(model(), ml.SGD(0.1), loss="cross_entropy", backend="numpy", progress=False)
    trainer.begin((X, Y))
    return trainer


def thaw(patterns: object) -> None:
    trainer().frozen = patterns


class Calls:
    """Functions with arguments that are right, to make wrong ones from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled = ml.compile(model(), "numpy", shapes={"input": [2, 3]})
        self.params = self.compiled.randomize_params(seed=0)
        self.compiled.bind(self.params)
        self.compiled.save(folder / "w.safetensors")
        self.loose = ml.compile(model(), "numpy")

    def table(self) -> dict:
        """Name -> function and its right arguments, by name."""
        c, p, x = self.compiled, self.params, {"input": X}
        rows = {
            "evaluate": (c.evaluate, {"params": p, "inputs": x}),
            "gradients": (c.evaluate, {"params": p, "inputs": x, "output_gradients": {"output": X}, "wrt": ["input"]}),
            "state": (c.evaluate, {"params": p, "inputs": x, "state": {}, "training": True}),
            "bound": (c, {"inputs": x}),
            "loose": (self.loose.evaluate, {"params": p, "inputs": x}),
            "bind": (c.bind, {"params": p, "state": {}}),
            "save": (c.save, {"path": self.folder / "w.safetensors", "params": p, "state": {}}),
            "load": (c.load, {"path": self.folder / "w.safetensors"}),
            "load_state_dict": (c.load_state_dict, {"tensors": p, "strict": True}),
            "export": (c.export, {"path": self.folder / "m.gguf", "format": None}),
            "memory_report": (c.memory_report, {"inputs": x}),
            "capture": (c.capture, {"params": p, "inputs": x, "names": None}),
            "randomize_params": (c.randomize_params, {"seed": 0, "inputs": x}),
            "initial_state": (c.initial_state, {"seed": 0}),
            "ml.load": (ml.load, {"path": self.folder / "m.gguf", "format": None}),
            "ml.compile": (ml.compile, {"model": model(), "backend": "numpy", "shapes": {"input": [2, 3]}}),
            "ml.diff": (ml.diff, {"model": model(), "backends": ["numpy", "numpy"], "inputs": x, "seed": 0}),
            "BenchmarkConfig": (
                ml.BenchmarkConfig,
                {"warmup_iterations": 0, "benchmark_iterations": 1, "metrics": ["latency"]},
            ),
            "run_benchmark": (
                ml.run_benchmark,
                {"model": c, "inputs": x, "config": ml.BenchmarkConfig(0, 1), "params": p, "batch_sizes": None},
            ),
            "find_batch_size": (
                ml.find_batch_size,
                {"compiled": c, "inputs": x, "most": 2, "seconds": 0.01, "params": p},
            ),
            "process_in_batches": (ml.process_in_batches, {"compiled": c, "inputs": x, "batch_size": 1}),
            "ml.parse": (ml.parse, {"text": str(c.graph)}),
            "ml.gradients": (ml.gradients, {"graph": c.interface, "of": ["output"], "wrt": None}),
            "dtype": (ml.dtype, {"like": "float32"}),
            "Dim": (ml.Dim, {"name": "B", "low": 1, "high": 3}),
            "IOKey": (ml.IOKey, {"name": "x", "shape": [2], "dtype": "float32"}),
            "set_outputs": (lambda *a, **k: model().set_outputs(*a, **k), {"y": "output"}),
            "create": (Model.create, {"outputs": model()}),
            "model.input": (lambda *a, **k: model().input(*a, **k), {"name": "x", "shape": [2]}),
            "summary": (
                lambda *a, **k: model().summary(*a, **k),
                {"shapes": {"input": [2, 3]}, "types": None, "width": 80},
            ),
            "call": (lambda *a, **k: model().__ior__(Linear(3)(*a, **k)), {"input": "output", "output": "z"}),
            "DataLoader": (
                ml.DataLoader,
                {"data": (X, X), "batch_size": 1, "shuffle": True, "num_workers": 0, "seed": 0},
            ),
            "Trainer": (
                ml.Trainer,
                {"model": model(), "loss": "mse", "optimizer": ml.Adam(1e-3), "backend": "numpy", "metrics": []},
            ),
            "fit": (
                lambda *a, **k: trainer().fit(*a, **k),
                {"x": X, "y": Y, "epochs": 1, "batch_size": 2, "sample_weight": None, "class_weight": {0: 2.0}},
            ),
            "predict": (lambda *a, **k: trainer().predict(*a, **k), {"x": X, "batch_size": 1}),
            "trainer.evaluate": (lambda *a, **k: trainer().evaluate(*a, **k), {"x": X, "y": Y, "batch_size": 1}),
            "Padding": (lambda *a, **k: ml.Padding(*a, **k)([{"x": X}, {"x": X[:1]}]), {"sizes": [4], "value": 0}),
            "Buckets": (ml.Buckets, {"lengths": [1, 2], "sizes": [3]}),
            "TarStream": (lambda *a, **k: list(ml.TarStream(*a, **k)), {"paths": self.folder / "x.tar", "shuffle": 3}),
            "transforms": (
                lambda *a, **k: ml.DataLoader((X, Y), *a, **k),
                {"transform": lambda row: row, "batch_transform": None, "collate": None, "buckets": None},
            ),
            "frozen": (lambda *a, **k: thaw(*a, **k), {"patterns": ()}),
            "profile": (ml.profile, {}),
        }
        for kind in (ml.NumpyBackend, ml.TorchBackend, ml.JaxBackend, ml.MlxBackend, ml.CBackend, ml.GGMLBackend):
            rows[kind.__name__] = (kind, {"device": None, "dtype": "float32", "precision": None})
        for option in core_options():
            if option.name not in ("timeout",):
                rows[f"option {option.name}"] = (compile_with, {option.name: option.default})
        for name in (
            "SGD",
            "Adam",
            "AdamW",
            "RMSprop",
            "Lion",
            "Adagrad",
            "Adafactor",
            "Adamax",
            "Adadelta",
            "RAdam",
            "Cosine",
            "Cyclic",
            "Polynomial",
            "StepDecay",
            "WarmUp",
            "L1",
            "L2",
            "MLflow",
            "Pruning",
            "ReduceLROnPlateau",
            "TensorBoard",
            "WandB",
        ):
            rows[name] = (getattr(ml, name), {})
        for name in ("GradientNoise", "Lookahead", "SAM"):
            rows[name] = (getattr(ml, name), {"inner": ml.SGD(0.1)})
        for name in ("ColorJitter", "CutMix", "MixUp", "RandomAffine", "RandomCrop", "RandomFlip"):
            kind = getattr(ml, name)
            parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
            rows[f"layer {name}"] = (kind, {p.name: 2 if p.default is p.empty else p.default for p in parameters})
        for name in layers.__all__:
            kind = getattr(layers, name)
            if inspect.isclass(kind) and issubclass(kind, layers.Layer) and kind not in (layers.Layer, Model):
                parameters = inspect.signature(kind.__init__).parameters
                rows[f"layer {name}"] = (
                    kind,
                    {
                        n: 2 if p.default is p.empty else p.default
                        for n, p in [*parameters.items()][1:]
                        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
                    },
                )
        return rows


def compile_with(*args, **options):
    return ml.compile(model(), "numpy", *args, **{"shapes": {"input": [2, 3]}, **options})


def malformed(rng: random.Random, right: dict) -> tuple[tuple, dict]:
    """Right arguments with one to two mistakes: a wrong value, a missing one, an unknown name, one too many."""
    args, options = (), dict(right)
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.random()
        if kind < 0.7 and options:
            options[rng.choice([*options])] = rng.choice(JUNK)
        elif kind < 0.8 and options:
            options.pop(rng.choice([*options]))
        elif kind < 0.9:
            options[rng.choice(("nope", "Inputs", "shape_", "self_", "x y"))] = rng.choice(JUNK)
        else:
            args = (*args, rng.choice(JUNK))
    return args, options


def outcome(function, args, options) -> tuple[str, str]:
    """``"ran"``, ``"refused"`` or the foreign exception, with the end of its traceback."""

    def late(*_):
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*args, **options)
        return "ran", ""
    except MithrilError as error:
        assert str(error)
        return "refused", ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return type(error).__name__, f"{error} | " + " < ".join(
            f"{Path(f.filename).name}:{f.lineno}" for f in frames[:0:-1][:4]
        )
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(count: int, folder: Path, seed: int = 0) -> tuple[Counter, list[str]]:
    rng = random.Random(seed)
    table = Calls(folder).table()
    names = list(table)
    outcomes: Counter = Counter()
    foreign = []
    for k in range(count):
        name = names[k % len(names)]
        function, right = table[name]
        args, options = malformed(rng, right)
        if name in UNWRAPPED:
            args = ()
        if name in LOW:
            args, options = (
                (),
                {n: v for n, v in options.items() if n in right} | {n: None for n in right if n not in options},
            )
        kind, location = outcome(function, args, options)
        outcomes[kind if kind in ("ran", "refused") else "foreign"] += 1
        if kind not in ("ran", "refused"):
            shown = ", ".join([*map(short, args), *(f"{n}={short(v)}" for n, v in options.items())])
            foreign.append(f"{name}({shown}): {kind}: {location}")
    return outcomes, foreign


def short(value) -> str:
    return repr(value).replace("\n", " ")[:60]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_malformed_calls_raise_our_errors(folder):
    outcomes, foreign = run(FAST, folder)
    assert not foreign, "\n".join(foreign)
    assert outcomes["refused"] > FAST // 2


# Declarations of plugin authors, records of graphs, and decorators: Python itself rejects a misspelled keyword of
# these, and the first argument of a decorator is code. Constructors of scikit-learn's estimators check nothing: its own
# checks demand this.
DECLARATIONS = frozenset(
    """
    Architecture BackendSpec Builder Classifier Command CompileContext Connection DType DeviceSpec Dim Export
    FileFormat Found FrontendSpec Graph HardwareTarget Lowering MemoryLevel Node OpsSpec Option Origin Pass
    PassManager PassSpec PipelineDraft ProfilerSpec Regressor Rule RuleSet TensorType Value composite
    hookimpl op pass_ rule
    """.split()
)
LIBRARY_SETTINGS = frozenset({"WandB", "MLflow"})  # the keywords of these are checked by the library
PUBLIC = [
    name
    for name in dir(ml)
    if callable(getattr(ml, name))
    and name not in DECLARATIONS
    and not (isinstance(getattr(ml, name), type) and issubclass(getattr(ml, name), BaseException))
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_rejects_misspelled_and_surplus_arguments(name):
    """Call every name of the facade, with the exports of all plugins."""
    call = getattr(ml, name)
    misspelled = [] if name in LIBRARY_SETTINGS else [((), {"misspelled": 1})]
    for args, options in (*misspelled, (tuple(range(30)), {})):
        with pytest.raises(MithrilError):
            call(*args, **options)
    required = [
        p
        for p in inspect.signature(call).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if required:
        with pytest.raises(MithrilError):
            call()
    elif isinstance(call, type):
        with suppress(MithrilError):  # abstract ones
            call()


@pytest.mark.soak
def test_two_thousand_malformed_calls(folder):
    outcomes, foreign = run(ALL, folder, seed=1)
    print(dict(outcomes))
    assert not foreign, "\n".join(foreign)


COMMANDS = [
    *("", "nope", "compile", "compile x", "compile x:y", "explain a:b:c", "compile /etc/passwd:net"),
    *(
        "compile broken.py:net",
        "compile missing.py:net",
        "compile raises.py:net",
        "compile exits.py:net",
        "compile fails.py:net",
    ),
    *("compile .x:y",),
    *(
        "compile good.py:net --shape input",
        "compile good.py:net --shape input=x,,",
        "compile good.py:net --backend nope",
    ),
    *("compile good.py:nope", "compile good.py:number", "diff good.py:net", "bench good.py:net --backend nope"),
    *("bench /etc/passwd:net", "cache nope", "cache info --folder /proc/x", "new-plugin pass class!"),
    *("explain good.py:net",),
    *("compile good.py:net --shape input=-1,3", "compile good.py:net --shape input=99999999999999999999,3"),
]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_shows_no_traceback(folder, line):
    from click.testing import CliRunner

    from mithril_tools.cli import main

    files = {
        "broken.py": "def (",
        "raises.py": "1 / 0",
        "exits.py": "import sys; sys.exit(3)",
        "fails.py": "def net():\n    return [][1]",
        "good.py": "from mithril.models import Linear\nnet = Linear(3)\nnumber = 3\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    result = CliRunner().invoke(main, line.split())
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)


def test_dtypes_that_were_assumed(tmp_path):
    class Tokens(ml.models.Layer):
        def __init__(self):
            self.table = ml.models.Embedding(10, 4)

        def build(self, x):
            return self.table(x)

    compiled = ml.compile(Tokens(), "numpy", shapes={"input": [2, 5]})
    with pytest.raises(ml.DTypeError) as caught:
        compiled.randomize_params()
    assert str(caught.value).endswith(
        "assumed without a declaration: input: f32[2, 5]\n"
        "hint: if it is of integers, declare it: types={'input': 'int32'}"
    )
