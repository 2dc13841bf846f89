"""Programs over several devices: the batch is sharded along the mesh axis ``data``, weights along ``model``.

With ``parallelism="fsdp"`` parameters and their optimizer state are sharded along ``data`` too.

XLA propagates the shardings to all other values and inserts the collectives; results do not depend on the shardings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mithril as ml
from mithril.backend import ExactSizesRequired
from mithril.graph import BackendError, Decisions, Graph, Input, OptionError, Output, TensorType, operation
from mithril.system import launched_task
from mithril_jax import process_config
from mithril_jax.mesh import own_sums

AXES = ("data", "model", "pipeline")
KINDS = (None, "data", "fsdp", "hsdp", "expert", "model", "sequence", "context", "pipeline")  # values of parallelism
SECOND = {
    "model": "model",
    "sequence": "second",
    "context": "second",
    "hsdp": "second",
}  # names in errors of the axis that they require
GROUPS = ("weights", "activations")  # names in tensor_split_dims in addition to parameters

# Below this number of elements, dividing an array saves less than its collectives cost.
SMALLEST_DIVIDED = 256

MeshAxes = str | tuple[str, ...]
STATUS = re.compile(r"[A-Z_]{4,}: ")  # prefix of XLA's own errors, which have several Python classes


def parse_mesh(device_mesh: Any) -> tuple[int, ...]:
    """Normalize ``device_mesh`` to a (data, model, pipeline) tuple, possibly shortened."""
    sizes = (device_mesh,) if isinstance(device_mesh, int) else tuple(device_mesh)
    if not sizes or len(sizes) > len(AXES) or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise OptionError(
            f"device_mesh={device_mesh!r} is not a valid mesh of devices",
            facts=[
                "(4,) splits batches over 4 devices; (2, 4) batches over 2 and weights over 4; (1, 1, 4) layers over 4"
            ],
        )
    return sizes


def make(platform: str | None, sizes: Sequence[int]) -> Mesh:
    """Build the mesh from this machine's devices; simulate them on a CPU if JAX is not initialized yet."""
    count = int(np.prod(sizes))
    if platform in (None, "cpu"):
        process_config.simulate_devices(count)
    devices = jax.devices(platform) if platform else jax.devices()
    if len(devices) < count:
        cpu = devices[0].platform == "cpu"
        raise BackendError(
            f"device_mesh={tuple(sizes)} requires {count} devices, but JAX has {len(devices)}",
            facts=[f"available: {', '.join(str(d) for d in devices)}"],
            hint=f"create this backend before importing code that uses JAX, or set JAX_NUM_CPU_DEVICES={count}"
            if cpu
            else f"use a mesh of {len(devices)} devices, or device='cpu' to simulate it",
        )
    task = launched_task()
    # A plain srun started as many separate trainings as tasks (commit c35b4bac).
    if task is not None and task.size > 1 and jax.process_count() == 1:
        raise BackendError(
            f"{task.launcher} started {task.size} processes, but JAX knows only this one: each would run everything",
            hint="call jax.distributed.initialize() before the first JaxBackend",
        )
    left_out = {d.process_index for d in devices} - {d.process_index for d in devices[:count]}
    if left_out:
        raise BackendError(
            f"device_mesh={tuple(sizes)} leaves process {min(left_out)} without a device",
            facts=[f"{len(devices)} devices in {jax.process_count()} processes; the mesh uses {count}"],
            hint=f"use a mesh of {len(devices)} devices, or start fewer processes",
        )
    return Mesh(arranged(devices[:count], sizes), AXES[: len(sizes)])


def arranged(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the devices as an array of this shape whose neighbors are neighbors in the hardware.

    On a torus an axis of the mesh becomes a ring of links. Slices, which only a slower network connects, are split
    along the first axis that their number divides.
    """
    shape = tuple(sizes)
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    outer = next((k for k, n in enumerate(shape) if n % slices == 0), None)
    if slices == 1 or outer is None:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)  # type: ignore[no-any-return]
    per_slice = tuple(n // slices if k == outer else n for k, n in enumerate(shape))
    across = tuple(slices if k == outer else 1 for k in range(len(shape)))
    return mesh_utils.create_hybrid_device_mesh(  # type: ignore[no-any-return]
        per_slice, across, devices, allow_split_physical_axes=True
    )


def put(x: Any, sharding: Any) -> jax.Array:
    """Place an array on devices; for devices of other processes, each process provides its own shards."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    x = own_sums.complete(x)
    with jax.enable_x64(True) if x.dtype.itemsize == 8 else nullcontext():
        if getattr(sharding, "is_fully_addressable", True):
            return jax.device_put(x, sharding)
        # No process has all elements, so that only a program of all of them can move the array.
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.jit(lambda y: y, out_shardings=sharding)(x)
        full = np.asarray(x)
        return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])


