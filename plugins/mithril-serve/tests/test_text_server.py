"""The interface of OpenAI, by its official client: texts, streams, limits, cancellation, and hostile requests."""

import asyncio
import json
import queue
import socket
import threading
import time

import httpx2
import numpy as np
import openai
import pytest
from small_servers import Words, running, speaker

import mithril as ml
from mithril_serve.engine import Engine, Job
from mithril_serve.limits import Busy, Limits
from mithril_serve.serving import application

LIMITS = Limits(rows=3, queue=6, body_bytes=100_000, seconds=20)


@pytest.fixture(scope="module")
def url():
    app = application(speaker(), name="small", tokenizer=Words(), stop=[63], limits=LIMITS)
    with running(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def expected(prompt, count, **options):
    tokens = ml.generate(speaker(), Words().encode(prompt), max_new_tokens=count, stop=[63], **options)
    return tokens[:-1] if tokens[-1] == 63 else tokens


def complete(client, prompt, **options):
    return client.completions.create(model="small", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options})


def test_completions_are_those_of_generate(client):
    assert [m.id for m in client.models.list()] == ["small"] == [client.models.retrieve("small").id]
    answer = complete(client, "HELLO")
    assert answer.choices[0].token_ids == expected("HELLO", 8)
    assert answer.choices[0].text == Words().decode(expected("HELLO", 8))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    several = complete(client, [[8, 5], [1, 2, 3]], max_tokens=3)
    assert [c.token_ids for c in several.choices] == [expected("HE", 3), expected("ABC", 3)]
    drawn = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "max_tokens": 5}
    texts = complete(client, "HELLO", n=2, **drawn).choices
    settings = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    alike = ml.generate(speaker(), [Words().encode("HELLO")] * 2, max_new_tokens=5, stop=[63], **settings)
    assert [c.token_ids for c in texts] == alike


def test_streams_of_chats_have_all_pieces(client):
    options = {"model": "small", "messages": [{"role": "user", "content": "HELLO"}], "temperature": 0, "max_tokens": 6}
    answer = client.chat.completions.create(**options).choices[0].message.content
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(p.delta.content for p in pieces) == answer == Words().decode(expected("HELLO", 6))
    assert pieces[0].delta.role == "assistant" and pieces[-1].finish_reason == "length"
    assert stream[-1].usage.total_tokens == 11


def test_a_stop_string_ends_a_text_in_front_of_it(client):
    text = complete(client, "HELLO").choices[0].text
    stop = text[2:4]
    answer = complete(client, "HELLO", stop=[stop]).choices[0]
    stream = list(complete(client, "HELLO", stop=stop, stream=True))
    assert answer.text == text[: text.find(stop)] == "".join(chunk.choices[0].text for chunk in stream)
    assert answer.finish_reason == "stop" == stream[-1].choices[0].finish_reason


