"""Training steps of kinds of parallelism on JAX by the TPU compiler: memory and exchanged bytes of one device.

``python benchmarks/bench_kinds.py``: a transformer block and a mixture of experts with Adam on four chips of TPU v5e.
Nothing runs on a TPU and none is needed, only its compiler (libtpu); a CPU that simulates four devices has the arrays
of the step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4", NPROC="24", TPU_SKIP_MDS_QUERY="1")
os.environ.update(TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost")
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-parallel" / "tests"))

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from small_models import block

import mithril as ml
from mithril.models import IOKey, LayerNorm, MixtureOfExperts, Model
from mithril_jax.mesh.mesh_execution import arranged
from mithril_tpu.aot import analysis

ROWS, LENGTH, FEATURES = 4, 512, 256


def transformer_block() -> Model:
    return block(FEATURES, 4, 4 * FEATURES)


def mixture() -> Model:
    x = IOKey("x")
    return Model.create(outputs={"y": x + MixtureOfExperts(8, 4 * FEATURES)(LayerNorm(FEATURES)(x))})


WAYS: tuple[tuple[Callable[[], Model], str, tuple[int, ...]], ...] = (
    (transformer_block, "data", (4,)),
    (transformer_block, "fsdp", (4,)),
    (transformer_block, "hsdp", (2, 2)),
    (transformer_block, "model", (1, 4)),
    (transformer_block, "sequence", (1, 4)),
    (mixture, "data", (4,)),
    (mixture, "fsdp", (4,)),
    (mixture, "expert", (4,)),
)


def compiled_step(make: Callable[[], Model], parallelism: str, mesh: tuple[int, ...]) -> Any:
    """Return a step of the trainer as the TPU compiler compiles it."""
    training = ml.Trainer(
        make(),
        ml.Adam(1e-3),
        loss="mse_loss",
        backend=ml.JaxBackend(device_mesh=mesh),
        parallelism=parallelism,
        progress=False,
    )
    batch = dict.fromkeys(("x", "target"), np.ones((ROWS, LENGTH, FEATURES), np.float32))
    training.step(batch)
    step = next(iter(training.engine._steps.values())).run
    call, values = step.call, {**training.engine.arrays, **batch, "learning_rate": np.float32(1e-3)}
    chips = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    call.shardings.mesh = Mesh(arranged(chips, mesh), call.shardings.mesh.axis_names)

    def argument(name: str) -> Any:
        x = values[name]
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=call.shardings.sharding(name))

    by_name = {n: NamedSharding(call.shardings.mesh, call.shardings.specs[n]) for n in call.shardings.specs}
    results = tuple(by_name.get(r.of) if r.role in ("gradient", "state") else None for r in step.graph.results)
    step_function = jax.jit(call._flat, out_shardings=results, donate_argnums=tuple(range(len(call.params))))
    return step_function.lower(*map(argument, (*call.params, *call.inputs))).compile()


def main() -> None:
    print(f"{'':<30}{'mesh':<8}{'arrays MiB':>12}{'peak MiB':>10}{'MB exchanged':>14}")
    for make, parallelism, mesh in WAYS:
        program = compiled_step(make, parallelism, mesh)
        memory = program.memory_analysis()
        exchanged = sum(c.bytes for c in analysis.collectives(program.as_text()).values())
        arrays = memory.argument_size_in_bytes / 2**20
        peak = arrays + (memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 2**20
        size = " x ".join(map(str, mesh))
        print(
            f"{make.__name__:<20}{parallelism:<10}{size:<8}{arrays:>12.1f}{peak:>10.1f}{exchanged / 1e6:>14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
