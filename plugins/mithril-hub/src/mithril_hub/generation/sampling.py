"""The choice of the next token: one graph, with the portable random numbers of the framework."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import to_numpy
from mithril.compiler import compile
from mithril.graph import Builder, InputError, dtype as as_dtype

UNDEFINED = -1  # the token of a row whose logits are nan
LARGEST = 1e30  # reciprocal of a temperature


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the most probable one; other settings then have no effect."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
        )
        for name, valid, range_ in checks:
            if not valid:
                raise InputError(
                    f"generate: {name}={getattr(self, name)} is out of range", facts=[f"expected {range_}"]
                )

    @property
    def penalizes(self) -> bool:
        """Whether tokens that occurred before are less probable."""
        return self.repetition_penalty != 1.0


class Sampler:
    """Draws tokens from logits on the backend that computed them; equal for a seed on every backend."""

    def __init__(self, sampling: Sampling, backend: str, seed: int) -> None:
        self.sampling = sampling
        self.backend = backend
        self.seed = seed

    def tokens(self, logits: Any, history: list[list[int]], samples: list[int]) -> list[int]:
        """Return the next token of each row of logits [rows, vocabulary].

        The random numbers of a row depend on the seed, the number of tokens before it, and its number in ``samples``.
        """
        count, vocabulary = logits.shape
        program = _program(self.sampling, self.backend, count, vocabulary, as_dtype(logits.dtype).name)
        inputs: dict[str, Any] = {"logits": logits}
        if self.sampling.temperature:
            # By position and sample, not by row: a row of a batch draws the numbers that its prompt draws
            # alone, and speculation draws those of the large model (commit b7a2d64f).
            inputs["draw"] = np.array([[len(h), n] for h, n in zip(history, samples, strict=True)], np.int32)
            inputs["seed"] = np.array([self.seed >> 32 & 0xFFFFFFFF, self.seed & 0xFFFFFFFF], np.uint32)
        if self.sampling.penalizes:
            seen = np.zeros((count, vocabulary), np.bool_)
            for row, text in zip(seen, history, strict=True):
                row[[t for t in text if t < vocabulary]] = True
            inputs["seen"] = seen
        tokens = [int(t) for t in to_numpy(program.evaluate({}, inputs)["tokens"])]
        if UNDEFINED in tokens:
            raise undefined(tokens.index(UNDEFINED))
        return tokens


def undefined(row: int) -> InputError:
    """Return the error of logits that are nan."""
    return InputError(
        f"generate: logits of row {row} are nan",
        hint="check the parameters, and compute in float32 if numbers of 16 bits overflow",
    )


@lru_cache(maxsize=64)
def _program(sampling: Sampling, backend: str, rows: int, vocabulary: int, dtype: str) -> Any:
    """Return the compiled graph that draws tokens."""
    with Builder("sample") as b:
        original = b.input("logits", (rows, vocabulary), dtype)
        # Gumbel noise and softmax need more digits than 16 bits have.
        logits = ops.cast(original, dtype="float32")
        if sampling.penalizes:
            seen, penalty = b.input("seen", (rows, vocabulary), "bool"), sampling.repetition_penalty
            less = ops.where(ops.less(logits, 0.0), logits * penalty, logits * (1.0 / penalty))
            logits = ops.where(seen, less, logits)
        if sampling.temperature:
            # the largest becomes 0, so that a low temperature overflows to -inf only
            logits = logits - ops.max(logits, axis=-1, keepdims=True)
            # Bounded: the reciprocal of a subnormal temperature is infinite, and 0 * inf is nan for the
            # largest logit.
            logits = _filtered(logits * min(1.0 / sampling.temperature, LARGEST), sampling)
            seed, draw = b.input("seed", (2,), "uint32"), b.input("draw", (rows, 2), "int32")
            logits = logits + _noise(seed, draw, rows, vocabulary)
        tokens = ops.argmax(logits, axis=-1)
        is_undefined = ops.any(ops.isnan(original), axis=-1)
        tokens = ops.where(is_undefined, UNDEFINED, tokens)
    return compile(b.build({"tokens": tokens}), backend, inference=True)


def _noise(seed: Any, draw: Any, rows: int, vocabulary: int) -> Any:
    """Return Gumbel noise, whose addition turns the largest logit into a sample."""
    noise = []
    for r in range(rows):
        key = ops.fold_in(ops.fold_in(seed, draw[r, 0]), draw[r, 1])
        noise.append(ops.uniform(key, shape=(vocabulary,), low=1e-20, high=1.0))
    return -ops.log(-ops.log(ops.stack(*noise, axis=0)))


def _filtered(logits: Any, sampling: Sampling) -> Any:
    """Exclude improbable tokens, in the order top-k, top-p, min-p."""
    excluded = float("-inf")
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        values, _ = ops.top_k(logits, k=sampling.top_k, axis=-1)
        logits = ops.where(ops.less(logits, values[:, -1:]), excluded, logits)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered = ops.sort(logits, axis=-1, descending=True)
        shares = ops.softmax(ordered, axis=-1)
        before = ops.cumsum(shares, axis=-1) - shares  # of all tokens that are more probable
        lowest = ops.min(ops.where(ops.less(before, sampling.top_p), ordered, float("inf")), axis=-1, keepdims=True)
        logits = ops.where(ops.less(logits, lowest), excluded, logits)
    if sampling.min_p:
        floor = ops.max(logits, axis=-1, keepdims=True) + float(np.log(sampling.min_p))
        logits = ops.where(ops.less(logits, floor), excluded, logits)
    return logits
