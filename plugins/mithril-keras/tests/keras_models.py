"""Keras models of the comparisons: each function builds one, with random weights, and a function of its inputs.

Keras is imported by the functions: only ``record_archives.py`` and ``benchmarks/bench_keras.py`` call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Built = tuple[Any, dict[str, np.ndarray[Any, Any]]]
MODELS: dict[str, Callable[[], Built]] = {}


def model(build: Callable[[], Built]) -> Callable[[], Built]:
    MODELS[build.__name__] = build
    return build


def _x(*shape: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _tokens(*shape: int, high: int = 7) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).integers(0, high, shape).astype(np.int32)


def randomize(net: Any) -> None:
    """Give every variable random values, statistics and biases included."""
    rng = np.random.default_rng(0)
    for v in net.weights:
        if "seed" in v.path:
            continue
        values = rng.normal(0.0, 0.4, v.shape)
        if v.path.endswith(("variance", "gamma", "scale")):
            values = rng.uniform(0.5, 1.5, v.shape)
        if "int" not in str(v.dtype):
            v.assign(values.astype(np.float32))


@model
def dense() -> Built:
    import keras
    from keras import layers as kl

    net = keras.Sequential(
        [
            keras.Input((6,), name="x"),
            kl.Normalization(mean=[0.1] * 6, variance=[1.5] * 6),
            kl.Dense(8, activation="gelu"),
            kl.Dropout(0.3),
            kl.LayerNormalization(),
            kl.Dense(8, activation="silu", use_bias=False),
            kl.BatchNormalization(),
            kl.LeakyReLU(0.1),
            kl.PReLU(),
            kl.UnitNormalization(),
            kl.RMSNormalization(),
            kl.GaussianNoise(0.1),
            kl.Dense(5, activation="elu"),
            kl.ELU(0.5),
            kl.ReLU(max_value=3.0, negative_slope=0.1, threshold=0.2),
            kl.Dense(4),
            kl.Softmax(),
        ]
    )
    return net, {"x": _x(3, 6)}


@model
def images() -> Built:
    import keras
    from keras import layers as kl

    x = keras.Input((12, 10, 3), name="image")
    h = kl.Rescaling(0.5, 0.1)(x)
    h = kl.Conv2D(6, 3, strides=2, padding="same", activation="relu")(h)
    h = kl.BatchNormalization()(h)
    a = kl.DepthwiseConv2D(3, padding="same", depth_multiplier=1)(h)
    b = kl.SeparableConv2D(6, (3, 2), padding="same", activation="tanh")(h)
    h = kl.Add()([a, b, h])
    h = kl.ZeroPadding2D(((1, 0), (2, 1)))(h)
    h = kl.Conv2D(8, 2, dilation_rate=2, groups=2)(h)
    h = kl.GroupNormalization(4)(h)
    h = kl.UpSampling2D(2)(h)
    h = kl.Cropping2D(((1, 0), (0, 1)))(h)
    p, q = kl.MaxPooling2D(3, strides=2, padding="same")(h), kl.AveragePooling2D(3, strides=2, padding="same")(h)
    h = kl.Concatenate()([p, q])
    s = kl.GlobalAveragePooling2D(keepdims=True)(h)
    s = kl.Conv2D(16, 1, activation="sigmoid")(s)
    h = kl.Multiply()([h, s])
    h = kl.SpatialDropout2D(0.2)(h)
    h = kl.Conv2DTranspose(4, 3, strides=2, padding="same")(h)
    h = kl.Conv2DTranspose(4, 2, strides=3, padding="valid")(h)
    h = kl.UpSampling2D(2, interpolation="bilinear")(h)
    top = kl.Dense(3)(kl.Flatten()(kl.AveragePooling2D(9)(h)))
    return keras.Model(x, [top, kl.GlobalMaxPooling2D()(h)]), {"image": _x(2, 12, 10, 3)}


@model
def axes() -> Built:
    """Convolutions of one and of three axes, reshapes."""
    import keras
    from keras import layers as kl

    x, z = keras.Input((9, 4), name="sound"), keras.Input((4, 5, 6, 2), name="volume")
    h = kl.Conv1D(6, 3, padding="causal", dilation_rate=2, activation="selu")(x)
    h = kl.SeparableConv1D(6, 3, padding="same")(h)
    h = kl.DepthwiseConv1D(3)(h)
    h = kl.Conv1DTranspose(5, 4, strides=2, padding="same")(h)
    h = kl.MaxPooling1D(2)(h)
    h = kl.ZeroPadding1D(1)(h)
    h = kl.Cropping1D((1, 2))(h)
    h = kl.UpSampling1D(2)(h)
    h = kl.Permute((2, 1))(h)
    h = kl.Reshape((-1, 4))(h)
    h = kl.GlobalAveragePooling1D()(h)
    h = kl.RepeatVector(3)(h)
    w = kl.Conv3D(4, 2, strides=(1, 2, 1), padding="same")(z)
    w = kl.LayerNormalization(axis=[2, 3])(w)
    w = kl.MaxPooling3D(2)(w)
    w = kl.Conv3DTranspose(3, 2)(w)
    w = kl.BatchNormalization(axis=1)(w)
    w = kl.GlobalAveragePooling3D()(w)
    return keras.Model([x, z], {"sequence": h, "features": w}), {"sound": _x(2, 9, 4), "volume": _x(2, 4, 5, 6, 2)}


@model
def recurrent() -> Built:
    import keras
    from keras import layers as kl

    tokens = keras.Input((7,), dtype="int32", name="tokens")
    h = kl.Embedding(7, 5, mask_zero=True)(tokens)
    h = kl.Bidirectional(kl.LSTM(4, return_sequences=True), name="both")(h)
    h = kl.TimeDistributed(kl.Dense(6, activation="softsign"))(h)
    h, state = kl.GRU(5, return_sequences=True, return_state=True)(h)
    h = kl.GRU(4, reset_after=False, return_sequences=True, go_backwards=True, use_bias=False)(h)
    h = kl.Bidirectional(kl.SimpleRNN(3), merge_mode="mul")(h)
    return keras.Model(tokens, [h, state]), {"tokens": _tokens(3, 7)}


@model
def cells() -> Built:
    import keras
    from keras import layers as kl

    x = keras.Input((5, 6, 5, 3), name="x")
    h = kl.TimeDistributed(kl.RandomShear(0.2))(x)
    h, carried, last = kl.ConvLSTM2D(4, (3, 2), padding="same", return_sequences=True, return_state=True)(h)
    h = kl.ConvLSTM2D(3, 2, strides=2, go_backwards=True, activation="relu")(h, initial_state=None)
    h = kl.Reshape((3, 2, 3, 1))(h)
    h = kl.Flatten()(kl.AdaptiveMaxPooling3D(2)(h))
    sequence = kl.ConvLSTM1D(2, 3, dilation_rate=2, return_sequences=True)(kl.Reshape((5, 15, 6))(x))
    sequence = kl.Reshape((5, 22))(sequence)
    stack = kl.StackedRNNCells([kl.LSTMCell(3), kl.GRUCell(4, reset_after=False), kl.LSTMCell(2)])
    sequence = kl.RNN(stack, return_sequences=True, go_backwards=True)(sequence)
    end = kl.RNN(kl.SimpleRNNCell(4, use_bias=False), return_state=True)(sequence)
    return keras.Model(x, [h, carried, last, kl.SpectralNormalization(kl.Dense(3))(sequence), *end]), {
        "x": _x(2, 5, 6, 5, 3)
    }


@model
def masked_cells() -> Built:
    import keras
    from keras import layers as kl

    x = keras.Input((6, 4), name="x")
    h = kl.Masking()(x)
    results = []
    for zero in (False, True):
        cells = kl.StackedRNNCells([kl.LSTMCell(3), kl.GRUCell(4), kl.SimpleRNNCell(2)])
        sequence = kl.RNN(cells, return_sequences=True, go_backwards=True, zero_output_for_mask=zero)(h)
        cells = kl.StackedRNNCells([kl.GRUCell(3), kl.LSTMCell(2)])
        results += [sequence, kl.SimpleRNN(2)(sequence), kl.RNN(cells, go_backwards=True)(h)]
    values = _x(3, 6, 4)
    values[0, 4:] = 0.0
    values[1, 2] = 0.0
    values[2, :3] = 0.0
    return keras.Model(x, results), {"x": values}


@model
def vocabulary() -> Built:
    import keras
    from keras import layers as kl

    tokens = keras.Input((7,), dtype="int32", name="tokens")
    tied = kl.ReversibleEmbedding(9, 4, logit_soft_cap=0.5, mask_zero=True)
    free = kl.ReversibleEmbedding(9, 4, tie_weights=False)
    h = kl.LSTM(4, return_sequences=True)(tied(tokens))
    return keras.Model(tokens, [tied(h, reverse=True), free(free(tokens), reverse=True)]), {"tokens": _tokens(2, 7)}


@model
def masks() -> Built:
    import keras
    from keras import layers as kl

    x = keras.Input((6, 4), name="x")
    h = kl.Masking()(x)
    a = kl.LSTM(3, return_sequences=True)(h, initial_state=None)
    b = kl.MultiHeadAttention(2, 3)(h, h)
    c = kl.Attention(use_scale=True)([a, a])
    d = kl.AdditiveAttention()([a, a])
    h = kl.Concatenate()([a, b, c, d])
    values = _x(3, 6, 4)
    values[0, 4:] = 0.0
    values[2, 1:] = 0.0
    return keras.Model(x, [kl.GlobalAveragePooling1D()(h), kl.SimpleRNN(4)(h)]), {"x": values}


@model
def transformer() -> Built:
    import keras
    from keras import layers as kl, ops as ko

    tokens = keras.Input((None,), dtype="int32", name="tokens")
    inner_in = keras.Input((None, 8))
    y = kl.MultiHeadAttention(2, 4)(inner_in, inner_in, use_causal_mask=True)
    y = kl.LayerNormalization(epsilon=1e-6)(kl.Add()([inner_in, y]))
    y = kl.Add()([y, kl.EinsumDense("abc,cd->abd", output_shape=(None, 8), bias_axes="d", activation="gelu")(y)])
    block = keras.Model(inner_in, y, name="block")
    head = keras.Sequential([kl.Dense(8, activation="mish"), kl.Dense(7)], name="head")
    h = kl.Embedding(7, 8)(tokens)
    h = block(h) * 2.0 + ko.mean(h, axis=1, keepdims=True)
    h = block(h)  # the same weights again
    h = kl.GroupQueryAttention(4, 4, 2)(h, h)
    y = head(h)
    last = ko.softmax(y[:, -1] / 3.0, axis=-1)
    return keras.Model(tokens, [y, last]), {"tokens": _tokens(2, 5)}


@model
def merging() -> Built:
    import keras
    from keras import layers as kl, ops as ko

    a, b = keras.Input((3, 4), name="a"), keras.Input((3, 4), name="b")
    parts = [f()([a, b]) for f in (kl.Subtract, kl.Average, kl.Maximum, kl.Minimum)]
    h = kl.Concatenate(axis=1)(parts)
    dots = kl.Dot(axes=2, normalize=True)([a, b])
    h = ko.concatenate([ko.transpose(h, (0, 2, 1)), ko.relu(ko.matmul(ko.swapaxes(a, 1, 2), dots))], axis=-1)
    h = ko.where(ko.greater(h, 0.0), ko.sqrt(ko.abs(h)), -ko.square(h))
    h = ko.reshape(h, (-1, 4 * 15))
    c = kl.Discretization(bin_boundaries=[-0.5, 0.0, 0.7])(a)
    c = kl.CategoryEncoding(4, output_mode="count")(kl.Flatten()(c))
    return keras.Model([a, b], [h, c]), {"a": _x(2, 3, 4), "b": _x(2, 3, 4, seed=3)}


@model
def channels() -> Built:
    """Channels before the other axes, and activations by name."""
    import keras
    from keras import layers as kl

    x = keras.Input((3, 8, 8), name="x")
    h = kl.Conv2D(4, 3, data_format="channels_first")(x)
    h = kl.BatchNormalization(axis=1)(h)
    h = kl.MaxPooling2D(2, data_format="channels_first")(h)
    names = ("softplus", "hard_sigmoid", "hard_silu", "relu6", "exponential", "log_sigmoid", "hard_tanh", "celu")
    names = (*names, "soft_shrink", "hard_shrink", "tanh_shrink", "sparse_plus", "squareplus", "sparse_sigmoid")
    h = kl.Concatenate(axis=1)([kl.Activation(n)(h) for n in (*names, "leaky_relu", "log_softmax")])
    return keras.Model(x, kl.Flatten(data_format="channels_first")(h)), {"x": _x(1, 3, 8, 8)}


@model
def mixed() -> Built:
    """Return a dtype policy of computations in half precision."""
    import keras
    from keras import layers as kl

    net = keras.Sequential(
        [
            keras.Input((6,), name="x"),
            kl.Dense(8, activation="relu", dtype="mixed_bfloat16"),
            kl.LayerNormalization(dtype="mixed_bfloat16"),
            kl.Dense(3, dtype="float32"),
        ]
    )
    return net, {"x": _x(3, 6)}
