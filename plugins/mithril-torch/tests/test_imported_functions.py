"""``ml.from_torch``: operators that PyTorch's exporter leaves whole, and complex numbers: values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_importing import Expressions, draw
from torch.utils import _pytree as pytree

import mithril as ml
from mithril.graph import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

special = torch.special
EDGES = torch.tensor([-1.0, -0.2, 0.1, 0.8])
WIDE = torch.tensor([0.3, 2.0, 9.5, 0.9, 4.0, 12.0])
COUNTS = torch.tensor([4, 12, 9, 0])


def symmetric(x):
    return x[0, :, :4] @ x[0, :, :4].T + 3 * torch.eye(4)


# x: [3, 4, 6], y: [4, 6], i: integers [3, 4] of 0 to 3, m: bools [3, 4, 6]
FUNCTIONS = {
    "search": lambda x, y, i, m: [torch.searchsorted(EDGES, x), torch.bucketize(x, EDGES, right=True)],
    "search_rows": lambda x, y, i, m: torch.searchsorted(y.sort(-1)[0], y.flip(0), side="right", out_int32=True),
    "histograms": lambda x, y, i, m: [torch.histc(x, 5, -1, 1), torch.histc(y, 3), torch.histc(i.float(), 4, 0, 3)],
    "medians": lambda x, y, i, m: [x.median(), x.median(1), y.kthvalue(2, 0), x.nanmedian(-1), i.median(1)],
    "nan_medians": lambda x, y, i, m: [(y.sqrt()).median(1)[0], y.sqrt().nanmedian(1)[0]],
    "mode": lambda x, y, i, m: [i.mode(1), i.mode(0, keepdim=True)],
    "running": lambda x, y, i, m: [x.cummax(1), x.cummin(-1), i.cummax(1), x.sqrt().cummax(0), y.logcumsumexp(0)],
    "factors": lambda x, y, i, m: [torch.linalg.lu(y), torch.linalg.lu_factor(symmetric(x)), y.geqrf()],
    "solutions": lambda x, y, i, m: torch.linalg.lu_solve(*torch.linalg.lu_factor(x[:, :, :4] + EDGES), y),
    "inverses": lambda x, y, i, m: [torch.linalg.pinv(y), torch.cholesky_inverse(torch.linalg.cholesky(symmetric(x)))],
    "exponential": lambda x, y, i, m: torch.matrix_exp(x[:, :, :4] * 2),
    "reflections": lambda x, y, i, m: torch.linalg.householder_product(*torch.geqrf(x.mT)),
    "gamma": lambda x, y, i, m: [x.lgamma(), x.digamma(), y.polygamma(2), special.gammainc(WIDE, y.exp() * 3)],
    "normal": lambda x, y, i, m: [(x * 3).erfc(), special.log_ndtr(x * 5), special.erfcx(y)],
    "quantiles": lambda x, y, i, m: special.ndtri(y.sigmoid()),
    "bessel": lambda x, y, i, m: [
        *(special.i0(x * 9), special.i1e(x * 9), special.i0e(y), special.i1(y - y)),
        *(f((x * 15).detach()) for f in (special.bessel_j0, special.bessel_j1)),
        *(f((y * 15).detach()) for f in (special.bessel_y0, special.bessel_y1, special.modified_bessel_k0)),
        special.scaled_modified_bessel_k1((y * 4).detach()),
    ],
    "polynomials": lambda x, y, i, m: [
        special.hermite_polynomial_h(y[:, :4], i[:1]),
        special.legendre_polynomial_p(y, 5),
        special.chebyshev_polynomial_u(y, 3),
    ],
    "bits": lambda x, y, i, m: [i << 2, (i - 2) >> 1, x.signbit(), torch.copysign(x, y), torch.nextafter(x, y)],
    "rounded": lambda x, y, i, m: [x.round(decimals=1), (x * 100).round(decimals=-1), x.frexp(), x.ldexp(i[..., None])],
    "divisors": lambda x, y, i, m: [torch.gcd(i * 6, COUNTS), torch.lcm(i + 2, COUNTS)],
    "bags": lambda x, y, i, m: [
        F.embedding_bag(i.ravel(), y, torch.tensor([0, 5, 5, 9]), mode=mode) for mode in ("sum", "mean", "max")
    ],
    "scattered": lambda x, y, i, m: [
        y.scatter_reduce(1, i.expand(3, 4)[:, :3] + 1, x[0, :3, :3], r, include_self=s)
        for r in ("sum", "prod", "mean", "amax", "amin")
        for s in (True, False)
    ],
    "index_reduced": lambda x, y, i, m: [y.index_reduce(1, i[0], y[:, :4], r) for r in ("prod", "mean", "amax")],
    "written": lambda x, y, i, m: [
        y.diagonal_scatter(y[0, :4], 1),
        y.select_scatter(y[0], 0, -1),
        y.masked_scatter(m[0], x[1]),
        torch.as_strided(y.contiguous(), (3, 3), (2, 3), 1),
    ],
    "read_in_python": lambda x, y, i, m: [
        torch.cov(x[0]),
        torch.corrcoef(y),
        torch.where(torch.as_tensor(torch.equal(y, y + 0)), x, 0),
        torch.narrow(y, 1, i[0, 1], 2),
        torch.take(y, i - 4),
        F.one_hot(i, 5),
        F.gaussian_nll_loss(x[0], y, y[:, :1], full=True),
        torch.masked_select(y, torch.ones(4, 6).triu() > 0),
    ],
    "placed": lambda x, y, i, m: [
        F.max_unpool2d(x[None, :, :2, :2], i[None, :, None, :2] * torch.ones(2, 1, dtype=torch.int64), 2),
        y.put(torch.arange(4) * 5 - 2, y[0, :4]),
        torch.pdist(y),
    ],
    "attended": lambda x, y, i, m: F.scaled_dot_product_attention(x[:, None], y[None, None], y[None, None]),
    "copies": lambda x, y, i, m: [torch.unbind_copy(y), torch.permute_copy(x, (2, 0, 1)), y.narrow_copy(1, 1, 2)],
    "triangles": lambda x, y, i, m: [torch.tril_indices(3, 4, 1), torch.triu_indices(3, 4, -1)],
    "windows": lambda x, y, i, m: [
        F.fold(F.unfold(x[None], 2), (4, 6), 2),
        F.interpolate(x[None], scale_factor=1.7, mode="bilinear"),
        F.interpolate(x[None], size=(2, 3), mode="bilinear", antialias=True),
        F.interpolate(x[None], size=(3, 4), mode="bicubic", antialias=True),
        F.interpolate(x[None], size=(3, 4), mode="bilinear", antialias=True, align_corners=True),
        F.fractional_max_pool2d(x[None], 2, output_size=(2, 3), _random_samples=torch.full((1, 3, 2), 0.3)),
        F.interpolate(x[None], size=(6, 4), mode="nearest-exact"),
        F.conv_transpose1d(x, x[0][:, :4, None], stride=2, dilation=3, padding=2, output_padding=2),
    ],
    "spectra": lambda x, y, i, m: [
        torch.fft.fft(x, 5), torch.fft.rfft(y, norm="ortho"), torch.fft.irfft(torch.fft.fft(y)), torch.fft.ifft2(x),
        torch.fft.hfft(x), torch.fft.ihfft(y), torch.fft.fftn(x, dim=(0, 2)), torch.fft.fftshift(torch.fft.fft(y), 1),
    ],
    "frames": lambda x, y, i, m: torch.stft(x[0].ravel(), 8, 4, window=torch.hann_window(8), return_complex=True).abs(),
    "resynthesis": lambda x, y, i, m: torch.istft(
        torch.stft(x[:, 0].repeat(1, 3), 8, 4, window=torch.hann_window(8), return_complex=True),
        8, 4, window=torch.hann_window(8),
    ),
    "rotary": lambda x, y, i, m: torch.view_as_real(
        torch.view_as_complex(x.reshape(3, 4, 3, 2)) * torch.polar(torch.ones(4, 3), y[:, :3])
    ),
    "complex": lambda x, y, i, m: [
        (torch.complex(y, x[0]).exp() / torch.complex(x[1], y)).angle(),
        (torch.complex(y, x[0]) @ torch.complex(y, x[1]).mH).real,
        torch.complex(y, x[0]).sum(0).conj().imag,
        (torch.complex(y, x[0]) ** 3 * 1j + y).abs(),
        torch.cat([torch.complex(y, x[0]), torch.complex(x[1], y).conj()], 1),
    ],
}  # fmt: skip
# gradients that PyTorch defines by convention: at several extreme elements, of permutations, through nan
WITHOUT_GRADIENTS = {"bits", "divisors", "nan_medians", "running", "reflections", "rounded", "factors", "written"}


def inputs():
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 4, (3, 4), generator=generator)
    return draw(3, 4, 6), draw(4, 6, seed=2).abs() * 0.9, integers, draw(3, 4, 6, seed=3) > 0


def real(x):
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()


@pytest.fixture(scope="module")
def functions():
    """Return the module of all functions and its model: tracing takes more time than compiling and running."""
    module = Expressions(FUNCTIONS)
    return module, ml.from_torch(module, inputs(), training=False)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_values_and_gradients_equal_those_of_pytorch(functions, backend):
    (module, model), tensors = functions, inputs()
    x, y = (t.clone().requires_grad_() for t in tensors[:2])
    expected = [real(t) for t in pytree.tree_leaves(module(x, y, *tensors[2:]))]
    compiled = ml.compile(model, backend, optimization_level="low", trainable=["x", "y"])
    arguments = dict(zip("xyim", tensors, strict=True))
    arguments = {n: t if backend == "torch" else t.numpy() for n, t in arguments.items()}
    values = compiled.evaluate({}, arguments)
    for (name, value), theirs in zip(values.items(), expected, strict=True):
        np.testing.assert_allclose(value, theirs.detach(), rtol=2e-4, atol=2e-5, err_msg=name)
        assert str(value.dtype).removeprefix("torch.") == str(theirs.dtype).removeprefix("torch."), name
    cotangents = {
        name: torch.cos(torch.arange(float(t.numel()))).reshape(t.shape)
        for name, t in zip(model.outputs, expected, strict=True)
        if t.requires_grad and not any(name.startswith(w) for w in WITHOUT_GRADIENTS)
    }
    theirs = [t for n, t in zip(model.outputs, expected, strict=True) if n in cotangents]
    slopes = torch.autograd.grad(theirs, (x, y), list(cotangents.values()))
    seeds = {n: t if backend == "torch" else t.numpy() for n, t in cotangents.items()}
    gradients = compiled.evaluate({}, arguments, seeds, training=False)[1]
    for name, slope in zip("xy", slopes, strict=True):
        np.testing.assert_allclose(gradients[name], slope, rtol=2e-3, atol=2e-3, err_msg=name)


def test_complex_operators_without_a_row_are_refused():
    class Product(torch.nn.Module):
        def forward(self, x):
            return torch.view_as_complex(x).cumprod(0).real

    model = ml.from_torch(Product(), draw(3, 2), training=False)
    with pytest.raises(
        UnsupportedError, match=r"'cumprod' of complex numbers cannot be expressed(?s:.)*expressed: (?s:.)*sqrt"
    ):
        ml.compile(model, "numpy")
