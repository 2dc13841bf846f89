"""Samples from tar files, in the layout of WebDataset: the files of a sample follow each other and share a key."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any
from zlib import crc32

import numpy as np

from mithril.backend import CheckedType, Least
from mithril.graph import InputError, PluginError
from mithril_train.data.shuffle import permutation

Decoder = Callable[[bytes], Any]


def _image(data: bytes) -> Any:
    """Decode an image to float32 [C, H, W] from 0 to 1."""
    try:
        from PIL import Image
    except ImportError:
        raise PluginError("images need Pillow", hint='pip install "mithril-train[images]"') from None
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return np.array(pixels.transpose(2, 0, 1), np.float32, order="C") / 255


DECODERS: Mapping[str, Decoder] = {
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
    "cls": lambda data: np.int32(int(data)),
    "json": json.loads,
    "txt": bytes.decode,
    **dict.fromkeys(("jpg", "jpeg", "png"), _image),
}


class TarStream(metaclass=CheckedType):
    """Samples of tar files as dictionaries: the files ``0001.image.png`` and ``0001.target.cls`` are one sample.

    ``paths`` are files, or a pattern such as ``"train-{000..127}.tar"``. Columns are named after the middle part of a
    name (``image``, ``target``), else after its extension. ``decode`` adds or replaces decoders by extension; files of
    other extensions are bytes. ``shuffle`` is the size of a buffer from which samples are drawn; the order of the
    files is shuffled as well. It depends on ``seed`` and the epoch only.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        decode: Mapping[str, Decoder] | None = None,
        shuffle: Annotated[int, Least(0)] = 0,
        seed: int = 0,
    ) -> None:
        self.paths = expanded(paths)
        self.decoders = {**DECODERS, **(decode or {})}
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self.epoch = epoch

    def fingerprint(self) -> int:
        """Return a checksum of the names of the files and their order, which a checkpoint compares on resume."""
        names = [os.path.basename(path) for path in self.paths]
        return crc32(json.dumps([names, self.shuffle, self.seed]).encode())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.shuffle:
            return self._samples(self.paths)
        order = permutation(len(self.paths), self.seed, self.epoch)
        return self._shuffled(self._samples([self.paths[k] for k in order]))

    def _shuffled(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        rng = np.random.Generator(np.random.Philox(key=np.array([self.seed & 0xFFFFFFFF, self.epoch], np.uint64)))
        waiting: list[dict[str, Any]] = []
        for sample in samples:
            if len(waiting) < self.shuffle:
                waiting.append(sample)
                continue
            k = int(rng.random() * len(waiting))
            waiting[k], sample = sample, waiting[k]
            yield sample
        yield from (waiting[int(k)] for k in permutation(len(waiting), self.seed, self.epoch))

    def _samples(self, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
        for path in paths:
            key, sample = "", dict[str, Any]()
            for name, data in _files(path):
                folder, _, file = name.rpartition("/")
                stem, _, extension = file.partition(".")
                if f"{folder}/{stem}" != key and sample:
                    yield sample
                    sample = {}
                key = f"{folder}/{stem}"
                column, _, kind = extension.rpartition(".")
                sample[column or kind] = self._decoded(path, name, kind.lower(), data)
            if sample:
                yield sample

    def _decoded(self, path: str, name: str, kind: str, data: bytes) -> Any:
        decoder = self.decoders.get(kind)
        try:
            return data if decoder is None else decoder(data)
        except PluginError:
            raise
        except Exception as error:
            raise InputError(f"'{name}' of '{path}' cannot be decoded as {kind}: {error}") from error


def _files(path: str) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None
                    yield member.name.removeprefix("./"), file.read()
    except FileNotFoundError:
        raise InputError(f"there is no file '{path}'") from None
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise InputError(f"'{path}' is not a complete tar file: {error}") from None


def expanded(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the paths of a pattern with ranges in braces, or those of a list."""
    if not isinstance(paths, (str, os.PathLike)):
        return [path for p in paths for path in expanded(p)]
    text = os.fspath(paths)
    match = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if match is None:
        return [text]
    first, last = match.groups()
    numbers = [str(k).zfill(len(first)) for k in range(int(first), int(last) + 1)]
    return [path for n in numbers for path in expanded(text[: match.start()] + n + text[match.end() :])]
