"""The stages of a forward pass in this process, run by a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from mithril.graph import Graph, OptionError, TensorType
from mithril_torch.parallel.collectives import STORED
from mithril_torch.parallel.layout import MeshAxes, Split
from mithril_torch.parallel.sharded_module import ShardedModule

Values = dict[str, torch.Tensor]


class StageModule(ShardedModule):
    """One stage for the rows of one process; ``inputs`` are the inputs of the model for each chunk."""

    def __init__(
        self,
        stage: Any,
        load: Callable[[Graph], Callable[..., dict[str, Any]]],
        splits: Mapping[str, Split],
        trained: Sequence[str],
        axes: MeshAxes,
        gives: Sequence[str],
        compiler: Mapping[str, Any] | None,
    ) -> None:
        names = [i.name for i in stage.graph.with_role("param")]
        splits = {n: splits[n] for n in names}
        trained = [n for n in trained if n in names]
        # parameters are gathered once for all chunks
        super().__init__(stage.graph, load, splits, trained, axes, reshard=False, compiler=compiler)
        self.takes, self.gives, self.ends = stage.takes, tuple(gives), stage.results
        self.reads = [i.name for i in stage.graph.arguments if i.role != "param" and i.name not in stage.takes]
        self.dtypes = [getattr(torch, stage.graph.input(n).type.dtype.name) for n in stage.takes]
        self.inputs: list[Values] = []
        self.results: list[Values] = []

    def forward(  # type: ignore[override]
        self, *received: torch.Tensor, chunk: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run one chunk; results of the model stay in this process."""
        values = [_decoded(x, dtype) for x, dtype in zip(received, self.dtypes, strict=True)]
        results = super().forward({**dict(zip(self.takes, values, strict=True)), **self.inputs[int(chunk)]})
        self.results.append({n: results[n].detach() for n in self.ends})
        return tuple([_encoded(results[n]) for n in self.gives])


def _encoded(x: torch.Tensor) -> torch.Tensor:
    """Return a value in a form that can be sent; a copy, which schedules detach in place."""
    x = x.view(STORED[x.dtype]) if x.dtype in STORED else x
    return x.clone(memory_format=torch.contiguous_format)


def _decoded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.view(dtype)


class Pipeline:
    """The stages of this process, and their schedule.

    ``stages`` are those of ``ml.forward_pipeline``. The results ``objectives`` of the last stage are differentiated,
    multiplied by their cotangents; without objectives the stages run forward only.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        modules: Mapping[int, StageModule],
        objectives: Sequence[str],
        group: Any,
        device: torch.device,
        *,
        chunks: int,
        schedule: str,
    ) -> None:
        self.modules, self.objectives = modules, objectives
        self.has_last = len(stages) - 1 in modules
        self.cotangents: Sequence[Values] = ()
        self.numbers = torch.arange(chunks)
        parts = [_engine_stage(k, stages, module, device, group) for k, module in modules.items()]
        scheduler: Any = get_schedule_class(schedule)
        several = issubclass(scheduler, PipelineScheduleMulti)
        loss = self._objective if objectives else None
        try:
            self.schedule = scheduler(parts if several else parts[0], chunks, loss_fn=loss, scale_grads=False)
        except ValueError as error:
            raise OptionError(
                f"pipeline_schedule='{schedule}' cannot run pipeline_chunks={chunks} in {len(stages)} stages",
                facts=[str(error)],
                hint=f"set pipeline_chunks={-(-chunks // len(stages)) * len(stages)}, or pipeline_schedule='1f1b'",
            ) from None

    def run(self, inputs: Sequence[Mapping[int, Values]], cotangents: Sequence[Values]) -> None:
        """Run all chunks on the inputs of each stage, and backward with the cotangents of the objectives."""
        for k, module in self.modules.items():
            module.inputs = [chunk[k] for chunk in inputs]
            module.results = []
        self.cotangents = cotangents
        targets = {"target": self.numbers} if self.has_last and self.objectives else {}
        try:
            with torch.set_grad_enabled(bool(self.objectives)):
                self.schedule.step(return_outputs=False, chunk=self.numbers, **targets)
        except RuntimeError as error:  # of a schedule, around that of an operation
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
        if not self.objectives:
            for module in self.modules.values():
                module.release()

    def _objective(self, results: Any, chunk: torch.Tensor) -> torch.Tensor:
        """Return a number whose gradients for the results are their cotangents."""
        cotangents = self.cotangents[int(chunk)]
        results = results if isinstance(results, tuple) else (results,)
        terms = [(x * cotangents[n]).sum() for n, x in zip(self.objectives, results, strict=True) if x.requires_grad]
        return torch.stack([torch.zeros((), requires_grad=True), *(x.float().cpu() for x in terms)]).sum()


def _engine_stage(
    k: int, stages: Sequence[Any], module: StageModule, device: torch.device, group: Any
) -> PipelineStage:
    graph = stages[k].graph
    outputs = {r.name: r.value.type for r in graph.results}
    return PipelineStage(
        module,
        k,
        len(stages),
        device,
        input_args=tuple(_example(graph.input(n).type) for n in module.takes),
        output_args=tuple(_example(outputs[n]) for n in module.gives),
        group=group,
    )


def _example(t: TensorType) -> torch.Tensor:
    """Return a tensor without elements that tells shape and dtype of a value between stages."""
    dtype = getattr(torch, t.dtype.name)
    shape = tuple(map(int, t.shape))
    return torch.empty(shape, dtype=STORED.get(dtype, dtype), device="meta", requires_grad=t.dtype.is_float)
