"""Which distribution of this project brings a name that is not installed: only ever used to print the pip line."""

from __future__ import annotations

DISTRIBUTIONS = (
    "mithril-passes",
    "mithril-tools",
    "mithril-testing",
    "mithril-numpy",
    "mithril-jax",
    "mithril-torch",
    "mithril-mlx",
    "mithril-cbackend",
    "mithril-ggml",
    "mithril-tpu",
    "mithril-train",
)

BACKENDS = {
    "numpy": "mithril-numpy",
    "jax": "mithril-jax",
    "torch": "mithril-torch",
    "mlx": "mithril-mlx",
    "c": "mithril-cbackend",
    "ggml": "mithril-ggml",
}

# Distribution -> the names it gives to the public face.
NAMES = {
    "mithril-tools": (
        "BenchmarkConfig",
        "calibrate",
        "diff",
        "estimate",
        "find_batch_size",
        "process_in_batches",
        "profile",
        "run_benchmark",
        "tune",
    ),
    "mithril-numpy": ("NumpyBackend",),
    "mithril-jax": ("JaxBackend",),
    "mithril-torch": ("TorchBackend",),
    "mithril-mlx": (
        "MlxAutoTuner",
        "MlxBackend",
        "MlxBatchOptimizer",
        "MlxComputationGraph",
        "MlxKernelFusion",
        "MlxMemoryOptimizer",
        "MlxProfiler",
        "MlxTensorCache",
    ),
    "mithril-cbackend": ("CBackend",),
    "mithril-ggml": (
        "GGMLBackend",
        "TernaryLinear",
        "quantization_report",
    ),
    "mithril-train": (
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "CSVLog",
        "Callback",
        "Checkpoint",
        "Constant",
        "Cosine",
        "DataLoader",
        "EarlyStopping",
        "JSONLog",
        "LearningRateMonitor",
        "Lion",
        "OneCycle",
        "Optimizer",
        "RMSprop",
        "SGD",
        "Schedule",
        "StepDecay",
        "TensorBoard",
        "Trainer",
        "WarmUp",
        "search",
    ),
    "mithril-tpu": ("load_sharded", "placement", "plan", "save_sharded", "shard", "staged"),
}
EXPORTS = {name: home for home, names in NAMES.items() for name in names}

# Methods of compiled models that a distribution adds.
METHODS = {"get_profile_stats": "mithril-tools"}

FORMATS = {"gguf": "mithril-ggml", "c": "mithril-cbackend", "tpu": "mithril-tpu"}

OPTIONS = {
    "mithril-passes": (
        "checkpoint_segments",
        "gradient_checkpointing",
        "mixed_precision",
    ),
    "mithril-tools": (
        "dump_format",
        "dump_graph",
        "intermediate_dir",
        "profile",
        "profile_output",
        "save_intermediates",
        "trace_shapes",
        "verbose",
        "visualize",
        "viz_options",
    ),
    "mithril-jax": ("jax_options", "pjit", "vectorize", "xla_optimization_level"),
    "mithril-torch": ("torch_dynamo", "torch_fx", "torch_options"),
    "mithril-cbackend": ("cpu_options", "mobile_options"),
    "mithril-tpu": (
        "parallelism",
        "pipeline_chunks",
        "pipeline_schedule",
        "pipeline_stages",
        "tensor_split_dims",
        "tpu_options",
        "tpu_replicas",
    ),
}


def option_owner(name: str) -> str | None:
    """The distribution that owns an option of ``ml.compile``."""
    return next((distribution for distribution, names in OPTIONS.items() if name in names), None)
