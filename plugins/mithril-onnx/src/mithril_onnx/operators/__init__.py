"""The operators of ONNX, a file per family; importing a file registers its rows."""

from mithril_onnx.operators import (  # noqa: F401
    elementwise,
    shape,
)
