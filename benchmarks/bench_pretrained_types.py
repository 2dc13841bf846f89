"""Imports small models of the types of transformers by ``ml.from_pretrained``, and compares them with transformers.

``python benchmarks/bench_pretrained_types.py [TYPE ...] [--results FILE]``: each type that is not native, or the given
ones, with random weights: equal, refused with its reason, or WRONG, and the seconds of import. Rows that ``FILE`` has
are not repeated. Sizes, padding and data of the compared call are not those of the example that was exported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mithril as ml
from mithril.graph import MithrilError
from mithril_hub.architectures import is_native
from mithril_hub.others.examples import DEFAULTS

LIMIT = 1e-4  # of the difference, relative to the largest element
SECONDS = 240  # for one type
HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION")
SMALL = """
    32: hidden_size d_model n_embd dim embed_dim projection_dim encoder_embed_dim word_embed_proj_dim
    48: intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim n_inner
    48: moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
    4: num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads
    8: head_dim d_kv attention_head_size qk_nope_head_dim qk_rope_head_dim v_head_dim
    4: num_experts num_local_experts n_routed_experts moe_num_experts
    2: num_experts_per_tok n_group topk_group
    2: num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
    2: num_decoder_layers depth num_decoder_blocks conformer_num_layers
    16: embedding_size q_lora_rank kv_lora_rank
    99: vocab_size
    64: image_size
    24: max_source_positions
    31: conv_depthwise_kernel_size
    3: num_labels
    1: first_k_dense_replace
"""
SIZES = {
    name: int(size) for line in SMALL.split("\n") for size, _, names in [line.partition(":")] for name in names.split()
}
DERIVED = {"out_features", "out_indices", "stage_names", "attention_layers", "transformers_version"}
WINDOWS = {"image_size": 128, "window_size": 4}  # which divides the sizes of all stages
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin", "focalnet", "swin2sr"), WINDOWS),
}
LISTS = {"depths": 1, "num_blocks": 1, "hidden_sizes": 8, "embed_dims": 8, "conv_dim": 16, "tdnn_dim": 16}


def small(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a small model: known sizes are replaced, those within lists divided."""
    result = {name: value for name, value in settings.items() if name not in DERIVED}
    count = settings.get("num_hidden_layers")
    for name, value in list(result.items()):
        if name == "embed_dim" and isinstance(settings.get("num_heads"), (list, tuple)):
            continue  # one number of heads for each stage divides it
        if isinstance(value, dict):
            result[name] = small(value) if name.endswith("_config") else value
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            result[name] = min(value, SIZES[name])
        elif name in LISTS and isinstance(value, (list, tuple)):
            result[name] = [1 if LISTS[name] == 1 else max(LISTS[name], n // LISTS[name] // 8 * 8) for n in value]
        elif isinstance(value, (list, tuple)) and count and len(value) == count:
            result[name] = list(value)[:2]
        elif name.endswith("_token_id") and isinstance(value, int):
            result[name] = min(value, 2)
    return result


def class_of(config: Any) -> Any:
    """Return the class of the first head of a type, else the model itself."""
    for name in (*(f"MODEL_FOR_{head}_MAPPING" for head in HEADS), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, name)
        if type(config) in mapping:
            kind_of_module = mapping[type(config)]
            return kind_of_module[0] if isinstance(kind_of_module, (tuple, list)) else kind_of_module
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)]
    return next((c for c in classes if c.config_class is type(config) and "PreTrained" not in c.__name__), None)


