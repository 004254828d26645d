"""Rows of other programs for :mod:`bench.bench_real`: llama.cpp's server and OpenVINO GenAI.

Each takes token ids and gives token ids, so that all rows read the same prompt. Both stop at the model's end of the text, as ours do.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

START_SECONDS = 120


class LlamaServer:
    """One ``llama-server`` process; a call is a row. ``options`` are its own, after the model's file."""

    def __init__(self, binary: Path, model: Path, threads: int, options: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        common = ["--port", str(port), "-t", str(threads), "-tb", str(threads), "-np", "1", "-c", "4096", "-fit", "off"]
        command = [str(binary), "-m", str(model), *common, *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"does not start: {' '.join(command)}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def __call__(self, ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[list[int], float, float]:
        """Seconds to the first token are those of the call less the server's own time of decoding."""
        temperature = arguments.get("temperature", 0.0) if arguments["do_sample"] else 0.0
        body = {"prompt": ids[0].tolist(), "n_predict": arguments["max_new_tokens"], "temperature": temperature}
        body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = json.load(answer)
        seconds = time.perf_counter() - begin
        return found["tokens"], seconds, seconds - found["timings"]["predicted_ms"] / 1000

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


# Runs in the interpreter that has openvino_genai: a job per line, an answer per line.
_WORKER = """
import json, sys, time
import numpy, openvino, openvino_genai as genai
folder, options = json.loads(sys.argv[1])
draft = options.pop("draft", None)
if draft: options["draft_model"] = genai.draft_model(draft, "CPU")
per_call = options.pop("per_call", {})
pipe = genai.LLMPipeline(folder, "CPU", **options)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    config = pipe.get_generation_config()
    config.max_new_tokens = job["max_new_tokens"]
    config.do_sample = False
    for name, value in per_call.items(): setattr(config, name, value)
    ids = openvino.Tensor(numpy.array(job["ids"], dtype=numpy.int64))
    begin = time.perf_counter()
    out = pipe.generate(ids, config)
    seconds = time.perf_counter() - begin
    print(json.dumps([list(map(int, out.tokens[0])), seconds, out.perf_metrics.get_ttft().mean / 1000]), flush=True)
"""


class OpenVino:
    """One process with an OpenVINO GenAI pipeline; a call is a row, greedy only.

    ``python`` is an interpreter with ``openvino_genai``; ``folder`` and ``draft`` are exported models; ``lookup`` is the number of tokens per
    step that its prompt lookup proposes.
    """

    def __init__(self, python: Path, folder: Path, draft: Path | None = None, lookup: int = 0) -> None:
        options: dict[str, Any] = {}
        if draft is not None:
            options |= {"draft": str(draft), "per_call": {"num_assistant_tokens": 3}}
        if lookup:
            options |= {"prompt_lookup": True, "per_call": {"num_assistant_tokens": lookup, "max_ngram_size": 3}}
        command = [str(python), "-c", _WORKER, json.dumps([str(folder), options])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._answer() != "ready":
            raise RuntimeError(f"does not start: {folder}")

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"OpenVINO's process ended with status {self._process.wait()}")
        return json.loads(line)

    def __call__(self, ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[list[int], float, float]:
        if arguments["do_sample"]:
            raise ValueError("greedy only")
        assert self._process.stdin is not None
        job = {"ids": ids.tolist(), "max_new_tokens": arguments["max_new_tokens"]}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        tokens, seconds, first = self._answer()
        return tokens, seconds, first

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
