"""Ensembles of decision trees as programs of gathers: each round takes every tree of every row one node down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import InputError, OperationError, dtype as as_dtype
from mithril_onnx.operators.learning.scores import TRANSFORMS, as_float, as_matrix, labels_of, learned, transformed
from mithril_onnx.values import as_value

Array = np.ndarray[Any, Any]
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
LEAF, EQUAL, UNEQUAL = (MODES.index(mode) for mode in ("LEAF", "BRANCH_EQ", "BRANCH_NEQ"))
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")  # TreeEnsemble refers to them by position
ROUNDS = 6  # of a kernel: the ways of several rows through several trees overlap in the processor
DEEPEST = 1024  # deeper trees are refused


@dataclass
class Trees:
    """The nodes of all trees."""

    roots: Array
    features: Array
    thresholds: Array
    modes: Array
    children: Array  # [nodes, 2]: where the test fails, where it holds
    missing: Array  # whether nan goes where the test holds
    members: Array | None = None  # [nodes, most members]: the sets of BRANCH_MEMBER, filled up with nan

    def __post_init__(self) -> None:
        inner = self.modes != LEAF
        children = self.children[inner]
        if children.size and (children.min() < 0 or children.max() >= len(self.modes)):
            raise InputError("a tree refers to a node that does not exist")
        # The opposite of a test that is false for nan, as all others are.
        differs = self.modes == UNEQUAL
        self.modes = np.where(differs, EQUAL, self.modes)
        self.children[differs] = self.children[differs, ::-1]
        self.missing = self.missing & inner & ~differs
        self.thresholds = np.where(inner, self.thresholds, np.nan)
        self.features = np.where(inner, self.features, 0)

    def arranged(self) -> tuple[Array, Array, int]:
        """Return the node of each place, the place of its first child, and the depth; siblings have adjacent places.

        Leaves are their own child, since no test holds for the threshold nan.
        """
        inner = self.modes != LEAF
        limit = 2 * int(inner.sum()) + len(self.roots)
        levels, firsts, count = [self.roots], [], len(self.roots)
        while True:
            level = levels[-1]
            starts = count - len(level)
            descends = inner[level]
            after = np.cumsum(2 * descends) - 2 * descends
            firsts.append(np.where(descends, count + after, starts + np.arange(len(level))))
            if not descends.any():
                if not np.isin(np.flatnonzero(inner), np.concatenate(levels)).all():
                    raise InputError("a node is below itself, and no root leads to it")
                return np.concatenate(levels), np.concatenate(firsts), len(levels) - 1
            levels.append(self.children[level[descends]].reshape(-1))
            count += len(levels[-1])
            if count > limit:
                raise InputError("a node is below two others, or below itself")
            if len(levels) > DEEPEST:
                raise InputError(f"a tree is deeper than {DEEPEST} nodes")


COMPARISONS = (ops.less_equal, ops.less, ops.greater_equal, ops.greater, ops.equal)


def leaves_of(x: Any, trees: Trees) -> tuple[Any, Array]:
    """Return the place of the leaf that each row of x reaches in each tree, and the node of each place.

    The tables have one more row, so that a sum of a first child and a test is always a place.
    """
    if trees.features.size and trees.features.max() >= x.shape[1]:
        raise InputError(f"a tree tests column {trees.features.max()}, the input has {x.shape[1]}")
    order, firsts, depth = trees.arranged()
    order = np.append(order, order[-1:])
    kind = as_dtype(x.dtype).numpy
    features, children = (as_value(a.astype(np.int32)) for a in (trees.features[order], np.append(firsts, 0)))
    thresholds = as_value(trees.thresholds[order].astype(kind))
    missing = as_value(trees.missing[order]) if trees.missing.any() else None
    tests = _tests(trees, order, kind)
    roots = np.arange(len(trees.roots), dtype=np.int32)
    node = ops.broadcast_to(as_value(roots), shape=(x.shape[0], roots.size))
    for round_number in range(depth):
        if round_number and round_number % ROUNDS == 0:
            (node,) = ops.barrier(node)
        value = ops.take_along_axis(x, ops.take(features, node, axis=0), axis=1)
        threshold = ops.take(thresholds, node, axis=0)
        holds = None
        for is_mode, test in tests:
            result = test(value, threshold, node)
            holds = result if holds is None else ops.where(ops.take(is_mode, node, axis=0), result, holds)
        if missing is not None:
            goes = ops.take(missing, node, axis=0)
            holds = ops.logical_or(holds, ops.logical_and(goes, ops.isnan(value)))
        # Siblings are adjacent, so that one table of first children is read: 1,000 rows of 100 trees
        # took 1.8 ms on C in place of 10 ms, also because positions known in bounds are not clamped
        # (c12adea9).
        node = ops.take(children, node, axis=0) + ops.cast(holds, dtype="int32")
    return node, order


def _tests(trees, order, kind):
    """Return the tests that occur, each with the nodes that have it."""
    tests = []
    for mode in np.unique(trees.modes[trees.modes != LEAF]):
        if mode < len(COMPARISONS):
            test = _comparison(COMPARISONS[mode])
        else:
            test = _membership(as_value(trees.members[order].astype(kind)))
        tests.append((as_value(trees.modes[order] == mode), test))
    return tests


def _comparison(compare):
    return lambda value, threshold, node: compare(value, threshold)


def _membership(members):
    def test(value, threshold, node):
        return ops.any(ops.equal(ops.unsqueeze(value, axis=(-1,)), ops.take(members, node, axis=0)), axis=-1)

    return test


def aggregated(leaves: tuple[Any, Array], table: Array, present: Array, aggregate: str) -> Any:
    """Return the score of each target: the weights of the leaves, aggregated over the trees."""
    node, order = leaves
    table, present = table[order], present[order]
    if aggregate not in AGGREGATES:
        raise OperationError(f"aggregate_function is '{aggregate}'", facts=[f"expected: {', '.join(AGGREGATES)}"])
    if aggregate in ("SUM", "AVERAGE"):
        total = ops.sum(ops.take(table, node, axis=0), axis=1)
        return total / float(node.shape[1]) if aggregate == "AVERAGE" else total
    empty = np.inf if aggregate == "MIN" else -np.inf
    weights = ops.take(np.where(present, table, empty).astype(table.dtype), node, axis=0)
    result = ops.min(weights, axis=1) if aggregate == "MIN" else ops.max(weights, axis=1)
    # The score of a target is 0 if no leaf that was reached has a weight for it.
    return ops.where(ops.isinf(result), np.zeros((), table.dtype), result)


# -- the operators of versions 1 and 3 --------------------------------------------------------------------------------
def _read(
    nodes_falsenodeids, nodes_featureids, nodes_missing_value_tracks_true, nodes_modes, nodes_nodeids, nodes_treeids,
    nodes_truenodeids, nodes_values, nodes_values_as_tensor,
):  # fmt: skip
    """Return trees, with the position of each node by the numbers of its tree and node."""
    positions = {key: k for k, key in enumerate(zip(nodes_treeids, nodes_nodeids, strict=True))}
    modes = np.asarray([MODES.index(m) for m in nodes_modes])
    children = np.zeros((len(modes), 2), np.int64)
    for column, ids in enumerate((nodes_falsenodeids, nodes_truenodeids)):
        for k, child in enumerate(ids):
            if modes[k] != LEAF:
                children[k, column] = positions[nodes_treeids[k], child]
    below = set(children[modes != LEAF].reshape(-1).tolist())
    first: dict[int, int] = {}  # the root of a tree is its first node without a parent
    for k, tree in enumerate(nodes_treeids):
        if k not in below:
            first.setdefault(tree, k)
    if len(first) != len(set(nodes_treeids)):
        raise InputError("a tree has no root: each of its nodes is below another one")
    values = nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor
    missing = nodes_missing_value_tracks_true or np.zeros(len(modes))
    trees = Trees(
        np.asarray([*first.values()]), np.asarray(nodes_featureids, np.int64), np.asarray(values), modes, children,
        np.asarray(missing, np.bool_),
    )  # fmt: skip
    return trees, positions


def _table(positions, trees: Sequence[int], nodes: Sequence[int], targets: Sequence[int], weights, count: int):
    """Return the weight of each node for each target, and whether it has one."""
    kind = np.float64 if getattr(weights, "dtype", None) == np.float64 else np.float32  # tuples are of float32
    table = np.zeros((len(positions), count), kind)
    present = np.zeros(table.shape, np.bool_)
    rows = [positions[key] for key in zip(trees, nodes, strict=True)]
    if targets and not 0 <= min(targets) <= max(targets) < count:
        raise InputError(f"a leaf has the target {max(targets)} of {count}")
    np.add.at(table, (rows, list(targets)), weights)
    present[rows, list(targets)] = True
    return table, present


@learned
def TreeEnsembleRegressor(
    x, *, aggregate_function="SUM", base_values=None, base_values_as_tensor=None, n_targets=1, nodes_falsenodeids,
    nodes_featureids, nodes_hitrates=None, nodes_hitrates_as_tensor=None, nodes_missing_value_tracks_true=None,
    nodes_modes, nodes_nodeids, nodes_treeids, nodes_truenodeids, nodes_values=None, nodes_values_as_tensor=None,
    post_transform="NONE", target_ids, target_nodeids, target_treeids, target_weights=None,
    target_weights_as_tensor=None,
):  # fmt: skip
    trees, positions = _read(
        nodes_falsenodeids, nodes_featureids, nodes_missing_value_tracks_true, nodes_modes, nodes_nodeids,
        nodes_treeids, nodes_truenodeids, nodes_values, nodes_values_as_tensor,
    )  # fmt: skip
    weights = target_weights if target_weights_as_tensor is None else target_weights_as_tensor
    table, present = _table(positions, target_treeids, target_nodeids, target_ids, weights, n_targets)
    scores = aggregated(leaves_of(as_matrix(as_float(x)), trees), table, present, aggregate_function)
    base = base_values if base_values_as_tensor is None else base_values_as_tensor
    if base is not None and len(base):
        scores = scores + np.asarray(base, table.dtype)
    return ops.cast(transformed(scores, post_transform), dtype="float32")


@learned
def TreeEnsembleClassifier(
    x, *, base_values=None, base_values_as_tensor=None, class_ids, class_nodeids, class_treeids, class_weights=None,
    class_weights_as_tensor=None, classlabels_int64s=None, classlabels_strings=None, nodes_falsenodeids,
    nodes_featureids, nodes_hitrates=None, nodes_hitrates_as_tensor=None, nodes_missing_value_tracks_true=None,
    nodes_modes, nodes_nodeids, nodes_treeids, nodes_truenodeids, nodes_values=None, nodes_values_as_tensor=None,
    post_transform="NONE",
):  # fmt: skip
    trees, positions = _read(
        nodes_falsenodeids, nodes_featureids, nodes_missing_value_tracks_true, nodes_modes, nodes_nodeids,
        nodes_treeids, nodes_truenodeids, nodes_values, nodes_values_as_tensor,
    )  # fmt: skip
    count = len(classlabels_strings or classlabels_int64s or ())
    weights = class_weights if class_weights_as_tensor is None else class_weights_as_tensor
    base = base_values if base_values_as_tensor is None else base_values_as_tensor
    base = np.asarray(() if base is None else base, np.float32)
    table, present = _table(positions, class_treeids, class_nodeids, class_ids, weights, count)
    is_binary = count == 2 and len(set(class_ids)) == 1
    if is_binary:
        table, present = table[:, class_ids[:1]], present[:, class_ids[:1]]
    scores = aggregated(leaves_of(as_matrix(as_float(x)), trees), table, present, "SUM")
    if is_binary:
        classes, scores = _binary(scores, base, min(weights) >= 0, post_transform)
    else:
        scores = scores + base.astype(table.dtype) if base.size else scores
        classes = ops.argmax(scores, axis=1)
        scores = transformed(scores, post_transform)
    return labels_of(classes, classlabels_strings, classlabels_int64s), ops.cast(scores, dtype="float32")


def _binary(score, base, is_positive, post_transform):
    """Return class and both scores of a model whose leaves weigh only one of the two classes.

    Weights that are all positive are probabilities of the second class; others are decisions around zero.
    """
    if base.size:
        score = score + base[-1].astype(as_dtype(score.dtype).numpy)
    is_second = ops.greater(score, 0.5 if is_positive else 0.0)
    if is_positive:
        second = transformed(score, post_transform)
        scores = ops.concat(1.0 - second, second, axis=1)
    else:
        scores = transformed(ops.concat(-score, score, axis=1), post_transform)
    return ops.cast(ops.squeeze(is_second, axis=(1,)), dtype="int64"), scores


# -- version 5 --------------------------------------------------------------------------------------------------------
@learned
def TreeEnsemble(
    x, *, aggregate_function=1, leaf_targetids, leaf_weights, membership_values=None, n_targets=1, nodes_falseleafs,
    nodes_falsenodeids, nodes_featureids, nodes_hitrates=None, nodes_missing_value_tracks_true=None, nodes_modes,
    nodes_splits, nodes_trueleafs, nodes_truenodeids, post_transform=0, tree_roots,
):  # fmt: skip
    """Read nodes and leaves that have numbers of their own; leaves follow the nodes here."""
    count, leaves = len(nodes_featureids), len(leaf_targetids)
    modes = np.concatenate([np.asarray(nodes_modes, np.int64).reshape(-1), np.full(leaves, LEAF)])
    children = np.zeros((count + leaves, 2), np.int64)
    for column, (ids, is_leaf) in enumerate(
        ((nodes_falsenodeids, nodes_falseleafs), (nodes_truenodeids, nodes_trueleafs))
    ):
        children[:count, column] = np.asarray(ids) + count * np.asarray(is_leaf, np.int64)
    splits = np.asarray(nodes_splits).reshape(-1)
    missing = nodes_missing_value_tracks_true or np.zeros(count)
    trees = Trees(
        np.asarray(tree_roots),
        np.concatenate([np.asarray(nodes_featureids, np.int64), np.zeros(leaves, np.int64)]),
        np.concatenate([splits, np.zeros(leaves, splits.dtype)]),
        modes,
        children,
        np.concatenate([np.asarray(missing, np.bool_), np.zeros(leaves, np.bool_)]),
        _members(membership_values, modes),
    )
    x = as_matrix(x)
    table = np.zeros((count + leaves, n_targets), as_dtype(x.dtype).numpy)
    present = np.zeros(table.shape, np.bool_)
    rows = np.arange(count, count + leaves)
    table[rows, list(leaf_targetids)] = np.asarray(leaf_weights).reshape(-1)
    present[rows, list(leaf_targetids)] = True
    scores = aggregated(leaves_of(x, trees), table, present, AGGREGATES[aggregate_function])
    return transformed(scores, TRANSFORMS[post_transform])


def _members(values: Any, modes: Array) -> Array | None:
    """Return the set of each node; the file lists the sets in the order of their nodes, each ended by nan."""
    tests = np.flatnonzero(modes == MODES.index("BRANCH_MEMBER"))
    if not tests.size:
        return None
    flat = np.asarray(values, np.float64).reshape(-1)
    sets = np.split(flat, np.flatnonzero(np.isnan(flat)) + 1)[: tests.size]
    table = np.full((len(modes), max(len(s) for s in sets)), np.nan)
    for k, members in zip(tests, sets, strict=True):
        table[k, : len(members)] = members
    return table
