"""TensorBoard's event files: scalars as protocol buffers in records with checksums."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # of CRC-32C


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C of the data, rotated as the record format requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _field(number: int, data: bytes) -> bytes:
    """Encode a field of bytes, a string, or a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def event(step: int, scalars: dict[str, float], seconds: float) -> bytes:
    """Encode an ``Event`` with a summary of scalars."""
    values = [_field(1, _field(1, n.encode()) + b"\x15" + struct.pack("<f", x)) for n, x in scalars.items()]
    return b"\x09" + struct.pack("<d", seconds) + b"\x10" + _varint(step) + _field(5, b"".join(values))


class EventFile:
    """An event file in a folder, which TensorBoard shows as one run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1_000:017d}.{socket.gethostname()}.{os.getpid()}"
        self.file = (Path(folder) / name).open("ab")
        self._record(b"\x09" + struct.pack("<d", time.time()) + _field(3, b"brain.Event:2"))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Append scalars of a step."""
        self._record(event(step, values, time.time()))

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self.file.write(length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data)))

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()
