"""Networks as converters write them: an image network and a keyword network in int8, and an LSTM in floats."""

from __future__ import annotations

import numpy as np
from tflite_files import Model

SAME, RELU, RELU6, TANH = 0, 1, 3, 4


class Quantized:
    """A network of bytes under construction; each layer gets the scale of a range of its results."""

    def __init__(self, shape, scale, zero, seed):
        self.model = Model()
        self.g = self.model.graph()
        self.rng = np.random.default_rng(seed)
        self.x = self.g.input(shape, "int8", name="serving_default_input:0", scale=scale, zero=zero)
        self.shape, self.scale = list(shape), scale

    def result(self, shape, scale, zero, name, dtype="int8"):
        self.shape, self.scale = list(shape), scale
        self.x = self.g.tensor(shape, dtype, name=name, scale=scale, zero=zero)
        return self.x

    def weights(self, shape, axis, name):
        """Return weights of one scale per channel, and a bias."""
        terms = np.prod(shape) / shape[axis]
        scales = self.rng.uniform(0.5, 1.5, shape[axis]) * 2 / 127 / np.sqrt(terms)
        w = self.g.constant(
            self.rng.integers(-127, 128, shape).astype(np.int8), scale=scales, axis=axis, name=f"{name}/W"
        )
        sums = np.round(self.rng.standard_normal(shape[axis]) * 0.1 / (scales * self.scale)).astype(np.int32)
        return w, self.g.constant(sums, scale=(scales * self.scale).astype(np.float32), name=f"{name}/B")

    def conv(self, name, channels, size, stride=1, activation=RELU6, is_depthwise=False):
        b, h, w, c = self.shape
        shape = (1, *size, c) if is_depthwise else (channels, *size, c)
        operands = [self.x, *self.weights(shape, 3 if is_depthwise else 0, name)]
        kind, options = ("DEPTHWISE_CONV_2D", {"depth_multiplier": 1}) if is_depthwise else ("CONV_2D", {})
        new = (b, -(-h // stride), -(-w // stride), channels)
        scale, zero = (6 / 255, -128) if activation == RELU6 else (0.05, 3)
        y = self.result(new, scale, zero, f"net/{name}/{'depthwise' if is_depthwise else 'Conv2D'}")
        self.g.operator(
            kind, operands, [y], padding=SAME, stride_w=stride, stride_h=stride, activation=activation, **options
        )
        return y

    def add(self, name, other):
        operands = [self.x, other]
        self.g.operator("ADD", operands, [self.result(self.shape, 0.06, 1, f"net/{name}/add")], activation=0)

    def classified(self, classes):
        """Add a mean, a dense layer and a softmax, and return the model."""
        b, *_, c = self.shape
        axes, x = self.g.constant(np.asarray([1, 2], np.int32)), self.x
        self.g.operator("MEAN", [x, axes], [self.result((b, c), 0.02, -128, "net/pool/Mean")], keep_dims=False)
        operands = [self.x, *self.weights((classes, c), 0, "head")]
        self.g.operator("FULLY_CONNECTED", operands, [self.result((b, classes), 0.06, 4, "net/head/MatMul")])
        logits = self.x
        self.g.operator(
            "SOFTMAX", [logits], [self.result((b, classes), 1 / 256, -128, "StatefulPartitionedCall:0")], beta=1.0
        )
        self.g.outputs.append(self.x)
        return self.model, np.random.default_rng(1).integers(-128, 128, self.g.tensors[0][0]).astype(np.int8)


def image_network():
    """Return inverted residual blocks as those of MobileNetV2, with their input."""
    n = Quantized((1, 32, 32, 3), 0.02, -1, 0)
    n.conv("stem", 16, (3, 3), stride=2)
    for k, (channels, stride) in enumerate([(16, 1), (24, 2), (24, 1)]):
        before, old = n.x, n.shape
        n.conv(f"block{k}/expand", 4 * old[3], (1, 1))
        n.conv(f"block{k}/depth", 4 * old[3], (3, 3), stride, is_depthwise=True)
        n.conv(f"block{k}/project", channels, (1, 1), activation=0)
        if n.shape == old:
            n.add(f"block{k}", before)
    n.conv("last", 64, (1, 1))
    return n.classified(10)


def keyword_network():
    """Return depthwise separable convolutions over 49 frames of 10 coefficients, with their input."""
    n = Quantized((1, 49, 10, 1), 0.6, 80, 2)
    n.conv("stem", 32, (10, 4), stride=2, activation=RELU6)
    for k in range(2):
        n.conv(f"depth{k}", 32, (3, 3), is_depthwise=True)
        n.conv(f"point{k}", 32, (1, 1))
    return n.classified(12)


def recurrent_network():
    """Return an LSTM with a dense layer, in floats, with its input."""
    rng = np.random.default_rng(4)
    model = Model()
    g = model.graph()
    x = g.input((2, 12, 8), name="serving_default_sequence:0")

    def weights(*shape):
        return g.constant((rng.standard_normal(shape) / 3).astype(np.float32))

    gates = [weights(16, 8) for _ in range(4)] + [weights(16, 16) for _ in range(4)]
    biases, none = [weights(16) for _ in range(4)], [None]
    states = [g.tensor((2, 16), variable=True) for _ in range(2)]
    h = g.tensor((2, 12, 16), name="net/lstm/LSTM")
    g.operator(
        "UNIDIRECTIONAL_SEQUENCE_LSTM", [x, *gates, *none * 3, *biases, *none * 2, *states], [h], activation=TANH
    )
    y = g.tensor((24, 5), name="net/head/MatMul;net/head/Relu")
    g.operator("FULLY_CONNECTED", [h, weights(5, 16), weights(5)], [y], activation=RELU)
    g.outputs.append(y)
    return model, rng.standard_normal((2, 12, 8)).astype(np.float32)
