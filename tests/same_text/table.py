"""What a call may ask for, chains of drafts, and ways to run them. A new feature is one row; :mod:`tests.same_text.test_same_text` runs their product.

A row does not name the schedules that it is for: the table of :mod:`pipespec.registry` tells which options a schedule takes.
"""

import copy
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria

from pipespec import NgramDraft
from pipespec.engine.chain import DraftSpec
from pipespec.engine.head import HeadDraft
from pipespec.engine.proposer import ProposerDraft
from pipespec.engine.translation import TranslatedDraft
from pipespec.registry import LOCKSTEP, SCHEDULES, Schedule, has_captured_form
from pipespec_train.heads import head_for
from tests.conftest import DEVICE, always_right, always_wrong, left_pad, noisy, random_llama
from tests.pipespec.vocabularies import byte_level, sentencepiece
from tests.support.grammars import END, Classes
from tests.support.proposers import LastToken
from tests.support.streamers import Recorder
from tests.trials import trials

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=sentencepiece())
VOCABULARY, NEW, SEED, TOP = len(TOKENIZER), 14, 5, 4
WORD = next(i for i in range(4, VOCABULARY) if TOKENIZER.convert_ids_to_tokens(i).isalpha())
"""A token that is no single byte."""


# ---- calls


class Favour(LogitsProcessor):
    """Of the user's, without a state: the token that follows the last one is likelier. It changes the scores in place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores), device=scores.device), (input_ids[:, -1] + 1) % VOCABULARY] += 3.0
        return scores


class Counting(LogitsProcessor):
    """Of the user's, with a state: it must see each token once and in order."""

    def __init__(self) -> None:
        self.record: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.record += input_ids.tolist()
        scores = scores.clone()
        scores[:, len(self.record) % 4 :: 4] = -torch.inf
        return scores


class Until(StoppingCriteria):
    """Ends each row at its own length, and keeps what it was shown."""

    def __init__(self, *new: int) -> None:
        self.new, self.record, self.begin = torch.tensor(new), [], 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.begin = self.begin or input_ids.shape[1] - 1
        self.record.append((input_ids.tolist(), None if scores is None else len(scores)))
        return input_ids.shape[1] - self.begin >= self.new.to(input_ids.device)


@dataclass(frozen=True)
class Call:
    """Arguments of ``generate()``.

    Args:
        options: As a user writes them. A function: of the new tokens without them, one list per row.
        rows: How many prompts, of different lengths.
        by_position: Processors run on the host, position by position: captured steps leave such calls to others.
        turns: How many calls, each of which continues the cache of the one before.
        is_special: Whether it is its own feature: such a call runs with one chain for each schedule, not with all.
    """

    options: Any = field(default_factory=dict)
    rows: int = 3
    by_position: bool = False
    turns: int = 1
    is_special: bool = True

    def prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each prompt repeats itself, so that an n-gram index has drafts."""
        generator = torch.Generator().manual_seed(self.rows)
        rows = [torch.randint(4, VOCABULARY, (n,), generator=generator) for n in (3, 7, 2, 5)[: self.rows]]
        return left_pad([torch.cat([row, row]) for row in rows])

    def arguments(self, text: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Of one call: objects with a state are new."""
        options = self.options(text) if callable(self.options) else copy.deepcopy(self.options)
        return {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, "eos_token_id": None} | options


SAMPLED = {"do_sample": True, "seed": SEED, "top_k": 0}
FILTERED = SAMPLED | {"temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.001}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.9, "frequency_penalty": 0.35}
BIASES = {"sequence_bias": {(5,): -9.0, (11,): 1.5}, "logit_bias": {7: 2.0, 9: float("-inf")}}
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "logprobs": TOP}


def ends(text: Sequence[Sequence[int]]) -> dict[str, Any]:
    """End tokens at which two rows end early, at different places."""
    return {"eos_token_id": [text[0][4], text[-1][9]]}


def with_ends(**options: Any) -> Callable[[Sequence[Sequence[int]]], dict[str, Any]]:
    return lambda text: copy.deepcopy(options) | ends(text)


def matchers() -> list[Classes]:
    """The first two rows end, the last one is cut."""
    return [Classes(n, VOCABULARY) for n in (6, 9, 30)]


