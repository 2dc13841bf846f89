"""Bytes of weights in memory."""

import numpy as np

from mithril.backend import EncodedWeight, held_weights


class Halves(EncodedWeight):
    """Numbers stored as halves."""

    def decoded(self):
        return self.quantized.view(np.float16)[self.order].astype(np.float32)


def test_quantized_values_count_with_the_order_of_their_rows():
    quantized, order = np.zeros((4, 16), np.uint8), np.arange(4)
    weights = [Halves(quantized, (4, 8), order), Halves(quantized, (4, 8))]
    assert held_weights(weights).in_memory == quantized.nbytes + order.nbytes
    assert held_weights(weights[1:]).in_memory == quantized.nbytes
