"""Train under Ray Train with two workers on this machine, end one of them, and let Ray resume the training.

``pip install ray[train]``; then ``python benchmarks/ray_train.py``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, str]) -> None:
    """Train in one worker; Ray has set RANK, WORLD_SIZE, MASTER_ADDR and created the group of PyTorch."""
    import numpy as np
    import torch

    import mithril as ml
    from mithril.models import MLP

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    class EndOnce(ml.Callback):
        """Kill worker 1 in step 8 of the first attempt, as the loss of a machine would."""

        def step_end(self, trainer, report):
            mark = Path(config["folder"], "killed")
            if rank == 1 and trainer.steps == 8 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((96, 6), dtype=np.float32)
    trainer = ml.Trainer(
        MLP([16, 1]),
        ml.Adam(0.01),
        loss="mse_loss",
        backend=ml.TorchBackend(device="cpu", device_mesh=(size,)),
        parallelism="fsdp",
        callbacks=[ml.Checkpoint(f"{config['folder']}/run", every=4), EndOnce()],
        progress=False,
        timeout=20.0,
    )
    loader = ml.DataLoader((x, x[:, :1]), 16, shuffle=True, rank=rank, world=size)
    trainer.fit(loader, epochs=3, resume="auto")
    print(f"process {rank} of {size}: {trainer.steps} steps, losses {trainer.history['loss']}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=4, include_dashboard=False)
        TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, name="ray", failure_config=FailureConfig(max_failures=2)),
        ).fit()
        print("checkpoints:", sorted(os.listdir(f"{folder}/run")))
        ray.shutdown()


if __name__ == "__main__":
    main()
