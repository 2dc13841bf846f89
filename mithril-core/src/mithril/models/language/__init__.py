"""The model language: layers, models, connections, control flow, and tracing to a graph."""

# These fill slots of connections and models: operations on connections, running a model inside a layer or on
# arrays, its summary, surgery on layers, and files of models.
from mithril.models.language import apply_op, eager, model_summary, surgery, terminals, trace  # noqa: F401
from mithril.models.saving import reading, writing  # noqa: F401
