"""A server over transformers' own classes of models, for benchmarks on GPUs, where an engine is measured
against what it is held to: `python -m benchmarks.peers.transformers_server FOLDER --port N --device cuda`.

Completions of token ids, streamed. Those that come together and are of one length are one batch; what was
computed for one prompt is kept for no other.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GATHER_S = 0.02  # that a batch waits for more prompts
ANSWER_S_MAX = 600.0


@dataclass(slots=True, kw_only=True)
class Asked:
    ids: list[int]
    max_tokens: int
    tokens: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)


class Generator:
    """One batch after the other, on a thread of its own."""

    def __init__(self, folder: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._device = device
        self._model: Any = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        )
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="generator", daemon=True).start()

    def tokens(self, ids: list[int], max_tokens: int) -> Iterator[int]:
        asked = Asked(ids=ids, max_tokens=max_tokens)
        self._asked.put(asked)
        for _ in range(max_tokens):
            yield asked.tokens.get(timeout=ANSWER_S_MAX)

    def _serve(self) -> None:
        import torch

        waiting: list[Asked] = []
        with torch.inference_mode():
            while True:
                waiting = waiting or [self._asked.get()]
                time.sleep(GATHER_S)
                while not self._asked.empty():
                    waiting.append(self._asked.get())
                length = len(waiting[0].ids)
                self._generate([one for one in waiting if len(one.ids) == length])
                waiting = [one for one in waiting if len(one.ids) != length]

    def _generate(self, batch: list[Asked]) -> None:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        ids = torch.tensor([one.ids for one in batch], device=self._device)
        for step in range(max(one.max_tokens for one in batch)):
            logits = self._model(ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            for one, token in zip(batch, ids[:, 0].tolist(), strict=True):
                if step < one.max_tokens:
                    one.tokens.put(token)


def serve(generator: Generator, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._begin("application/json")
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._begin("text/event-stream")
            for token in generator.tokens(asked["prompt"], asked["max_tokens"]):
                choice = {"index": 0, "text": "", "logprobs": {"tokens": [f"token_id:{token}"]}}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def _begin(self, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads a line a request."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    serve(Generator(options.folder, options.device), options.port)


if __name__ == "__main__":
    main()
