"""Random conversations: a pipeline that has kept earlier texts says what one says that has just been made, whatever happens between two calls."""

import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import pipespec
from pipespec import Pipeline
from pipespec.models.loading import load_model
from pipespec.models.quantizing import quantized
from tests.conftest import left_pad, noisy
from tests.pipespec import blocks, heads
from tests.pipespec.test_adapters import Lora, adapted
from tests.pipespec.test_gguf_architectures import written
from tests.pipespec.tiny_models import make
from tests.support.streamers import failing
from tests.trials import trials

CHUNK, WIDE = 16, 5
CONTEXT, LONGEST = 256, 150
VOCABULARY = 95
FIXED = {"schedule": "lockstep", "lookahead": 4}
"""Steps whose widths do not depend on time: for forwards whose bits depend on the width."""
COUPLED = ({}, FIXED, {"schedule": "plain"}, {"schedule": "lockstep", "lookahead": 2, "exact": True})


class Kind(NamedTuple):
    """A target, and the pipelines on it.

    Attributes:
        model: of :data:`tiny_models.TINY_MODELS`, or a file of :func:`files`.
        dtype: of its weights.
        options: those that a pipeline may have.
        drafts: its drafts: an index, models, or a file of :func:`files`.
        wide: whether its wide forwards run in the library.
        with_adapters: whether it has LoRA.
        weights: format of its blocks; empty: it has numbers.
    """

    model: str = "llama"
    dtype: torch.dtype = torch.float32
    options: tuple[Mapping[str, Any], ...] = COUPLED
    drafts: tuple[str, ...] = ("ngram", "noisy", "other", "none")
    wide: bool = False
    with_adapters: bool = False
    weights: str = ""


PLAIN = MappingProxyType({"schedule": "plain"})
REJECTION = FIXED | {"acceptance": "rejection"}
MODULES = ({"schedule": "plain", "native": False}, FIXED | {"native": False})
GRAPHS = ({"schedule": "plain", "graphs": True, "exact": True}, FIXED | {"graphs": True})
MODELS = ("noisy", "other")

KINDS = {
    "native": Kind(),
    "adapters": Kind(options=(FIXED, PLAIN), with_adapters=True),
    "rejection": Kind(options=(REJECTION,), drafts=MODELS),
    "bfloat16, library": Kind(dtype=torch.bfloat16, options=(FIXED, PLAIN), wide=True),
    "bfloat16, rejection": Kind(dtype=torch.bfloat16, options=(REJECTION,), drafts=MODELS, wide=True),
    "bfloat16, exact": Kind(dtype=torch.bfloat16, options=({"exact": True},), wide=True),
    "bfloat16, windows": Kind("mistral, window", torch.bfloat16, options=(FIXED, PLAIN)),
    "blocks": Kind(weights="q8_0"),
    "own modules": Kind(options=MODULES),
    "own modules, bfloat16": Kind(dtype=torch.bfloat16, options=MODULES, drafts=("none",)),
    "captured": Kind(options=GRAPHS, drafts=MODELS),
    "streams": Kind(options=({"schedule": "streams"},), drafts=MODELS),
    "window": Kind("mistral, window"),
    "windows": Kind("gemma3, mixed, two RoPE bases"),
    "windows, own modules": Kind("gemma2, mixed, caps", options=MODULES),
    "sinks": Kind("gpt_oss, mixed, sinks"),
    "experts": Kind("mixtral, window"),
    "latents": Kind("deepseek_v3, latents"),
    "shared keys": Kind("gemma4, mixed, shared keys"),
    "shared keys, own modules": Kind("gemma4, mixed, shared keys", options=MODULES),
    "recurrent": Kind("qwen3_next, recurrent"),
    "recurrent, dense": Kind("qwen3_5, recurrent"),
    "recurrent, short": Kind("lfm2, recurrent"),
    "file": Kind("llama.gguf"),
    "file, recurrent": Kind("qwen35.gguf"),
    "head": Kind("heads", options=(FIXED,), drafts=("head", "head", "ngram")),
    "block drafter": Kind("heads", options=(FIXED,), drafts=("drafter",)),
}  # fmt: skip


