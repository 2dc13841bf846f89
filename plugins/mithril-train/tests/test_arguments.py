"""Wrong arguments of everything in mithril-train raise our errors, with the argument and a remedy."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from small import X, Y, classifier, loader, trainer

import mithril as ml
from mithril.graph.errors import MithrilError, OptionError

JUNK = ["2", None, -1, 1.5, math.nan, True, (), [], {}, {"a": 1}, b"x", object(), print, np.zeros(2), ["x"], 10**30]


@dataclass(frozen=True, kw_only=True)
class WithoutUpdate(ml.Optimizer):
    learning_rate: float = 0.1


OPTIMIZERS = [
    ml.SGD,
    ml.Adam,
    ml.AdamW,
    ml.Adagrad,
    ml.RMSprop,
    ml.Lion,
    ml.Adafactor,
    ml.Adamax,
    ml.RAdam,
    ml.Adadelta,
]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ml.Adam(lr=1e-3), "Adam has no argument 'lr'(?s:.)*hint: write learning_rate="),
        (lambda: ml.Adam(betas=(0.9, 0.99)), "write beta1= and beta2="),
        (lambda: ml.Adam(beta3=0.9), "did you mean 'beta"),
        (
            lambda: ml.Adam(beta1="0.9"),
            r"Adam: beta1: expected float of at least 0, got '0.9' \(str\)\nhint: write beta1=0.9",
        ),
        (lambda: ml.Adam(weight_decay=-1), "weight_decay: expected float of at least 0"),
        (lambda: ml.SGD(momentum=1.0), "momentum=1.0 must be at least 0 and less than 1"),
        (lambda: ml.Adam(groups={"*": {"lr": 1}}), "group '.' sets 'lr'(?s:.)*hint: write learning_rate="),
        (lambda: ml.Adam(groups={"*": {"beta1": "x"}}), "group '.': beta1: expected float"),
        (lambda: ml.Optimizer(), "Optimizer has no learning_rate\nhint: use an optimizer such as ml.SGD"),
        (
            lambda: type("Own", (ml.Optimizer,), {"__init__": lambda self, rate: None}),
            r"the settings of the optimizer Own are fields(?s:.)*hint: @dataclass\(frozen=True\) class Own",
        ),
        (
            lambda: type("Own", (ml.Optimizer,), {"update": lambda self, g, p: None}),
            r"update\(\) of Own cannot be called: too many(?s:.)*hint: def update\(self, p, g, slots, s\)",
        ),
        (lambda: type("Own", (ml.Optimizer,), {})(learning_rate=0.1), r"hint: write @dataclass\(frozen=True\) above"),
        (lambda: ml.Schedule(), "Schedule is abstract\nhint: define __call__ in it or in a class derived from it"),
        (lambda: ml.StepLogger(), "StepLogger is abstract\nhint: define log"),
        (
            lambda: trainer(optimizer=WithoutUpdate()).fit(X, Y),
            r"WithoutUpdate has no update rule\nhint: define update",
        ),
        (lambda: ml.Cosine(0.1), "Cosine requires 'steps'"),
        (lambda: ml.StepDecay(0.1, every=0), "every: expected int of at least 1"),
        (
            lambda: ml.DataLoader(X, num_workers="2"),
            r"num_workers: expected int of at least 0, got '2' \(str\)\nhint: write num_workers=2",
        ),
        (lambda: ml.DataLoader(X, bach_size=3), "did you mean 'batch_size'"),
        (lambda: ml.DataLoader(X, collate_fn=print), "write collate="),
        (lambda: ml.EarlyStopping(moniter="loss"), "did you mean 'monitor'"),
        (lambda: trainer(gradient_accumulation_steps="2"), "write gradient_accumulation_steps=2"),
        (lambda: trainer(callbacks=[print]), r"callbacks: at \[0\]: expected Callback"),
        (lambda: trainer(optimizerr=ml.Adam()), "did you mean 'optimizer'"),
        (lambda: trainer(lr=0.1), r"ml.Adam\(learning_rate=...\)"),
        (lambda: trainer(ema=2.0), "ema=2.0 must be between 0 and 1"),
        (lambda: trainer().fit(X, Y, 1, 2), r"hint: fit\(x, y, epochs=...\), or fit\(loader, epochs=...\)"),
        (
            lambda: trainer().fit(loader(), batch_size=3),
            r"batch_size belongs to arrays(?s:.)*DataLoader\(..., batch_size",
        ),
        (lambda: trainer().fit(loader(), Y), "y belongs to arrays(?s:.)*yield it as a column"),
        (lambda: trainer().fit(loader(), -3), "epochs: expected int of at least 0, got -3"),
        (lambda: trainer().fit(X, Y, validation=(X, Y), validation_data=(X, Y)), "are the same argument"),
        (lambda: trainer().fit(X, Y, class_weight={-1: 2.0}), "is not a weight of at least 0 per label"),
        (lambda: trainer().fit(X, Y, class_weight={"a": 2.0}), "class_weight: at (?s:.)*expected int"),
        (
            lambda: trainer(loss={"outptu": "cross_entropy"}),
            "loss: unknown output 'outptu'(?s:.)*did you mean 'output'",
        ),
        (lambda: trainer(loss={}), "loss is an empty dictionary"),
        (lambda: trainer(loss_weights={"output": 1.0}), "loss_weights: unknown loss 'output'"),
        (
            lambda: trainer(regularizers={"*.wieght": ml.L2()}).fit(X, Y),
            r"'\*.wieght' in regularizers matches no parameter",
        ),
        (lambda: trainer(regularizers={"*": "l2"}), "regularizers: at (?s:.)*expected a function"),
        (
            lambda: trainer(regularizers={"*": ml.ops.abs}).fit(X, Y),
            r"the regularizer of '\*' gave (?s:.)*expected a scalar",
        ),
        (lambda: ml.L2(-1), "strength: expected float of at least 0"),
        (lambda: trainer().fit(loader(), verbose=3), "verbose: expected 0 or 1 or 2"),
        (lambda: trainer().fit(loader(), epochs="3"), "write epochs=3"),
        (lambda: trainer().fit(loader(), epochs=-1), "epochs: expected int of at least 0"),
        (lambda: trainer(callbacks=[print]), r"callbacks: at \[0\]: expected Callback(?s:.)*hint: derive a class"),
        (
            lambda: trainer().fit(loader(), callbacks=[print]),
            "expected Callback(?s:.)*hint: derive a class from ml.Cal",
        ),
        (lambda: trainer().evaluate(loader(), emma=True), "did you mean 'ema'"),
    ],
)
def test_argument_and_remedy_are_named(call, message):
    with pytest.raises(OptionError, match=message):
        call()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_junk_for_an_optimizer_is_accepted_or_ours(kind):
    names = list(kind.__dataclass_fields__)
    for name, junk in itertools.product(names, JUNK):
        try:
            kind(**{name: junk})
        except MithrilError:
            pass


CONSTRUCTORS = [
    (
        ml.DataLoader,
        {"dataset": X},
        [
            "batch_size",
            "shuffle",
            "seed",
            "num_workers",
            "worker",
            "prefetch_factor",
            "pin_memory",
            "drop_last",
            "collate",
            "sampler",
            "dataset",
        ],
    ),
    (ml.Constant, {"rate": 0.1}, ["rate"]),
    (ml.Cosine, {"rate": 0.1, "steps": 3}, ["rate", "steps", "final"]),
    (ml.StepDecay, {"rate": 0.1, "every": 3}, ["rate", "every", "gamma"]),
    (ml.WarmUp, {"inner": 0.1, "steps": 3}, ["inner", "steps", "start"]),
    (ml.OneCycle, {"rate": 0.1, "steps": 3}, ["rate", "steps", "warm", "start_factor", "final_factor"]),
    (ml.EarlyStopping, {}, ["monitor", "patience", "min_delta", "mode", "restore"]),
    (ml.Checkpoint, {"folder": "x"}, ["folder", "every", "keep", "monitor", "mode"]),
    (ml.CSVLog, {}, ["path"]),
    (ml.JSONLog, {}, ["path"]),
    (ml.TensorBoard, {}, ["folder"]),
]


@pytest.mark.parametrize(("kind", "good", "names"), CONSTRUCTORS, ids=lambda x: getattr(x, "__name__", ""))
def test_junk_for_a_constructor_is_accepted_or_ours(kind, good, names):
    for name, junk in itertools.product(names, JUNK):
        try:
            optimizer = kind(**{**good, name: junk})
            if kind is ml.DataLoader and junk is not JUNK[-1]:
                next(iter(optimizer), None)
        except MithrilError:
            pass


TRAINER = [
    *("optimizer", "loss", "metrics", "backend", "gradient_accumulation_steps", "clip_norm", "clip_value", "frozen"),
    *(
        "loss_weights",
        "regularizers",
        "ema",
        "loss_scale",
        "detect_nan",
        "params",
        "state",
        "seed",
        "callbacks",
        "progress",
    ),
]


@pytest.mark.parametrize("name", TRAINER)
def test_junk_for_a_trainer_is_accepted_or_ours(name):
    for junk in JUNK:
        if name == "loss" and junk is print:
            continue
        try:
            options = {"optimizer": ml.SGD(0.1), "loss": "cross_entropy", "backend": "numpy", "progress": False}
            ml.Trainer(classifier(), **{**options, name: junk}).step((X[:4], Y[:4]))
        except MithrilError:
            pass


FIT = [
    *("y", "epochs", "validation", "validation_data", "batch_size", "shuffle", "sample_weight", "class_weight"),
    *("steps_per_epoch", "callbacks", "resume"),
]


def test_names_of_trainers_elsewhere_are_errors_with_the_way_here():
    subject = trainer()
    for words in ml.Trainer.elsewhere:
        for word in words.split():
            with pytest.raises(AttributeError, match=f"^'Trainer' object has no attribute '{word}'; use "):
                getattr(subject, word)
    with pytest.raises(AttributeError, match=r"^type object 'Trainer' .* 'resume'; use trainer.fit"):
        ml.Trainer.resume
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'frobnicate'$"):
        subject.frobnicate()


METHODS = ["fit", "evaluate", "predict", "save", "load", "step", "begin"]


@pytest.mark.parametrize("method", METHODS)
def test_junk_for_a_method_is_accepted_or_ours(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subject = trainer()
    subject.step((X[:4], Y[:4]))
    for junk in [*JUNK, list(JUNK[:3]), [(X, "a")], [None], {3: X}, {"input": None}]:
        if method == "fit" and junk is print:
            continue
        try:
            getattr(subject, method)(junk)
        except MithrilError:
            pass
    if method == "fit":
        for name, junk in itertools.product(FIT, JUNK):
            if name in ("epochs", "y", "steps_per_epoch") and junk is JUNK[-1]:
                continue
            for form in ([(X[:4], Y[:4])], X[:4]):
                try:
                    subject.fit(form, **{"y": Y[:4] if isinstance(form, np.ndarray) else None, name: junk})
                except MithrilError:
                    pass
