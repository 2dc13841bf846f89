"""Analysis of a compiled program: memory per device, operations, bytes, collectives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from mithril_tpu.aot.serialized_hlo import instructions

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_CALL = re.compile(r"=\s+(?P<shape>\(.*?\)|\S+)\s+(?P<kind>" + "|".join(KINDS) + r")(?P<start>-start)?\(")
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\w+)"')  # of an exchange that several fusions perform
_ARRAY = re.compile(r"(?P<dtype>pred|bf16|[a-z]+\d+\w*)\[(?P<dims>[\d,]*)\]")
_BITS = {"pred": 8}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device; ``peak`` is the memory that the device must have."""

    arguments: int
    outputs: int
    aliased: int  # outputs in buffers of arguments
    temporaries: int
    code: int
    peak: int


@dataclass(frozen=True, slots=True)
class Collective:
    """The number of collectives of one kind, and the bytes of their results on one device."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """The figures of one device; None if the compiler does not report them."""

    memory: MemoryUse
    flops: float | None
    bytes_accessed: float | None
    seconds: float | None  # the compiler's own estimate
    collectives: Mapping[str, Collective] | None  # empty if there are none; None if they are unknown

    def as_dict(self) -> dict[str, Any]:
        """Return the analysis as JSON-serializable data."""
        return asdict(self)


def memory(compiled: Any) -> MemoryUse:
    """Return the memory use of a ``jax.stages.Compiled``."""
    stats = compiled.memory_analysis()
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )


def analyze(compiled: Any, hlo: str | None) -> Analysis:
    """Analyze a ``jax.stages.Compiled`` and its HLO text; without the text its serialized form is read."""
    cost = compiled.cost_analysis() or {}
    if isinstance(cost, list):
        cost = cost[0] if cost else {}
    seconds = cost.get("optimal_seconds")
    return Analysis(
        memory(compiled),
        _positive(cost.get("flops")),
        _positive(cost.get("bytes accessed")),
        # instructions without a cost count -1 each, so that a negative sum is meaningless
        _positive(seconds),
        collectives(hlo) if hlo is not None else serialized_collectives(compiled.runtime_executable().serialize()),
    )


def _positive(x: float | None) -> float | None:
    return float(x) if x is not None and x > 0 else None


def collectives(hlo: str) -> dict[str, Collective]:
    """Count the collectives in an optimized program's HLO text; one in a loop body counts once."""
    return _counted(_calls(hlo))


def serialized_collectives(serialized: bytes) -> dict[str, Collective] | None:
    """Count the collectives of a serialized program; None if its format is unknown."""
    module = instructions(serialized)
    if module is None:
        return None
    calls = [(i.opcode.removesuffix("-start"), i.opcode.endswith("-start"), i) for i in module]
    return _counted(
        (kind, _transferred([prod(shape) * bits // 8 for bits, shape in i.arrays], asynchronous=start), i.chain)
        for kind, start, i in calls
        if kind in KINDS
    )


def _counted(calls: Iterable[tuple[str, int, Any]]) -> dict[str, Collective]:
    """Count calls of a kind and a size; those of the same chain are parts of one, which XLA fuses with other work."""
    counts: dict[str, list[int]] = {}
    chains = set()
    for kind, size, chain in calls:
        if chain is None or (kind, chain) not in chains:
            chains.add((kind, chain))
            counts.setdefault(kind, []).append(size)
    return {kind: Collective(len(counts[kind]), sum(counts[kind])) for kind in KINDS if kind in counts}


def _transferred(sizes: list[int], *, asynchronous: bool) -> int:
    """Return the bytes of a call; the largest result of an asynchronous start is the data transferred."""
    return max(sizes, default=0) if asynchronous else sum(sizes)


def _calls(hlo: str) -> Iterator[tuple[str, int, Any]]:
    for line in hlo.splitlines():
        match = _CALL.search(line)
        if match is None:
            continue
        sizes = [_size(m) for m in _ARRAY.finditer(match["shape"])]
        chain = _CHAIN.search(line)
        yield match["kind"], _transferred(sizes, asynchronous=bool(match["start"])), chain and chain.groups()


def _size(array: re.Match[str]) -> int:
    dtype = array["dtype"]
    bits = _BITS.get(dtype) or int(next(iter(re.findall(r"\d+", dtype)), "8"))
    count = 1
    for n in array["dims"].split(","):
        count *= int(n) if n else 1
    return count * bits // 8
