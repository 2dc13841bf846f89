"""Modules that run segments of a forward pass: blocks of layers, and stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mithril.graph import OptionError, TensorType, UnsupportedError
from mithril_torch.segments import Segment, SegmentCode


class Step(NamedTuple):
    """A segment, its position among those of its block, and its function."""

    segment: Segment
    position: int
    code: SegmentCode


def run_step(owner: torch.nn.Module, step: Step, values: dict[str, Any]) -> None:
    """Run a segment on the values that it takes, and add those that it gives."""
    segment, position, code = step
    for name in segment.shared:
        values[name] = owner.get_parameter(name)
    operands = [values[name] for name in segment.takes]
    if not segment.block:
        results = code(owner, operands)
    else:
        block = owner.get_submodule(segment.block)
        results = block(*operands, segment=position) if position else block(*operands)
    values.update(zip(segment.gives, results, strict=True))


class Container(torch.nn.Module):  # type: ignore[misc]
    """A module whose submodules and tensors may have every name that ``torch.nn.Module`` leaves free.

    Names of its own interface have the prefix ``mithril_``, and are also available without it where the model does not
    use the name: ``module.blocks`` is a submodule ``blocks``, else ``module.mithril_blocks``.
    """

    def __getattr__(self, name: str) -> Any:
        prefixed = f"mithril_{name}"
        if not any(name in vars(self).get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")) and (
            prefixed in vars(self) or hasattr(type(self), prefixed)
        ):
            return getattr(self, prefixed)
        return super().__getattr__(name)

    # Those of PyTorch read attributes, where names of this interface hide those of the model.
    def get_submodule(self, target: str) -> Any:
        module: Any = self
        for part in target.split(".") if target else ():
            module = module._modules.get(part)
            if module is None:
                return super().get_submodule(target)
        return module

    def get_parameter(self, target: str) -> Any:
        path, _, name = target.rpartition(".")
        parameter = self.get_submodule(path)._parameters.get(name)
        return super().get_parameter(target) if parameter is None else parameter


INTEGERS = {"int32": torch.int32, "int64": torch.int64}


def declared_integers(types: Mapping[str, TensorType]) -> dict[str, torch.dtype]:
    """Return the dtypes of the inputs that may be int32 or int64."""
    return {name: INTEGERS[t.dtype.name] for name, t in types.items() if t.dtype.name in INTEGERS}


def convert_integers(values: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
    """Convert int32 and int64 values, such as ids of tokens, to the declared dtype; they saturate."""
    for name, dtype in dtypes.items():
        x = values.get(name)
        if isinstance(x, torch.Tensor) and x.dtype is not dtype and x.dtype in INTEGERS.values():
            limits = torch.iinfo(torch.int32)
            values[name] = (x.clamp(limits.min, limits.max) if dtype is torch.int32 else x).to(dtype)


class Block(torch.nn.Module):  # type: ignore[misc]
    """A block of layers: it holds their parameters and runs its segments of the forward pass of the current mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mithril_segments: dict[bool, list[SegmentCode]] = {True: [], False: []}

    def forward(self, *values: torch.Tensor, segment: int = 0) -> tuple[torch.Tensor, ...]:
        """Run one segment on the values that it takes from other_parameters."""
        return self.mithril_segments[self.training][segment](self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        return deepcopied(self, memo, ("mithril_segments",))  # type: ignore[no-any-return]


class Stage(Container):
    """Consecutive blocks of a module with its parameters, under the same names.

    The first stage takes the inputs of the model by position. A later one takes the values that the previous stage
    returns; inputs of the model that it reads itself, such as masks, are arguments by name. ``shared`` are parameters
    of which another stage has a copy: sum their gradients over the stages before the update.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        steps: Sequence[Step],
        integers: Mapping[str, torch.dtype],
        inputs: Sequence[str],
        outputs: Sequence[str],
        index: int,
        num_stages: int,
    ) -> None:
        super().__init__()
        self.__integers = integers
        stages = _stages([step.segment for step in steps], num_stages)
        if not 0 <= index < num_stages:
            raise OptionError(f"stage({index}, num_stages={num_stages}): expected a number from 0 to {num_stages - 1}")
        self.mithril_gives = _sent(steps, stages, index, outputs)
        self.mithril_takes = tuple(inputs) if index == 0 else _sent(steps, stages, index - 1, outputs)
        local = [step for step, k in zip(steps, stages, strict=True) if step.segment.free or k == index]
        self.__steps = _needed(local, self.mithril_gives)
        for path in dict.fromkeys(step.segment.block for step in self.__steps if step.segment.block):
            owner, leaf = submodule_of(self, path, lambda _: torch.nn.Module())
            owner._modules[leaf] = module.get_submodule(path)
        names = [_root_parameters(steps, stages, k) for k in range(num_stages)]
        other_parameters = {n for k in range(num_stages) if k != index for n in names[k]}
        self.mithril_shared = tuple(n for n in names[index] if n in other_parameters)
        for name in names[index]:
            owner, leaf = submodule_of(self, name, lambda _: torch.nn.Module())
            p = module.get_parameter(name)
            # a schedule scales the gradients of each stage, those of a common tensor twice
            copied = torch.nn.Parameter(p.detach().clone(), p.requires_grad) if name in other_parameters else p
            owner._parameters[leaf] = copied

    def forward(self, *values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the blocks of this stage."""
        live = {**named, **dict(zip(self.mithril_takes, values, strict=True))}
        convert_integers(live, self.__integers)
        for step in self.__steps:
            run_step(self, step, live)
        results = tuple([live[name] for name in self.mithril_gives])
        return results if len(results) > 1 else results[0]


def _stages(segments: Sequence[Segment], count: int) -> list[int]:
    """Return the stage of each segment: equal numbers of blocks, each with the root's segments that follow it."""
    blocks = list(dict.fromkeys(s.block for s in segments if s.block))
    if not 1 <= count <= len(blocks):
        raise OptionError(
            f"stage(num_stages={count}): the module has {len(blocks)} blocks to distribute",
            hint="choose as many stages as blocks or fewer, or name other layers by to_module(blocks=[...])",
        )
    stages: list[int] = []
    for s in segments:
        last = stages[-1] if stages else 0
        stages.append(max(last, blocks.index(s.block) * count // len(blocks)) if s.block else last)
    return stages


def _sent(steps: Sequence[Step], stages: Sequence[int], index: int, outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the values that a stage hands to the next one, or the outputs of the model."""
    if index == max(stages):
        return tuple(outputs)
    later = {n for step, k in zip(steps, stages, strict=True) if k > index for n in step.segment.takes} | set(outputs)
    names = []
    for (segment, *_), k in zip(steps, stages, strict=True):
        for name, dtype in zip(segment.gives, segment.dtypes, strict=True):
            # Free segments depend on inputs only, and each stage repeats them (f38cbb1f).
            if segment.free or k > index or name not in later:
                continue
            if not dtype.is_float:
                raise UnsupportedError(
                    f"stage {index} would send '{name}' of dtype {dtype} to the next one, without a gradient",
                    hint="choose another number of stages, or other blocks: to_module(blocks=[...])",
                )
            names.append(name)
    return tuple(names)


def _needed(steps: Sequence[Step], results: Sequence[str]) -> list[Step]:
    """Return the steps of a stage without repeated ones whose values it does not read."""
    needed, selected = set(results), []
    for step in reversed(steps):
        if not step.segment.free or needed.intersection(step.segment.gives):
            selected.append(step)
            needed.update(step.segment.takes)
    return selected[::-1]


def _root_parameters(steps: Sequence[Step], stages: Sequence[int], index: int) -> list[str]:
    """Return the parameters outside blocks that a stage reads."""
    names: dict[str, None] = {}
    for (segment, *_), k in zip(steps, stages, strict=True):
        if k == index:
            names.update(dict.fromkeys(segment.shared if segment.block else (*segment.params, *segment.shared)))
    return list(names)


def submodule_of(
    module: torch.nn.Module, path: str, make: Callable[[str], torch.nn.Module]
) -> tuple[torch.nn.Module, str]:
    """Return the submodule that holds the tensor of this dotted path, created by ``make``, and the last part."""
    owner, prefix = module, ""
    *parents, name = path.split(".")
    for part in parents:
        child = owner._modules.get(part)
        prefix = f"{prefix}.{part}" if prefix else part
        if child is None:
            _require_free(owner, part, path)
            child = owner._modules[part] = make(prefix)
        owner = child
    _require_free(owner, name, path)
    return owner, name


PLAIN = torch.nn.Module()


def _require_free(owner: torch.nn.Module, name: str, path: str) -> None:
    """Raise UnsupportedError if PyTorch does not allow the name of a submodule or tensor."""
    if not name or hasattr(PLAIN, name) or any(name in d for d in (owner._modules, owner._parameters, owner._buffers)):
        raise name_clash(path, name)


def deepcopied(module: Any, memo: dict[int, Any], shared: Sequence[str]) -> Any:
    """Copy the tensors of a module; the generated functions are shared."""
    cls: Any = type(module)
    copied = cls.__new__(cls)
    memo[id(module)] = copied
    for name, x in module.__dict__.items():
        # torch.compile caches by function: copies of a function would be compiled again.
        copied.__dict__[name] = x if name in shared else copy.deepcopy(x, memo)
    return copied


def name_clash(path: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"'{path}' cannot name a tensor of a torch module: '{name}' is an attribute of torch.nn.Module",
        hint="rename the layer with name=...",
    )
