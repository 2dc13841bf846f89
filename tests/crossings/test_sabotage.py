"""The rows find defects: each sabotage breaks mithril in one place, and its row, which passes otherwise, must fail."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from crossings import modes, oracle, rows, third_party
from crossings.model import Case, Refused
from mithril import ops
from mithril.compiler import partition, program_cache
from mithril_hub.generation.session import Session
from mithril_hub.gguf import writing
from mithril_onnx.export import model as export_model
from mithril_train.data import loader
from mithril_train.engine import carried_arrays, engine
from mithril_train.optim import optimizers
from mithril_train.step import quantization, step

PLAIN = "options=medium"
TRAIN = "options=medium mode=train"


def around(owner: Any, name: str, change: Any) -> Any:
    """Return a sabotage that replaces a function by ``change(original, *arguments)``."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *given, **named: change(original, *given, **named))

    return apply


def one_cache_entry(patch: pytest.MonkeyPatch) -> None:
    """Give all models one entry of the cache; entries of layers at other lines are compiled again otherwise."""

    def anywhere(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        self.places = ()

    around(program_cache.ProgramCache, "__init__", anywhere)(patch)
    around(program_cache.ProgramCache, "key", lambda original, self, request: "0" * 64)(patch)


def gradient_of(op: Any, place: int = 0) -> Any:
    """Change a gradient so that it misses a tenth of one term."""

    def change(original: Any, *given: Any, **named: Any) -> Any:
        results = original(*given, **named)
        if not isinstance(results, tuple):
            return results * 0.9
        return tuple(g * 0.9 if k == place and g is not None else g for k, g in enumerate(results))

    return around(getattr(ops, op) if isinstance(op, str) else op, "gradient", change)


class Broken:
    """A compiled model that works like another one, except for its results or side effects."""

    def __init__(self, inner: Any, change: Any) -> None:
        self.inner, self.change, self.calls = inner, change, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def bind(self, params: Any) -> Broken:
        self.inner.bind(params)
        return self

    def __call__(self, inputs: Any) -> Any:
        self.calls += 1
        return self.change(self, self.inner(inputs))


def call(change: Any) -> Any:
    """Break the calls of the row's compiled model, not those of the reference."""

    def compiled(original: Any, case: Case, **more: Any) -> Any:
        result = original(case, **more)
        return result if case.row["options"] == "none" else Broken(result, change)

    return around(Case, "compile", compiled)


def output(function: Any) -> Any:
    return call(lambda model, results: {**results, "output": function(results["output"])})


def warn(model: Any, results: Any) -> Any:
    warnings.warn("the framework will change", FutureWarning, stacklevel=1)
    return results


def leave(model: Any, results: Any) -> Any:
    Path("forgotten.txt").write_text("")
    return results


def leave_temporary(model: Any, results: Any) -> Any:
    import tempfile

    tempfile.mkstemp()
    return results


def fail(error: Exception, from_call: int = 1) -> Any:
    def change(model: Any, results: Any) -> Any:
        if model.calls >= from_call:
            raise error
        return results

    return call(change)


def repeated(original: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Let the first sample of a batch take the place of the last."""
    for batch in original(self, *given, **named):
        for column in batch.values():
            column[-1] = column[0]
        yield batch


def refuse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(oracle, "limits", lambda row: [Refused("said to be refused", "input", mode="infer")])


def statistics_lost(original: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Forget the running statistics of batch norm."""
    previous = {name: np.array(self.arrays[name]) for name in self.states}
    reports = original(self, *given, **named)
    self.arrays = {**self.arrays, **previous}
    return reports


def batch_lost(original: Any, self: Any, batch: Any, *given: Any, last: bool = True) -> Any:
    """Forget the gradients of the batches before the last one of a step."""
    previous = {name: np.array(x) for name, x in self.arrays.items()}
    reports = original(self, batch, *given, last=last)
    if not last:
        self.arrays = previous
    return reports


def slots_lost(original: Any, self: Any, tensors: Any) -> Any:
    restored = original(self, tensors)
    return {n: x * 0 if n.startswith("momentum") or "/momentum" in n else x for n, x in restored.items()}


def misplaced(original: Any, self: Any, name: str, numbers: Any) -> Any:
    """Write tokens one place after their own."""
    return original(self, name, numbers) + (name == "position")


def first_transfer(patch: pytest.MonkeyPatch) -> None:
    """Let parts on another engine keep the first parameters."""
    transferred: dict[Any, Any] = {}
    original = partition.Partitioned._transfer

    def transfer(self: Any, array: Any, source: Any, target: Any) -> Any:
        result = original(array, source, target)
        return transferred.setdefault((id(self), tuple(array.shape)), result) if array.ndim == 2 else result

    patch.setattr(partition.Partitioned, "_transfer", transfer)


SABOTAGES = {
    "rounding of training forgotten": (
        around(quantization, "round_to_grid", lambda original, x, grid: x),
        f"{TRAIN} precision=aware8",
    ),
    "parameters of another engine stale": (first_transfer, "options=backend_map mode=train"),
    "gradient of a critic": (gradient_of("softplus"), "options=medium mode=adversarial"),
    "gradient of a skip": (gradient_of("concat"), "mode=gradient network=unet"),
    "gradient of a scan": (gradient_of("sigmoid"), "mode=gradient network=scan"),
    "kernel of a third party wrong": (
        around(third_party, "of_numpy", lambda original, x: original(x) * 0.9),
        "options=lowering",
    ),
    "gradient of a third party wrong": (
        around(third_party.bend, "gradient", lambda original, *given, **named: (original(*given, **named)[0] * 0.9,)),
        "mode=gradient network=foreign",
    ),
    "cache of a decoder misplaced": (
        around(Session, "_one_or_all", misplaced),
        f"{PLAIN} network=decoder source=pretrained mode=generate",
    ),
    "hook lost in a file": (
        around(writing, "require_layers_of_settings", lambda original, model: None),
        f"{PLAIN} network=decoder source=pretrained surgery=hook mode=to_llama",
    ),
    "calibrated 8 bits coarse": (output(lambda y: y * 0.5), f"{PLAIN} precision=int8"),
    "gradient of tanh": (gradient_of("tanh"), "mode=gradient"),
    "gradient of the weight in linear": (gradient_of("linear", 1), "mode=gradient"),
    "gradient of the input in linear": (gradient_of("linear", 0), "mode=gradient"),
    "gradient of the bias in linear": (gradient_of("linear", 2), "mode=gradient"),
    "gradient of LoRA": (gradient_of("linear", 1), "mode=gradient surgery=lora"),
    "gradient of a convolution": (gradient_of("conv", 1), "mode=gradient network=convolutions"),
    "gradient of a rectifier": (gradient_of("relu"), "mode=gradient network=convolutions"),
    "gradient in a loop": (gradient_of("tanh"), "mode=gradient network=loop"),
    "momentum ignored": (
        around(optimizers.SGD, "update", lambda original, self, p, g, slots, s: (p - s["rate"] * g, slots)),
        TRAIN,
    ),
    "learning rate doubled": (
        around(
            optimizers.SGD, "update", lambda o, self, p, g, slots, s: o(self, p, g, slots, {**s, "rate": s["rate"] * 2})
        ),
        TRAIN,
    ),
    "freeze ignored": (
        around(carried_arrays, "trained_names", lambda original, graph, recipe: step.parameter_names(graph)),
        f"{TRAIN} surgery=freeze",
    ),
    "clipping ignored": (
        around(step, "clipped", lambda original, recipe, gradients: (dict(gradients), None)),
        "options=medium mode=average",
    ),
    "average of another decay": (
        around(
            step,
            "scalars_of",
            lambda o, r, *given: {**o(r, *given), "average_share": ops.full((), fill=0.5, dtype="float32")},
        ),
        "options=medium mode=average",
    ),
    "optimizer state lost on resume": (
        around(carried_arrays.CarriedArrays, "restored", slots_lost),
        f"{TRAIN} event=resume",
    ),
    "samples repeated": (around(loader.DataLoader, "__iter__", repeated), TRAIN),
    "statistics lost": (
        around(engine.Engine, "step", statistics_lost),
        f"{TRAIN} network=convolutions",
    ),
    "stale cache": (one_cache_entry, "options=cache"),
    "result moved": (output(lambda y: y + 0.01), PLAIN),
    "one row wrong": (output(lambda y: np.concatenate([y[:-1], y[:1]])), PLAIN),
    "one row missing": (output(lambda y: y[:-1]), f"{PLAIN} sizes=odd"),
    "rank lost": (output(lambda y: y.reshape(-1)), PLAIN),
    "result nan": (output(lambda y: y * np.nan), PLAIN),
    "results of several rows mixed": (output(lambda y: y[::-1]), f"{PLAIN} sizes=open"),
    "an output renamed": (call(lambda model, results: {"result": results["output"]}), PLAIN),
    "an output too many": (call(lambda model, results: {**results, "debug": results["output"]}), PLAIN),
    "an output lost": (call(lambda model, results: {"output": results["output"]}), f"{PLAIN} surgery=outputs"),
    "second call wrong": (call(lambda model, r: r if model.calls < 2 else {n: y * 2 for n, y in r.items()}), PLAIN),
    "foreign exception": (fail(KeyError("states")), PLAIN),
    "foreign exception of the second call": (fail(RuntimeError("freed"), 2), PLAIN),
    "foreign exception in a thread": (fail(RuntimeError("busy"), 2), f"{PLAIN} event=threads"),
    "undeclared refusal": (fail(ml.UnsupportedError("no", hint="another engine")), PLAIN),
    "foreign warning": (call(warn), PLAIN),
    "file left in the current folder": (call(leave), PLAIN),
    "temporary file left": (call(leave_temporary), PLAIN),
    "declared refusal that works": (refuse, PLAIN),
    "coarse 16 bits": (output(lambda y: np.round(y.astype(np.float32))), f"{PLAIN} precision=bfloat16"),
    "coarse 8 bits": (output(lambda y: y * 0.5), f"{PLAIN} precision=dynamic8"),
    "batch of an accumulated step forgotten": (
        around(engine.Engine, "step", batch_lost),
        "options=medium mode=accumulate",
    ),
    "exported weights halved": (
        around(export_model, "tensor_of", lambda original, array, *more: original(array / 2, *more)),
        f"{PLAIN} mode=to_onnx",
    ),
    "interrupt swallowed": (
        around(
            modes.Seen,
            "step_end",
            lambda original, self, trainer, report: setattr(self, "stop_at", 0) or original(self, trainer, report),
        ),
        f"{TRAIN} event=interrupt",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SABOTAGES))
def test_sabotage_is_found(name, monkeypatch):
    sabotage, line = SABOTAGES[name]
    row = rows.parse(line if "options=" in line else f"{line} options=none")
    sabotage(monkeypatch)
    assert oracle.judge(row).kind == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for _, line in SABOTAGES.values()}))
def test_rows_pass_without_sabotage(line):
    verdict = oracle.judge(rows.parse(line if "options=" in line else f"{line} options=none"))
    assert verdict.kind in ("passed", "refused"), verdict.text
