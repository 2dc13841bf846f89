"""``ml.from_torch``: operators against PyTorch, open sizes, training mode, names, and errors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mithril as ml
from mithril import ops
from mithril.graph import InputError, ModelError, UnsupportedError
from mithril.models import Linear, Model
from mithril_torch.importing.table import ROWS, Row

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Expressions(nn.Module):
    """A module that returns many expressions of its inputs, by name: one export covers all of them."""

    def __init__(self, expressions):
        super().__init__()
        self.expressions = expressions

    def forward(self, x, y, i, m):
        return {name: function(x, y, i, m) for name, function in self.expressions.items()}


# x: [3, 4, 6], y: [4, 6], i: integers [3, 4] of 0 to 3, m: bools [3, 4, 6]
ELEMENTS = {
    "promoted_sum": lambda x, y, i, m: x + i[..., None] * 2,
    "bool_sum": lambda x, y, i, m: m + i[..., None],
    "alpha": lambda x, y, i, m: torch.sub(x, y, alpha=3) + torch.add(y, x, alpha=0.5),
    "reverse": lambda x, y, i, m: 1.5 - x,
    "integer_division": lambda x, y, i, m: i / 3,
    "floor": lambda x, y, i, m: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y, i, m: torch.div(i - 2, 2, rounding_mode="trunc"),
    "trunc_float": lambda x, y, i, m: torch.div(x, 0.3, rounding_mode="trunc"),
    "remainder": lambda x, y, i, m: (i - 2) % 3,
    "fmod": lambda x, y, i, m: torch.fmod(i - 2, 3),
    "fmod_float": lambda x, y, i, m: torch.fmod(x, 0.7),
    "powers": lambda x, y, i, m: x**2 + x**3 + y.abs() ** 0.5 + 2.0**y,
    "pow_int": lambda x, y, i, m: i**2,
    "compare_int_with_float": lambda x, y, i, m: i > 1.5,
    "compare": lambda x, y, i, m: (x >= y) & (x != 0) | ~m,
    "bits": lambda x, y, i, m: (i & 1) ^ (i | 2),
    "where": lambda x, y, i, m: torch.where(m, x, 0.0) + torch.where(m, i[..., None], 7),
    "masked_fill": lambda x, y, i, m: x.masked_fill(m, float("-inf")),
    "clamp": lambda x, y, i, m: x.clamp(-0.5, 0.5) + x.clamp(min=y) + x.clamp(max=0.1),
    "casts": lambda x, y, i, m: i.float()[..., None] + x.double() + m.to(torch.int32),
    "trigonometry": lambda x, y, i, m: x.sin() + x.cos() + y.tan() + x.atan() + torch.atan2(x, y),
    "exponentials": lambda x, y, i, m: x.exp() + x.abs().log1p() + (x.abs() + 1).log() + (x.abs() + 1).rsqrt(),
    "logarithms": lambda x, y, i, m: (x.abs() + 1).log2() + (x.abs() + 1).log10() + x.expm1() + x.erf(),
    "rounding": lambda x, y, i, m: x.floor() + x.ceil() * 2 + x.round() * 3 + x.trunc() * 5 + x.sign(),
    "lerp": lambda x, y, i, m: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=0.5),
    "activations": lambda x, y, i, m: F.relu(x) + F.silu(x) + F.mish(x) + F.hardswish(x) + F.hardsigmoid(x) + F.selu(x),
    "gelu": lambda x, y, i, m: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "elu": lambda x, y, i, m: F.elu(x, 0.7) + F.celu(x, 0.5) + F.leaky_relu(x, 0.2) + F.hardtanh(x, -0.3, 0.9),
    "softplus": lambda x, y, i, m: F.softplus(x) + F.softplus(x, beta=2.0) + F.logsigmoid(x) + F.relu6(x * 9),
    "shrink": lambda x, y, i, m: F.softshrink(x, 0.3) + F.hardshrink(x, 0.3) + F.threshold(x, 0.1, 5.0),
    "glu": lambda x, y, i, m: F.glu(x, -1),
    "softmax": lambda x, y, i, m: F.softmax(x, 1) + F.log_softmax(x, -1),
}
REDUCTIONS = {
    "sums": lambda x, y, i, m: x.sum() + x.sum((0, 2), keepdim=True) + i.sum(1, dtype=torch.float32)[:, None, None],
    "count": lambda x, y, i, m: m.sum(-1),
    "means": lambda x, y, i, m: x.mean() + x.mean(-1, keepdim=True),
    "extremes": lambda x, y, i, m: x.amax((1, 2)) - x.amin(0).amin() + x.max() + x.min(),
    "max_dim": lambda x, y, i, m: x.max(1),
    "min_dim": lambda x, y, i, m: x.min(-1, keepdim=True),
    "positions": lambda x, y, i, m: x.argmax(1) + x.argmin() + x.argmax(),
    "logic": lambda x, y, i, m: m.any(-1) | m.all(0).all() | m.any(),
    "product": lambda x, y, i, m: x.prod(-1) + y.prod(),
    "variance": lambda x, y, i, m: x.var(-1) + x.std((0, 2), keepdim=True)[0, :, 0] + x.var(1, correction=0).mean(),
    "norms": lambda x, y, i, m: x.norm(dim=-1) + torch.linalg.vector_norm(x, 1, -1) + x.norm(3.0, -1),
    "normalize": lambda x, y, i, m: F.normalize(x, dim=-1),
    "cumulative": lambda x, y, i, m: x.cumsum(1) + i.cumsum(0)[..., None] + y.cumprod(-1),
    "logsumexp": lambda x, y, i, m: x.logsumexp((1, 2)),
    "sort": lambda x, y, i, m: x.sort(-1, descending=True),
    "argsort": lambda x, y, i, m: y.argsort(0),
    "topk": lambda x, y, i, m: x.topk(2, -1),
    "smallest": lambda x, y, i, m: x.topk(2, 1, largest=False)[0],
    "var_mean": lambda x, y, i, m: torch.var_mean(x, -1),
}
SHAPES = {
    "views": lambda x, y, i, m: x.view(3, 24) @ x.reshape(-1, 3),
    "permuted": lambda x, y, i, m: x.permute(2, 0, 1) + x.transpose(0, -1).transpose(1, 2),
    "expanded": lambda x, y, i, m: y[None].expand(3, -1, -1) + y.expand(3, 4, 6),
    "squeezed": lambda x, y, i, m: x[:, None].squeeze(1) + x.unsqueeze(-1).squeeze(),
    "sliced": lambda x, y, i, m: x[:, 1:-1, ::2] + x[..., -1:, :3],
    "selected": lambda x, y, i, m: x[1, -1] + x.select(0, -1)[2],
    "narrowed": lambda x, y, i, m: x.narrow(1, 1, 2),
    "concatenated": lambda x, y, i, m: torch.cat([x, y[None], i[..., None].expand(3, 4, 6)[:1]]),
    "stacked": lambda x, y, i, m: torch.stack([x[0], y], dim=-1),
    "split": lambda x, y, i, m: x.split(2, -1)[1] + x.chunk(3, 2)[0] + x.unbind(1)[2][:, None, :2],
    "repeated": lambda x, y, i, m: x.repeat(2, 1, 2) + x.tile(2).repeat(2, 1, 1),
    "interleaved": lambda x, y, i, m: y.repeat_interleave(2, 0),
    "flipped": lambda x, y, i, m: x.flip(0, 2) + x.roll(1, 1) + x.roll((1, 2), (0, 2)) + y.roll(3),
    "triangles": lambda x, y, i, m: x.tril() + x.triu(1) + m.tril(-1),
    "diagonal": lambda x, y, i, m: x.diagonal(1, 1, 2) + torch.diag_embed(y.diagonal()).sum(0)[:4].sum(),
    "padded": lambda x, y, i, m: F.pad(x, (1, 2, 0, 1), value=3.0).sum() + F.pad(x, (1, -2)),
    "borders": lambda x, y, i, m: F.pad(x, (2, 1), mode="reflect") + F.pad(x, (2, 1), mode="replicate"),
    "flattened": lambda x, y, i, m: x.flatten(1) + x.flatten().unflatten(0, (3, 24)),
    "created": lambda x, y, i, m: torch.arange(6) + torch.zeros(4, 6) + torch.ones_like(y) + torch.full((6,), 2.5),
    "ranges": lambda x, y, i, m: torch.arange(1, 10, 3) + torch.linspace(0, 1, 3) + torch.eye(3),
    "empty": lambda x, y, i, m: torch.empty(4, 6).fill_(2.0) + torch.zeros_like(y).add_(y),
    "written": lambda x, y, i, m: _written(x),
    "constant": lambda x, y, i, m: x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "meshgrid": lambda x, y, i, m: torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")[0] + i,
}
INDEXING = {
    "taken": lambda x, y, i, m: y[i] + x[:, i[0]].sum(),
    "two_indices": lambda x, y, i, m: x[i[:, 0] % 3, i[:, 1]],
    "separated": lambda x, y, i, m: x[i[:, 0] % 3, :, i[:, 1]],
    "inner": lambda x, y, i, m: x[:, i[:, :3], i[:, 1:]],
    "negative": lambda x, y, i, m: y[-i - 1],
    "index_select": lambda x, y, i, m: x.index_select(1, i[0]),
    "gather": lambda x, y, i, m: x.gather(1, i[:, :2, None].expand(3, 2, 5)),
    "scatter": lambda x, y, i, m: y.scatter(0, i[:1], 7.0) + y.scatter(0, i[:2], x[0]),
    "scatter_add": lambda x, y, i, m: y.scatter_add(0, i, x[:, :, 0]) + y.index_add(0, i[0], x[0]),
    "index_put": lambda x, y, i, m: y.index_put((i[0],), x[1]) + y.index_put((i[0], i[1]), x[0, 0, 0], accumulate=True),
    "masked_write": lambda x, y, i, m: _masked(x, m),
    "one_hot": lambda x, y, i, m: F.one_hot(i, 5),
    "embedding": lambda x, y, i, m: F.embedding(i, y),
}
PRODUCTS = {
    "matmul": lambda x, y, i, m: x @ y.T + torch.bmm(x, x.transpose(1, 2)) + (y @ y[0]),
    "addmm": lambda x, y, i, m: torch.addmm(y[:, :4], y, y.T, beta=0.5, alpha=2.0),
    "baddbmm": lambda x, y, i, m: torch.baddbmm(x[:, :, :4], x, x.transpose(1, 2)),
    "outer": lambda x, y, i, m: torch.outer(y[0], y[1]) + torch.dot(y[0], y[1]),
    "einsum": lambda x, y, i, m: torch.einsum("bij,kj->bki", x, y),
    "linear": lambda x, y, i, m: F.linear(x, y, y[:, 0]) + F.linear(y[0], y),
    "bilinear": lambda x, y, i, m: F.bilinear(x, x, x[:2, :, :].repeat(1, 2, 1)[:, :6]),
    "attention": lambda x, y, i, m: F.scaled_dot_product_attention(x, x, x),
    "causal": lambda x, y, i, m: F.scaled_dot_product_attention(
        x[None], x[None, :, :3], x[None, :, :3], is_causal=True
    ),
    "masked": lambda x, y, i, m: F.scaled_dot_product_attention(
        x[None], x[None], x[None], m[0, :, :4] & (i[:1, :] > 9)
    ),
    "added": lambda x, y, i, m: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], y[:, :4], scale=0.3),
    "layer_norm": lambda x, y, i, m: F.layer_norm(x, (6,), y[0], y[1]) + F.layer_norm(x, (4, 6)),
    "rms_norm": lambda x, y, i, m: F.rms_norm(x, (6,), y[0], 1e-5) + F.rms_norm(x, (4, 6)),
    "group_norm": lambda x, y, i, m: F.group_norm(x, 2, y[:, 0], y[:, 1]),
    "batch_norm": lambda x, y, i, m: F.batch_norm(x, y[:, 0], y[:, 1].abs(), y[:, 2], y[:, 3]),
    "instance_norm": lambda x, y, i, m: F.instance_norm(x, weight=y[:, 0], bias=y[:, 1]),
    "similarity": lambda x, y, i, m: F.cosine_similarity(x, y[None], -1) + torch.cdist(x, x).sum(-1),
}


def definite(y):
    """Return a symmetric positive definite matrix [4, 4]."""
    return y @ y.T + 3 * torch.eye(4)


ALGEBRA = {
    "cholesky": lambda x, y, i, m: torch.linalg.cholesky(definite(y)) + torch.linalg.cholesky(definite(y), upper=True),
    "solve": lambda x, y, i, m: torch.linalg.solve(definite(y), y) + torch.cholesky_solve(y, definite(y)),
    "solve_vector": lambda x, y, i, m: torch.linalg.solve(definite(y), y[:, 0]),
    "solve_left": lambda x, y, i, m: torch.linalg.solve(definite(y), y.T, left=False),
    "inverse": lambda x, y, i, m: torch.linalg.inv(definite(y)) * torch.linalg.det(definite(y)),
    "slogdet": lambda x, y, i, m: torch.stack(torch.linalg.slogdet(-definite(y))),
    "triangular": lambda x, y, i, m: torch.linalg.solve_triangular(definite(y), y, upper=True),
    "triangular_right": lambda x, y, i, m: torch.linalg.solve_triangular(definite(y), y.T, upper=False, left=False),
    "unit": lambda x, y, i, m: torch.linalg.solve_triangular(definite(y), y, upper=False, unitriangular=True),
    "qr": lambda x, y, i, m: [part.abs() for part in torch.linalg.qr(y.T)],
    "svd": lambda x, y, i, m: [part.abs() for part in torch.linalg.svd(x, full_matrices=False)],
    "singular_values": lambda x, y, i, m: torch.linalg.svdvals(x),
    "eigenvalues": lambda x, y, i, m: torch.linalg.eigvalsh(y[:, :4]) + torch.linalg.eigvalsh(y[:, :4], UPLO="U"),
    "eigenvectors": lambda x, y, i, m: torch.linalg.eigh(definite(y))[1].abs(),
    "pixels": lambda x, y, i, m: torch.nn.functional.grid_sample(
        x[None], y[None, :, :2, None].expand(1, 4, 2, 2), align_corners=False
    ),
    "cubic_pixels": lambda x, y, i, m: torch.nn.functional.grid_sample(
        x[None], y[None, :, :2, None].expand(1, 4, 2, 2), "bicubic", "reflection", align_corners=False
    ),
    "pixels_of_the_border": lambda x, y, i, m: torch.nn.functional.grid_sample(
        x[None], y[None, :, :2, None].expand(1, 4, 2, 2), "nearest", "border", align_corners=True
    ),
}
IMAGES = {  # x: [2, 4, 7, 9], y: [6, 2, 3, 3], i: [2, 4, 7], m: unused
    "conv": lambda x, y, i, m: F.conv2d(x, y, y[:, 0, 0, 0], stride=(2, 1), padding=1, groups=2),
    "dilated": lambda x, y, i, m: F.conv2d(x, y, dilation=2, padding=(2, 0), groups=2),
    "same": lambda x, y, i, m: (
        F.conv2d(x[:, :2], y, padding="same") + F.conv2d(x[:, :2], y, padding="same", dilation=2)
    ),
    "single_image": lambda x, y, i, m: F.conv2d(x[0, :2], y),
    "conv1d": lambda x, y, i, m: F.conv1d(x[..., 0], y[:, :, 0].repeat(1, 2, 1), padding=1),
    "conv3d": lambda x, y, i, m: F.conv3d(x[:, None], y[:, :1, None]),
    "transposed": lambda x, y, i, m: F.conv_transpose2d(x[:, :2], y[:2], stride=2, padding=1, output_padding=1),
    "transposed_1d": lambda x, y, i, m: F.conv_transpose1d(x[:, :2, 0], y[:2, :, 0], groups=2),
    "max_pool": lambda x, y, i, m: F.max_pool2d(x, 3, 2, 1) + F.max_pool2d(x, 2, 2, ceil_mode=True),
    "max_pool_1d": lambda x, y, i, m: F.max_pool1d(x[..., 0], 3, stride=1, dilation=2),
    "max_pool_indices": lambda x, y, i, m: F.max_pool2d(x, 2, return_indices=True)[0],
    "avg_pool": lambda x, y, i, m: F.avg_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool_ceil": lambda x, y, i, m: (
        F.avg_pool2d(x, 2, 2, ceil_mode=True) + F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)
    ),
    "avg_pool_ceil_inside": lambda x, y, i, m: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool_divisor": lambda x, y, i, m: F.avg_pool2d(x, 2, divisor_override=3),
    "avg_pool_1d": lambda x, y, i, m: F.avg_pool1d(x[..., 0], 2),
    "adaptive": lambda x, y, i, m: F.adaptive_avg_pool2d(x, (3, 2)) + F.adaptive_avg_pool2d(x, 1),
    "adaptive_max": lambda x, y, i, m: F.adaptive_max_pool2d(x, (3, 2)),
    "nearest": lambda x, y, i, m: F.interpolate(x, scale_factor=2),
    "nearest_size": lambda x, y, i, m: F.interpolate(x, (10, 5)),
    "bilinear": lambda x, y, i, m: F.interpolate(x, (10, 5), mode="bilinear"),
    "corners": lambda x, y, i, m: F.interpolate(x, (10, 5), mode="bilinear", align_corners=True),
    "bicubic": lambda x, y, i, m: F.interpolate(x, (10, 5), mode="bicubic"),
    "bicubic_corners": lambda x, y, i, m: F.interpolate(x, (4, 12), mode="bicubic", align_corners=True),
    "shuffled": lambda x, y, i, m: F.pixel_shuffle(x, 2),
    "unshuffled": lambda x, y, i, m: F.pixel_unshuffle(x[:, :, :6, :6], 3),
    "reflected": lambda x, y, i, m: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "prelu": lambda x, y, i, m: F.prelu(x, y[0, 0].flatten()[:4]),
}


def _written(x):
    z = x.clone()
    z[:, 1:3] = 5.0
    z[..., ::2] += 1.0
    z[:, 0] = x[:, 1]
    return z


def _masked(x, m):
    z = x * 2
    z[m] = -1.0
    return z


def small():
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 4, (3, 4), generator=generator)
    return draw(3, 4, 6), draw(4, 6, seed=2), integers, draw(3, 4, 6, seed=3) > 0


def images():
    return draw(2, 4, 7, 9), draw(6, 2, 3, 3, seed=2), torch.zeros(1), torch.zeros(1)


GROUPS = {
    "elements": (ELEMENTS, small),
    "algebra": (ALGEBRA, small),
    "reductions": (REDUCTIONS, small),
    "shapes": (SHAPES, small),
    "indexing": (INDEXING, small),
    "products": (PRODUCTS, small),
    "images": (IMAGES, images),
}


def compiled_and_run(model, inputs, **options):
    compiled = ml.compile(model, "torch", inference=True, **options)
    return list(compiled.evaluate(dict(zip(model.inputs, inputs, strict=True))).values())


@pytest.mark.parametrize("group", GROUPS)
def test_operators_match_pytorch(group):
    expressions, inputs = GROUPS[group][0], GROUPS[group][1]()
    module = Expressions(expressions)
    expected = module(*inputs)
    model = ml.from_torch(module, inputs, training=False)
    tensors = torch.utils._pytree.tree_leaves(expected)
    results = compiled_and_run(model, inputs)
    assert len(tensors) == len(results) == len(model.outputs)
    for name, result, theirs in zip(model.outputs, results, tensors, strict=True):
        assert result.dtype == theirs.dtype, name
        torch.testing.assert_close(result, theirs, rtol=1e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.net = getattr(nn, kind)(5, 6, 2, batch_first=kind != "RNN", bidirectional=kind != "GRU")

    def forward(self, x):
        y, state = self.net(x)
        return y, state


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_modules(kind):
    torch.manual_seed(0)
    module, x = Recurrent(kind), draw(3, 4, 5)
    model = ml.from_torch(module, x, training=False)
    expected = torch.utils._pytree.tree_leaves(module(x))
    for result, theirs in zip(compiled_and_run(model, [x]), expected, strict=True):
        torch.testing.assert_close(result, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_open_lengths_of_recurrent_modules(kind):
    torch.manual_seed(0)
    module = Recurrent(kind).eval()
    compiled = ml.compile(
        ml.from_torch(module, draw(3, 4, 5), dynamic_shapes={"x": {0: "a", 1: "b"}}), "torch", inference=True
    )
    for shape in ((3, 4, 5), (2, 7, 5)):
        expected = torch.utils._pytree.tree_leaves(module(draw(*shape)))
        for result, theirs in zip(compiled({"x": draw(*shape)}).values(), expected, strict=True):
            torch.testing.assert_close(result, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_lstm(bias):
    torch.manual_seed(0)
    module, x = nn.LSTM(5, 6, 2, bias=bias, bidirectional=True, proj_size=3), draw(4, 2, 5)
    expected = torch.utils._pytree.tree_leaves(module(x))
    for result, theirs in zip(compiled_and_run(ml.from_torch(module, x), [x]), expected, strict=True):
        torch.testing.assert_close(result, theirs.detach(), rtol=1e-5, atol=1e-6)


class Masked(nn.Module):
    """A transformer that makes its mask, which PyTorch compares with a causal one by its elements."""

    def __init__(self):
        super().__init__()
        self.net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, source, target, causal):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        later = self.net(source, target, tgt_mask=mask, tgt_is_causal=True)
        return self.net(source, target, tgt_mask=mask), later, self.net(source, target, tgt_mask=causal)


def test_masks_of_transformers():
    torch.manual_seed(0)
    module = Masked().eval()
    inputs = (draw(2, 5, 8), draw(2, 4, 8), torch.triu(torch.ones(4, 4, dtype=torch.bool), 2))
    model = ml.from_torch(module, inputs, training=False)
    for result, theirs in zip(compiled_and_run(model, inputs), module(*inputs), strict=True):
        torch.testing.assert_close(result, theirs.detach(), rtol=1e-5, atol=2e-6)


class Alignment(nn.Module):
    """CTC losses: lengths as tensors, as numbers, and of one sequence."""

    def forward(self, x, labels, x_lengths, label_lengths):
        x = x.log_softmax(-1)
        losses = F.ctc_loss(x, labels, x_lengths, label_lengths, blank=1, reduction="none")
        one = F.ctc_loss(x[:, 0], labels[0], x_lengths[0], label_lengths[0], reduction="sum")
        return losses, one, F.ctc_loss(x, labels, [7, 7], [3, 3], zero_infinity=True)


def test_ctc_loss():
    inputs = (draw(7, 2, 5), torch.tensor([[2, 2, 4], [3, 4, 2]]), torch.tensor([7, 6]), torch.tensor([3, 1]))
    model = ml.from_torch(Alignment(), inputs, training=False)
    for result, theirs in zip(compiled_and_run(model, inputs), Alignment()(*inputs), strict=True):
        torch.testing.assert_close(result, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def regions():
    """Declare the operator of torchvision if its library is missing."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "roi_align"):
        library.define(
            "roi_align(Tensor x, Tensor boxes, float scale, int height, int width, int samples, bool aligned) -> Tensor"
        )

        def shape(x, boxes, scale, height, width, samples, aligned):
            return x.new_empty((boxes.shape[0], x.shape[1], height, width))

        library.impl("roi_align", shape, "Meta")
    yield torch.ops.torchvision.roi_align
    library._destroy()


