"""The code on the page about writing models runs."""

import importlib.util
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
spec = importlib.util.spec_from_file_location("model_test_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)


def test_every_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {}
    for block in (b for b in blocks if "ml.compile(" not in b):  # tests/test_guide.py runs those that need a backend
        exec(compile(block, str(PAGE), "exec"), names)
    assert "conv2d (Conv2d)" in capsys.readouterr().out
    out, params = helpers.run(names["Gated"](4), {"input": helpers.f32(2, 3)})
    assert out["output"].shape == (2, 4)
    assert set(params) == {"norm.weight", "norm.bias", "weight"}
