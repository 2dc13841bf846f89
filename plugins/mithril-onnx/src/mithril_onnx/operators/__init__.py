"""The operators of ONNX, a file per family; importing a file registers its rows."""

from mithril_onnx.operators import (  # noqa: F401
    attention_ops,
    contrib,
    contrib_attention,
    control,
    elementwise,
    indexing,
    losses,
    nn,
    pooling,
    quantized,
    random,
    recurrent,
    reduction,
    resize,
    selection,
    sequences,
    shape,
    signal,
    text,
    vision,
)
from mithril_onnx.operators.learning import linear_models, preparation, trees  # noqa: F401
