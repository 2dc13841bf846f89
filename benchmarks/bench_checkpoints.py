"""Milliseconds for which a step waits for an asynchronous save of ``ml.Checkpoint``, by format of the checkpoint.

``python benchmarks/bench_checkpoints.py --engine jax``: two processes train 100 MB of parameters with Adam (300 MB of
arrays, sharded by ``--parallelism``) and save every fifth step: medians of the time on the clock and of the time of
computing, of the slower process. ``--memory`` measures the memory of a process instead: while it builds its arrays,
trains, ends ``fit``, and resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from rank_programs import outputs

WIDTH, LAYERS = 2048, 6
MODEL = f"""
    import json, time
    from mithril.models import MLP
    rows = numbers.standard_normal((160, {WIDTH}), dtype=np.float32)
    def large(**options):
        return ml.Trainer(
            MLP([{WIDTH}] * {LAYERS + 1}), ml.Adam(1e-4), loss="mse_loss", backend=backend(), progress=False,
            parallelism=sys.argv[3], **options,
        )
    def batches():
        return ml.DataLoader((rows, rows), 16)
"""
SAVES = """
    class Clock(ml.Callback):
        '''Note the time, and that of computing alone, before or after another callback at the end of steps.'''
        def __init__(self, prepare=lambda trainer: None):
            self.times, self.prepare = [], prepare
        def step_end(self, trainer, report):
            report["loss"]
            self.prepare(trainer)
            self.times.append((time.perf_counter(), time.thread_time()))
    saves = ml.Checkpoint(sys.argv[2], every=5, keep=1, format=sys.argv[4])
    saves.epoch_end = lambda trainer, row: None
    before = Clock(lambda trainer: trainer.steps % 5 or saves._finish(trainer))  # a save waits for the previous one
    after = Clock()
    large(callbacks=[before, saves, after]).fit(batches(), 2)
    say(json.dumps((np.array(after.times) - before.times)[4::5].T.tolist()))
"""
PEAKS = """
    import re
    from pathlib import Path
    def memory(kind):
        return int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 2**10
    def begin_peak():
        Path("/proc/self/clear_refs").write_text("5")
    small = trainer()
    small.fit(loader(), 1)  # engines initialize themselves
    begin_peak()
    start, peaks = memory("VmRSS"), []
    def note_peak():
        peaks.append(memory("VmHWM") - start)
        begin_peak()
"""
TRAIN = """
    class Steps(ml.Callback):
        def step_end(self, trainer, report):
            report["loss"]
            if trainer.steps in (1, 9):
                note_peak()
    t = large(callbacks=[Steps()])
    t.begin(next(iter(batches())))
    note_peak()
    t.fit(batches(), 1)
    note_peak()
    t.save(sys.argv[2])
    say(json.dumps(peaks))
"""
RESUME = """
    large().fit(batches(), 1, resume=sys.argv[2])
    note_peak()
    say(json.dumps(peaks))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["jax", "torch"], required=True)
    parser.add_argument("--formats", default="parts,dcp,orbax")
    parser.add_argument("--parallelism", choices=["fsdp", "pipeline"], default="fsdp")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.engine, arguments.parallelism)
        return
    for form in arguments.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results = run(Path(folder), arguments.engine, SAVES, arguments.parallelism, form)
        medians = [max(1e3 * statistics.median(times) for times in ranks) for ranks in zip(*results, strict=True)]
        print("|", " | ".join([arguments.engine, form, *(f"{median:.0f}" for median in medians)]), "|", flush=True)


def memory(engine: str, parallelism: str) -> None:
    """Print a row of the table of docs/many-devices.md: MiB of each process above its memory before."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that the system gets back each array that is freed
    with tempfile.TemporaryDirectory() as folder:
        trained, resumed = (run(Path(folder), engine, PEAKS + text, parallelism) for text in (TRAIN, RESUME))
    begin, _, steady, end = (max(values) for values in zip(*trained, strict=True))
    resume = max(peaks[0] for peaks in resumed)
    print("|", " | ".join([engine, parallelism, *(f"{peak:.0f}" for peak in (begin, steady, end, resume))]), "|")


def run(folder: Path, engine: str, text: str, *arguments: str) -> list[Any]:
    """Return the last line of each process."""
    return [
        json.loads(out.splitlines()[-1])
        for out in outputs(folder, engine, MODEL + text, str(folder / "run"), *arguments)
    ]


if __name__ == "__main__":
    main()
