"""``ml.generate``: sampling, stops, callbacks, reuse of the cache, speculation, beams."""

import numpy as np
import pytest
from checkpoints import read_record

import mithril as ml
from mithril.graph import InputError

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


@pytest.mark.parametrize("temperature", [1e-6, 1e-42, 5e-324])
def test_low_temperatures_take_the_most_probable_token(compiled, temperature):
    greedy = ml.generate(compiled, PROMPT[:5], max_new_tokens=6, stop=())
    drawn = {"temperature": temperature, "top_k": 9, "top_p": 0.9, "min_p": 0.1}
    assert ml.generate(compiled, PROMPT[:5], max_new_tokens=6, stop=(), **drawn) == greedy


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9}, {"num_beams": 2}], ids=str)
def test_undefined_logits_are_an_error(compiled, settings):
    params = {
        name: np.full_like(x, np.nan) if name.endswith("model.norm.weight") else x
        for name, x in compiled.params.items()
    }
    with pytest.raises(InputError, match="logits of row 0 are nan"):
        ml.generate(compiled.runner(params), PROMPT[:5], **settings)


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
    stop = [np.int64(tokens[1]), tuple(np.array(tokens[5:7]))]
    assert ml.generate(compiled, PROMPT[:5], max_new_tokens=20, stop=stop) == tokens[:2]
    options = {"max_new_tokens": 3, "stop": ()}
    assert ml.generate(compiled, PROMPT[:5], on_token=lambda r, t: np.True_, **options) == tokens[:1]
    assert ml.generate(compiled, PROMPT[:5], on_token=lambda r, t: 1, **options) == tokens[:3], "of a writing function"


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


def test_rows_of_a_batch_draw_the_numbers_of_their_prompt_alone(compiled):
    """Only prompts that occur more than once are continued differently."""
    prompts = [PROMPT[:5], PROMPT[:7], PROMPT[:5], PROMPT[2:6]]
    settings = {"max_new_tokens": 6, "stop": (), "temperature": 1.5, "seed": 4}
    rows = [ml.generate(compiled, prompt, **settings) for prompt in prompts]
    batch = ml.generate(compiled, prompts, **settings)
    assert [batch[n] == rows[n] for n in range(4)] == [True, True, False, True]
    draft = {"draft": compiled, "draft_tokens": 2}
    assert ml.generate(compiled, prompts, **settings, **draft) == batch


def test_each_row_of_a_session_needs_room_for_its_own_tokens_only(compiled):
    """Continue a long text next to a new one, each of which the cache holds; end one that fills it before another."""
    session = ml.Session(compiled)
    long = [*PROMPT[:20], *PROMPT[:20]]
    ml.generate(session, [long, PROMPT[:2]], max_new_tokens=1)
    prompts = [[*long, 5], PROMPT[:20]]
    expected = [ml.generate(compiled, p, max_new_tokens=3, stop=()) for p in prompts]
    assert ml.generate(session, prompts, max_new_tokens=3, stop=()) == expected
    full, short = [*long, *PROMPT[:8]], PROMPT[:5]
    (last,) = ml.generate(compiled, full, max_new_tokens=1, stop=())
    row = ml.generate(compiled, short, max_new_tokens=4, stop=())
    assert last not in row
    assert ml.generate(compiled, [full, short], max_new_tokens=4, stop=[last]) == [[last], row]


@pytest.mark.parametrize("family", ["longrope", "dynamic"])
def test_rotations_that_depend_on_the_length_are_those_of_the_text(family, folders):
    """Read a shorter text again after a longer one, and verify proposals up to the length of another rotation only."""
    prompt, options = read_record(family)["prompt"], {"max_new_tokens": 8, "stop": ()}
    compiled = ml.compile(ml.from_pretrained(folders(family), cache=48), "numpy", inference=True)
    expected = ml.generate(compiled, prompt[:12], **options)
    assert ml.generate(compiled, prompt[:12], **options, draft=compiled, draft_tokens=3) == expected
    session = ml.Session(compiled)
    for count in (20, 12, 20):
        assert ml.generate(session, prompt[:count], **options) == ml.generate(compiled, prompt[:count], **options)


