"""``ml.push_to_hub``: a folder, or the export of a pretrained model, as a repository of Hugging Face."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from mithril.backend import checked
from mithril.compiler import CompiledModel
from mithril.graph import BackendError, InputError, PluginError
from mithril_hub.checkpoint.folder import REPOSITORY
from mithril_hub.checkpoint.writing import export

CARD = """---
tags:
- mithril
---

# {title}

mithril runs this model on PyTorch, JAX, MLX and NumPy, as a C program, and by GGML:

```python
import mithril as ml

model = ml.from_pretrained("{repository}")
compiled = ml.compile(model, "numpy", inference=True)
```
"""


@checked()
def push_to_hub(
    source: CompiledModel | str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    message: str = "Upload a model",
) -> str:
    """Upload a folder, or a compiled model of ``ml.from_pretrained``, and return the address of the repository.

    The repository ``owner/name`` is created if there is none. All files of the folder but hidden ones are one commit;
    a model card is added if the folder has no ``README.md``. The token is that of ``hf auth login`` or ``HF_TOKEN``.
    """
    if not REPOSITORY.fullmatch(repository):
        raise InputError(f"'{repository}' is not the name of a repository", hint="pass 'owner/name'")
    with tempfile.TemporaryDirectory() as temporary:
        folder = export(source, Path(temporary) / "model").path if isinstance(source, CompiledModel) else Path(source)
        return _uploaded(_files(folder, repository), repository, private, message)


def _files(folder: Path, repository: str) -> dict[str, Path | bytes]:
    """Return the files of a folder by their paths in the repository, with a model card."""
    if not folder.is_dir():
        raise InputError(f"there is no folder '{folder}'", hint="pass a folder, or a compiled model")
    names = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    shown = {name.as_posix(): p for name, p in names.items() if not any(part.startswith(".") for part in name.parts)}
    if not shown:
        raise InputError(f"the folder '{folder}' has no files")
    card = CARD.format(title=repository.rpartition("/")[2], repository=repository)
    return {"README.md": card.encode(), **shown}


def _uploaded(contents: dict[str, Path | bytes], repository: str, private: bool, message: str) -> str:
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise PluginError(
            "huggingface_hub, which uploads repositories, is not installed",
            facts=[str(error)],
            hint="pip install 'mithril-hub[download]'",
        ) from None
    operations: list[Any] = [hub.CommitOperationAdd(name, content) for name, content in contents.items()]
    try:
        address = hub.HfApi().create_repo(repository, private=private, exist_ok=True)
        hub.HfApi().create_commit(repository, operations, commit_message=message)
    except Exception as error:  # errors of several network libraries
        text = str(error).strip() or "no message"
        raise BackendError(
            f"'{repository}' was not uploaded",
            facts=[f"{type(error).__name__}: {text.splitlines()[0][:300]}"],
            hint="hf auth login, or HF_TOKEN=..., with a token that may write to this repository",
        ) from None
    return str(address)
