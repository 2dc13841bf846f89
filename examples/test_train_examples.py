"""The training examples reach the figures on their pages; few epochs keep this fast."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mithril_train")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.parametrize(("name", "min_accuracy"), [("MLP", 0.95), ("CNN", 0.96)])
def test_digits(name, min_accuracy):
    pytest.importorskip("sklearn")
    from train_digits import train

    assert train(name, "numpy", 12, progress=False).history["val_accuracy"][-1] > min_accuracy


def test_autoencoder_draws_digits():
    pytest.importorskip("sklearn")
    from train_vae import as_text, draw, train

    trainer = train("numpy", 8, progress=False)
    assert trainer.history["val_loss"][-1] < 30
    images = draw(trainer, 3)
    assert images.shape == (3, 8, 8)
    assert images.std() > 0.1
    assert len(as_text(images).splitlines()) == 8


def test_regression():
    from train_regression import train

    assert train("numpy", 60, progress=False).history["val_r2_score"][-1] > 0.95


def test_characters():
    from train_char_gpt import train, write

    trainer, alphabet = train("numpy", 1, progress=False, max_batches=20)
    assert trainer.history["loss"][-1] < np.log(len(alphabet))
    assert write(trainer, alphabet, "def ", 5).startswith("def ")


def test_the_same_curve_on_numpy_twice():
    pytest.importorskip("sklearn")
    from train_everywhere import losses

    assert losses("numpy", 10) == losses("numpy", 10)