def test_a_full_cache_is_an_error_before_the_step(compiled):
    with pytest.raises(InputError, match="the cache holds 48 positions"):
        ml.generate(compiled, list(range(3, 52)), max_new_tokens=1)
    session = ml.Session(compiled)
    with pytest.raises(InputError, match="48"):
        ml.generate(session, PROMPT[:13], max_new_tokens=60, stop=[[0] * 70])  # which could end in time
    assert len(session.rows[0]) == 48, "the state of the last step is kept"


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("equal", [True, False], ids=["perfect draft", "other draft"])
def test_speculation_changes_nothing(compiled, folders, settings, equal):
    draft = compiled if equal else ml.compile(ml.from_pretrained(folders("llama2"), cache=48), "numpy", inference=True)
    plain = ml.generate(compiled, PROMPT[:9], max_new_tokens=20, stop=(), **settings)
    assert ml.generate(compiled, PROMPT[:9], max_new_tokens=20, stop=(), draft=draft, **settings) == plain


def test_a_draft_has_a_cache_of_its_own(compiled):
    session, runner = ml.Session(compiled), compiled.runner()
    for model, draft in ((session, session), (runner, runner), (session, session.runner)):
        with pytest.raises(InputError, match="the draft has the cache of the model"):
            ml.generate(model, PROMPT[:5], draft=draft)


def test_proposals_end_at_tokens_that_one_model_does_not_know(compiled):
    """Accept vocabularies of different sizes: models of a family pad theirs differently."""

    def other(vocabulary):
        tokens, position = ml.IOKey("tokens", dtype="int32"), ml.IOKey("position", dtype="int32")
        x = ml.models.Embedding(vocabulary, 8)(tokens)
        x = ml.models.MultiHeadAttention(8, 2, causal=True, cache=48)(x, position)
        model = ml.Model.create(outputs={"scores": ml.models.Linear(vocabulary)(x)})
        small = ml.compile(model, "numpy", shapes={"tokens": [None, None], "position": []}, inference=True)
        return small.runner(small.randomize_params(0))

    for vocabulary, settings in ((60, {}), (300, {"temperature": 2.0, "seed": 1})):
        options = {"max_new_tokens": 12, "stop": (), **settings}
        expected = ml.generate(compiled, PROMPT[:9], **options)
        assert ml.generate(compiled, PROMPT[:9], draft=other(vocabulary), **options) == expected


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


def test_beams_end_where_all_candidates_end(compiled):
    """Find a text although the most probable tokens, or all of them, end it."""
    (best,) = ml.generate(compiled, PROMPT[:5], max_new_tokens=1, stop=())
    assert ml.generate(compiled, PROMPT[:5], max_new_tokens=4, stop=list(range(97)), num_beams=2) == [best]
    (logits,) = np.asarray(ml.Session(compiled).start([PROMPT[:5]]))[0]
    probable = [int(t) for t in np.argsort(-logits)[:5]]
    text = ml.generate(compiled, PROMPT[:5], max_new_tokens=4, stop=probable, num_beams=2)
    assert text[-1] in probable or len(text) == 4


def test_a_session_forks_rows_that_exist(compiled):
    session = ml.Session(compiled)
    for _ in range(2):
        with pytest.raises(InputError, match="there is no row 1 in a session"):
            session.fork([1])
        session.start([PROMPT[:5]])


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
        {"prompt": None},
        {"prompt": 5},
        {"prompt": "text"},
        {"prompt": [1.5]},
        {"prompt": [3, -1]},
        {"prompt": [3, 97]},
        {"prompt": [3, 2**40]},
        {"stop": [4.5]},
        {"stop": ["ab"]},
        {"draft_tokens": 0, "draft": True},
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


@pytest.mark.parametrize(
    ("prompt", "settings", "text"),
    [
        ([1] * 40, {"stop": ()}, "max_new_tokens=9, or ml.from_pretrained(folder, cache=104)"),
        ({"input_ids": [1, 2]}, {}, "prompt['input_ids']"),
        ([{"role": "user", "content": "hello"}], {}, "pass tokenizer.chat(messages)"),
        ([1], {"max_tokens": 3}, "write max_new_tokens="),
        ([1], {"backend": "jax"}, "compile the model for it"),
        ([1], {"stream": True}, "write on_token=function"),
    ],
)
def test_arguments_of_other_libraries_name_the_way_here(compiled, prompt, settings, text):
    with pytest.raises((InputError, ml.OptionError)) as caught:
        ml.generate(compiled, prompt, **settings)
    assert text in str(caught.value)
    with pytest.raises(ml.OptionError, match=r"hint: compile it: ml.compile\(ml.from_pretrained"):
        ml.generate(ml.models.Linear(3), prompt)


def test_the_last_token_needs_no_room(compiled):
    assert len(ml.generate(compiled, [1] * 40, stop=(), max_new_tokens=9)) == 9


def test_a_model_without_a_cache(folders):
    plain = ml.compile(ml.from_pretrained(folders("qwen3")), "numpy", inference=True)
    with pytest.raises(InputError, match="cache=1024"):
        ml.generate(plain, [5, 6])