IN_CHUNKS = ("adapters", "own modules", "own modules, bfloat16", "windows, own modules", "shared keys, own modules", "captured", "streams")  # fmt: skip
"""Kinds whose prefixes end at chunks, in batches of as many rows: few short conversations may have none."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models, heads and drafters in files."""
    folder = tmp_path_factory.mktemp("conversations")
    written("llama", folder / "llama.gguf", "q8_0")
    written("qwen3_5_text", folder / "qwen35.gguf", "q8_0")
    heads.write_original(folder / "head", heads.make_weights())
    blocks.write_z_lab(folder / "drafter", blocks.make_weights())
    return folder


# ---- what happens between two calls


def _weight_of(model: Any, draw: random.Random) -> tuple[Any, str]:
    """A module and the name of one of its parameters of numbers."""
    found = [
        (module, name)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point()
    ]
    return draw.choice(found)


def _through_data(model: Any, draw: random.Random) -> None:
    module, name = _weight_of(model, draw)
    getattr(module, name).data.mul_(1.25)


def _one_value(model: Any, draw: random.Random) -> None:
    module, name = _weight_of(model, draw)
    values = getattr(module, name).data.view(-1)
    values[draw.randrange(len(values))] += 2


def _in_place(model: Any, draw: random.Random) -> None:
    module, name = _weight_of(model, draw)
    with torch.no_grad():
        getattr(module, name).add_(0.05)


def _replaced(model: Any, draw: random.Random) -> None:
    module, name = _weight_of(model, draw)
    setattr(module, name, torch.nn.Parameter(getattr(module, name).detach() * 1.1))


def _other_adapter(model: Any, draw: random.Random) -> None:
    for layer in model.model.layers:
        base = layer.self_attn.q_proj.base_layer
        layer.self_attn.q_proj = Lora(base, draw.randrange(3))


CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (_through_data, _one_value, _in_place, _replaced)
EVENTS = ("none",) * 6 + ("change", "change of a draft", "interrupted", "fork", "closed", "threads")


