"""Runs a row and judges it: the results of the reference, or a refusal that the feature model declares."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

import mithril as ml
from mithril import plugins

from . import processes, third_party
from .model import PLAIN, Case, Excluded, Known, Refused, Row, limits, make
from .modes import MODES, Arrays, Wrong, plain, short

EXACT = 1e-3  # tolerances of 32 bits are smaller


@dataclass(frozen=True)
class Verdict:
    """``kind`` is passed, refused, missing, known or failed; ``text`` says why."""

    kind: str
    text: str = ""


def judge(row: Row, shared: Path | None = None) -> Verdict:
    """Run a row in a folder of its own; ``shared`` is that of all processes of a mesh, which run the same row."""
    applicable = limits(row)
    for kind, name in ((Excluded, "excluded"), (Known, "known")):
        if reasons := [limit.reason for limit in applicable if isinstance(limit, kind)]:
            return Verdict(name, reasons[0])
    if row["engine"] not in plugins.backends():
        return Verdict("missing", f"{row['engine']} is not installed")
    if row["engine"] == "torch" and row["mesh"] != "none" and shared is None:
        return processes.judge(row)
    refusals = [limit for limit in applicable if isinstance(limit, Refused)]
    with workplace() as folder, np.errstate(all="ignore"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            verdict = compare(row, folder, shared or folder)
        except ml.MithrilError as error:
            verdict = refused(error, refusals)
        except ImportError as error:
            verdict = Verdict("missing", str(error))
        except Wrong as error:
            verdict = Verdict("failed", str(error))
        except Exception as error:
            verdict = Verdict("failed", f"a foreign exception, {type(error).__name__}: {error}")
        else:
            if refusals:
                verdict = Verdict("failed", f"works, but is declared as refused: {refusals[0].reason}")
        left = [str(path.relative_to(folder)) for name in ("here", "tmp") for path in (folder / name).glob("*")]
        left = [name for name in left if "torchinductor" not in name]  # the cache of torch.compile, which PyTorch owns
    foreign = [w for w in caught if not type_is_ours(w.category) and "mithril" not in str(w.filename)]
    foreign = [w for w in foreign if "FSDP2-wrapped module" not in str(w.message)]  # which mithril-torch ignores
    if verdict.kind == "passed" and foreign:
        return Verdict("failed", f"a foreign warning, {foreign[0].category.__name__}: {foreign[0].message}")
    if verdict.kind == "passed" and left:
        return Verdict("failed", f"leaves on disk: {', '.join(left)}")
    return verdict


def type_is_ours(kind: type) -> bool:
    return kind.__module__.startswith("mithril")


def refused(error: ml.MithrilError, refusals: list[Refused]) -> Verdict:
    """Accept a declared refusal whose text names both features and a remedy."""
    text = str(error)
    if not refusals:
        return Verdict("failed", f"a refusal that is not declared, {type(error).__name__}: {text}")
    if not any(all(word in text for word in refusal.words) for refusal in refusals):
        return Verdict("failed", f"the refusal lacks one of the words {refusals[0].words}: {text}")
    if not error.hint:
        return Verdict("failed", f"the refusal names no remedy: {text}")
    return Verdict("refused", text)


@contextmanager
def workplace() -> Iterator[Path]:
    """Make a folder for the files of a row, an empty current folder, and an empty folder for temporary files."""
    before, temporary = Path.cwd(), tempfile.tempdir
    with tempfile.TemporaryDirectory() as name:
        for folder in ("here", "tmp"):
            (Path(name) / folder).mkdir()
        os.chdir(Path(name) / "here")
        tempfile.tempdir = str(Path(name) / "tmp")
        try:
            yield Path(name)
        finally:
            third_party.remove_operation()
            third_party.remove_lowerings()
            os.chdir(before)
            tempfile.tempdir = temporary


def reference(row: Row, folder: Path, shared: Path) -> Case:
    """Return the same row on NumPy at level none, in double precision where the model takes it."""
    # The reference of generation reads each text again, without a cache.
    mode = {"generate": "to_llama"}.get(row["mode"], row["mode"])
    case = make({**row, **PLAIN, "mode": mode}, folder, shared)
    case.rows, case.length = sizes_of(row, folder)
    case.double = row["source"] in ("layers", "sequential", "functional", "json") and row["network"] not in (
        "tied",
        "experts",
    )  # experts are routed in float32
    return case


def sizes_of(row: Row, folder: Path) -> tuple[int, int]:
    from .model import value

    case = Case(row, folder, folder)
    value("sizes", row["sizes"]).apply(case)
    return case.rows, case.length


def compare(row: Row, folder: Path, shared: Path) -> Verdict:
    plain_case = reference(row, folder, shared)
    plain_compiled = plain_case.compile(shapes={plain_case.input: plain_case.sized(4)})
    params = moved(plain_compiled.randomize_params(seed=0))
    plain_case.params = params
    plain_case.target = tuple(plain_compiled.get_shapes()[plain_case.output])[1:]
    case = make(row, folder, shared, params)
    case.target = plain_case.target
    mode = MODES[row["mode"]]
    results = mode.run(case, params)
    third_party.remove_lowerings()  # the reference has none
    for field in ("seen", "keeps_state", "rounded", "tolerance"):
        setattr(plain_case, field, getattr(case, field))
    expected = mode.expect(plain_case, params)
    return difference(results, expected, case.tolerance)


def moved(params: Mapping[str, object]) -> Arrays:
    """Return parameters without zeros and symmetries, the same for each name, which every precision represents."""
    values = plain(params)
    return {
        name: short(x + 0.3 * np.random.default_rng(crc32(name.encode())).normal(size=x.shape))
        for name, x in values.items()
    }


def difference(results: Arrays, expected: Arrays, tolerance: float) -> Verdict:
    """Compare each array relative to its largest element; gradients of 16 bits, whose terms cancel, to the largest.

    These round in the forward and in the backward pass, hence the factor 2.
    """
    if set(results) != set(expected):
        return Verdict("failed", f"returns {sorted(results)}, expected are {sorted(expected)}")
    largest = max((float(np.abs(x).max(initial=0)) for n, x in expected.items() if n.startswith("gradient")), default=0)
    for name, right in expected.items():
        result = results[name]
        if result.shape != right.shape:
            return Verdict("failed", f"{name} has shape {result.shape}, expected is {right.shape}")
        is_short = tolerance > EXACT and name.startswith("gradient")
        scale = max(1.0, 2 * largest if is_short else float(np.abs(right).max(initial=0)))
        if result.size and not (error := float(np.abs(result - right).max())) <= tolerance * scale:
            return Verdict("failed", f"{name} differs by {error:.3g} of {scale:.3g}, more than {tolerance:g} of it")
    return Verdict("passed")
