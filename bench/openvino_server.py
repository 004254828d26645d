"""Generates with OpenVINO GenAI, in an environment of its own: ``PYTHON openvino_server.py NAME=FOLDER ... < requests``.

``bench/openvino.py`` starts this file with the interpreter of an environment that has openvino-genai and optimum-intel, which need another
version of transformers. So it imports nothing of pipespec. The models are converted once, in float32, to a temporary folder. Requests and
answers are lines of JSON: ``{"draft", "lookup", "threads"}`` builds a pipeline, ``{"ids", "new_tokens", "num_draft_tokens", "stop"}``
generates with it. An answer has ``tokens``, ``built`` or ``error``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def convert(source: str, folder: Path) -> None:
    """Write the model and its tokenizer in OpenVINO's form."""
    OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=False, compile=False).save_pretrained(folder)
    both = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for model, name in zip(both, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml")


class Server:
    """The converted models, and the pipeline of the last request."""

    def __init__(self, sources: dict[str, str], folder: Path) -> None:
        self.folders = {name: folder / name for name in sources}
        for name, source in sources.items():
            convert(source, self.folders[name])
        self.pipeline: Any = None

    def build(self, draft: str | None, lookup: bool, threads: int) -> None:
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        # The other rows compute in float32, too.
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        more: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
        if draft is not None:
            more["draft_model"] = openvino_genai.draft_model(str(self.folders[draft]), "CPU", **options)
        self.pipeline = None  # frees its threads first
        self.pipeline = openvino_genai.LLMPipeline(str(self.folders["target"]), "CPU", **options, **more)

    def generate(
        self, ids: list[int], new_tokens: int, stop: list[int], num_draft_tokens: int | None, lookup: bool
    ) -> list[int]:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
        config.stop_token_ids = set(stop)
        config.ignore_eos = not stop
        if num_draft_tokens is not None:
            config.num_assistant_tokens = num_draft_tokens
        if lookup:
            config.max_ngram_size = 3
        inputs = openvino.Tensor(np.array([ids], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        tokens = self.pipeline.generate(openvino_genai.TokenizedInputs(inputs, mask), config).tokens[0]
        return [int(token) for token in tokens]


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too

    def answer(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        server = Server(dict(argument.split("=", 1) for argument in sys.argv[1:]), Path(folder))
        answer(built=openvino_genai.__version__)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if "ids" in request:
                    answer(tokens=server.generate(**request))
                else:
                    server.build(**request)
                    answer(built=True)
            except Exception as error:
                answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