class Conversations:
    """Random calls: a conversation is continued, with its answer as it was or edited, branches, or starts again; one at a time, or several in a batch."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._texts = [self._tokens(30)]

    def _tokens(self, most: int) -> list[int]:
        return [self._draw.randrange(3, VOCABULARY) for _ in range(self._draw.randint(1, most))]

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
        ids, mask = left_pad([torch.tensor(self._prompt()[-LONGEST:]) for _ in range(rows)])
        how = {"do_sample": False} if draw.random() < 0.5 else {"do_sample": True, "seed": draw.randrange(1000)}
        return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": draw.randint(1, 24)} | how

    def note(self, call: dict[str, Any], out: torch.Tensor) -> None:
        padding = (1 - call["attention_mask"]).sum(1).tolist()
        self._texts += [row[n:].tolist() for row, n in zip(out, padding, strict=True)]
        del self._texts[:-6]


class Trial:
    """Calls of two pipelines on one target, each against a pipeline that is made for it.

    Args:
        name: of :data:`KINDS`.
        seed: decides the rest.
        files: the folder of :func:`files`.
    """

    def __init__(self, name: str, seed: int, files: Path) -> None:
        self.kind, self.files, self._draw = KINDS[name], files, random.Random(seed)
        draw, self.log = self._draw, [f"{name}, seed {seed}"]
        self.target = self._target(seed % 3)
        self.setups = [self._setup() for _ in range(2)]
        self.is_attached = draw.random() < 0.5
        self.reused = 0

    def _target(self, seed: int) -> Any:
        kind = self.kind
        if kind.model == "heads":
            return heads.make_target(seed)
        if kind.model.endswith(".gguf"):
            return load_model(self.files / kind.model)
        model = make(kind.model, seed, max_position_embeddings=CONTEXT).to(kind.dtype)
        if kind.weights:
            return quantized(model, kind.weights)
        return adapted(model).get_base_model() if kind.with_adapters else model

    def _setup(self) -> tuple[list[Any], dict[str, Any]]:
        """Drafts and options of a pipeline."""
        draw = self._draw
        options, drafted = dict(draw.choice(self.kind.options)), draw.choice(self.kind.drafts)
        if options.get("schedule") == "plain":
            drafted = "none"
        elif drafted == "none" and "lookahead" in options:
            drafted = "ngram"
        self.log.append(f"{options} with {drafted}")
        match drafted:
            case "none":
                return [], options
            case "noisy" if not (self.kind.model.endswith(".gguf") or self.kind.weights):
                return [noisy(self.target, 0.02, seed=draw.randrange(9))], options
            case "noisy" | "other":
                size = self.target.config.vocab_size
                return [make("llama", 5, max_position_embeddings=CONTEXT, vocab_size=size)], options
            case "ngram":
                return ["ngram"], options
        return [self.files / drafted], options

    def run(self, calls: int) -> str | None:
        """What is wrong; None: nothing."""
        draw, conversations = self._draw, Conversations(self._draw)
        budget = draw.choice((None, None, 1, 60_000))
        self.log.append(f"budget {budget}, attached {self.is_attached}")
        pipes = []
        try:
            for i, (drafts, options) in enumerate(self.setups):
                make_one = pipespec.attach if i == 0 and self.is_attached else Pipeline
                more = {"unsupported": "raise"} if make_one is pipespec.attach else {}
                pipes.append(make_one(self.target, drafts, prefix_cache=budget, **options, **more))
            for _ in range(calls):
                i = draw.choice((0, 0, 1))
                event, call = draw.choice(EVENTS), conversations.call()
                self.log.append(f"{event}, then {_shown(call)} by pipeline {i}")
                wrong = self._call(i, pipes[i], event, call, conversations)
                if wrong is not None:
                    return "\n    ".join([*self.log, wrong])
        finally:
            if self.is_attached:
                pipespec.detach(self.target)
            for pipe in pipes:
                pipe.close()
        return None

    def _call(
        self, i: int, pipe: Pipeline, event: str, call: dict[str, Any], conversations: Conversations
    ) -> str | None:
        draw = self._draw
        generate = self.target.generate if i == 0 and self.is_attached else pipe.generate
        drafts = [draft for draft in self.setups[i][0] if isinstance(draft, torch.nn.Module)]
        if event == "change":
            changes = (*CHANGES, _other_adapter) if self.kind.with_adapters else CHANGES
            draw.choice(changes)(self.target, draw)
        elif event == "change of a draft" and drafts:
            draw.choice(CHANGES)(drafts[0], draw)
        elif event == "closed":
            pipe.close()
        elif event == "interrupted":
            before = conversations.call()
            rows = len(before["input_ids"])
            try:
                generate(**before, streamer=failing(rows * draw.randint(0, 9)))
            except ZeroDivisionError:
                pass
        threads = torch.get_num_threads()
        try:
            if event == "threads":
                torch.set_num_threads(threads + 1)
            return self._compare(i, pipe, generate, event == "fork", call, conversations)
        finally:
            torch.set_num_threads(threads)

    def _compare(
        self, i: int, pipe: Pipeline, generate: Any, is_forked: bool, call: dict[str, Any], conversations: Conversations
    ) -> str | None:
        drafts, options = self.setups[i]
        with Pipeline(self.target, drafts, **options) as fresh:
            wanted = fresh.generate(**call)
        if is_forked:
            if (child := os.fork()) == 0:
                os._exit(0 if torch.equal(generate(**call), wanted) else 1)
            if os.waitpid(child, 0)[1] != 0:
                return "another text after a fork"
        out = generate(**call)
        if not torch.equal(out, wanted):
            width = call["input_ids"].shape[1]
            return f"wanted {wanted[:, width:].tolist()}, not {out[:, width:].tolist()}"
        assert pipe.report is not None
        self.reused += pipe.report.prompt_tokens_reused
        conversations.note(call, out)
        return None


def _shown(call: dict[str, Any]) -> str:
    lengths = call["attention_mask"].sum(1).tolist()
    return f"{lengths} tokens, {call['max_new_tokens']} more, seed {call.get('seed')}"


@pytest.mark.parametrize("name", KINDS)
def test_random_conversations(name, files, monkeypatch):
    kind = KINDS[name]
    monkeypatch.setattr("pipespec.engine.chain.PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr("pipespec.engine.prefixes.SHORTEST", 4)
    if kind.wide:
        monkeypatch.setattr("pipespec.engine.forward.library_columns", lambda dtype: WIDE)
    count = trials(ci=2, nightly=40)
    first = int(os.environ.get("PIPESPEC_FIRST_TRIAL", "0"))
    wrong, reused = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            trial = Trial(name, seed, files)
            found = trial.run(6)
            reused += trial.reused
            if found is not None:
                wrong.append(found)
    assert not wrong, "\n".join(wrong)
    assert reused > 0 or name in IN_CHUNKS
