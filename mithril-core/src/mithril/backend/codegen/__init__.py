"""Python source from a graph: what the numpy, jax, torch and mlx backends share."""

from mithril.backend.codegen.call import Call
from mithril.backend.codegen.emit import emit
from mithril.backend.codegen.helper_metadata import needs
from mithril.backend.codegen.lowering_table import Lowerings
from mithril.backend.codegen.source import Source

__all__ = ["Call", "Lowerings", "Source", "emit", "needs"]
