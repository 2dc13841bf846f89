"""The axes of a mesh: the dimensions that ``device_mesh`` lists, and the axis along which rows are divided."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from mithril.graph import OptionError

AXES = DATA, MODEL, PIPELINE = ("data", "model", "pipeline")
CONTEXT, REPLICA, PARTS = "context", "replica", "parts"
Split = tuple[str | None, ...]

# The first axis of a mesh divides rows; these divide something else over its second axis. Positions and weights can be
# divided together: positions over the first axis then, and rows over none.
SECOND = ("model", "sequence", "context", "hsdp")


def kinds_of(parallelism: str | tuple[str, ...] | None) -> frozenset[str]:
    """Return the kinds of parallelism that the option names."""
    return frozenset({parallelism} if isinstance(parallelism, str) else parallelism or ())


def check_kinds(kinds: frozenset[str], mesh: tuple[int, ...]) -> None:
    """Raise OptionError for kinds that conflict with one another or with the mesh."""
    second = [kind for kind in SECOND if kind in kinds]
    conflicts = [("data", "fsdp"), ("data", "hsdp"), ("fsdp", "hsdp"), ("expert", "hsdp")]
    is_combined = divides_positions_and_weights(kinds)
    if is_combined:
        conflicts += [(kind, "context") for kind in ("data", "fsdp", "expert")]
        second.remove("context")
    pairs = [second[:2]] if len(second) > 1 else [pair for pair in conflicts if kinds.issuperset(pair)]
    if pairs:
        a, b = pairs[0]
        raise OptionError(f"parallelism='{a}' conflicts with '{b}': both divide an axis of the mesh", hint="omit one")
    if is_combined and 1 in mesh[:2]:
        raise OptionError(
            f"parallelism=('context', '{second[0]}') requires a mesh of two axes",
            facts=[f"device_mesh={mesh}; the first axis divides positions, the second one weights"],
            hint="use device_mesh=(2, 2), or one of the two kinds",
        )
    if second and mesh[1] == 1:
        raise OptionError(
            f"parallelism='{second[0]}' requires a mesh with a second axis",
            facts=[f"device_mesh={mesh}"],
            hint=f"use device_mesh=({mesh[0]}, 2, {mesh[2]})" if mesh[2] > 1 else f"use device_mesh=(1, {prod(mesh)})",
        )
    if "expert" in kinds and mesh[0] == 1:
        raise OptionError(
            "parallelism='expert' requires a mesh with a data axis",
            facts=[f"device_mesh={mesh}; experts are divided over the processes that divide the batch"],
            hint=f"use device_mesh=({prod(mesh)},)",
        )
    if mesh[2] > 1 and (conflicting := kinds & {"data", "model", "expert"}):
        raise OptionError(
            f"parallelism='{min(conflicting)}' conflicts with device_mesh={mesh}, which has {mesh[2]} stages",
            hint=f"use device_mesh={mesh[:2]}, or omit parallelism",
        )


def divides_positions_and_weights(kinds: frozenset[str]) -> bool:
    """Whether the axes of a mesh divide positions and weights instead of rows and one of both."""
    return "context" in kinds and bool(kinds & {"model", "sequence"})


def dimensions_of(kinds: frozenset[str]) -> tuple[str, str, str]:
    """Return the names of the axes that ``device_mesh`` lists."""
    if "hsdp" in kinds:
        return (REPLICA, PARTS, PIPELINE)
    if divides_positions_and_weights(kinds):
        return (CONTEXT, MODEL, PIPELINE)
    return (DATA, CONTEXT if "context" in kinds else MODEL, PIPELINE)


class MeshAxes:
    """The processes of a mesh by axes. With ``hsdp`` rows are divided over two of its dimensions together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        names = mesh.mesh_dim_names
        assert names is not None
        self._sizes = dict(zip(names, mesh.shape, strict=True))
        self.dimensions: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        if REPLICA in names:
            self.dimensions = {DATA: (REPLICA, PARTS), **self.dimensions}
        self._placements: dict[tuple[Split, tuple[str, ...]], tuple[Any, ...]] = {}
        self._groups: dict[str, Any] = {}
        self._meshes: dict[tuple[str, str], DeviceMesh] = {}
        storage_names = tuple(name for name in names if name != PIPELINE)
        groups = mesh.mesh.unbind(-1) if self.size(PIPELINE) > 1 else ()
        self.stages = [DeviceMesh(mesh.device_type, ranks, mesh_dim_names=storage_names) for ranks in groups]
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self._coordinate = dict(zip(names, coordinate, strict=True))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of processes along each axis."""
        return {axis: self.size(axis) for axis in self.dimensions}

    def size(self, axis: str | None) -> int:
        """Return the number of processes along an axis; 1 for None and for an axis that the mesh does not have."""
        return prod(self._sizes[name] for name in self.dimensions.get(axis or "", ()))

    def index(self, axis: str) -> int:
        """Return the position of this process along an axis; 0 for one that the mesh does not have."""
        position = 0
        for name in self.dimensions.get(axis, ()):
            position = position * self._sizes[name] + self._coordinate[name]
        return position

    def over(self, *axes: str) -> DeviceMesh:
        """Return a one-dimensional mesh of the processes along these axes together."""
        names = tuple(n for n in self.mesh.mesh_dim_names or () for a in axes if n in self.dimensions.get(a, ()))
        return self.mesh[names[0]] if len(names) == 1 else self.mesh[names]._flatten("_".join(names))

    def storage(self, axis: str, replicas: str) -> DeviceMesh:
        """Return the mesh of parameters in parts along ``axis``, replicated along ``replicas``, its first dimension."""
        if self.size(replicas) == 1:
            return self.over(axis)
        if (axis, replicas) not in self._meshes:
            names = tuple(n for n in self.mesh.mesh_dim_names or () if n in (axis, replicas))
            mesh = self.mesh[names]
            if names != (replicas, axis):
                mesh = DeviceMesh(mesh.device_type, mesh.mesh.T, mesh_dim_names=(replicas, axis))
            self._meshes[axis, replicas] = mesh
        return self._meshes[axis, replicas]

    def get_group(self, axis: str) -> Any:
        """Return the process group along an axis."""
        if axis not in self._groups:
            self._groups[axis] = self.over(axis).get_group()
        return self._groups[axis]

    def storage_of(self, owner: int | None) -> DeviceMesh:
        """Return the mesh of an array: that of one process of a pipeline, or all."""
        return self.mesh if owner is None else self.stages[owner]

    def placements(self, split: Split, mesh: DeviceMesh) -> tuple[Any, ...]:
        """Return the placement of a ``DTensor`` along each dimension of a mesh."""
        names = mesh.mesh_dim_names or ()
        if (split, names) not in self._placements:
            places: Mapping[str, Any] = {
                name: Shard(k) for k, axis in enumerate(split) if axis is not None for name in self.dimensions[axis]
            }
            self._placements[split, names] = tuple(places.get(name, Replicate()) for name in names)
        return self._placements[split, names]