def test_regions_of_torchvision(regions):
    class Regions(nn.Module):
        def __init__(self, samples=2):
            super().__init__()
            self.samples = samples

        def forward(self, x, boxes):
            return regions(x, boxes, 0.5, 2, 3, self.samples, True)

    x, boxes = draw(2, 3, 6, 7), torch.tensor([[1.0, 2.0, 1.0, 9.0, 8.0], [0.0, 0.0, 3.0, 6.5, 11.0]])
    result = compiled_and_run(ml.from_torch(Regions(), (x, boxes), training=False), (x, boxes))[0]
    settings = {"size": (2, 3), "scale": 0.5, "samples": 2, "aligned": True}
    expected = ops.roi_align(x.numpy(), boxes[:, 1:].numpy(), boxes[:, 0].numpy().astype("int32"), **settings)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="sampling_ratio=-1"):
        compiled_and_run(ml.from_torch(Regions(samples=-1), (x, boxes), training=False), (x, boxes))


class Block(nn.Module):
    """A network with batch statistics, dropout, a constant buffer and shared weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])
        self.layers[0].weight = nn.Parameter(torch.randn(8, 8))
        self.again = self.layers[0]
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        return {"logits": self.layers[1](self.dropout(self.again(self.layers[0](h)))) * self.scale, "hidden": h}


def test_parameters_states_and_training():
    torch.manual_seed(0)
    module, x = Block(), draw(5, 3, 6, 6)
    module.eval()
    model = ml.from_torch(module, x, dynamic_shapes={"x": {0: "batch"}})
    assert not module.training and model.inputs == ("x",) and model.outputs == ("logits", "hidden")
    compiled = ml.compile(model, "torch")
    names = {name for name, _ in module.named_parameters()}
    assert set(compiled.params) == names and str(compiled.get_shapes()["x"][0]) == "batch"
    assert set(compiled.initial_state()) == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    for rows in (1, 3):
        torch.testing.assert_close(compiled.evaluate({"x": x[:rows]}), module(x[:rows]), rtol=1e-5, atol=1e-6)
    module.train()
    g = draw(3, 4, seed=4)
    outputs = module(x[:3])
    outputs["logits"].backward(g)
    result, gradients, state = compiled.evaluate(
        compiled.params, {"x": x[:3]}, {"logits": g}, state=compiled.initial_state()
    )
    torch.testing.assert_close(result["logits"], outputs["logits"], rtol=1e-5, atol=1e-6)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    buffers = dict(module.named_buffers())
    for name, value in state.items():
        torch.testing.assert_close(value, buffers[name])


def test_results_of_submodules():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.rnn, self.head = Block(), nn.GRU(8, 3), Bessel()

        def forward(self, x):
            return self.head(self.rnn(self.block(x)["hidden"])[0])

    torch.manual_seed(0)
    module, x = Features().eval(), draw(5, 3, 6, 6)
    model = ml.from_torch(module, x, outputs=["block.conv", "rnn", "block"])
    assert model.outputs == ("block_conv", "rnn_0", "rnn_1", "block_logits", "block_hidden")
    results = ml.compile(model, "torch").evaluate({"x": x})
    torch.testing.assert_close(results["block_conv"], module.block.conv(x))
    torch.testing.assert_close(results["rnn_0"], module.rnn(module.block(x)["hidden"])[0], rtol=1e-5, atol=1e-6)
    first = ml.compile(ml.from_torch(module, x, outputs=["block.conv"], training=False), "torch")
    assert set(first.params) == {"block.conv.weight", "block.conv.bias"}
    with pytest.raises(InputError, match="unknown submodule 'block.con' in outputs="):
        ml.from_torch(module, x, outputs=["block.con"])
    assert "forward" not in vars(module) and not module.block.conv._forward_hooks


def test_dropout_is_random_in_training_only():
    module, x = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), draw(2, 4)
    compiled = ml.compile(ml.from_torch(module, x), "torch")
    state = compiled.initial_state()
    plain = compiled.evaluate({"input": x})["output"]
    first, state = compiled.evaluate(compiled.params, {"input": x}, training=True, state=state)
    second, _ = compiled.evaluate(compiled.params, {"input": x}, training=True, state=state)
    assert not torch.equal(first["output"], second["output"])
    nonzero = first["output"] != 0
    assert 0.3 < nonzero.float().mean() < 0.7
    torch.testing.assert_close(first["output"][nonzero], plain[nonzero] * 2)


def test_an_imported_module_is_a_block_of_other_models():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), draw(2, 4)
    m = Model()
    m |= ml.from_torch(module, x)(input="x", output="h")
    m |= Linear(3, name="head")(input="h", output="y")
    compiled = ml.compile(m, "torch", shapes={"x": [2, 4]})
    params = compiled.randomize_params(0)
    loaded = [name for name in params if name.endswith("0.weight")]
    assert len(loaded) == 1
    torch.testing.assert_close(params[loaded[0]], module[0].weight.detach())
    again = ml.compile(ml.from_torch(module, x), "torch").to_module()
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again(x), module(x))


class Branch(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (x,))


class Positions(nn.Module):
    """Sizes as numbers, in ranges, shapes and masks."""

    def forward(self, x):
        batch, length, _ = x.shape
        places = torch.arange(length) + 1
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        scores = (x @ x.transpose(1, 2) / length).masked_fill(~mask, float("-inf"))
        y = torch.cat([scores.softmax(-1) @ x, x[:, -1:]], 1)
        return y[:, 1:] * places[:, None] + torch.zeros(batch, length, 1) + x.reshape(batch * length, -1).sum() * batch


@pytest.mark.parametrize("module", [Branch(), Positions()], ids=lambda m: type(m).__name__)
def test_open_sizes_and_branches(module):
    model = ml.from_torch(module, draw(3, 5, 4), dynamic_shapes={"x": {0: "batch", 1: "length"}})
    compiled = ml.compile(model, "torch", inference=True)
    for shape in ((3, 5, 4), (2, 7, 4), (6, 2, 4)):
        x = draw(*shape, seed=5)
        torch.testing.assert_close(compiled.evaluate({"x": x})["output"], module(x), rtol=1e-5, atol=1e-5)
    assert len(compiled.programs) == 1


# -- errors --------------------------------------------------------------------------------------
class Unsupported(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).abs() + torch.special.airy_ai(x)[..., :3] + torch.special.airy_ai(x).sum()


def test_all_unsupported_operators_are_named_with_the_line():
    with pytest.raises(UnsupportedError) as info:
        ml.from_torch(Unsupported(), draw(2, 4))
    text = str(info.value)
    assert "special_airy_ai, 2 times: " in text and "test_importing.py:" in text and "operators=" in text


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) * 2


def test_functions_of_the_user_replace_operators():
    x = draw(2, 4)
    model = ml.from_torch(Bessel(), x, operators={"special_bessel_j0": lambda x: ops.cos(x)})
    torch.testing.assert_close(compiled_and_run(model, [x])[0], torch.cos(x) * 2)


def test_arguments_are_checked():
    with pytest.raises(InputError, match="weights_only=True"):
        ml.from_torch("model.pt", draw(2, 4))
    with pytest.raises(InputError, match="call the class first"):
        ml.from_torch(Bessel, draw(2, 4))
    with pytest.raises(InputError, match="'y', which is not an example input"):
        ml.from_torch(Bessel(), draw(2, 4), dynamic_shapes={"y": {0: "batch"}})
    with pytest.raises(UnsupportedError, match="axis 0 of input 'x' is fixed to 1"):
        ml.from_torch(
            Bessel(), draw(1, 4), dynamic_shapes={"x": {0: "batch"}}, operators={"special_bessel_j0": ops.sin}
        )


class OnlyEvaluation(nn.Module):
    def forward(self, x):
        if self.training and float(x.sum()) > 0:
            return x * 2
        return x


def test_a_module_that_cannot_be_exported_in_training_mode():
    x = draw(2, 4)
    model = ml.from_torch(OnlyEvaluation(), x)
    torch.testing.assert_close(compiled_and_run(model, [x])[0], x)
    with pytest.raises(ModelError, match="cannot export this module in training mode"):
        ml.compile(model, "torch").evaluate({}, {"x": x}, training=True)
    assert np.isfinite(
        ml.compile(ml.from_torch(OnlyEvaluation(), x, training=False), "torch")({"x": x})["output"]
    ).all()


# -- the source beside the imported model -------------------------------------------------------------------------
class Compared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cell = nn.Linear(4, 3), nn.LSTM(3, 5, batch_first=True)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return {"hidden": hidden, "last": self.cell(hidden)[0]}


def test_a_broken_row_is_named_with_its_line_and_both_values(monkeypatch, tmp_path):
    module = Compared()
    model = ml.from_torch(module, draw(2, 6, 4), dynamic_shapes={"x": {0: "batch"}}, training=False)
    inputs = {"x": draw(5, 6, 4, seed=1).numpy()}
    assert ml.verify(model, module, inputs), "with another batch than that of the export"
    monkeypatch.setitem(ROWS, "tanh", Row(ops.sin, "", frozenset()))
    first = ml.verify(model, module, inputs).first
    assert (first.source, first.node.op.name) == ("node 'tanh' of the source", "sin")
    assert first.node.origin.file == __file__ and "at [" in str(first)
    place, expected, actual = first.largest
    assert expected != actual and len(place) == 3


def test_other_weights_and_other_sources_are_reported():
    module, x = Compared(), draw(2, 6, 4)
    model = ml.from_torch(module, x, training=False)
    assert ml.verify(model, Compared(), {"x": x}).first.source == "node 'linear' of the source"
    with pytest.raises(InputError, match=r"is a torch\.nn\.Module, got function"):
        ml.verify(model, draw, {"x": x})
    with pytest.raises(InputError, match="needs an array for input 'x'"):
        ml.verify(model, module, {})
    with pytest.raises(InputError, match="was not imported"):
        ml.verify(Linear(3), module, {"input": x})


def test_results_whose_keys_become_one_name():
    class Nested(torch.nn.Module):
        def forward(self, x):
            return {"a": {"b": x + 1}, "a_b": x * 3}

    outputs = ml.compile(ml.from_torch(Nested(), torch.ones(2)), "numpy", inference=True)({"x": np.ones(2, np.float32)})
    assert {name: y.tolist() for name, y in outputs.items()} == {"a_b": [2, 2], "a_b_2": [3, 3]}


class Leaking(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clamp(min=0)

    @staticmethod
    def backward(context, g):
        return g


def test_a_gradient_of_the_user_is_reported():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return Leaking.apply(x)

    with pytest.warns(UserWarning) as warned:
        model = ml.from_torch(Layer(), torch.ones(2))
    assert str(warned[0].message) == (
        "gradients of the model are derivatives of its forward operations: the backward of "
        f"{__name__}.Leaking is not imported; where it differs, use y + (x - y).detach() in the module, which has the "
        "value of x and the gradient of y"
    )
    assert warned[0].filename == __file__
    result = ml.compile(model, "numpy", inference=True)({"x": np.asarray([-1, 2], np.float32)})
    assert next(iter(result.values())).tolist() == [0, 2]
    assert "apply" in vars(torch.autograd.Function) and Leaking.apply(torch.ones(1)).tolist() == [1]


class Stopped(torch.nn.Module):
    """Blocks without gradients: detached values, a block of no_grad, and a write to a detached buffer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        h = self.linear(x)
        with torch.no_grad():
            scale, target = h.abs().amax(0), torch.tanh(h)
            self.mean.detach().mul_(0.5).add_(h.mean(0))
        return h + (h.round() - h).detach() * scale + self.mean, target


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_values_without_gradients(engine):
    module, x = Stopped().train(), torch.linspace(-2, 2, 6).reshape(2, 3)
    compiled = ml.compile(ml.from_torch(copy.deepcopy(module), x), engine)
    theirs, target = module(x)
    (theirs.sum() * 3).backward()
    cotangents = dict(zip(compiled.model.outputs, (np.full((2, 3), 3, np.float32), np.ones((2, 3), np.float32))))
    state = compiled.initial_state()
    results, gradients, state = compiled.evaluate(compiled.params, {"x": x.numpy()}, cotangents, state=state)
    for value, expected in zip(results.values(), (theirs, target), strict=True):
        np.testing.assert_allclose(np.asarray(value), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(np.asarray(gradients[name]), parameter.grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(state["mean"]), module.mean, rtol=1e-5, atol=1e-6)
