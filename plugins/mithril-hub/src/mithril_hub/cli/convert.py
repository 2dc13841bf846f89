"""``mithril convert``: pretrained models from one file format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mithril.graph import InputError, UnsupportedError

PICKLES = (".bin", ".pt", ".pth")


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--quantize", help="The type of matrices in a GGUF file, such as q8_0 or q4_k.")
@click.option("--dtype", default="float32", show_default=True, help="The dtype of the parameters.")
def convert(source: str, target: str, quantize: str | None, dtype: str) -> None:
    """Write SOURCE as TARGET.

    SOURCE is a folder or repository of Hugging Face and TARGET a file such as model.gguf, or SOURCE is a pickle of
    PyTorch (.bin, .pt) and TARGET a .safetensors file.
    """
    path = Path(target)
    if Path(source).suffix in PICKLES:
        if path.suffix != ".safetensors":
            raise InputError(f"'{source}' can be converted to a .safetensors file only, not to '{target}'")
        unpickle(Path(source), path)
    elif path.suffix == ".gguf":
        to_gguf(source, path, quantize, dtype)
    else:
        raise InputError(f"'{target}' has no format that models are converted to", facts=["accepted: .gguf"])
    click.echo(f"{target}: {path.stat().st_size / 2**20:.1f} MiB")


def to_gguf(source: str, target: Path, quantize: str | None, dtype: str) -> None:
    """Write a checkpoint as a file for llama.cpp."""
    import mithril as ml
    from mithril_hub.gguf.writing import architecture_of

    model = ml.from_pretrained(source, dtype=dtype)
    name = architecture_of(model)
    compiled = ml.compile(model, "numpy", inference=True)
    compiled.export(target, architecture=name, **({"quantize": quantize} if quantize else {}))


def unpickle(source: Path, target: Path) -> None:
    """Write the tensors of a pickle as safetensors; PyTorch reads the tensors of it and nothing that runs."""
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            f"'{source}' is a pickle of PyTorch, which is not installed", hint="pip install torch"
        ) from None
    from mithril.compiler import save_file

    try:
        content: Any = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch have errors of their own
        raise InputError(
            f"'{source}' is not a file of tensors", facts=[f"{type(error).__name__}: {error}".splitlines()[0][:300]]
        ) from None
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(t, torch.Tensor) for t in content.values()):
        raise InputError(f"'{source}' holds other objects than tensors", hint="save model.state_dict() with torch.save")
    from mithril.backend import to_numpy

    save_file({str(name): to_numpy(tensor) for name, tensor in content.items()}, target, {"format": "pt"})
