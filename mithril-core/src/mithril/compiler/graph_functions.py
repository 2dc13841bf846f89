"""Functions of graphs as users call them: with checked arguments."""

from mithril.autodiff import gradients as _gradients
from mithril.backend import checked
from mithril.ir import parse as _parse

gradients = checked()(_gradients)
parse = checked()(_parse)
