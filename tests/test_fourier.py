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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "axes"), [((3, 6, 8), (-2, -1)), ((4, 3, 5), (2, 0)), ((2, 3, 4), (0, 1, 2))])
def test_transforms_of_several_axes(backend: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    re, im = generator.normal(size=(2, *shape)).astype(np.float32)
    size = shape[axes[-1]]
    with ml.Builder() as b:
        x, y = b.input("re", shape), b.input("im", shape)
        forward, half = ml.ops.fftn(x, y, axes=axes), ml.ops.rfftn(x, axes=axes)
        back, real = ml.ops.ifftn(*forward, axes=axes), ml.ops.irfftn(*half, size=size, axes=axes)
        values = (*forward, *half, *back, real)
        graph = b.build({str(k): v for k, v in enumerate(values)})
    compiled = ml.compile(graph, backend)
    results = [compiled.backend.to_numpy(a) for a in compiled.evaluate({}, {"re": re, "im": im}).values()]
    full, part = np.fft.fftn(re + 1j * im, axes=axes), np.fft.rfftn(re, axes=axes)
    for actual, expected in zip(results, (full.real, full.imag, part.real, part.imag, re, im, re), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual / scale, expected / scale, atol=2e-5 if backend != "ggml" else 2e-3)


def test_repeated_axes_are_refused() -> None:
    with pytest.raises(ml.ShapeError, match=r"the transformed axes \[0, -2\] are not different ones"):
        ml.ops.rfftn(np.ones((3, 4), np.float32), axes=(0, -2))


def test_axes_out_of_range_are_refused() -> None:
    with pytest.raises(ml.ShapeError, match="axis 2 is out of range for rank 2\n  accepted: -2 to 1"):
        ml.ops.rfftn(np.ones((3, 4), np.float32), axes=(0, 2))
    with pytest.raises(ml.ShapeError, match="axis 0 is out of range for rank 0"):
        ml.ops.rfftn(np.float32(1), axes=(0,))
