"""What mithril-train adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import Export, hookimpl

# Module below ``mithril_train`` -> the names it gives to the public face.
EXPORTS = {
    "callbacks": ("Callback", "Checkpoint", "CSVLog", "EarlyStopping", "JSONLog", "LearningRateMonitor", "TensorBoard"),
    "data.loader": ("DataLoader",),
    "optimizers": ("SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Lion", "Optimizer", "RMSprop"),
    "schedules": ("Constant", "Cosine", "OneCycle", "Schedule", "StepDecay", "WarmUp"),
    "trainer": ("Trainer",),
}


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.Trainer``, ``ml.DataLoader``, the optimizers, schedules and callbacks."""
    return [Export(name, f"mithril_train.{module}:{name}") for module, names in EXPORTS.items() for name in names]
