"""Plugin of mithril-train; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import Export, Option, PassSpec, hookimpl
from mithril.backend import Layers

# Module of ``mithril_train`` -> the names that it exports as ``ml.*``.
EXPORTS = {
    "augment.images": ("Augmentation", "ColorJitter", "RandomAffine", "RandomCrop", "RandomFlip"),
    "augment.mixing": ("CutMix", "MixUp"),
    "loop.callbacks": (
        "Callback",
        "CSVLog",
        "EarlyStopping",
        "JSONLog",
        "LearningRateMonitor",
        "ReduceLROnPlateau",
    ),
    "loop.checkpoint_callback": ("Checkpoint",),
    "engine.batches": ("LocalRows",),
    "loop.pruning": ("Pruning",),
    "loop.loggers": ("MLflow", "StepLogger", "TensorBoard", "WandB"),
    "data.loader": ("DataLoader",),
    "data.sequences": ("Buckets", "Padding"),
    "data.tar_stream": ("TarStream",),
    "optim.optimizers": (
        *(
            "SGD",
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "Lion",
            "Optimizer",
            "RAdam",
            "RMSprop",
        ),
    ),
    "optim.schedules": (
        "Constant",
        "Cosine",
        "Cyclic",
        "OneCycle",
        "Polynomial",
        "Schedule",
        "StepDecay",
        "WarmUp",
    ),
    "loop.trainer": ("Trainer",),
    "optim.wrappers": ("SAM", "GradientNoise", "Lookahead", "OptimizerWrapper"),
    "step.train_step": ("TrainStep",),
    "step.regularizers": ("L1", "L2"),
    "estimators": ("Classifier", "Regressor"),
    "hyperparameter_search": ("search",),
}


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return ``ml.Trainer``, ``ml.DataLoader``, the optimizers, schedules and callbacks."""
    return [Export(name, f"mithril_train.{module}:{name}") for module, names in EXPORTS.items() for name in names]


@hookimpl
def mithril_passes() -> Sequence[PassSpec]:
    """Return the pass of quantization-aware training."""
    return [
        PassSpec(
            "quantization-aware",
            "mithril_train.step.quantization:quantization_aware",
            stage="fuse",  # before the backward pass is built, so that gradients pass through the rounding
            level=None,
            options=("quantization_aware",),
            after=("operator-fusion",),
            summary="Round weights and inputs of linear layers as int8 kernels will.",
        )
    ]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the option of quantization-aware training."""
    return [
        Option(
            "quantization_aware",
            bool | Mapping[str, Any],
            False,
            "Train with the rounding of int8 kernels.",
            keys={"bits": int, "block": int, "activations": bool, "keep": Layers},
            example='{"bits": 8, "keep": ["head"]}',
        )
    ]
