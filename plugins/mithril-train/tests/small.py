"""A small model and data for the tests of training."""

import numpy as np

import mithril as ml
from mithril.models import Dropout, Linear, Model, Relu

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(96, 8)).astype(np.float32)
Y = (X[:, :3].argmax(1)).astype(np.int32)


def everywhere(*without):
    """Names of the installed backends as parameters of a test."""
    return [n for n in sorted(ml.plugins.backends()) if n not in without]


def classifier(dropout=0.0):
    model = Model()
    model += Linear(8, 16, name="first")(input="input")
    model += Relu()
    if dropout:
        model += Dropout(dropout)
    model += Linear(16, 3, name="last")
    return model


def loader(batch_size=16, **options):
    return ml.DataLoader((X, Y), batch_size=batch_size, shuffle=True, **options)


def trainer(model=None, optimizer=None, **options):
    options = {"loss": "cross_entropy", "backend": "numpy", "progress": False, **options}
    return ml.Trainer(model if model is not None else classifier(), optimizer or ml.Adam(0.01), **options)


def arrays(subject):
    return subject.engine.to_numpy()
