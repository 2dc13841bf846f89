"""The nine standard programs of the examples learn on every backend, with the losses of NumPy.

JAX and C compile for seconds and run a third of the programs; ``examples/standard_programs.py jax c`` runs all.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mithril_lora")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import standard_programs

STEPS, THIRD = 3, {"jax": 0, "c": 1}
SMALL = {"ResNet": {"count": 2}, "U-Net": {"depth": 1}, **{name: {"layers": 1} for name in ("ViT", "GPT", "LoRA")}}


@cache
def trained(name, backend):
    standard_programs.RNG = np.random.default_rng(5)
    trainer, batch = standard_programs.PROGRAMS[name](backend, **SMALL.get(name, {}))
    losses = [float(trainer.step(batch)["loss"]) for _ in range(STEPS)]
    return trainer, batch, losses


@pytest.mark.parametrize("name", standard_programs.PROGRAMS)
def test_program_learns_with_the_losses_of_numpy(name, backend):
    if (third := THIRD.get(backend)) is not None and list(standard_programs.PROGRAMS).index(name) % 3 != third:
        pytest.skip("compiles for seconds")
    losses, expected = trained(name, backend)[2], trained(name, "numpy")[2]
    np.testing.assert_allclose(losses, expected, rtol=2e-3, atol=2e-4)
    assert losses[-1] < losses[0] or name == "VAE"  # its noise is larger than the progress of three steps


def test_gpt_continues_a_prompt(backend):
    trainer, batch, _ = trained("GPT", backend)
    text = standard_programs.write(trainer, batch[0][:1, :4], 5, layers=1)
    np.testing.assert_array_equal(text[:, :4], batch[0][:1, :4])
    inputs = np.zeros_like(batch[0])  # the batch and length of training
    inputs[:1, : text.shape[1] - 1] = text[:, :-1]
    logits = np.asarray(trainer.predict(inputs))
    np.testing.assert_array_equal(logits[:1, 3:8].argmax(-1), text[:, 4:])


def test_lora_trains_adapters_and_head_only(backend):
    trainer, _, _ = trained("LoRA", backend)
    initial = trainer.compiled.randomize_params(trainer.seed)
    updated = {
        n for n, x in trainer.params.items() if not np.array_equal(trainer.to_numpy(x), trainer.to_numpy(initial[n]))
    }
    assert {n.rpartition(".")[2] for n in updated if not n.startswith("head.")} == {"lora_a", "lora_b"}
