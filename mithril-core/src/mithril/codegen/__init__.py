"""Python source from a graph: what the numpy, jax, torch and mlx backends share."""

from mithril.codegen.call import Call
from mithril.codegen.emit import emit
from mithril.codegen.helper import needs
from mithril.codegen.source import Source
from mithril.codegen.table import Lowerings

__all__ = ["Call", "Lowerings", "Source", "emit", "needs"]
