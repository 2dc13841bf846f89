"""Each old name warns once, on the line of the program, with today's spelling."""

import warnings

import mithril_compat as ml
from mithril_compat import notices
from mithril_compat.models import Convolution2D, Linear, Model


def test_each_name_warns_once(monkeypatch):
    monkeypatch.setattr(notices, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = Model()
            model |= Convolution2D(kernel_size=3, out_channels=4).connect(input="input")
            model += Linear(2)
    assert [(str(w.message), w.category) for w in caught] == [
        ("'Convolution2D' is the predecessor's: today, Conv2d of mithril.models", ml.PredecessorWarning),
        ("'connect' is the predecessor's: today, call the layer: layer(input=...)", ml.PredecessorWarning),
    ]
    assert {w.filename for w in caught} == {__file__}
