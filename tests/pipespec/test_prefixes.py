"""Kept prefixes: a text is the same with and without them, whatever calls came before, and a prompt's beginning is not read again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from pipespec import Pipeline
from tests.conftest import left_pad, noisy, random_llama
from tests.pipespec.tiny_models import model_of
from tests.trials import trials

TURNS = 7
CHUNK, WIDE = 16, 5
LOCKSTEP = {"schedule": "lockstep", "lookahead": 4}
REJECTION = LOCKSTEP | {"acceptance": "rejection"}


class Kind(NamedTuple):
    """A target, whether its wide forwards run in the library, whether it has a draft, and options of the pipeline."""

    model: str = "llama"
    dtype: torch.dtype = torch.float32
    wide: bool = False
    drafted: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


KINDS = {
    "native": Kind(options={"schedule": "plain"}),
    "n-gram": Kind(),
    "draft": Kind(drafted=True, options=LOCKSTEP),
    "controller": Kind(drafted=True),
    "rejection": Kind(drafted=True, options=REJECTION),
    "bfloat16, library": Kind(dtype=torch.bfloat16, wide=True, drafted=True, options=LOCKSTEP),
    "bfloat16, rejection": Kind(dtype=torch.bfloat16, wide=True, drafted=True, options=REJECTION),
    "bfloat16, exact": Kind(dtype=torch.bfloat16, wide=True, options={"exact": True}),
    "blocks": Kind(drafted=True, options=LOCKSTEP | {"weights": ["q8_0", "q4_0"]}),
    "own modules": Kind(dtype=torch.bfloat16, options={"schedule": "plain", "native": False}),
    "windows": Kind(model="gemma3, mixed, two RoPE bases", options={"schedule": "plain"}),
    "recurrent": Kind(model="qwen3_5, recurrent", options={"schedule": "plain"}),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks and prefixes of the size of these prompts."""
    monkeypatch.setattr("pipespec.engine.inputs.PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr("pipespec.engine.prefixes.SHORTEST", 4)


def pipelines(kind: Kind, monkeypatch: Any) -> tuple[Pipeline, Pipeline]:
    """One that keeps prefixes, and one that does not."""
    if kind.wide:
        monkeypatch.setattr("pipespec.engine.forward.library_columns", lambda dtype: WIDE)
    target = random_llama(7).to(kind.dtype) if kind.model == "llama" else model_of(kind.model)
    drafts = [noisy(target, 0.02, seed=1)] if kind.drafted else []
    return Pipeline(target, drafts, **kind.options), Pipeline(target, drafts, **kind.options, prefix_cache=0)


class Conversations:
    """Random calls: a conversation goes on, with its answer as it was or edited, branches, or begins anew; one at a time, or several in a batch."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._draw, self._vocabulary = random.Random(seed), vocabulary
        self._texts = [self._tokens(30)]

    def _tokens(self, most: int) -> list[int]:
        return [self._draw.randrange(3, self._vocabulary) for _ in range(self._draw.randint(1, most))]

    def _prompt(self) -> list[int]:
        draw, text = self._draw, self._draw.choice(self._texts)
        match draw.randrange(6):
            case 0:  # a new conversation
                return self._tokens(60)
            case 1:  # a branch
                return text[: draw.randint(1, len(text))] + self._tokens(12)
            case 2:  # an edited answer
                return [*text[: max(1, len(text) - draw.randint(1, 9))], *self._tokens(12)]
            case 3:  # the same once more
                return text
            case _:
                return text + self._tokens(20)

    def call(self) -> dict[str, Any]:
        draw = self._draw
        rows = draw.choice((1, 1, 1, 2, 3))
        ids, mask = left_pad([torch.tensor(self._prompt()[-150:]) for _ in range(rows)])
        how = {"do_sample": False} if draw.random() < 0.5 else {"do_sample": True, "seed": draw.randrange(1000)}
        return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": draw.randint(1, 24)} | how

    def note(self, call: dict[str, Any], out: torch.Tensor) -> None:
        padding = (1 - call["attention_mask"]).sum(1).tolist()
        self._texts += [row[n:].tolist() for row, n in zip(out, padding, strict=True)]
        del self._texts[:-6]


def check(keeping: Pipeline, fresh: Pipeline, seed: int, vocabulary: int) -> Iterator[int]:
    """Compare the texts of random calls. Yields the tokens that were not read again."""
    conversations = Conversations(seed, vocabulary)
    for _ in range(TURNS):
        call = conversations.call()
        out, wanted = keeping.generate(**call), fresh.generate(**call)
        assert fresh.report is not None
        assert fresh.report.prompt_tokens_reused == 0
        assert torch.equal(out, wanted), f"seed {seed}, {call}"
        conversations.note(call, out)
        assert keeping.report is not None
        yield keeping.report.prompt_tokens_reused


@pytest.mark.parametrize("name", KINDS)
def test_random_conversations(name, monkeypatch):
    keeping, fresh = pipelines(KINDS[name], monkeypatch)
    reused = 0
    with keeping, fresh:
        for seed in range(trials(ci=4, nightly=84)):
            reused += sum(check(keeping, fresh, seed, 95))
    assert reused > 0
