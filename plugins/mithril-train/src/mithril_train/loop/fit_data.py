"""The data of ``fit`` and ``evaluate``: arrays become columns and batches, loaders are adapted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.compiler import CompiledModel, Transformed
from mithril.graph import InputError, OptionError
from mithril.models import Layer
from mithril_train.data.datasets import as_source
from mithril_train.data.loader import DataLoader
from mithril_train.data.tables import is_table
from mithril_train.engine.adapters import Loader, as_loader
from mithril_train.engine.batches import is_batch, named
from mithril_train.step.loss_binding import SAMPLE_WEIGHT

BATCH_SIZE = 32


def columns_of(x: Any, y: Any, inputs: Sequence[str], sample_weight: Any = None) -> dict[str, Any]:
    """Return inputs, targets and weights as columns by name; targets by output may be a dictionary."""
    columns = named(_table(x), inputs)
    if isinstance(y, Mapping):
        clash = next((n for n in y if n in columns), None)
        if clash is not None:
            raise InputError(f"'{clash}' is both an input and a target", hint="rename the output of the model")
        columns.update(named(y, ()))
    elif y is not None:
        targets = y if isinstance(y, tuple) else (y,)
        columns.update(named(tuple(_table(t) for t in targets), ()))
    if sample_weight is not None:
        columns.update(named({SAMPLE_WEIGHT: sample_weight}, ()))
    return columns


def _table(x: Any) -> Any:
    """Return the numbers of a data frame."""
    return x.to_numpy("float32" if len(x.shape) > 1 else None) if hasattr(x, "iloc") else x


def _samples(x: Any, y: Any, inputs: Sequence[str], sample_weight: Any) -> Any:
    """Return the data set of fit's arguments: arrays as columns, or a table; None for a loader of batches."""
    if is_table(x):
        if y is not None or sample_weight is not None:
            surplus = "y" if y is not None else SAMPLE_WEIGHT
            raise OptionError(
                f"{surplus} belongs to arrays, and this is a table with columns",
                facts=[f"columns: {', '.join(x.column_names)}"],
                hint=f"name its columns after the model: {', '.join(inputs)}, target"
                + (f", {SAMPLE_WEIGHT}" if sample_weight is not None else ""),
            )
        return x
    return columns_of(x, y, inputs, sample_weight) if is_batch(x) or hasattr(x, "iloc") else None


def split(x: Any, y: Any, inputs: Sequence[str], sample_weight: Any, share: float) -> tuple[Any, Any]:
    """Return the samples of fit's arrays in two parts; the second is the last ``share`` of them."""
    samples = _samples(x, y, inputs, sample_weight)
    if samples is None:
        raise OptionError(
            f"validation_split belongs to arrays, and this is a {type(x).__name__}",
            hint="divide the data set, and give fit(validation=...)",
        )
    count = as_source(samples).length or 0
    first = count - round(count * share) if 0 < share < 1 else count
    if not 0 < first < count:
        raise OptionError(
            f"validation_split={share:g} does not divide {count} samples in two parts",
            hint="a share above 0 and below 1, such as validation_split=0.2",
        )
    if isinstance(samples, dict):
        return {n: c[:first] for n, c in samples.items()}, {n: c[first:] for n, c in samples.items()}
    if hasattr(samples, "slice"):  # an Arrow table, whose select chooses columns
        return samples.slice(0, first), samples.slice(first)
    return samples.select(range(first)), samples.select(range(first, count))


def source_of(
    x: Any,
    y: Any,
    inputs: Sequence[str],
    *,
    seed: int,
    batch_size: int | None,
    shuffle: bool | None,
    sample_weight: Any,
) -> Loader:
    """Return the loader of ``fit``: of arrays in shuffled batches, or an adapter of a loader."""
    if isinstance(x, CompiledModel | Layer | Transformed):
        raise InputError(
            "fit takes arrays or a loader of batches", hint="fit(x, y), or ml.DataLoader((x, y), batch_size=32)"
        )
    samples = _samples(x, y, inputs, sample_weight)
    if samples is not None:
        order = True if shuffle is None else shuffle
        return as_loader(DataLoader(samples, batch_size=batch_size or BATCH_SIZE, shuffle=order, seed=seed), seed)
    options = {"y": y, "batch_size": batch_size, "shuffle": shuffle, "sample_weight": sample_weight}
    surplus = next((n for n, option in options.items() if option is not None), None)
    if surplus is not None:
        hint = "yield it as a column" if surplus in ("y", SAMPLE_WEIGHT) else f"ml.DataLoader(..., {surplus}=...)"
        raise OptionError(f"{surplus} belongs to arrays, and this is a {type(x).__name__} of batches", hint=hint)
    return as_loader(x, seed)


def evaluation_source(
    x: Any, y: Any, inputs: Sequence[str], batch_size: int | None = None, sample_weight: Any = None
) -> Any:
    """Return the batches to evaluate: of arrays all at once unless there is a batch size, or those of a loader."""
    samples = _samples(x, y, inputs, sample_weight)
    if samples is not None:
        if batch_size is None and samples is not x:
            return [samples]
        return DataLoader(samples, batch_size=batch_size or BATCH_SIZE).evaluation_batches()
    if y is not None:
        raise OptionError(f"y belongs to arrays, and x is a {type(x).__name__} of batches", hint="yield it as a column")
    return as_loader(x, 0).evaluation_batches()


def validation_source(data: Any, inputs: Sequence[str], batch_size: int | None) -> Any:
    """Return the arguments of ``evaluate`` for validation data, which may be (x, y, sample_weight)."""
    if batch_size is not None and isinstance(data, tuple) and len(data) in (2, 3):
        x, y, weights = (*data, None)[:3]
        return columns_of(x, y, inputs, weights)
    return data


class ClassWeight:
    """``class_weight=``: a weight per label, which multiplies the weight of each sample."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        wrong = next((k for k, w in weights.items() if k < 0 or not w >= 0), None)
        if wrong is not None or not weights:
            raise OptionError(
                f"class_weight={dict(weights)!r} is not a weight of at least 0 per label",
                hint="class_weight={0: 1.0, 1: 5.0}",
            )
        self.table = np.ones(max(weights) + 1, np.float32)
        self.table[list(weights)] = list(weights.values())

    def __call__(self, columns: dict[str, Any], inputs: Sequence[str], read: Any) -> dict[str, Any]:
        """Return the columns with the weights of their samples."""
        targets = [n for n in columns if n not in inputs and n != SAMPLE_WEIGHT]
        if len(targets) != 1:
            raise OptionError(
                f"class_weight needs one target, and the batch has {len(targets)}",
                facts=[f"batch: {', '.join(columns)}"],
                hint="add a column sample_weight instead",
            )
        labels = read(columns[targets[0]])
        if labels.dtype.kind not in "iu" or (labels.size and labels.min() < 0):
            raise InputError(
                f"class_weight needs labels of at least 0, and '{targets[0]}' is an array of {labels.dtype}",
                hint="add a column sample_weight instead",
            )
        weights = np.where(labels < len(self.table), self.table[np.minimum(labels, len(self.table) - 1)], np.float32(1))
        weight = columns.get(SAMPLE_WEIGHT)
        if weight is not None:
            weight = read(weight)
            weights = weights * weight.reshape(weight.shape + (1,) * (weights.ndim - weight.ndim))
        return {**columns, SAMPLE_WEIGHT: weights.astype(np.float32)}
