"""Dynamic batching: requests that arrive together run as one batch, where no row of the model depends on others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.compiler import CompiledModel, TraceRequest, source_of
from mithril.graph import Dim, MithrilError, TensorType, dtype as as_dtype
from mithril.ops import first_row_mixing_node
from mithril_serve.limits import Busy, Closing, answerable

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(eq=False)
class Call:
    """The inputs of one request, and the future of its outputs."""

    inputs: Arrays
    key: tuple[Any, ...]  # names, types and all sizes but the number of rows
    rows: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Arrays]
    arrived: float = field(default_factory=time.monotonic)

    def finish(self, result: Arrays | BaseException) -> None:
        def settle() -> None:
            if not self.future.done():
                setter = self.future.set_exception if isinstance(result, BaseException) else self.future.set_result
                setter(result)  # type: ignore[arg-type]

        with contextlib.suppress(RuntimeError):  # the loop of a server that shut down
            self.loop.call_soon_threadsafe(settle)


class Batcher:
    """Runs a compiled model in a thread. A request waits at most ``delay`` seconds for others."""

    def __init__(self, model: CompiledModel, *, rows: int = 8, queue: int = 64, delay: float = 0.002) -> None:
        self.model, self.rows, self.limit, self.delay = model, rows, queue, delay
        self.waiting: deque[Call] = deque()
        self.batches = self.calls = 0
        self.independent: dict[tuple[Any, ...], bool] = {}  # by key: whether calls can be rows of a batch
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mithril-serve", daemon=True)
        self._thread.start()

    async def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs of the model; raise Busy if too many requests wait."""
        loop = asyncio.get_running_loop()
        names = sorted(inputs)
        key = tuple((n, inputs[n].dtype.name, inputs[n].shape[1:]) for n in names)
        sizes = {inputs[n].shape[:1] for n in names}
        rows = next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes else 0  # 0: not a batch
        call = Call(inputs, key, rows, loop, loop.create_future())
        with self._changed:
            if self._closing:
                raise Closing
            # Calls whose clients left while they waited take no place.
            self.waiting = deque(c for c in self.waiting if not c.future.cancelled())
            if len(self.waiting) >= self.limit:
                raise Busy(len(self.waiting), self.limit)
            self.waiting.append(call)
            self._changed.notify()
        return await call.future

    def close(self) -> None:
        """Reject requests that wait, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while calls := self._next():
            self.batches, self.calls = self.batches + 1, self.calls + len(calls)
            try:
                for call, result in zip(calls, self._results(calls), strict=True):
                    call.finish(result)
            except Exception as error:
                answer = answerable(error)
                for call in calls:
                    call.finish(answer)
        for call in self.waiting:
            call.finish(Closing())

    def _next(self) -> list[Call]:
        """Return the calls of the next batch, or none at the end."""
        with self._changed:
            while not self.waiting and not self._closing:
                self._changed.wait()
            if self._closing:
                return []
            first = self.waiting.popleft()
        if not first.rows or not self._is_independent(first):
            return [first]
        calls, rows = [first], first.rows
        with self._changed:
            while True:
                for call in [c for c in self.waiting if c.key == first.key and not c.future.cancelled()]:
                    if rows + call.rows <= self.rows:
                        self.waiting.remove(call)
                        calls.append(call)
                        rows += call.rows
                left = first.arrived + self.delay - time.monotonic()
                if rows >= self.rows or left <= 0 or self._closing:
                    return calls
                self._changed.wait(left)

    def _results(self, calls: list[Call]) -> list[Arrays]:
        names = list(calls[0].inputs)
        rows = sum(call.rows for call in calls)
        inputs = {n: np.concatenate([call.inputs[n] for call in calls]) for n in names} if len(calls) > 1 else None
        if inputs is not None and self.model.backend.capabilities.recompiles:  # few sizes are compiled
            spare = (1 << (rows - 1).bit_length()) - rows
            inputs = {n: np.concatenate([x, *[x[-1:]] * spare]) for n, x in inputs.items()}
        outputs = self.model(inputs or calls[0].inputs)
        arrays = {n: self.model.backend.to_numpy(x) for n, x in outputs.items()}
        if inputs is None:
            return [arrays]
        ends = np.cumsum([call.rows for call in calls]).tolist()
        return [{n: x[end - call.rows : end] for n, x in arrays.items()} for call, end in zip(calls, ends, strict=True)]

    def _is_independent(self, call: Call) -> bool:
        """Whether the rows of each output depend on the same rows of the inputs only."""
        if call.key not in self.independent:
            self.independent[call.key] = self._analyzed(call.inputs)
        return self.independent[call.key]

    def _analyzed(self, inputs: Arrays) -> bool:
        rows = Dim("rows", 1, 1 << 20)
        types = {n: TensorType(as_dtype(x.dtype.name), (rows, *x.shape[1:])) for n, x in inputs.items()}
        try:
            for name, spec in self.model.specs.items():
                if spec.shape and isinstance(spec.shape[0], int):
                    return False
                if name in types and spec.dtype is not None:
                    types[name] = TensorType(spec.dtype, types[name].shape)
            graph = source_of(self.model.model, outputs=None, inference=True).graph(types, TraceRequest())
            graph = graph.replaced(results=tuple(r for r in graph.results if r.role == "output"))
            is_batch = all(v.shape[:1] == (rows,) for v in graph.outputs)
            return is_batch and first_row_mixing_node(graph, rows) is None
        except MithrilError:
            return False
