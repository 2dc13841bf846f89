"""Programs over many devices: the batch is split along the axis ``data`` of a mesh, weights along ``model``.

With ``parallelism="fsdp"`` parameters, and whatever is kept for them, are split along ``data`` too.

XLA works out how everything in between is placed and puts in the exchanges: results are the same however this is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mithril as ml
from mithril.base import BackendError, Decisions, OptionError
from mithril.ir import Graph, Input, Output
from mithril_jax import process_config

AXES = ("data", "model", "pipeline")
GROUPS = ("weights", "activations")  # what tensor_split_dims may name besides parameters

STATUS = re.compile(r"[A-Z_]{4,}: ")  # how XLA's own errors begin, of whatever class they come


def shape_of(given: Any) -> tuple[int, ...]:
    """``device_mesh`` as (data, model, pipeline)."""
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not sizes or len(sizes) > len(AXES) or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise OptionError(
            f"device_mesh={given!r} is no mesh of devices",
            facts=[
                "(4,) splits batches over 4 devices; (2, 4) batches over 2 and weights over 4; (1, 1, 4) layers over 4"
            ],
        )
    return sizes


def make(platform: str | None, sizes: Sequence[int]) -> Mesh:
    """The mesh, of this machine's devices; of simulated ones where JAX has not begun and computes on the CPU."""
    count = int(np.prod(sizes))
    if platform in (None, "cpu"):
        process_config.simulate_devices(count)
    found = jax.devices(platform) if platform else jax.devices()
    if len(found) < count:
        cpu = found[0].platform == "cpu"
        raise BackendError(
            f"device_mesh={tuple(sizes)} needs {count} devices, and JAX has {len(found)}",
            facts=[f"there is: {', '.join(str(d) for d in found)}"],
            hint=f"make this backend before anything uses JAX, or set JAX_NUM_CPU_DEVICES={count}"
            if cpu
            else "make the mesh as large as there are devices, or device='cpu' to simulate it",
        )
    return Mesh(np.array(found[:count]).reshape(tuple(sizes)), AXES[: len(sizes)])


def put(x: Any, where: Any) -> jax.Array:
    """An array on devices, some of which may be those of other processes: there each brings the parts it has."""
    if isinstance(x, jax.Array) and x.sharding == where:
        return x
    if getattr(where, "is_fully_addressable", True):
        return jax.device_put(x, where)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding == where else jax.jit(lambda y: y, out_shardings=where)(x)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def lost(error: Exception) -> BackendError:
    """An exchange failed: what JAX tells of it are addresses and ports."""
    return BackendError(
        "devices of other processes do not answer: one of these processes has ended",
        facts=[str(error).splitlines()[0], f"this is process {jax.process_index()} of {jax.process_count()}"],
        hint="its own output says why; jax.distributed.initialize(heartbeat_timeout_seconds=10) ends the others soon",
    )


