"""Mixtures of experts: a layer that computes the routed tokens only, against one whose experts compute all tokens.

The peer is the same layer made of batched products over all experts. Processor time, least of interleaved rounds.
"""

from __future__ import annotations

import time

import harness
import numpy as np

import mithril as ml
from mithril import ops
from mithril.models import Layer, MixtureOfExperts, Model

EXPERTS, ACTIVE, WIDTH, HIDDEN = 8, 2, 512, 1792  # Mixtral's ratios, an eighth of its width


class AllTokens(Layer):
    """Each expert computes all tokens; those of other experts count with the share 0."""

    def build(self, x):
        logits = ops.linear(x, self.param("router", (EXPERTS, WIDTH), "normal(std=0.02)"))
        _, indices, used = MixtureOfExperts.routed(logits, ACTIVE, normalized=True)
        weights = ops.sum(ops.one_hot(indices, depth=EXPERTS) * ops.unsqueeze(used, axis=(-1,)), axis=-2)
        gate, up = (self.param(n, (EXPERTS, WIDTH, HIDDEN), f"fan_in_uniform(fan_in={WIDTH})") for n in ("gate", "up"))
        down = self.param("down", (EXPERTS, HIDDEN, WIDTH), f"fan_in_uniform(fan_in={HIDDEN})")
        rows = ops.unsqueeze(x, axis=(0,))
        y = ops.matmul(ops.silu(ops.matmul(rows, gate)) * ops.matmul(rows, up), down)
        return ops.sum(y * ops.unsqueeze(ops.transpose(weights, perm=(1, 0)), axis=(-1,)), axis=0)


def runs(backend: str, tokens: int, training: bool):
    """Return a call of each layer, with the same parameters."""
    x = np.random.default_rng(0).standard_normal((tokens, WIDTH)).astype(np.float32)
    params = None
    layers = {"grouped": MixtureOfExperts(EXPERTS, HIDDEN, active=ACTIVE, balance=0.0), "dense": AllTokens()}
    for name, layer in layers.items():
        layer.name = "moe"
        compiled = ml.compile(Model(layer), backend, shapes={"input": [tokens, WIDTH]}, inference=not training)
        values = compiled.randomize_params(0)
        params = params or [np.array(ml.backend.to_numpy(v)) for _, v in sorted(values.items())]
        arrays = {n: compiled.backend.array(v) for (n, _), v in zip(sorted(values.items()), params, strict=True)}
        data = {"input": compiled.backend.array(x)}
        cotangent = compiled.backend.array(x)

        def call(compiled=compiled, arrays=arrays, data=data, cotangent=cotangent):
            if not training:
                return {"output": ml.backend.to_numpy(compiled.evaluate(arrays, data)["output"])}
            _, gradients = compiled.evaluate(arrays, data, {"output": cotangent})
            return {n.rpartition(".")[2]: ml.backend.to_numpy(g) for n, g in gradients.items()}

        yield name, call


def main() -> None:
    settings = harness.arguments(__doc__, "BACKEND", tokens=[1, 512])
    for backend in settings.words or ["numpy", "torch", "jax", "c", "mlx", "ggml"]:
        for tokens in settings.tokens:
            for training in (False, True) if tokens > 1 else (False,):
                calls = dict(runs(backend, tokens, training))
                results = {name: call() for name, call in calls.items()}
                for n, expected in results["dense"].items():
                    limit = 1e-3 * np.abs(expected).max()
                    np.testing.assert_allclose(results["grouped"][n], expected, rtol=1e-3, atol=limit)
                best = harness.interleaved(calls, 0.0, 5, time.process_time)
                grouped, dense = (best[n] * 1e3 for n in ("grouped", "dense"))
                kind = "outputs and gradients" if training else "outputs"
                times = f"{grouped:8.1f} ms, all tokens {dense:8.1f} ms, ratio {grouped / dense:.2f}"
                print(f"{backend:6} {tokens:4} tokens, {kind:21} {times}", flush=True)


if __name__ == "__main__":
    main()
