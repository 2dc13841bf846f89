"""Throughput of mithril-serve for several clients at once: tokens per second, and time to the first token.

    python benchmarks/bench_serving.py --backend c --clients 1 4 8

A decoder with random parameters is served in this process, and its clients are threads of it. With ``--alone`` each
round also generates the same texts by ``ml.generate``, one after another, without a server.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import numpy as np
import openai
import uvicorn

import mithril as ml
from mithril_hub.architectures import build
from mithril_hub.model import parameter_types
from mithril_serve.serving import application

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "eos_token_id": None,
}


def request(client: openai.OpenAI, number: int, tokens: int, firsts: list[float]) -> None:
    """Read a stream, and note the time until its first token."""
    prompt, start, first = [(7 * number + 3 * k) % 4096 for k in range(32)], time.perf_counter(), None
    options: dict[str, Any] = {"model": "m", "max_tokens": tokens, "temperature": 0, "stream": True}
    for _ in client.completions.create(prompt=prompt, **options):
        first = first or time.perf_counter() - start
    firsts.append(first or 0.0)


def measure(client: openai.OpenAI, clients: int, tokens: int, requests: int) -> tuple[float, float]:
    """Return tokens per second, and the median time to the first token."""
    firsts: list[float] = []

    def loop(first: int) -> None:
        for number in range(requests):
            request(client, first + number, tokens, firsts)

    threads = [threading.Thread(target=loop, args=(100 * k,)) for k in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * requests * tokens / (time.perf_counter() - start), statistics.median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="c")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    model, _ = build(CONFIG, dtype="float32", cache=128)
    compiled = ml.compile(model, options.backend, inference=True)
    rng = np.random.default_rng(0)
    types = parameter_types(model)
    compiled.bind({n: rng.normal(0, 0.02, t.shape).astype(np.float32) for n, t in types.items()})
    server = uvicorn.Server(uvicorn.Config(application(compiled, name="m"), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    for clients in options.clients:
        measure(client, clients, 4, 1)  # compiles
        speed, first = measure(client, clients, options.tokens, options.requests)
        print(
            f"{options.backend}: {clients} clients: {speed:.1f} tokens/s, first token after {1000 * first:.0f} ms",
            flush=True,
        )
        if options.alone:
            start = time.perf_counter()
            for number in range(clients):
                ml.generate(compiled, [(7 * number + 3 * k) % 4096 for k in range(32)], max_new_tokens=options.tokens)
            speed = clients * options.tokens / (time.perf_counter() - start)
            print(f"{options.backend}: ml.generate, one after another: {speed:.1f} tokens/s", flush=True)
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
