"""Run the README and the public examples of mithril's predecessor, unchanged, from a checkout of its repository.

    git clone https://github.com/synnada-ai/mithril /tmp/predecessor
    python benchmarks/predecessor.py /tmp/predecessor
    python benchmarks/predecessor.py /tmp/predecessor --trainings  # also the examples that train for minutes

Models whose examples download weights are built smaller, with random weights, and evaluated on NumPy. Each row is a
process of its own; the last line of its errors is printed if it fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRAININGS = ("cnn_forcast_sine_training", "linear_regression_jax_training", "variable_length_many_to_one_lstm")


def evaluate(model: Any, inputs: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Compile a model for these inputs, evaluate it with random weights, and return the shapes of the outputs."""
    import mithril_compat as ml

    backend = ml.NumpyBackend()
    shapes = {name: list(np.shape(x)) for name, x in inputs.items()}
    compiled = ml.compile(model, backend, data_keys=set(inputs), shapes=shapes, jit=False, **keys)
    params = {name: x * np.float32(0.05) for name, x in compiled.randomize_params().items()}
    statistics = {n: np.ones(compiled.shapes[n], "f4") for n in compiled.input_keys - {*inputs, *params}}
    outputs = compiled.evaluate(params, {**inputs, **statistics})
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    assert all(np.isfinite(x).all() for x in outputs.values() if isinstance(x, np.ndarray))
    return {name: np.shape(x) for name, x in outputs.items()}


def gpt(functional: bool = False) -> Any:
    if functional:
        from examples.gpt.functional_model import create_gpt
    else:
        from examples.gpt.model import create_gpt

    model = create_gpt(bias=True, block_size=16, dims=32, num_heads=4, num_layers=2, vocab_size=50)
    return evaluate(model, {"input": np.arange(8, dtype="i4")[None]})


def whisper() -> Any:
    from examples.whisper.whisper_model import whisper_model

    model = whisper_model(num_layers=2, input_dim=32, num_heads=4, ffn_dim=64)
    audio = np.random.default_rng(0).normal(size=(1, 80, 3000)).astype("f4")
    return evaluate(model, {"input": audio, "decoder_input_ids": np.arange(5, dtype="i4")[None]})


def clip() -> Any:
    from examples.clip.model import clip as build

    settings = {
        "embed_dim": 32, "image_resolution": 32, "vision_layers": 2, "vision_width": 64, "vision_patch_size": 16,
        "context_length": 77, "vocab_size": 100, "transformer_width": 32, "transformer_heads": 4,
        "transformer_layers": 2,
    }  # fmt: skip
    image = np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype("f4")
    return evaluate(build(**settings), {"image": image, "text": np.arange(77, dtype="i4")[None]})


T5 = {
    "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 64, "vocab_size": 100,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "tie_word_embeddings": True, "is_gated_act": False,
}  # fmt: skip


def t5_encoder() -> Any:
    from examples.t5 import t5_encode

    return evaluate(t5_encode(T5, name="encoder"), {"input": np.arange(6, dtype="i4")[None]})


def t5_decoder() -> Any:
    from examples.t5 import t5_decode

    memory = np.random.default_rng(0).normal(size=(1, 6, 32)).astype("f4")
    return evaluate(t5_decode(T5), {"input": np.arange(4, dtype="i4")[None], "memory": memory})


def segformer() -> Any:
    from types import SimpleNamespace

    from examples.segformer.segformer_semantic_segmentation import segformer_semantic_segmentation

    config = SimpleNamespace(
        num_channels=3, num_encoder_blocks=4, depths=[1, 1, 1, 1], sr_ratios=[8, 4, 2, 1], hidden_sizes=[8, 16, 24, 32],
        patch_sizes=[7, 3, 3, 3], strides=[4, 2, 2, 2], num_attention_heads=[1, 2, 2, 4], mlp_ratios=[2, 2, 2, 2],
        decoder_hidden_size=16, num_labels=5, reshape_last_stage=True, layer_norm_eps=1e-6,
    )  # fmt: skip
    image = np.random.default_rng(0).normal(size=(1, 3, 64, 64)).astype("f4")
    return evaluate(segformer_semantic_segmentation(config), {"input": image})


