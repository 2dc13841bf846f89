"""``ml.generate``: sampling, stops, callbacks, reuse of the cache, speculation, beams."""

import numpy as np
import pytest
from checkpoints import read_record

import mithril as ml
from mithril.base import InputError

PROMPT = read_record("qwen3")["prompt"]


@pytest.fixture(scope="module")
def compiled(folders):
    return ml.compile(ml.from_pretrained(folders("qwen3"), cache=48), "numpy", inference=True)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampling_depends_on_the_seed_only(compiled, settings):
    first = ml.generate(compiled, PROMPT[:5], max_new_tokens=12, stop=(), seed=3, **settings)
    assert first == ml.generate(compiled, PROMPT[:5], max_new_tokens=12, stop=(), seed=3, **settings)
    options = {"max_new_tokens": 12, "stop": (), **settings}
    assert len({tuple(ml.generate(compiled, PROMPT[:5], seed=s, **options)) for s in range(4)}) > 1


def drawn(compiled, count, **settings):
    """Return the distribution of the next token, from ``count`` rows of one batch."""
    rows = ml.generate(compiled, [PROMPT[:5]] * count, max_new_tokens=1, stop=(), **settings)
    return np.bincount([row[0] for row in rows], minlength=97) / count


def probabilities(compiled):
    runner = compiled.runner()
    logits = runner({"input_ids": np.array([PROMPT[:5]], np.int32), "position": np.int32(0)})["logits"][0, -1]
    p = np.exp(logits - logits.max())
    return p / p.sum()


def test_sampling_follows_the_distribution(compiled):
    p = probabilities(compiled)
    assert np.abs(drawn(compiled, 400, temperature=1.0) - p).max() < 0.08
    order = np.argsort(-p)
    top = drawn(compiled, 200, temperature=1.0, top_k=3)
    assert set(np.flatnonzero(top)) == set(order[:3])
    below = order[: int(np.searchsorted(np.cumsum(p[order]), 0.3)) + 1]
    assert set(np.flatnonzero(drawn(compiled, 200, temperature=1.0, top_p=0.3))) <= set(below)
    probable = np.flatnonzero(p >= 0.5 * p.max())
    assert set(np.flatnonzero(drawn(compiled, 200, temperature=1.0, min_p=0.5))) <= set(probable)


def test_a_penalty_avoids_repetition(compiled):
    plain = ml.generate(compiled, PROMPT[:5], max_new_tokens=20, stop=())
    varied = ml.generate(compiled, PROMPT[:5], max_new_tokens=20, stop=(), repetition_penalty=2.0)
    assert len(set(varied)) > len(set(plain))


def test_stops_and_callbacks(compiled):
    tokens = ml.generate(compiled, PROMPT[:5], max_new_tokens=20, stop=())
    assert ml.generate(compiled, PROMPT[:5], max_new_tokens=20, stop=[tokens[1]]) == tokens[:2]
    assert ml.generate(compiled, PROMPT[:5], max_new_tokens=20, stop=[tokens[10:13]]) == tokens[:13]
    seen = []
    ended = ml.generate(
        compiled, PROMPT[:5], max_new_tokens=20, stop=(), on_token=lambda r, t: seen.append(t) or len(seen) == 4
    )
    assert ended == seen == tokens[:4]


def test_a_session_reuses_the_beginning_of_a_prompt(compiled):
    session = ml.Session(compiled)
    first = ml.generate(session, PROMPT[:13], max_new_tokens=6, stop=())
    read = []
    step = session.runner
    session.runner = lambda inputs: read.append(inputs["input_ids"].shape[1]) or step(inputs)
    session.runner.model, session.runner.get_shapes = step.model, step.get_shapes
    longer = [*PROMPT[:13], *first, 7]
    tokens = ml.generate(session, longer, max_new_tokens=4, stop=())
    assert sum(read[:1]) <= 8, "only the new end of the prompt is read"
    assert tokens == ml.generate(compiled, longer, max_new_tokens=4, stop=())


def test_a_full_cache_is_an_error_before_the_step(compiled):
    with pytest.raises(InputError, match="the cache holds 48 positions"):
        ml.generate(compiled, list(range(3, 52)), max_new_tokens=1)
    session = ml.Session(compiled)
    with pytest.raises(InputError, match="48"):
        ml.generate(session, PROMPT[:13], max_new_tokens=60, stop=())
    assert len(session.rows[0]) == 48, "the state of the last step is kept"


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("equal", [True, False], ids=["perfect draft", "other draft"])
def test_speculation_changes_nothing(compiled, folders, settings, equal):
    draft = compiled if equal else ml.compile(ml.from_pretrained(folders("llama2"), cache=48), "numpy", inference=True)
    plain = ml.generate(compiled, PROMPT[:9], max_new_tokens=20, stop=(), **settings)
    assert ml.generate(compiled, PROMPT[:9], max_new_tokens=20, stop=(), draft=draft, **settings) == plain


def test_a_perfect_draft_saves_steps(compiled):
    session = ml.Session(compiled)
    calls = []
    verify = session.verify
    session.verify = lambda rows: calls.append(len(rows[0])) or verify(rows)
    ml.generate(session, PROMPT[:9], max_new_tokens=21, stop=(), draft=compiled, draft_tokens=4)
    assert calls == [5, 5, 5, 5]


@pytest.mark.parametrize("family", ["llama2", "qwen3", "gpt2", "phi3", "mixtral"])
def test_beams(family, folders):
    """The text that transformers finds with as many beams, also if some texts end earlier."""
    record = read_record(family)
    compiled = ml.compile(ml.from_pretrained(folders(family), cache=48), "numpy", inference=True)
    expected = record["beams"]
    for stop, text in (((), expected["best"]), ([expected["stop"]], expected["ended"])):
        settings = {"max_new_tokens": 10, "stop": stop, "num_beams": 4}
        assert ml.generate(compiled, record["prompt"][:5], **settings) == text


def test_a_runner_forks_and_resets(compiled):
    runner = compiled.runner()
    tokens = np.array([PROMPT[:4], PROMPT[4:8]], np.int32)
    runner({"input_ids": tokens, "position": np.int32(0)})
    other = runner.fork([1, 1, 0])
    step = {"input_ids": np.full((2, 1), 9, np.int32), "position": np.int32(4)}
    expected = runner(step)["logits"]
    again = other({**step, "input_ids": np.full((3, 1), 9, np.int32)})["logits"]
    np.testing.assert_allclose(again, expected[[1, 1, 0]], atol=1e-6)
    runner.reset()
    assert runner.state is None
    with pytest.raises(InputError, match="no row 5"):
        other.fork([5])


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[1], "a"]},
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_p": 0.0},
        {"num_beams": 0},
        {"num_beams": 2, "temperature": 1.0},
        {"max_new_tokens": 0},
        {"stop": [[]]},
    ],
    ids=str,
)
def test_wrong_arguments(compiled, arguments):
    with pytest.raises(InputError):
        ml.generate(compiled, **{"prompt": [5, 6], **arguments})


def test_a_model_without_a_cache(folders):
    plain = ml.compile(ml.from_pretrained(folders("qwen3")), "numpy", inference=True)
    with pytest.raises(InputError, match="cache=1024"):
        ml.generate(plain, [5, 6])
