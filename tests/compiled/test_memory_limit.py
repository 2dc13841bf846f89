"""``max_memory_gb`` with sizes that are known at the call only, on every backend."""

import numpy as np
import pytest

import mithril as ml
from mithril.models import Model, TransformerEncoderLayer


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx", "ggml"])
def test_open_sizes_are_checked_against_the_limit_at_each_call(engine):
    model = Model(TransformerEncoderLayer(32, 2, 128))
    compiled = ml.compile(model, engine, shapes={"input": [None, 32, 32]}, max_memory_gb="4MB")
    params = compiled.randomize_params(seed=0)
    for rows, fits in ((1, True), (2000, False), (2, True)):
        x = np.zeros((rows, 32, 32), np.float32)
        if fits:
            compiled.evaluate(params, {"input": x})
        else:
            with pytest.raises(ml.MemoryLimitError, match="max_memory_gb allows 4 MB"):
                compiled.evaluate(params, {"input": x})
