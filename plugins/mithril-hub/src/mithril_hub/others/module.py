"""The module of transformers for a configuration, with the weights of the files; no code of a checkpoint runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from mithril.graph import InputError, UnsupportedError
from mithril_hub.checkpoint.safetensors_file import Stored

# Settings that name code or files elsewhere, or select kernels: the network and its results do not depend on them.
IGNORED = {
    *("auto_map", "transformers_weights", "fusion_config", "use_pretrained_backbone", "_name_or_path"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
}
BFLOAT16 = "bfloat16"


def module_of(settings: Mapping[str, Any], tensors: Mapping[str, Stored], dtype: str, source: str) -> Any:
    """Return the module in evaluation mode; its parameters are views of the files unless they are converted."""
    import torch
    import transformers

    kind = settings["model_type"]
    if settings.get("quantization_config"):
        raise UnsupportedError("quantized checkpoints are not supported", facts=["config.json: quantization_config"])
    with _quiet(transformers):
        try:
            config = transformers.CONFIG_MAPPING[kind].from_dict(_without_ignored(settings))
            _without_cache(config)
            # The other implementations of experts select rows by data, or read pointers.
            options = {"experts_implementation": "batched_mm", "local_files_only": True, "output_loading_info": True}
            module, report = _class_of(transformers, config, settings).from_pretrained(
                None,
                config=config,
                state_dict={name: _tensor(torch, stored) for name, stored in tensors.items()},
                dtype=getattr(torch, dtype),
                **options,
            )
        except (InputError, UnsupportedError):
            raise
        except Exception as error:  # of any class: transformers does not check configurations
            raise InputError(
                f"transformers cannot create the model of {source}",
                facts=[f"type '{kind}', {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"],
                hint="check config.json; if the type is newer than the installed transformers, install a newer one",
            ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        more = [f"({len(missing)} in total)"] if len(missing) > 8 else []
        facts = [*(f"missing: '{name}'" for name in missing[:8]), *more]
        raise InputError(f"the weights in {source} do not fit its config.json", facts=facts)
    return module


def version() -> str:
    """Return the version of transformers."""
    import transformers

    return str(transformers.__version__)


def is_known(kind: str) -> bool:
    """Whether the installed transformers has models of a type."""
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


def _class_of(transformers: Any, config: Any, settings: Mapping[str, Any]) -> Any:
    """Return the class that the configuration names, or that of the model without a head if it names none."""
    names = settings.get("architectures") or []
    if names:
        # some classes are not among the names of the package
        for place in (transformers, import_module(type(config).__module__.replace(".configuration_", ".modeling_"))):
            kind = getattr(place, str(names[0]), None)
            if isinstance(kind, type) and getattr(kind, "config_class", None) is type(config):
                return kind
        raise InputError(
            f"transformers has no model '{names[0]}' of the type '{settings['model_type']}'",
            facts=["config.json: architectures"],
            hint="name a class of transformers, or leave architectures out for the model without a head",
        )
    classes = transformers.MODEL_MAPPING.get(type(config), None)
    if classes is None:
        raise InputError(
            f"models of the type '{settings['model_type']}' exist with a head only",
            hint="name a class of transformers in architectures of config.json",
        )
    return classes[0] if isinstance(classes, (tuple, list)) else classes


def _without_ignored(settings: Any) -> Any:
    if isinstance(settings, Mapping):
        return {name: _without_ignored(value) for name, value in settings.items() if name not in IGNORED}
    return settings


def _without_cache(config: Any) -> None:
    """Let a module, and those within it, return no keys and values."""
    config.use_cache = False
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _without_cache(part)


def _tensor(torch: Any, stored: Stored) -> Any:
    array = stored.array()
    if np.dtype(stored.dtype).name == BFLOAT16:  # which torch.from_numpy does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Within this context transformers draws no progress bar, and PyTorch accepts arrays that must not be written."""
    logging = transformers.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