def test_requests_at_once_are_those_of_each_alone(client, url):
    prompts = ["A", "BC", "DEFGH", "IJ", "KLM", "NO"]
    lengths = [3, 20, 9, 14, 2, 11]
    results = {}

    def request(prompt, length):
        results[prompt] = complete(client, prompt, max_tokens=length).choices[0].token_ids

    threads = [threading.Thread(target=request, args=pair) for pair in zip(prompts, lengths, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {p: expected(p, n) for p, n in zip(prompts, lengths, strict=True)}
    assert "mithril_generated_tokens_total" in httpx2.get(f"{url}/metrics").text
    assert httpx2.get(f"{url}/health").json()["ready"]


def wait_until_idle(url):
    for _ in range(400):
        if "mithril_active_texts 0\n" in httpx2.get(f"{url}/metrics").text:
            return
        time.sleep(0.02)
    raise AssertionError("texts are still generated")


def test_a_text_whose_client_left_ends():
    """Clients leave in the middle of a stream, and in front of an answer."""
    app = application(speaker(context=8192), name="small", tokenizer=Words())
    with running(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = complete(client, "A", max_tokens=8000, stream=True)
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            complete(client, "A", max_tokens=8000, timeout=0.3)
        wait_until_idle(url)


DEEP = b'{"model": "small", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
WRONG = {
    "not JSON": (b"{", 400, "not JSON"),
    "deep": (DEEP, 400, ""),
    "a list": (b"[]", 400, "not a JSON object"),
    "bytes": (b"\xff\xfe{", 400, ""),
    "large": (b'{"prompt": "' + b"A" * 200_000 + b'"}', 413, "100000 bytes"),
    "no model": (b"{}", 400, "model is missing"),
    "other model": (b'{"model": "big"}', 404, "does not exist"),
    "no prompt": (b'{"model": "small"}', 400, "prompt is missing"),
    "empty": (b'{"model": "small", "prompt": []}', 400, ""),
    "empty text": (b'{"model": "small", "prompt": ""}', 400, "no tokens"),
    "objects": (b'{"model": "small", "prompt": [{}]}', 400, "prompt is a text"),
    "negative": (b'{"model": "small", "prompt": [-1]}', 400, "prompt is a text"),
    "booleans": (b'{"model": "small", "prompt": [true]}', 400, "prompt is a text"),
    "long": (json.dumps({"model": "small", "prompt": [1] * 70}).encode(), 400, "context is 64 tokens"),
    "many tokens": (b'{"model": "small", "prompt": "A", "max_tokens": 64}', 400, "context is 64 tokens"),
    "no tokens": (b'{"model": "small", "prompt": "A", "max_tokens": 0}', 400, "max_tokens is 0"),
    "temperature": (b'{"model": "small", "prompt": "A", "temperature": NaN}', 400, "temperature is nan"),
    "text as number": (b'{"model": "small", "prompt": "A", "temperature": "1"}', 400, "temperature is 1"),
    "top_p": (b'{"model": "small", "prompt": "A", "top_p": 0}', 400, "top_p=0"),
    "seed": (b'{"model": "small", "prompt": "A", "seed": 1e99}', 400, "seed is 1e+99"),
    "n": (b'{"model": "small", "prompt": "A", "n": 4}', 400, "n is 4"),
    "stop": (b'{"model": "small", "prompt": "A", "stop": [""]}', 400, "stop is a text"),
    "unsupported": (b'{"model": "small", "prompt": "A", "logprobs": 3}', 400, "'logprobs' is not supported"),
    "unknown": (b'{"model": "small", "prompt": "A", "foo": 1}', 400, "'foo' is not supported"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_say_what_is_wrong(url, name):
    body, status, message = WRONG[name]
    answer = httpx2.post(f"{url}/v1/completions", content=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_errors_are_those_of_the_client(client, url):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="out of range"):
        complete(client, [500])
    with pytest.raises(openai.BadRequestError, match="messages is empty"):
        client.chat.completions.create(model="small", messages=[])
    with pytest.raises(openai.BadRequestError, match="parts of type text"):
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        )
    assert httpx2.get(f"{url}/v1/nothing").status_code == 404
    assert complete(client, "A", max_tokens=1).choices[0].finish_reason == "length"


def test_too_many_requests_are_refused():
    app = application(speaker(context=4096), name="small", tokenizer=Words(), limits=Limits(rows=1, queue=1))
    with running(app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        async def load():
            options = {"model": "small", "prompt": "A", "max_tokens": 400, "temperature": 0}
            return await asyncio.gather(
                *(client.completions.create(**options) for _ in range(6)), return_exceptions=True
            )

        results = asyncio.run(load())
        refused = [r for r in results if isinstance(r, openai.RateLimitError)]
        assert refused and len(refused) < len(results)
        assert all(isinstance(r, openai.RateLimitError) or len(r.choices[0].token_ids) == 400 for r in results)


def test_slow_clients_are_left_and_others_served():
    app = application(speaker(), name="small", tokenizer=Words(), limits=Limits(seconds=1.0))
    with running(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            assert complete(client, "A", max_tokens=2).choices[0].token_ids == expected("A", 2)
            slow.settimeout(10)
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_server_that_shuts_down_ends_its_texts():
    app = application(speaker(context=8192), name="small", tokenizer=Words())
    threads = threading.active_count()
    with running(app, timeout_graceful_shutdown=1) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        next(iter(complete(client, "A", max_tokens=8000, stream=True)))
    assert threading.active_count() <= threads + 1, "the thread of the engine has ended"


def test_an_error_of_a_text_leaves_the_others():
    class Broken(Words):
        def decode(self, tokens):
            raise ValueError("not a token")

    with running(application(speaker(), name="small", tokenizer=Broken())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                complete(client, "A")
        assert httpx2.get(f"{url}/health").status_code == 200


class Sink:
    """The receiver of the tokens of a text."""

    def __init__(self):
        self.tokens, self.end = [], queue.Queue()

    def __call__(self, token, reason):
        if token is None:
            self.end.put(reason)
        else:
            self.tokens.append(token)
        return False


def test_a_text_without_numbers_leaves_the_others():
    model = speaker(context=512)
    params = {name: np.array(x) for name, x in model.params.items()}
    next(x for name, x in params.items() if "embedding" in name)[9] = np.nan
    engine = Engine(model.bind(params))
    sinks = [Sink() for _ in range(3)]
    try:
        engine.submit([Job([k, 9] if k == 2 else [k], 200, sink) for k, sink in zip((1, 2, 3), sinks, strict=True)])
        ends = [sink.end.get(timeout=60) for sink in sinks]
    finally:
        engine.close()
    healthy = [k for k in (0, 2) if 9 not in sinks[k].tokens]
    assert healthy and all(ends[k] == "length" for k in healthy)
    assert isinstance(ends[1], ml.InputError) and "nan" in str(ends[1])


def test_clients_that_left_while_they_waited_take_no_place():
    engine = Engine(speaker(context=4096), rows=1, queue=1)
    first, canceled, last = (Job([1], count, Sink()) for count in (2000, 5, 5))
    try:
        engine.submit([first])
        while not first.new:
            time.sleep(0.001)
        engine.submit([canceled])
        with pytest.raises(Busy):
            engine.submit([last])
        canceled.cancelled = True
        engine.submit([last])
        first.cancelled = True
        assert last.emit.end.get(timeout=60) == "length"
    finally:
        engine.close()
    assert not canceled.emit.tokens
