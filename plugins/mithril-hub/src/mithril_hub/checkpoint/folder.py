"""Folders of Hugging Face checkpoints: where they are, and the files in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mithril.graph import InputError, parsed_json
from mithril.system import files
from mithril_hub.checkpoint.safetensors_file import Stored, read_safetensors

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # never a file that could hold code
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def locate(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: itself, else the local copy of a repository, else download it."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    text = os.fspath(name)
    if not REPOSITORY.fullmatch(text):
        raise InputError(
            f"there is no folder '{text}'",
            hint="pass a folder with config.json and model.safetensors, or a repository such as 'owner/name'",
        )
    return _in_cache(text, revision) or _downloaded(text, revision)


def _in_cache(repository: str, revision: str | None) -> Path | None:
    """Return the snapshot of a repository in the cache of huggingface_hub, which need not be installed."""
    home = os.environ.get("HF_HOME") or os.path.join(Path.home(), ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    folder = cache / f"models--{repository.replace('/', '--')}"
    branch = revision or "main"
    reference = folder / "refs" / branch
    commit = reference.read_text().strip() if reference.is_file() else branch
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch(r"[\w.-]+", commit) and (snapshot / "config.json").is_file() else None


def _downloaded(repository: str, revision: str | None) -> Path:
    advice = f"huggingface-cli download {repository}, or copy its files to a folder and pass that"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"'{repository}' is neither a folder nor in the local cache of Hugging Face",
            facts=["huggingface_hub, which downloads repositories, is not installed"],
            hint=f"pip install 'mithril-hub[download]', or elsewhere: {advice}",
        ) from None
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=FILES))
    except Exception as error:  # errors of several network libraries
        raise InputError(
            f"'{repository}' is not in the local cache of Hugging Face, and cannot be downloaded",
            facts=[f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"],
            hint=f"where there is a network: {advice}",
        ) from None


def read_text(folder: Path, name: str) -> str:
    """Return the text of a file of a checkpoint."""
    path = files.inside(folder, name)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"'{folder}' has no {name}", hint="pass the folder of a checkpoint") from None
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be read", facts=[str(error)[:200]]) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    content = parsed_json(read_text(path.parent, path.name), f"'{path}'")
    if not isinstance(content, dict):
        raise InputError(f"'{path}' is not a JSON object")
    return content


def tensors_of(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint in one file or in several with an index."""
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
            raise InputError(f"'{folder / INDEX}' has no weight_map")
        strange = next((p for p in places.values() if Path(p).name != p), None)
        if strange is not None:
            raise InputError(f"'{folder / INDEX}' names the file {strange!r} outside of its folder")
        parts = {name: read_safetensors(files.inside(folder, name)) for name in sorted(set(places.values()))}
        lost = next((n for n, p in places.items() if n not in parts[p]), None)
        if lost is not None:
            raise InputError(f"'{folder / places[lost]}' lacks the tensor '{lost}', which the index places there")
        return {name: parts[place][name] for name, place in places.items()}
    if (folder / SINGLE).is_file():
        return read_safetensors(files.inside(folder, SINGLE))
    raise _without_weights(folder)


def _without_weights(folder: Path) -> InputError:
    pickled = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in folder.glob(suffix))
    if not pickled:
        return InputError(f"'{folder}' has no model.safetensors")
    return InputError(
        f"'{folder}' has weights only in {pickled[0]}, a pickle, which can run code when it is read",
        hint=f"convert it once: mithril convert {folder / pickled[0]} {folder / SINGLE}",
    )


def pooling_of(folder: Path | None) -> str:
    """Return how a checkpoint of sentence-transformers pools: "mean", "cls", other modes, or "" if it does not say."""
    path = None if folder is None else folder / "1_Pooling" / "config.json"
    if path is None or not path.is_file():
        return ""
    used = [name.removeprefix("pooling_mode_") for name, is_used in read_json(path).items() if is_used is True]
    names = {"mean_tokens": "mean", "cls_token": "cls", "include_prompt": ""}
    return " and ".join(names.get(mode, mode) for mode in used if names.get(mode, mode))