def stop_strings(text: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A token in the middle of the text that is no single byte."""
    names = TOKENIZER.convert_ids_to_tokens(list(text[0]))
    at = next(i for i in range(3, NEW - 2) if names[i].isalpha())
    return {"stop_strings": [names[at], "never said"], "tokenizer": TOKENIZER}


CALLS = {
    "greedy": Call(is_special=False),
    "rows that end": Call(ends, is_special=False),
    "sampled": Call(FILTERED, is_special=False),
    "one row": Call(rows=1),
    "sampled without filters": Call(SAMPLED),
    "temperature": Call(SAMPLED | {"temperature": 1.4}, rows=2),
    "low temperature": Call(SAMPLED | {"temperature": 0.5}),
    "min-p": Call(SAMPLED | {"min_p": 0.08}),
    "repetition, sampled": Call(SAMPLED | {"repetition_penalty": 1.4}),
    "top-k": Call(SAMPLED | {"top_k": 20}),
    "top-p": Call(SAMPLED | {"top_p": 0.9}),
    "sampled rows that end": Call(with_ends(**FILTERED)),
    "returned sequences": Call(
        lambda _: {"streamer": Recorder(), "num_return_sequences": 2, **FILTERED}, rows=2
    ),
    "penalties": Call(PENALTIES),
    "negative penalties": Call({"presence_penalty": -0.5, "frequency_penalty": -0.2}),
    "biases": Call(BIASES),
    "another bias": Call(lambda text: {"logit_bias": {text[0][3]: -9.0}}),
    "penalties and biases, sampled": Call(PENALTIES | BIASES | FILTERED, is_special=False),
    "forbidden repetition": Call({"no_repeat_ngram_size": 1, "repetition_penalty": 1.2}, by_position=True),
    "biases of sequences": Call(
        {"sequence_bias": {(4, 6): 2.0, (5,): -1.0}, "presence_penalty": 0.9, "repetition_penalty": 1.2}, by_position=True
    ),
    "forbidden repetition, sampled": Call({"no_repeat_ngram_size": 2, **FILTERED}, by_position=True),
    "shortest length": Call({"min_new_tokens": 7, "eos_token_id": list(range(4, VOCABULARY, 7))}, by_position=True),
    "processor": Call(lambda _: {"logits_processor": [Favour()]}, rows=1, by_position=True),
    "processor with a state": Call(lambda _: {"logits_processor": [Counting()]}, rows=1, by_position=True),
    "processor with a state, sampled": Call(
        lambda _: {"logits_processor": [Counting()], **FILTERED}, rows=1, by_position=True
    ),
    "grammar": Call(lambda _: {"grammar": matchers(), "eos_token_id": END}, by_position=True),
    "grammar, penalties": Call(
        lambda _: {"grammar": matchers(), "eos_token_id": END, "repetition_penalty": 1.3}, by_position=True
    ),
    "grammar, sampled": Call(
        lambda _: {"grammar": matchers(), "eos_token_id": END, **FILTERED}, by_position=True
    ),
    "criteria": Call(lambda _: {"stopping_criteria": [Until(7)]}, rows=1),
    "criteria, sampled": Call(lambda _: {"stopping_criteria": [Until(9)], **FILTERED}, rows=1),
    "criteria of rows without an end": Call(lambda _: {"stopping_criteria": [Until(5, 11, 9)]}),
    "criteria of rows": Call(
        lambda text: {"stopping_criteria": [Until(5, 11, 9)], "eos_token_id": [1], "pad_token_id": 0}, rows=3
    ),
    "criteria that see scores": Call(lambda _: {"stopping_criteria": [Until(7)], **OUTPUTS}, rows=1),
    "stop strings": Call(stop_strings, rows=1),
    "streamer": Call(lambda _: {"streamer": Recorder()}, rows=1),
    "streamer, sampled": Call(lambda _: {"streamer": Recorder(), **FILTERED}, rows=1),
    "streamer, criteria": Call(lambda _: {"streamer": Recorder(), "stopping_criteria": [Until(6)]}, rows=1),
    "streamer of rows that end": Call(lambda text: {"streamer": Recorder(), **ends(text)}),
    "scores": Call(with_ends(**OUTPUTS, **PENALTIES)),
    "scores, sampled": Call(with_ends(**OUTPUTS, **FILTERED, repetition_penalty=1.2)),
    "scores, forbidden repetition": Call(OUTPUTS | {"no_repeat_ngram_size": 1} | FILTERED, by_position=True),
    "scores, normalised": Call(SAMPLED | OUTPUTS | {"temperature": 1.3, "renormalize_logits": True}),
    "scores, filters by position": Call(SAMPLED | OUTPUTS | {"typical_p": 0.8, "suppress_tokens": [4, 5]}, by_position=True),
    "scores, filters by entropy": Call(SAMPLED | OUTPUTS | {"top_h": 0.6, "top_k": 10, "min_new_tokens": 3, "eos_token_id": [7]}, by_position=True),
    "cache": Call(turns=2, is_special=False),
    "cache, sampled": Call(FILTERED, turns=2),
    "prompt in parts": Call({"prefill_chunk_size": 3}),
}  # fmt: skip


# ---- chains


@dataclass(frozen=True)
class Chain:
    """Drafts and options of a pipeline.

    Args:
        drafts: From the target to the drafts.
        kinds: Its drafts that not every schedule takes.
        uses: The options of :data:`pipespec.registry.OPTIONS` that it needs.
        options: Of ``Pipeline``.
        agrees: Whether the target accepts draft tokens, or all of them (1.0). None: now and then, perhaps.
        calls: The calls that it is for. None: see :func:`calls_of`.
    """

    drafts: Callable[[Any], list[Any]] = lambda _: []
    kinds: tuple[DraftSpec, ...] = ()
    uses: frozenset[str] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    agrees: float | None = True
    calls: tuple[str, ...] | None = None


def good(target: Any) -> Any:
    return noisy(target, 0.02, seed=1)


def bad(target: Any) -> Any:
    return noisy(target, 0.1, seed=2)


def foreign(target: Any) -> Any:
    """With a vocabulary of its own."""
    return random_llama(6, layers=1, vocabulary=byte_level().get_vocab_size())


HEADS = tempfile.TemporaryDirectory()


def head(target: Any) -> str:
    """The folder of a draft head that drafts half of the tokens."""
    folder = Path(HEADS.name, hashlib.sha256(target.lm_head.weight.detach().cpu().numpy()).hexdigest())
    if not folder.exists():
        cpu = copy.deepcopy(target).cpu()
        head_for(cpu, range(0, VOCABULARY, 2)).save(folder, cpu)
    return str(folder)


TRANSLATED = {"tokenizer": sentencepiece(), "draft_tokenizers": [byte_level()]}
INDEX: tuple[DraftSpec, ...] = (NgramDraft(),)
OWN: tuple[DraftSpec, ...] = (ProposerDraft(LastToken()),)
HEAD: tuple[DraftSpec, ...] = (HeadDraft("folder"),)
FOREIGN: tuple[DraftSpec, ...] = (TranslatedDraft(target=None, own=None),)
CHAINS = {
    "alone": Chain(agrees=None),
    "two": Chain(lambda t: [bad(t), good(t)]),
    "right": Chain(lambda t: [always_right(t)], agrees=1.0),
    "wrong": Chain(lambda t: [always_wrong(t)], agrees=False),
    "right after wrong": Chain(lambda t: [always_wrong(t), always_right(t)]),
    "three": Chain(lambda t: [bad(t), good(t), always_right(t)]),
    "index": Chain(lambda t: ["ngram"], INDEX, agrees=None),
    "index and one": Chain(lambda t: ["ngram", good(t)], INDEX),
    "index and wrong": Chain(lambda t: ["ngram", always_wrong(t)], INDEX, agrees=False),
    "index and two": Chain(lambda t: ["ngram", bad(t), good(t)], INDEX),
    "other tokenizer": Chain(lambda t: [foreign(t)], FOREIGN, options=TRANSLATED, agrees=None),
    "other tokenizer and one": Chain(
        lambda t: [foreign(t), good(t)],
        FOREIGN,
        options=TRANSLATED | {"draft_tokenizers": [byte_level(), None]},
    ),
    "head": Chain(
        lambda t: [head(t)], HEAD, agrees=None,
        calls=("greedy", "rows that end", "sampled", "penalties and biases, sampled", "cache", "grammar", "forbidden repetition, sampled"),
    ),
    "head, its own modules": Chain(lambda t: [head(t)], HEAD, options={"native": False}, agrees=None),
    "head in blocks": Chain(lambda t: [head(t)], HEAD, options={"weights": {"draft 0": "q5_0"}}, agrees=None),
    "exact head": Chain(lambda t: [head(t)], HEAD, options={"exact": True}, agrees=None),
    "index and head": Chain(lambda t: ["ngram", head(t)], INDEX + HEAD, agrees=None),
    "int8": Chain(lambda t: [good(t)], options={"weights": {"drafts": "int8"}}),
    "exact": Chain(lambda t: [good(t)], options={"exact": True}),
    "the models' own modules": Chain(lambda t: [good(t)], options={"native": False}),
    "rejection": Chain(
        lambda t: [good(t)], uses=frozenset({"acceptance"}), options={"acceptance": "rejection"}, calls=("greedy", "rows that end")
    ),
    "index after one": Chain(lambda t: [good(t), "ngram"], INDEX),
    "own": Chain(lambda t: [LastToken()], OWN, agrees=None),
    "own, index and one": Chain(lambda t: [LastToken(), "ngram", good(t)], INDEX + OWN),
}  # fmt: skip


# ---- ways


def is_captured(chain: Chain) -> bool:
    """Whether its steps have a captured form."""
    return "acceptance" not in chain.uses and all(map(has_captured_form, chain.kinds))


@dataclass(frozen=True)
class Way:
    """How a chain runs: a schedule, with captured steps or without, and how a program calls it."""

    row: Schedule
    captured: bool = False
    fixed: bool = True
    door: str = "generate"

    def takes(self, chain: Chain) -> bool:
        """By the table of schedules. Where no drafts take part, one chain with them is enough to show it."""
        if not self.row.has_drafts:
            return chain in (CHAINS["alone"], CHAINS["right"])
        if DEVICE != "cpu" and "weights" in chain.options:
            return False  # 16 bits, in which sums of forwards without a graph depend on the width
        if self.fixed and chain.kinds == INDEX + HEAD:
            return False  # the controller chooses between them
        if DEVICE != "cpu" and "exact" in chain.options and not self.captured:
            return False
        if self.door != "generate" and chain not in (CHAINS["two"], CHAINS["index"], CHAINS["other tokenizer"]):
            return False
        if not self.fixed and "acceptance" in chain.uses:
            return False  # as with fixed steps
        if self.captured and not is_captured(chain):
            return False
        if self.door == "spd":  # the target is in stages; its drafts propose one token at a time
            return chain in (CHAINS["two"], CHAINS["right"], CHAINS["wrong"], CHAINS["index"])
        if self.row.needs_ranks and (chain.options or chain in (CHAINS["index"], CHAINS["own"])):
            return False  # each rank loads its own model, with its tokenizer; an inline draft has no rank
        return chain is not CHAINS["alone"] and chain.uses <= self.row.options and all(map(self.row.takes, chain.kinds))

    @property
    def is_asynchronous(self) -> bool:
        """The number of draft tokens that come in time depends on the machine."""
        return self.row.has_processes or self.row.is_captured or self.row.needs_ranks


WAYS = {row.name: Way(row) for row in SCHEDULES.values() if not row.is_captured}
WAYS |= {f"{row.name}, captured": Way(row, captured=True) for row in SCHEDULES.values() if row.captured}
WAYS |= {f"{row.name}, controlled": Way(row, fixed=False) for row in SCHEDULES.values() if row.controlled}
WAYS |= {
    f"{row.name}, {door}": Way(row, door=door)
    for row in SCHEDULES.values()
    if row.controlled
    for door in ("attach", "custom_generate")
}


SPD = replace(LOCKSTEP, name="spd", options=frozenset())
WAYS["spd"] = Way(SPD, door="spd")


def calls_of(way: Way, chain: Chain) -> list[str]:
    """Every call once per way with fixed steps, and calls that are not special in all others: each way and each chain meets all of them, at night each pair."""
    if chain.calls is not None:
        return list(chain.calls)
    is_whole = way.fixed and way.door in ("generate", "spd") and chain in (CHAINS["alone"], CHAINS["two"])
    if is_whole:
        return list(CALLS)
    first, *rest = (name for name, call in CALLS.items() if not call.is_special)
    at = [*WAYS.values()].index(way) + [*CHAINS.values()].index(chain)
    few = 2 if way.door in ("generate", "spd") else len(rest)
    return [first, *(rest[(at + k) % len(rest)] for k in range(trials(ci=few, nightly=len(rest))))]
