"""Values of pipeline stages in arrays that every stage has in the same number, and the routes of values between stages.

A program for all devices has the same arrays on each of them, although its stages have different values. So values of
the same type share a slot; a stage with fewer of them leaves slots unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from mithril.graph import Value

Source = tuple[int, str]  # a task and the name of its output


class Kind(NamedTuple):
    """The type of a slot; ``split`` is that of a parameter between steps."""

    shape: tuple[Any, ...]
    dtype: Any
    split: tuple[Any, ...] = ()


class Slots:
    """An assignment of the values of each stage to slots."""

    def __init__(self, kinds: Sequence[Mapping[Any, Kind]]) -> None:
        counts: Counter[Kind] = Counter()
        numbered: list[dict[Hashable, tuple[Kind, int]]] = []
        for values in kinds:
            seen: Counter[Kind] = Counter()
            numbered.append({})
            for name, kind in values.items():
                numbered[-1][name] = (kind, seen[kind])
                seen[kind] += 1
            counts |= seen
        self.order = [(kind, k) for kind, count in counts.items() for k in range(count)]
        number = {slot: k for k, slot in enumerate(self.order)}
        self.slots = [{name: number[slot] for name, slot in values.items()} for values in numbered]

    def zeros(self, rows: int | None = None) -> list[Any]:
        """Return the initial arrays, with ``rows`` along a new first axis."""
        shapes = [kind.shape if rows is None else (rows, *kind.shape) for kind, _ in self.order]
        return [jnp.zeros(shape, kind.dtype) for shape, (kind, _) in zip(shapes, self.order, strict=True)]

    def name_at(self, stage: int, slot: int) -> Any:
        """Return the value of a stage in a slot, or None."""
        return next((name for name, k in self.slots[stage].items() if k == slot), None)

    def names_at(self, stage: int) -> list[tuple[int, Any]]:
        """Return the slots of a stage with their values."""
        return [(k, name) for name, k in self.slots[stage].items()]

    def pack(self, stage: int, values: Mapping[Any, Any]) -> list[Any]:
        """Return the arrays of a stage; a stage that does not exist has no values."""
        return self.put(stage, values, self.zeros()) if 0 <= stage < len(self.slots) else self.zeros()

    def unpack(self, stage: int, arrays: Sequence[Any], row: Any = None) -> dict[Any, Any]:
        """Return the values of a stage, of one row if the arrays have rows."""
        return {
            name: arrays[k] if row is None else lax.dynamic_index_in_dim(arrays[k], row, keepdims=False)
            for name, k in self.slots[stage].items()
        }

    def put(self, stage: int, values: Mapping[Any, Any], arrays: Sequence[Any], row: Any = None) -> list[Any]:
        """Return the arrays with those values of a stage that exist."""
        result = list(arrays)
        for name, k in self.slots[stage].items():
            if name in values:
                x = values[name].astype(result[k].dtype)
                result[k] = x if row is None else lax.dynamic_update_index_in_dim(result[k], x, row, 0)
        return result

    def add(self, stage: int, values: Mapping[Any, Any], arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays with those values of a stage that exist added to them."""
        slots = self.slots[stage].items()
        return self.put(stage, {name: arrays[k] + values[name] for name, k in slots if name in values}, arrays)


class Routes:
    """The way of each value from the task that computes it to those that read it, through neighboring stages.

    Forward tasks send values ``down`` to later stages, backward tasks ``up`` to earlier ones. A value that a backward
    task reads is ``saved`` in that task's stage, or if that stage is earlier, in the stage that computes it.
    """

    def __init__(self, staged: Any, results: Sequence[str]) -> None:
        self.staged = staged
        stages, tasks = staged.stages, staged.tasks
        self.kinds = {
            (k, name): _kind(v)
            for k, task in enumerate(tasks)
            for name, v in zip(task.graph.output_names, task.graph.outputs, strict=True)
        }
        self._down: list[dict[Source, Kind]] = [{} for _ in range(stages)]  # by the stage that receives the value
        self._up: list[dict[Source, Kind]] = [{} for _ in range(stages)]
        self._saved: list[dict[Source, Kind]] = [{} for _ in range(stages)]
        for task in tasks:
            if not task.once:
                for source in task.takes.values():
                    self._route(source, task)
        read_once = {source for task in tasks if task.once for source in task.takes.values()}
        every = [source for source in self.kinds if not tasks[source[0]].once]
        sums = [s for s in every if s[1] in tasks[s[0]].sums]
        unsummed = [s for s in every if s[1] not in tasks[s[0]].sums and (s[1] in results or s in read_once)]
        self.results = unsummed
        self.down, self.up, self.saved = Slots(self._down), Slots(self._up), Slots(self._saved)
        self.sums = self._of_stages(sums)
        self.collected = self._of_stages([s for s in unsummed if s[1] in staged.axes])
        self.latest = self._of_stages([s for s in unsummed if s[1] not in staged.axes])

    def task(self, stage: int, *, backward: bool) -> int:
        """Return the number of a stage's forward or backward task."""
        tasks = enumerate(self.staged.tasks)
        return next(k for k, t in tasks if t.stage == stage and t.backward == backward and not t.once)

    def _route(self, source: Source, reader: Any) -> None:
        producer, kind = self.staged.tasks[source[0]], self.kinds[source]
        start, end = producer.stage, reader.stage
        for stage in range(start + 1, end + 1):
            self._down[stage][source] = kind
        if not producer.backward and reader.backward:
            self._saved[max(start, end)][source] = kind
        for stage in range(end, start):
            self._up[stage][source] = kind

    def _of_stages(self, sources: Sequence[Source]) -> Slots:
        stages, tasks = range(self.staged.stages), self.staged.tasks
        return Slots([{s: self.kinds[s] for s in sources if tasks[s[0]].stage == stage} for stage in stages])


def _kind(v: Value) -> Kind:
    return Kind(v.type.shape, v.dtype.numpy)
