"""Images with channels last in memory: ``memory_format="channels_last"``.

PyTorch keeps the order of an image in its strides, from one operation to the next. Images are copied once, before the
first convolution that reads them; the shapes stay [batch, channels, ...].
"""

from __future__ import annotations

from mithril import ops
from mithril.backend import BuildOptions, Call, Lowerings
from mithril.graph import Graph, Node, Value, is_layout
from mithril_torch import helpers
from mithril_torch.fusion.packed_kernels import CONVOLUTIONS
from mithril_torch.fusion.subgraph_fusion import SETTINGS, conv_bias_relu

TAG = "channels last"
RANKS = (4, 5)  # of the images that PyTorch has such an order for


def with_image_order(graph: Graph, options: BuildOptions, *, is_packed: bool) -> Graph:
    """Return the graph with tags at convolutions that read images which the option reorders, and record how many."""
    wish = options.settings.get("memory_format")
    if wish is None:
        return graph
    if is_packed:
        message = "oneDNN packs embedded kernels, and their convolutions return images with channels last"
        options.decisions.record("choice", f"memory_format='{wish}': {message}")
        return graph
    if wish == "channels_first":
        options.decisions.record("choice", "memory_format='channels_first': images keep the order of the inputs")
        return graph
    entering = entering_images(graph)
    message = f"images have channels last: {len(entering)} copies at their boundaries"
    options.decisions.record("choice", f"memory_format='{wish}': {message}")
    nodes = (n.replaced(tags={**n.tags, TAG: True}) if _reads(n, entering) else n for n in graph.nodes)
    return graph.replaced(nodes=tuple(nodes))


def _reads(node: Node, images: set[Value]) -> bool:
    return node.op in CONVOLUTIONS and node.operands[0] in images


def entering_images(graph: Graph) -> set[Value]:
    """Return the images that convolutions read, but that no operation on images with channels last computes."""
    last: set[Value] = set()
    entering: set[Value] = set()
    for node in graph.nodes:
        x = node.operands[0] if node.operands else None
        if node.op in CONVOLUTIONS and x is not None and x.ndim in RANKS:
            entering |= {x} - last
            last.update(node.results)
        elif any(v in last for v in node.operands) and node.results[0].ndim in RANKS and not is_layout(node):
            last.update(node.results)
    return entering


def add_rows(table: Lowerings) -> None:
    """Add the lowering rows of tagged convolutions to ``table``."""
    table.function(*CONVOLUTIONS, when=lambda node: TAG in node.tags)(_convolution)


def _convolution(call: Call) -> str:
    settings = ", ".join(call.literal(call.attributes[n]) for n in SETTINGS)
    bias = "None" if call.node.op is ops.conv else call.b
    relu = ", relu=True" if call.node.op is conv_bias_relu else ""
    image = f"{call.helper(helpers.channels_last)}({call.x})"
    return f"{call.helper(helpers.conv)}({image}, {call.w}, {settings}, {bias}{relu})"
