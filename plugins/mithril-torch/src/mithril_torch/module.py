"""``compiled.to_module()``: a compiled model as ``torch.nn.Module``, differentiated by PyTorch's autograd.

Each block of layers is a submodule that owns its parameters and runs its own part of the generated forward pass, so
that ``fully_shard``, ``torch.compile`` and pipelines apply to blocks as to those of a module written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mithril.backend import BuildOptions
from mithril.compiler import PureProgram
from mithril.graph import InputError, TensorType, UnsupportedError
from mithril_torch.backend import TorchBackend
from mithril_torch.blocks import (
    Block,
    Container,
    Stage,
    Step,
    convert_integers,
    declared_integers,
    deepcopied,
    run_step,
    submodule_of,
)
from mithril_torch.segments import check_blocks, load_segments, repeated_blocks, segmented, separable


def to_module(compiled: Any, *, blocks: Sequence[str] | None = None) -> CompiledModule:
    """Return the compiled model as a ``torch.nn.Module`` with its parameters and state.

    Parameters have their names of the model, as in its state dictionary; states are buffers. Values are those bound to
    the compiled model, else initial ones. ``train()`` and ``eval()`` select the mode of dropout and batch norm.

    ``module.blocks`` are the submodules of the layers that repeat, such as those of a transformer, for ``fully_shard``
    and ``torch.compile``; ``blocks=["encoder", "decoder"]`` selects other layers by their paths.
    """
    if not isinstance(compiled.backend, TorchBackend):
        raise UnsupportedError(
            f"to_module() requires the torch backend, but this model was compiled for '{compiled.backend.name}'",
            hint="ml.compile(model, 'torch').to_module(), or compiled.to_function() for jax and mlx",
        )
    # Before sizes, which calls on a mesh determine.
    compiled.backend.require_one_device(BuildOptions(compiled.options))
    types = _types(compiled)
    function = compiled.to_function()
    programs = {False: function.program(types)}
    if not compiled.options["inference"]:
        programs[True] = compiled.to_function(training=True).program(types)
    params = compiled.params if compiled.params is not None else compiled.randomize_params()
    params = function.converted(programs[False], params)
    return CompiledModule(programs, compiled.interface, params, compiled.initial_state(), blocks)


def _types(compiled: Any) -> dict[str, TensorType]:
    """Return the types of the inputs, which must be known before the first call."""
    if compiled.programs:
        return dict(compiled.programs[-1].request.types)
    unknown = next((name for name, spec in compiled.specs.items() if spec.shape is None), None)
    raise InputError(
        f"to_module() requires the shapes of the inputs; that of '{unknown or next(iter(compiled.specs))}' is unknown",
        hint="pass shapes={'" + str(unknown) + "': [None, ...]} to ml.compile, or call the compiled model first",
    )


class CompiledModule(Container):
    """A compiled model as a module; ``blocks`` run parts of it, other submodules only hold parameters and buffers.

    ``forward`` takes the inputs in the order of the model, or by name; several outputs are returned as a dictionary.
    Integers may be int32 or int64, as tokenizers return them; values beyond the declared dtype saturate.
    """

    def __init__(
        self,
        programs: Mapping[bool, PureProgram],
        interface: Any,
        params: Mapping[str, torch.Tensor],
        states: Mapping[str, torch.Tensor],
        blocks: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        # Two underscores, here and below, so that layers named 'programs' or 'steps' do not meet these
        # attributes (cdf18f07).
        self.__programs = dict(programs)
        program = programs[False]
        self.__integers = declared_integers(program.types)
        self.mithril_input_names = tuple(program.types)
        self.mithril_output_names = program.results.outputs
        self.__distributed = False  # whether parameters are split by ``distribute``
        self.__calls: set[Any] = set()  # shapes that passed the checks
        self.__states: list[tuple[str, torch.nn.Module, str]] = []
        parameters = interface.with_role("param")
        forwards: list[Any] = [p.forward for p in programs.values()]
        self.mithril_block_paths = (
            separable(repeated_blocks({i.name: i.type for i in parameters}), [forward.graph for forward in forwards])
            if blocks is None
            else check_blocks(blocks, [i.name for i in parameters])
        )
        for i in parameters:
            # Into the dictionary: register_parameter refuses a name that the class has as an attribute,
            # such as 'blocks'.
            owner, name = self.__owner(i.name)
            trains = i.type.dtype.is_float and i.tags.get("trainable", True)
            owner._parameters[name] = torch.nn.Parameter(params[i.name].detach().clone(), requires_grad=trains)
        for i in interface.with_role("state"):
            owner, name = self.__owner(i.name)
            owner._buffers[name] = states[i.name].detach().clone()
            self.__states.append((i.name, owner, name))
        self.__steps: dict[bool, list[Step]] = {}
        self.__results: dict[bool, Mapping[str, str]] = {}
        for mode, p in programs.items():
            self.__load(mode, p)
        self.train(True in self.__programs)

    @property
    def mithril_blocks(self) -> list[Block]:
        """The blocks in the order of their parameters."""
        return [self.get_submodule(path) for path in self.mithril_block_paths]

    def __load(self, mode: bool, program: PureProgram) -> None:
        """Cut the program of a mode into segments, and hand them to the blocks."""
        forward: Any = program.forward
        cut = segmented(forward.graph, self.mithril_block_paths)
        self.__steps[mode] = []
        for segment, code in zip(cut.segments, load_segments(cut.segments, forward.load), strict=True):
            codes = self.get_submodule(segment.block).mithril_segments[mode] if segment.block else []
            self.__steps[mode].append(Step(segment, len(codes), code))
            codes.append(code)
        self.__results[mode] = cut.results

    def mithril_stage(self, index: int, *, num_stages: int) -> Stage:
        """Return the blocks of one of ``num_stages`` pipeline stages, for ``torch.distributed.pipelining``."""
        if any(p.results.states for p in self.__programs.values()):
            raise UnsupportedError(
                "this model has a state, which each chunk of a pipeline would change",
                hint="leave out dropout, and use a normalization without statistics of the batch",
            )
        mode = self.training
        outputs = [self.__results[mode][name] for name in self.mithril_output_names]
        return Stage(self, self.__steps[mode], self.__integers, self.mithril_input_names, outputs, index, num_stages)

    def mithril_distribute(self, mesh: Any) -> CompiledModule:
        """Split the parameters over a one-dimensional ``DeviceMesh``, as ``ml.placement`` chooses (tensor parallelism).

        Parameters become ``DTensor``; call this before ``fully_shard``. Inputs and outputs remain complete tensors.
        """
        from mithril_torch.parallel.tensor_parallel import distribute_parameters, model_splits

        graph = self.__programs[True in self.__programs].forward.graph  # type: ignore[attr-defined]
        distribute_parameters(self, mesh, model_splits(graph, mesh.size()))
        self.__distributed = True
        return self

    def __owner(self, path: str) -> tuple[torch.nn.Module, str]:
        """Return the submodule that holds the tensor of this dotted path, and the last part of the path."""
        return submodule_of(
            self, path, lambda prefix: Block() if prefix in self.mithril_block_paths else torch.nn.Module()
        )

    def train(self, mode: bool = True) -> CompiledModule:
        """Select the training mode; a model compiled with ``inference=True`` has none."""
        if mode and True not in self.__programs:
            raise InputError(
                "this model was compiled with inference=True: it has no training mode",
                hint="omit inference=True, or train in the mode of inference: module.eval() keeps its gradients",
            )
        super().train(mode)
        return self

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Run the program of the current mode; new states replace the buffers."""
        program = self.__programs[self.training]
        if program.results.states and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise _local_state_error(dict(program.results.states))
        inputs = dict(zip(self.mithril_input_names, args, strict=False))
        if kwargs or len(inputs) != len(self.mithril_input_names) or len(args) != len(self.mithril_input_names):
            inputs = self.__bound(args, kwargs)
        convert_integers(inputs, self.__integers)
        if not torch.compiler.is_compiling():
            self.__check(program, inputs)
        values = inputs
        for path, owner, name in self.__states:
            values[path] = getattr(owner, name)
        for step in self.__steps[self.training]:
            run_step(self, step, values)
            for name in step.segment.ends:
                del values[name]
        names = self.__results[self.training]
        if self.__distributed:
            values = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in values.items()}
        if program.results.states:
            self.__keep({name: values[names[name]] for _, name in program.results.states}, dict(program.results.states))
        if len(self.mithril_output_names) == 1:
            return values[names[self.mithril_output_names[0]]]
        return {name: values[names[name]] for name in self.mithril_output_names}

    def __keep(self, results: Mapping[str, torch.Tensor], changed: Mapping[str, str]) -> None:
        with torch.no_grad():
            for path, owner, name in self.__states:
                if path in changed:
                    # In place: state dictionaries refer to the buffer.
                    getattr(owner, name).copy_(results[changed[path]].detach())

    def __bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs by name; ``is_training`` follows the mode of the module."""
        inputs = {**dict(zip(self.mithril_input_names, args, strict=False)), **kwargs}
        if "is_training" in self.mithril_input_names and "is_training" not in inputs:
            inputs["is_training"] = torch.tensor(self.training)
        surplus = [n for n in kwargs if n not in self.mithril_input_names or n in self.mithril_input_names[: len(args)]]
        if surplus or len(args) > len(self.mithril_input_names) or len(inputs) < len(self.mithril_input_names):
            raise InputError(
                f"forward expects the inputs {', '.join(self.mithril_input_names)}",
                facts=[f"got {len(args)} by position and by name: {', '.join(kwargs) or 'none'}"],
            )
        return inputs

    def __check(self, program: PureProgram, inputs: Mapping[str, Any]) -> None:
        """Check types and sizes, once per combination."""
        key = (self.training, *((x.dtype, x.shape) for x in inputs.values()))
        if key in self.__calls:
            return
        for name, t in program.types.items():
            x = inputs[name]
            if not isinstance(x, torch.Tensor) or x.dtype != getattr(torch, t.dtype.name):
                actual = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
                raise InputError(f"Type mismatch: expected {t.dtype}, got {actual}", facts=[f"input '{name}'"])
        program.check({name: tuple(inputs[name].shape) for name in program.types})
        self.__calls.add(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        return deepcopied(self, memo, ("_CompiledModule__programs", "_CompiledModule__steps"))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the inputs and outputs with their types, for ``print``."""
        program = self.__programs[False]
        inputs = ", ".join(f"{name}: {t}" for name, t in program.types.items())
        outputs = ", ".join(f"{name}: {t}" for name, t in program.interface.outputs.items())
        return f"{inputs} -> {outputs}"


def _local_state_error(states: Mapping[str, str]) -> UnsupportedError:
    """Return the error for dropout and statistics of the rows of one process: they would define another model."""
    return UnsupportedError(
        "dropout and batch normalization refer to the whole batch, of which this process has only some rows",
        facts=[f"{dist.get_world_size()} processes; state: {', '.join(states)}"],
        hint="train with ml.Trainer and ml.TorchBackend(device_mesh=...), which draws and sums over all rows, or use "
        "module.eval()",
    )
