"""Arena planner: results reuse the buffers of dead operands, other buffers reuse free space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mithril.backend import ALIGNMENT, Buffer, Strategy, find_strategy, peak_bytes
from mithril_ggml.program.program_builder import ProgramBuilder, Step
from mithril_ggml.program.strided_tensor import Storage, Tensor


@dataclass(frozen=True)
class Plan:
    """Bytes of a program: the arena, the arena without reuse, and the largest live set."""

    size: int
    total: int
    peak: int
    in_place: int


def plan(draft: ProgramBuilder, outputs: Sequence[Tensor], staged: Sequence[Tensor], strategy: str | Strategy) -> Plan:
    """Give every planned storage its offset. Outputs live to the end, staged inputs from the start."""
    last = len(draft.steps)
    for t in outputs:
        t.storage.end = last
    for t in staged:
        t.storage.start = 0
        t.storage.end = max(t.storage.end, 0)
    in_place = sum(_reuse_operand_buffer(step, index) for index, step in enumerate(draft.steps))
    alive = [s for s in draft.storages if s.role == "planned" and s.merged is None and s.start >= 0 and s.size]
    buffers = [Buffer([], _aligned(s.size), s.start, s.end) for s in alive]
    find_strategy(strategy)(buffers)
    for storage, buffer in zip(alive, buffers):
        storage.offset = buffer.offset
    return Plan(
        size=max((b.offset + b.size for b in buffers), default=0),
        total=sum(_aligned(s.size) for s in draft.storages if s.role == "planned" and s.start >= 0),
        peak=peak_bytes(buffers, last),
        in_place=in_place,
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _reuse_operand_buffer(step: Step, index: int) -> bool:
    """Store the result in the buffer of an operand without later uses; return whether that succeeded."""
    if not step.donors or len(step.writes) != 1:
        return False
    result = step.writes[0]
    storage = result.storage
    if storage.role != "planned" or storage.start != index or storage.merged is not None or not result.covers_storage:
        return False
    for donor in step.donors:
        root = donor.storage.root
        # Dead after this step, and of equal size, since the merged storage has the lifetime of both.
        fits = root.role == "planned" and root is not storage and root.end == index and root.size == storage.size
        if fits and donor.covers_storage and _only_view(donor, step, root):
            storage.merged = root
            root.end = storage.end
            return True
    return False


def _only_view(donor: Tensor, step: Step, root: Storage) -> bool:
    """Whether the step reads the donor's memory only as the donor does."""
    return all(t.storage.root is not root or t.place == donor.place for t in step.reads)
