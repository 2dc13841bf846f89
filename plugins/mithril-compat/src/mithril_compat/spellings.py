"""Today's spelling of the predecessor's names, as one-line advice; ``mithril migrate`` follows the same tables."""

from __future__ import annotations

# Layers that today have another name; their arguments are in ``ARGUMENTS``.
LAYERS = {
    "Absolute": "Abs", "AvgPool2D": "AvgPool2d", "BatchNorm2D": "BatchNorm2d", "Buffer": "Identity",
    "Clamp": "Clip", "Convolution1D": "Conv1d", "Convolution2D": "Conv2d", "Cosine": "Cos", "Exponential": "Exp",
    "MatrixMultiply": "MatMul", "MaxPool1D": "MaxPool1d", "MaxPool2D": "MaxPool2d", "SiLU": "Silu", "Sine": "Sin",
    "F1": "F1Score",
}  # fmt: skip

# Arguments of layers that today have another name, and those whose meaning is the default.
ARGUMENTS = {
    "use_bias": "bias", "out_channels": "out_channels", "start_dim": "start", "end_dim": "end", "keepdim": "keepdims",
    "min_val": "low", "max_val": "high",
}  # fmt: skip

COMPILE = {"constant_keys": "constants", "trainable_keys": "trainable"}

METHODS = {
    "connect": "call the layer: layer(input=...)",
    "cin": "the name of the input: model['input']",
    "cout": "the name of the output: model['output']",
    "set_shapes": "IOKey(name, shape=...), or shapes= of compile",
    "set_types": "IOKey(name, dtype=...), or types= of compile",
    "set_values": "IOKey(name, default=...)",
    "set_differentiability": "IOKey(name, trainable=...), or trainable= of compile",
    "set_cin": "connect terminals by name",
    "set_cout": "model.set_outputs(...)",
    "expose_keys": "model.set_outputs(...), or IOKey(name, expose=True)",
    "rename_key": "model.rename(terminal, name)",
    "merge_connections": "model.merge(*terminals, name=...)",
    "bind_state_keys": "self.state and self.update_state in build of a layer",
    "freeze": "a model is not frozen; model.freeze(pattern) stops the training of parameters",
    "constant_keys": "constants=",
    "data_keys": "nothing: inputs that are not parameters are data",
    "discard_keys": "outputs=",
    "trainable_keys": "trainable=",
    "device_mesh=": "ones(shape): the backend's mesh divides arrays where the program needs them",
    "TrainModel": "ml.Trainer(model, optimizer, loss=...)",
    "SquaredError": "MSELoss",
    "AbsoluteError": "L1Loss",
}

_OPERATIONS = (  # under the names of mithril.ops
    *("Arange", "BroadcastTo", "Cholesky", "Eye", "IsNan", "Ones", "Unique", "ZerosLike", "LogicalXOr", "ShiftLeft"),
    "ShiftRight",
)
_EXPRESSIONS = ("Shape", "Size", "Length", "Item", "Indexer", "Slice", "ToTuple", "ToList", "ToTensor")
_FUNCTIONS = (
    *("KernelizedSVM", "LinearSVM", "LogisticRegression", "RBFKernel", "PolynomialKernel", "PolynomialRegression"),
    *("MDS", "TSNE", "GaussProcessRegressionCore", "QuadHingeLoss", "QuantileLoss"),
)
_SEQUENCES = ("OneToMany", "ManyToOne", "EncoderDecoder", "EncoderDecoderInference")
SPELLINGS = {
    **{old: f"{new} of mithril.models" for old, new in LAYERS.items()},
    **METHODS,
    **dict.fromkeys(_OPERATIONS, "the operation in mithril.ops"),
    **dict.fromkeys(_EXPRESSIONS, "an expression of connections: x.shape, x[0], (a, b)"),
    **dict.fromkeys(_FUNCTIONS, "a function of mithril.ops in a layer of your own"),
    **dict.fromkeys(_SEQUENCES, "RNN, GRU or LSTM of mithril.models"),
}