def _copy(x: np.ndarray[Any, Any], device: Any) -> jax.Array:
    """Copy an array to a device; a CPU would use its memory if the alignment permits, even with ``may_alias=False``."""
    array = put(x, device)
    return jax.device_put(array, device, may_alias=False) if device.platform == "cpu" else array


def connection_error(error: Exception) -> BackendError:
    """Return a readable error for a failed collective; JAX itself reports only addresses and ports."""
    return BackendError(
        "a collective failed: another process of this program has exited",
        facts=[str(error).splitlines()[0], f"this is process {jax.process_index()} of {jax.process_count()}"],
        hint="read the output of that process for the reason; "
        "jax.distributed.initialize(heartbeat_timeout_seconds=10) stops the others soon",
    )


@contextmanager
def explained(is_remote: bool) -> Iterator[None]:
    """Raise BackendError if devices of other processes take part, and one of these has exited."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if is_remote and STATUS.match(str(error)):
            raise connection_error(error) from error
        raise


def constrained(mesh: Mesh, graph: Graph, settings: Mapping[str, Any], over: str = "data") -> Graph:
    """Return the graph with the shardings of its activations as operations; ``over`` names the axis of rows in them.

    Parameters that are split over ``data`` would otherwise lead XLA to split activations along features.
    """
    if mesh.shape["data"] == 1 or not all(i.type.is_static for i in graph.arguments):
        return graph
    splits, stored = (
        shardings.padded_specs(graph)
        for parallelism in (None, "fsdp")
        for shardings in [ArgumentShardings(mesh, graph, {**settings, "parallelism": parallelism}, Decisions())]
    )
    constrain = cast("Callable[..., Graph]", ml.constrain_placement)
    return constrain(graph, dict(mesh.shape), splits, stored, reshard=settings["fsdp_reshard"], over=over)


def with_sequences_in_parts(mesh: Mesh, graph: Graph, settings: Mapping[str, Any], decisions: Decisions) -> Graph:
    """Return the graph with activations split along sequences between products with split weights."""
    if not all(i.type.is_static for i in graph.arguments):
        raise ExactSizesRequired("sequences are divided for each size")
    shardings = ArgumentShardings(mesh, graph, settings, Decisions())
    divide = cast("Callable[..., Graph]", ml.with_sequences_in_parts)
    constrained = divide(graph, dict(mesh.shape), shardings.padded_specs(graph))
    constraint = operation("mesh.constrain")
    splits = (n.attributes["split"] for n in constrained.nodes if n.op is constraint)
    if not any("model" in split.split() for split in splits):
        decisions.record(
            "choice",
            "parallelism='sequence' splits no activation: no product with split weights has results of three or more "
            f"axes of which {mesh.shape['model']} devices can divide the second one, that of positions",
        )
    return constrained


def group_mesh(mesh: Mesh) -> Mesh:
    """Return the devices along the second axis, among which hsdp divides parameters, as a mesh of one axis."""
    return Mesh(mesh.devices.reshape(mesh.shape["data"], -1)[0], ("data",))


def group_shardings(mesh: Mesh, graph: Graph, settings: Mapping[str, Any]) -> ArgumentShardings:
    """Return the shardings of arguments among the devices along the second axis, for hsdp."""
    return ArgumentShardings(group_mesh(mesh), graph, {**settings, "parallelism": "fsdp"}, Decisions())


def _parameter(i: Input) -> str:
    """Return the name of a parameter, whose elements a program may hold transposed under another name."""
    return str(i.tags.get("parameter", i.name))


Placement = Callable[[Graph, Mapping[str, int]], tuple[Mapping[str, Any], Mapping[str, str]]]


def _placement() -> Placement | None:
    """Return ``ml.placement``, or None without mithril-parallel."""
    try:
        return cast("Placement", ml.placement)
    except (AttributeError, ml.MithrilError):
        return None


def _stays_whole(i: Input) -> bool:
    """Whether no device stores a part of the argument only: random keys, and arrays too small to gain by it."""
    # Two words of a key are one random state: a mesh of two devices divided it, and training with
    # dropout failed (commit f5b46c5f).
    return i.tags.get("init") == "key" or (i.type.is_static and math.prod(map(int, i.type.shape)) < SMALLEST_DIVIDED)


class ArgumentShardings:
    """The sharding of each argument of a program. ``place`` transfers arrays to it; parameters only once."""

    def __init__(
        self,
        mesh: Mesh,
        graph: Graph,
        settings: Mapping[str, Any],
        decisions: Decisions,
        sums: frozenset[str] = frozenset(),
    ) -> None:
        self.mesh = mesh
        self.sums = sums  # arguments of which each device has a term
        self.decisions = decisions
        self.is_remote = any(device.process_index != jax.process_index() for device in mesh.devices.flat)
        self.simulated = mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self.parallelism = settings.get("parallelism")
        self.splits: dict[str, int] = dict(settings["tensor_split_dims"]) if "tensor_split_dims" in settings else {}
        if self.parallelism not in KINDS:
            raise OptionError(
                f"parallelism={self.parallelism!r} is not available on JAX",
                facts=["available: " + ", ".join(f"'{kind}'" for kind in KINDS if kind)],
                hint="use ml.TorchBackend(device_mesh=...), or one of these",
            )
        if self.parallelism in SECOND and mesh.shape.get("model", 1) == 1:
            raise OptionError(
                f"parallelism='{self.parallelism}' requires a mesh with a {SECOND[self.parallelism]} axis",
                facts=[f"device_mesh={tuple(mesh.shape.values())}"],
                hint=f"use device_mesh=(1, {mesh.devices.size})",
            )
        if self.parallelism == "expert" and mesh.devices.size > mesh.shape["data"]:
            raise OptionError(
                "parallelism='expert' requires a mesh of one axis on JAX",
                facts=[f"device_mesh={tuple(mesh.shape.values())}; experts are divided over the devices of the batch"],
                hint=f"use device_mesh=({mesh.devices.size},), or ml.TorchBackend",
            )
        if self.parallelism == "context" and self.splits:
            raise OptionError(
                "tensor_split_dims conflicts with parallelism='context'",
                facts=["the second axis of the mesh splits positions, and each device has complete weights"],
                hint="omit tensor_split_dims, or use parallelism='model'",
            )
        self._check_names(graph, settings)
        # With hsdp the devices along the second axis are a fully sharded mesh, and the first one has copies of it.
        self.group = group_shardings(mesh, graph, settings) if self.parallelism == "hsdp" else None
        self.rows = ("data", "model") if self.group is not None else "data"
        self.experts = self._expert_splits(graph)
        self.pairs = self._pairs(graph)
        self.stored_pairs = self._stored_pairs(graph)
        self.specs = {i.name: self._spec(i) for i in graph.arguments}
        self._device_params: dict[str, tuple[Any, Any]] = {}  # parameters: the user's array, the placed array

    def _check_names(self, graph: Graph, settings: Mapping[str, Any]) -> None:
        params = [_parameter(i) for i in graph.with_role("param")]
        for pattern in self.splits:
            if pattern in GROUPS or any(fnmatchcase(name, pattern) for name in params):
                continue
            if not settings["static_inference"]:
                raise OptionError(
                    f"tensor_split_dims: no parameter matches '{pattern}'",
                    facts=["groups: " + ", ".join(GROUPS), "parameters: " + ", ".join(params[:12])],
                )
            self.decisions.record(
                "ignored",
                f"tensor_split_dims: '{pattern}' matches no weight that the program holds as an argument; "
                "each device has all embedded ones",
            )
        if "activations" in self.splits and self.splits["activations"] != 0:
            self.decisions.record(
                "ignored",
                "tensor_split_dims: XLA selects the sharding of activations, except for the batch on axis 0",
            )

    def _spec(self, i: Input) -> PartitionSpec:
        if i.name in self.sums:
            return PartitionSpec("data")
        if i.role == "param":
            if i.name in self.experts:
                return PartitionSpec(*self.experts[i.name])
            if self.group is not None:
                return PartitionSpec(*("model" if axis == "data" else axis for axis in self.group.specs[i.name]))
            spec = self._weight_spec(i)
            if _stays_whole(i):
                return spec
            if self.parallelism == "fsdp":
                spec = self.stored_pairs.get(i.name) or self._divided(i, spec, "data")
            return self._divided(i, spec, "pipeline")
        if i.role == "state" or not i.type.shape:
            return PartitionSpec()
        axes = ("data", "model") if self.parallelism == "context" else (self.rows,)
        split = [self._batch_axis(i, k, over) for k, over in enumerate(axes[: len(i.type.shape)])]
        return PartitionSpec(*split) if any(split) else PartitionSpec()

    def _parts(self, over: MeshAxes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in ((over,) if isinstance(over, str) else over))

    def _batch_axis(self, i: Input, axis: int, over: MeshAxes) -> MeshAxes | None:
        """Return the axes of the mesh that split rows or positions of an input, or None if they cannot."""
        size = i.type.shape[axis]
        if self._parts(over) == 1 or (axis > 0 and not isinstance(size, int)):
            return None
        if isinstance(size, int) and size % self._parts(over):
            self._record_replicated(i.name, axis, size, over)
            return None
        return over

    def _expert_splits(self, graph: Graph) -> Mapping[str, Any]:
        """Return the splits of the weights of experts and of their optimizer values."""
        if self.parallelism != "expert" or not all(i.type.is_static for i in graph.arguments):
            return {}
        names = ml.divided_experts(graph, self.mesh.shape["data"], "devices")
        splits, _ = ml.placement(graph, {"data": self.mesh.shape["data"]}, uneven=True, experts=names)
        return {i.name: splits[i.name] for i in graph.with_role("param") if i.name in splits}

    def _pairs(self, graph: Graph) -> Mapping[str, Any] | None:
        """Return specs that split weights in pairs as in Megatron, by columns and then by rows.

        The result is None without mithril-parallel, which finds the pairs, and empty if the user selects the axes.
        """
        if self.mesh.shape.get("model", 1) == 1 or any(n != "activations" for n in self.splits):
            return {}
        if self.parallelism == "context":  # the axis splits positions
            return {}
        if not all(i.type.is_static for i in graph.arguments):
            return None
        choose = _placement()
        if choose is None:
            return None
        pairs, replicated = choose(graph, {"model": self.mesh.shape["model"]})
        for name, reason in replicated.items():
            self.decisions.record("choice", f"'{name}' is replicated: {reason}")
        return pairs

    def _stored_pairs(self, graph: Graph) -> Mapping[str, PartitionSpec]:
        """Return the specs over ``data`` of pairs of fully sharded weights, which can then stay in parts."""
        if self.parallelism != "fsdp" or self.mesh.size > self.mesh.shape["data"] or self.mesh.size == 1:
            return {}
        if not all(i.type.is_static for i in graph.arguments):
            return {}
        choose = _placement()
        if choose is None:
            return {}
        pairs, _ = choose(graph, {"model": self.mesh.size})
        return {
            n: PartitionSpec(*("data" if axis == "model" else axis for axis in s)) for n, s in pairs.items() if any(s)
        }

    def _divided(self, i: Input, spec: PartitionSpec, over: str) -> PartitionSpec:
        """Shard over another axis of the mesh as well, along the longest axis that is not sharded yet."""
        parts, shape = self.mesh.shape.get(over, 1), i.type.shape
        split = (*spec, *[None] * (len(shape) - len(spec)))
        fits = [k for k, n in enumerate(shape) if split[k] is None and isinstance(n, int) and n and n % parts == 0]
        if parts == 1 or not fits:
            return spec
        longest = max(fits, key=lambda k: (shape[k], -k))
        return PartitionSpec(*(over if k == longest else a for k, a in enumerate(split)))

    def _weight_spec(self, i: Input) -> PartitionSpec:
        name = _parameter(i)
        order = i.tags.get("held_order", range(len(i.type.shape)))  # axes are those of the parameter
        shape = tuple(i.type.shape[order.index(k)] for k in range(len(order)))
        parts = self.mesh.shape.get("model", 1)
        axis = self._requested_axis(name, len(shape))
        if axis is not None and not -len(shape) <= axis < len(shape):
            facts = [f"it is {TensorType(i.type.dtype, shape)}"]
            raise OptionError(f"tensor_split_dims: '{name}' has no axis {axis}", facts=facts)
        if parts == 1 or not shape:
            return PartitionSpec()
        fits = [k for k, n in enumerate(shape) if isinstance(n, int) and n % parts == 0]
        if axis is not None:
            split_axis: int | None = axis % len(shape)
            if split_axis not in fits:
                self._record_replicated(name, axis % len(shape), shape[axis], "model")
                return PartitionSpec()
        elif self.pairs is not None:
            return PartitionSpec(*self.pairs.get(i.name, ()))
        else:
            split_axis = next(iter(fits), None) if len(shape) > 1 else None
        return PartitionSpec(*("model" if k == split_axis else None for k in order))

    def _requested_axis(self, name: str, rank: int) -> int | None:
        if name in self.splits:
            return self.splits[name]
        for pattern, axis in self.splits.items():
            if pattern not in GROUPS and fnmatchcase(name, pattern):
                return axis
        return self.splits.get("weights") if rank >= 2 else None

    def _record_replicated(self, name: str, axis: int, size: Any, over: MeshAxes) -> None:
        reason = f"axis {axis} of length {size} cannot be divided by {self._parts(over)}"
        self.decisions.record("choice", f"'{name}' is replicated: {reason}")

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which sharding constraints of the generated function find the mesh."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)  # type: ignore[no-any-return]

    def padded_specs(self, graph: Graph) -> dict[str, tuple[str | None, ...]]:
        """Return the axis of the mesh for each axis of each argument."""
        ranks = {i.name: len(i.type.shape) for i in graph.arguments}
        return {n: (*self.specs[n], *[None] * (rank - len(self.specs[n]))) for n, rank in ranks.items()}

    def sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.specs[name])

    def results(self, results: Iterable[Output]) -> tuple[NamedSharding | None, ...]:
        """Return the shardings of gradients, parameters and state as for the arguments; None: XLA selects one.

        It selects those of gradients of open sizes, which a mesh may not divide.
        """
        return tuple(
            self.sharding(r.of)
            if r.role in ("gradient", "state") and r.of in self.specs and r.value.type.is_static
            else None
            for r in results
        )

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with the shardings of the program."""
        return {name: put(x, self.sharding(name)) for name, x in params.items()}

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> jax.Array:
        """Build a parameter from ``read(index)`` for the regions of this process.

        One region at a time is in the memory of the host, for all devices that hold it.
        """
        if name in self.sums:
            return own_sums.assemble(self.mesh, read((slice(None),) * len(shape)))
        sharding = self.sharding(name)
        devices: dict[tuple[tuple[int, int, int], ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            region = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
            devices.setdefault(region, []).append(device)
        arrays = []
        for region, holders in devices.items():
            part = np.asarray(read(tuple(slice(*bounds) for bounds in region)))
            # Copies are asynchronous: waiting lets the part go before the next one is read.
            arrays += jax.block_until_ready([_copy(part, device) for device in holders])
            del part
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def place(self, name: str, x: Any, *, keep: bool) -> Any:
        if keep and (cached := self._device_params.get(name)) is not None and cached[0] is x:
            return cached[1]
        if name in self.sums:
            return own_sums.as_rows(self.mesh, x)
        spec = self.specs[name]
        if len(spec) and spec[0] == self.rows and x.shape[0] % self._parts(self.rows):
            self._record_replicated(name, 0, x.shape[0], self.rows)
            spec = PartitionSpec(None, *spec[1:])
        result = put(x, NamedSharding(self.mesh, spec))
        if keep:
            self._device_params[name] = (x, result)
        return result

    def carried(self, results: dict[str, Any]) -> dict[str, Any]:
        """Return the results of a program; sums are arrays of terms between programs."""
        return results | {n: own_sums.from_rows(self.mesh, results[n]) for n in self.sums}