def flux() -> Any:
    sys.path.insert(0, str(Path(sys.argv[1]) / "examples/flux"))
    from examples.flux.model import FluxParams, flux as build

    params = FluxParams(
        in_channels=64, vec_in_dim=768, context_in_dim=4096, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=1,
        depth_single_blocks=1, axes_dim=[4, 6, 6], theta=10000, qkv_bias=True, guidance_embed=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    inputs = {
        "img": rng.normal(size=(1, 4096, 64)), "txt": rng.normal(size=(1, 512, 4096)), "y": rng.normal(size=(1, 768)),
        "img_ids": np.ones((1, 4096, 3)), "txt_ids": np.ones((1, 512, 3)), "timesteps": np.ones(1),
    }  # fmt: skip
    return evaluate(build(params), {name: x.astype("f4") for name, x in inputs.items()})


def flux_decoder() -> Any:
    sys.path.insert(0, str(Path(sys.argv[1]) / "examples/flux"))
    from examples.flux.auto_encoder import AutoEncoderParams, decoder

    params = AutoEncoderParams(
        resolution=32, in_channels=3, ch=32, out_ch=3, ch_mult=[1, 2], num_res_blocks=1, z_channels=4,
        scale_factor=0.36, shift_factor=0.11,
    )  # fmt: skip
    names = ("ch", "out_ch", "ch_mult", "num_res_blocks")
    latent = np.random.default_rng(0).normal(size=(1, 4, 8, 8)).astype("f4")
    return evaluate(decoder(*(getattr(params, name) for name in names)), {"input": latent})


BUILT: dict[str, Callable[[], Any]] = {
    "gpt/model": gpt,
    "gpt/functional_model": lambda: gpt(functional=True),
    "whisper/whisper_model": whisper,
    "clip/model": clip,
    "t5, encoder": t5_encoder,
    "t5, decoder": t5_decoder,
    "segformer/segformer_semantic_segmentation": segformer,
    "flux/model": flux,
    "flux/auto_encoder, decoder": flux_decoder,
}


def report(name: str, command: list[str], folder: Path) -> bool:
    """Run a row, and print its outcome."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], check=False, cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = lines[-1] if lines else ""
    detail = last if done.returncode == 0 else (errors[-1] if errors else last)
    print(f"| {name} | {'runs' if done.returncode == 0 else 'fails'} | {seconds:.1f} s | {detail[:150]} |", flush=True)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--trainings", action="store_true", help="run the examples that train for minutes, too")
    parser.add_argument("--built", help="build one model in this process")
    arguments = parser.parse_args()
    checkout: Path = arguments.checkout.resolve()
    if arguments.built:
        from mithril_compat.running import redirect

        redirect(str(checkout))
        print(BUILT[arguments.built]())
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        blocks = re.findall(r"```python\n(.*?)```", (checkout / "README.md").read_text(), re.DOTALL)
        for number, block in enumerate(blocks, 1):
            script = Path(folder) / f"block{number}.py"
            script.write_text(block)
            rows.append(report(f"README, block {number}", ["-m", "mithril_compat", str(script)], Path(folder)))
    examples = checkout / "examples/model_api"
    for script in sorted(examples.glob("*.py")):
        if arguments.trainings or script.stem not in TRAININGS:
            rows.append(report(f"model_api/{script.stem}", ["-m", "mithril_compat", script.name], examples))
    for name in BUILT:
        rows.append(report(name, [str(Path(__file__).resolve()), str(checkout), "--built", name], checkout))
    print(f"{sum(rows)} of {len(rows)} run")


if __name__ == "__main__":
    main()
