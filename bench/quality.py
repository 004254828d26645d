"""What does a weight format do to a model? ``python -m bench.quality MODEL --text FILE [--formats q8_0 q4_k] [--gguf FILE] [--tokens N] [--json FILE]``

MODEL is a folder with weights in 16 or 32 bits; in float32 it is the reference. The text is read in windows of ``--window`` tokens, each from an empty cache, by the
forwards that generate text. The first half of a window is context and not scored, as in llama.cpp's ``llama-perplexity``. Per format: perplexity, mean and 99th percentile of the divergence KL(float32 || format) per token in nats, and how often
both have the same likeliest token. ``--gguf`` adds a file with the same tokenizer.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.harness import markdown_table, save
from bench.machine import provenance
from pipespec.config import WEIGHT_FORMATS
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward
from pipespec.models.loading import load_model
from pipespec.models.quantizing import quantized
from pipespec.models.tokenizers import load_tokenizer

_CHUNK = 64  # columns of a forward: the logits of more would take much memory


class Score:
    """What is known of one model so far."""

    def __init__(self) -> None:
        self.nll, self.same, self.tokens = 0.0, 0, 0
        self.divergences: list[torch.Tensor] = []

    def add(self, ours: torch.Tensor, reference: torch.Tensor, following: torch.Tensor) -> None:
        """Log-probabilities ``[n, vocabulary]`` and the tokens ``[n]`` that follow."""
        self.nll -= float(ours.gather(1, following[:, None]).sum(dtype=torch.float64))
        self.same += int((ours.argmax(1) == reference.argmax(1)).sum())
        self.tokens += len(following)
        self.divergences.append((reference.exp() * (reference - ours)).sum(1))

    def record(self) -> dict[str, float]:
        """The numbers of a row."""
        found = torch.cat(self.divergences)
        return {
            "tokens": self.tokens,
            "perplexity": math.exp(self.nll / self.tokens),
            "mean_kl": float(found.mean()),
            "kl_99": float(found.quantile(0.99)),
            "same_token": self.same / self.tokens,
        }


def measure(models: dict[str, PreTrainedModel], ids: torch.Tensor, window: int) -> dict[str, dict[str, Any]]:
    """Score models on a text in windows of ``window`` tokens. The first is the reference."""
    scores = {name: Score() for name in models}
    forms = {}
    with torch.inference_mode():
        for text in ids.split(window):
            caches = {name: RowCache.for_model(model, 1, window) for name, model in models.items()}
            for at in range(0, len(text) - 1, _CHUNK):
                fed, following = text[at : min(at + _CHUNK, len(text) - 1)], text[at + 1 : at + 1 + _CHUNK]
                scored, reference = slice(max(0, window // 2 - at), None), None
                for name, model in models.items():
                    ours = forward(model, fed[None], caches[name], keep=len(fed))[0].float().log_softmax(-1)
                    reference = ours if reference is None else reference
                    scores[name].add(ours[scored], reference[scored], following[scored])
            forms = {name: described(model, caches[name]) for name, model in models.items()}
            print(f"{scores['float32'].tokens} tokens scored", file=sys.stderr, flush=True)
    return {name: {"forward": forms[name], **score.record()} for name, score in scores.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("model", type=Path, help="a folder with weights in 16 or 32 bits")
    parser.add_argument("--text", type=Path, required=True, help="a text in UTF-8")
    parser.add_argument(
        "--formats", nargs="*", choices=WEIGHT_FORMATS, default=list(WEIGHT_FORMATS), help="default: all"
    )
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="a file of it; may be repeated")
    parser.add_argument("--tokens", type=int, default=20_480, help="of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read from an empty cache")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args(arguments)
    text = options.text.read_text(encoding="utf-8")
    ids = torch.tensor(load_tokenizer(options.model)(text).input_ids)[: options.tokens]
    if len(ids) < options.window // 2 + 2 or options.window < 3:
        parser.error(
            f"the text has {len(ids)} tokens: after half a window of {options.window} nothing is left to score"
        )
    original = load_model(options.model, dtype="float32")
    models = {"float32": original} | {name: quantized(original, name) for name in options.formats}
    models |= {file.name: load_model(file) for file in options.gguf}
    rows = measure(models, ids, options.window)
    about = {"benchmark": "quality", "machine": provenance(), "model": options.model.name, "window": options.window}
    save(options.json, about | {"rows": rows})
    header = ("weights", "perplexity", "mean KL", "KL, 99 %", "same token")
    lines = [
        (name, f"{r['perplexity']:.4f}", f"{r['mean_kl']:.5f}", f"{r['kl_99']:.4f}", f"{r['same_token']:.4f}")
        for name, r in rows.items()
    ]
    print(markdown_table(header, lines))


if __name__ == "__main__":
    main()
