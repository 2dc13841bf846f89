"""Fourier transforms on every backend against numpy.fft, which none of the graph decompositions use."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml

BACKENDS = sorted(ml.plugins.backends())
generator = np.random.default_rng(0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 12, 37, 97, 1024])
def test_transforms(backend: str, size: int) -> None:
    re, im = generator.normal(size=(2, 3, size)).astype(np.float32)
    with ml.Builder() as b:
        x, y = b.input("re", (3, size)), b.input("im", (3, size))
        forward, half = ml.ops.fft(x, y), ml.ops.rfft(x)
        back = ml.ops.ifft(*forward)
        graph = b.build(
            {"f0": forward[0], "f1": forward[1], "b0": back[0], "b1": back[1], "h0": half[0], "h1": half[1]}
            | {"real": ml.ops.irfft(*half, size=size)}
        )
    results = {n: np.asarray(a) for n, a in ml.compile(graph, backend).evaluate({}, {"re": re, "im": im}).items()}
    spectrum, half_spectrum = np.fft.fft(re + 1j * im), np.fft.rfft(re)
    expected = {"f0": spectrum.real, "f1": spectrum.imag, "b0": re, "b1": im}
    expected |= {"h0": half_spectrum.real, "h1": half_spectrum.imag, "real": re}
    for name, array in expected.items():
        scale = np.abs(array).max() + 1e-6
        np.testing.assert_allclose(
            results[name] / scale, array / scale, atol=2e-5 if backend != "ggml" else 2e-3, err_msg=name
        )