class Shares:
    """Where each argument of a program lives. ``place`` moves what lies elsewhere; parameters only once."""

    def __init__(self, mesh: Mesh, graph: Graph, settings: Mapping[str, Any], decisions: Decisions) -> None:
        self.mesh = mesh
        self.decisions = decisions
        self.elsewhere = any(device.process_index != jax.process_index() for device in mesh.devices.flat)
        self.simulated = mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self.parallelism = settings.get("parallelism")
        self.splits: dict[str, int] = dict(settings.get("tensor_split_dims", {}))
        if self.parallelism == "model" and mesh.shape.get("model", 1) == 1:
            raise OptionError(
                "parallelism='model' needs a mesh with an axis for the model",
                facts=[f"device_mesh={tuple(mesh.shape.values())}"],
                hint=f"device_mesh=(1, {mesh.devices.size})",
            )
        self._check_names(graph)
        self.pairs = self._pairs(graph)
        self.specs = {i.name: self._spec(i) for i in graph.arguments}
        self.carried = {i.name for i in graph.with_role("param", "state")}
        self.handed_on = {i.name for i in graph.arguments if i.tags.get("handed_on")}  # by other stages, or this one
        self._kept: dict[str, tuple[Any, Any]] = {}  # parameters: as given, as placed

    def _check_names(self, graph: Graph) -> None:
        params = [i.name for i in graph.with_role("param")]
        for pattern in self.splits:
            if pattern not in GROUPS and not any(fnmatchcase(name, pattern) for name in params):
                raise OptionError(
                    f"tensor_split_dims: no parameter is called '{pattern}'",
                    facts=["groups: " + ", ".join(GROUPS), "parameters: " + ", ".join(params[:12])],
                )
        if "activations" in self.splits and self.splits["activations"] != 0:
            self.decisions.record(
                "ignored",
                "tensor_split_dims: XLA chooses how activations are split, but for the batch on axis 0",
            )

    def _spec(self, i: Input) -> PartitionSpec:
        if i.role == "param":
            return self._fully(i, self._of_weight(i)) if self.parallelism == "fsdp" else self._of_weight(i)
        if i.role == "state" or not i.type.shape or self.mesh.shape["data"] == 1:
            return PartitionSpec()
        size = i.type.shape[0]
        if isinstance(size, int) and size % self.mesh.shape["data"]:
            self._whole(i.name, 0, size, "data")
            return PartitionSpec()
        return PartitionSpec("data")

    def _pairs(self, graph: Graph) -> Mapping[str, Any] | None:
        """Weights in pairs as in Megatron, columns and then rows; None where nobody (mithril-parallel) finds them.

        Where somebody says which axes are split, there are none but those.
        """
        if self.mesh.shape.get("model", 1) == 1 or any(n != "activations" for n in self.splits):
            return {}
        if not all(i.type.is_static for i in graph.arguments):
            return None
        try:
            choose = ml.placement
        except (AttributeError, ml.MithrilError):
            return None
        found, left = choose(graph, {"model": self.mesh.shape["model"]})
        for name, why in left.items():
            self.decisions.record("choice", f"'{name}' is whole on every device: {why}")
        return found

    def _fully(self, i: Input, spec: PartitionSpec) -> PartitionSpec:
        """Split over ``data`` as well, along the longest axis that is still whole."""
        parts, shape = self.mesh.shape["data"], i.type.shape
        split = (*spec, *[None] * (len(shape) - len(spec)))
        fits = [k for k, n in enumerate(shape) if split[k] is None and isinstance(n, int) and n and n % parts == 0]
        if parts == 1 or not fits:
            return spec
        chosen = max(fits, key=lambda k: (shape[k], -k))
        return PartitionSpec(*("data" if k == chosen else a for k, a in enumerate(split)))

    def _of_weight(self, i: Input) -> PartitionSpec:
        parts, shape = self.mesh.shape.get("model", 1), i.type.shape
        axis = self._asked_axis(i.name, len(shape))
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise OptionError(f"tensor_split_dims: '{i.name}' has no axis {axis}", facts=[f"it is {i.type}"])
        if parts == 1 or not shape:
            return PartitionSpec()
        fits = [k for k, n in enumerate(shape) if isinstance(n, int) and n % parts == 0]
        if axis is not None:
            chosen: int | None = axis % len(shape)
            if chosen not in fits:
                self._whole(i.name, axis % len(shape), shape[axis], "model")
                return PartitionSpec()
        elif self.pairs is not None:
            return PartitionSpec(*self.pairs.get(i.name, ()))
        else:
            chosen = next(iter(fits), None) if len(shape) > 1 else None
        return PartitionSpec(*("model" if k == chosen else None for k in range(len(shape))))

    def _asked_axis(self, name: str, rank: int) -> int | None:
        if name in self.splits:
            return self.splits[name]
        for pattern, axis in self.splits.items():
            if pattern not in GROUPS and fnmatchcase(name, pattern):
                return axis
        return self.splits.get("weights") if rank >= 2 else None

    def _whole(self, name: str, axis: int, size: Any, over: str) -> None:
        why = f"axis {axis} of length {size} cannot be divided by {self.mesh.shape[over]}"
        self.decisions.record("choice", f"'{name}' is whole on every device: {why}")

    def sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.specs[name])

    def results(self, results: Iterable[Output]) -> tuple[NamedSharding | None, ...]:
        """Gradients are split like what they are of, new parameters and state like the old; XLA chooses for others."""
        return tuple(
            self.sharding(r.of) if r.role in ("gradient", "state") and r.of in self.specs else None for r in results
        )

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters where the program wants them."""
        return {name: put(x, self.sharding(name)) for name, x in params.items()}

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> jax.Array:
        """A parameter of what ``read(index)`` gives for the regions that this process has."""
        return jax.make_array_from_callback(shape, self.sharding(name), read)

    def place(self, name: str, x: Any, *, keep: bool) -> Any:
        if keep and (known := self._kept.get(name)) is not None and known[0] is x:
            return known[1]
        if name in self.handed_on and isinstance(x.sharding, NamedSharding):
            return x if x.sharding.mesh is self.mesh else jax.device_put(x, NamedSharding(self.mesh, x.sharding.spec))
        spec = self.specs[name]
        if len(spec) and spec[0] == "data" and x.shape[0] % self.mesh.shape["data"]:
            self._whole(name, 0, x.shape[0], "data")
            spec = PartitionSpec()
        made = put(x, NamedSharding(self.mesh, spec))
        if keep:
            self._kept[name] = (x, made)
        return made
