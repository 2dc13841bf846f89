"""Transformations of graphs that give graphs: rows of a batch, and derivatives of every order."""

from mithril.transforms.derivatives import (
    grad_graph as grad_graph,
    hessian_graph as hessian_graph,
    hvp_graph as hvp_graph,
    jacobian_graph as jacobian_graph,
    jvp_graph as jvp_graph,
    tangent_name as tangent_name,
    vjp_graph as vjp_graph,
)
from mithril.transforms.function_derivatives import (
    grad_function as grad_function,
    hessian_function as hessian_function,
    hvp_function as hvp_function,
    jacobian_function as jacobian_function,
    jvp_function as jvp_function,
    vjp_function as vjp_function,
)
from mithril.transforms.vmap import (
    same_rows as same_rows,
    vmap_function as vmap_function,
    vmap_graph as vmap_graph,
)
