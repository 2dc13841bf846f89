# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""A profiler that watches operations, a command, an observer and a method of compiled models."""

from collections import Counter
from pathlib import Path

import click

import mithril as ml
from mithril.compiler import watch


class Watch:
    """Seconds of operations by layer."""

    stepped = True

    def __init__(self):
        self.rows = []

    def add(self, section, name, start, seconds, layer="", kind="", **info):
        if kind == "operation":
            self.rows.append((name, seconds, info["flops"], info["bytes"]))

    def __enter__(self):
        self._watching = watch(self)
        self._watching.__enter__()
        return self

    def __exit__(self, *failure):
        return self._watching.__exit__(*failure)

    def summary(self):
        return "\n".join(f"{name}: {flops:g} flops" for name, _, flops, _ in self.rows) or "no operations"


class Observer:
    """Keep stages and passes."""

    def __init__(self, seen):
        self.seen = seen

    def stage(self, name, graph, start, seconds):
        self.seen.append(("stage", name, graph is not None))

    def passed(self, name, before, after, start, seconds):
        self.seen.append(("passed", name, after is before))

    def built(self, program):
        self.seen.append(("built",))

    def end(self, result, error):
        self.seen.append(("ended", error is None))


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def count(path):
    """Count the operations of the graph in PATH."""
    counts = Counter(node.op.name for node in ml.parse(path.read_text(encoding="utf-8")).nodes)
    click.echo("\n".join(f"{name}: {number}" for name, number in sorted(counts.items())))


def size(compiled):
    return sum(array.size for array in compiled.params.values())
