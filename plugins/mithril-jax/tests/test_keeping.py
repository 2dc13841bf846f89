"""``cache=True``: a later process loads the programs that XLA compiled in an earlier one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model

CODE = """
    import sys
    import jax, numpy as np
    import mithril as ml
    from mithril.models import Linear, Model

    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
    model = Model()
    model += Linear(4)
    compiled = ml.compile(model, "jax", shapes={"input": [None, 8]}, cache=True, cache_dir=sys.argv[1])
    params = compiled.randomize_params(0)
    for rows in (2, 3, 2):
        x = np.ones((rows, 8), np.float32)
        y = compiled.evaluate(params, {"input": x})["output"]
        compiled.evaluate(params, {"input": x}, np.ones((rows, 4), np.float32))
    print(sum(hits), float(y.sum()))
"""


def in_a_process(folder):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_a_second_process_compiles_nothing(tmp_path):
    first, second = in_a_process(tmp_path), in_a_process(tmp_path)
    assert (first[0], second[0]) == ("0", "4")
    assert first[1] == second[1]


def test_settings_of_jax_are_restored(tmp_path):
    model = Model()
    model += Linear(3)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, n) for n in names]
    compiled = ml.compile(model, "jax", shapes={"input": [2, 5]}, cache=True, cache_dir=str(tmp_path))
    compiled.evaluate(compiled.randomize_params(0), {"input": np.ones((2, 5), np.float32)})
    assert [getattr(jax.config, n) for n in names] == before
    with pytest.raises(ml.InputError):
        compiled.evaluate(compiled.randomize_params(0), {"input": np.ones((3, 5), np.float32)})