def write(kind: str, folder: Path) -> str:
    """Write a small model of a type with random weights; return why there is none, or ''."""
    try:
        config = CONFIG_MAPPING[kind]
        config = config.from_dict({**small(config().to_dict()), **OWN.get(kind, {})})
        kind_of_module = class_of(config)
        if kind_of_module is None:
            return "no model for text, images or sound"
        torch.manual_seed(0)
        module = kind_of_module(config).eval()
        count = sum(p.numel() for p in module.parameters())
        if count > 60_000_000:
            return f"{count} parameters in this configuration"
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        module.save_pretrained(folder)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def call(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of other sizes than the example, the last row of text padded."""
    rng = np.random.default_rng(1)
    sizes = {"batch": 3, "length": 9, "decoder_length": 4, "samples": 5000, "frames": 80, "height": 96, "width": 128}
    inputs = {}
    for name in (*model.inputs, *model.optional):
        shape, kind = model.expects(name)
        shape = tuple(n if isinstance(n, int) else sizes[str(n)] for n in shape)
        if name in DEFAULTS:
            inputs[name] = np.full(shape, DEFAULTS[name], np.int64)
        else:
            is_float = not str(kind).startswith("int")
            inputs[name] = rng.normal(size=shape).astype(np.float32) if is_float else rng.integers(3, 90, shape)
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, 6:] = 0
    return inputs


def difference(folder: Path, model: Any) -> float:
    """Return the largest difference from transformers, which reads the folder itself, relative to the results."""
    compiled = ml.compile(model, "numpy", inference=True)
    inputs = call(model)
    results = compiled(inputs)
    module = class_of(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()
    module.config.use_cache = False
    with torch.no_grad():
        expected = module(**{n: torch.from_numpy(x) for n, x in inputs.items()})
    references = [x.numpy() for x in torch.utils._pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
    worst = 0.0
    for reference, result in zip(references, results.values(), strict=True):
        assert reference.shape == np.shape(result), f"shape {np.shape(result)}, expected {reference.shape}"
        if "attention_mask" in inputs and reference.ndim > 1 and reference.shape[:2] == inputs["input_ids"].shape:
            reference, result = (x[inputs["attention_mask"] == 1] for x in (reference, result))
        if reference.size:
            worst = max(worst, float(np.abs(reference - result).max() / max(np.abs(reference).max(), 1e-6)))
            worst = worst if np.isfinite(reference).all() else float("nan")
    return worst


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def expired(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def attempt(kind: str) -> dict[str, Any]:
    """Return the row of a type."""
    row: dict[str, Any] = {"type": kind}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        reason = write(kind, folder)
        if reason:
            return {**row, "result": "no example", "reason": reason}
        start = time.perf_counter()
        try:
            with limited(SECONDS):
                model = ml.from_pretrained(folder)
        except MithrilError as error:
            reason = " | ".join([first_line(error), *map(str, error.facts)])[:400]
            return {**row, "result": "refused", "reason": reason}
        except BaseException as error:
            return {**row, "result": "FOREIGN", "reason": f"{type(error).__name__}: {first_line(error)}"}
        row["seconds"] = round(time.perf_counter() - start, 1)
        try:
            with limited(SECONDS):
                worst = difference(folder, model)
        except MithrilError as error:
            return {**row, "result": "refused at the call", "reason": first_line(error)}
        except BaseException as error:
            return {**row, "result": "not compared", "reason": f"{type(error).__name__}: {first_line(error)}"}
    return {**row, "result": "equal" if worst <= LIMIT else "WRONG", "difference": worst}


def main() -> None:
    """Print a row per type, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    rows = {row["type"]: row for row in map(json.loads, lines)}
    for kind in options.types or [k for k, c in CONFIG_MAPPING.items() if c.model_type == k and not is_native(k)]:
        if kind in rows:
            continue
        rows[kind] = attempt(kind)
        print(json.dumps(rows[kind]), flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(rows[kind]) + "\n")
    print(dict(Counter(row["result"] for row in rows.values())))
    seconds = sorted(row["seconds"] for row in rows.values() if "seconds" in row)
    if seconds:
        print(f"seconds of import: median {seconds[len(seconds) // 2]}, largest {seconds[-1]}")


if __name__ == "__main__":
    main()
