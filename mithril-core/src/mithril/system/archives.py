"""Zip archives whose content costs no more memory than the size of the file permits."""

from __future__ import annotations

import os
import zipfile

from mithril.base import check_memory

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # Python bounds the memory of these while it reads them


def check_archive(archive: zipfile.ZipFile, size: int, name: str | os.PathLike[str]) -> None:
    """Raise InputError if the members that are compressed, together, expand too much, ValueError for other members."""
    for info in archive.infolist():
        if info.compress_type not in METHODS or info.flag_bits & 1:
            raise ValueError(f"'{info.filename}' is encrypted, or compressed by another method than deflate")
        if info.compress_size > size or (info.compress_type == zipfile.ZIP_STORED and info.file_size > size):
            raise ValueError(f"'{info.filename}' claims {info.file_size} bytes in a file of {size}")
    expanded = sum(i.file_size for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED)
    check_memory(expanded, size, f"the compressed content of '{os.fspath(name)}'")
