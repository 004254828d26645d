"""Every argument of the installed ``generate()``: the same result as ``target.generate()``, or a refusal that names it.

Greedy; other files test the arguments of sampling. An argument of a newer transformers that is not yet
classified fails here.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

from pipespec import Pipeline, trust
from pipespec.api.arguments import ARGUMENTS, How
from tests.conftest import VOCABULARY, left_pad, noisy, random_llama, random_prompts
from tests.support.streamers import Recorder

NEW = 20  # tokens per call

_PARAMETERS = [
    p.name
    for p in inspect.signature(GenerationMixin.generate).parameters.values()
    if p.name != "self" and p.kind is not p.VAR_KEYWORD
]
_FIELDS = [name for name in GenerationConfig().__dict__ if not name.startswith("_")]
# What reaches transformers' generate() through **kwargs.
_KEYWORDS = ["input_ids", "attention_mask", "past_key_values", "tokenizer", "assistant_tokenizer", "inputs_embeds", "position_ids", "cache_position", "logits_to_keep", "trust_remote_code"]  # fmt: skip
INSTALLED = [*_PARAMETERS, *_KEYWORDS, *_FIELDS]


def of(*hows: How) -> list[str]:
    return [name for name, argument in ARGUMENTS.items() if argument.how in hows]


@dataclass
class Situation:
    """A prompt, or several, and the model's continuation."""

    model: Any
    pipe: Pipeline
    ids: torch.Tensor
    mask: torch.Tensor

    def __post_init__(self):
        out = self.model.generate(self.ids, attention_mask=self.mask, max_new_tokens=NEW, do_sample=False)
        self.text = out[:, self.ids.shape[1] :].tolist()
        self.rows, self.width = self.ids.shape
        first = self.text[0]
        # A token at which the text may end.
        self.late = next(t for i, t in enumerate(first) if i >= 6 and t not in first[:i])

    def call(self, generate, **changes):
        """``changes`` to the ordinary call; DROP leaves an argument out."""
        arguments = {"inputs": self.ids, "attention_mask": self.mask, "max_new_tokens": NEW, "do_sample": False}
        arguments |= changes
        return generate(**{name: value for name, value in arguments.items() if value is not DROP})


DROP = object()


@pytest.fixture(scope="module")
def pipe(model):
    return Pipeline(model, noisy(model, 0.02), lookahead=4, schedule="lockstep")


@pytest.fixture(scope="module")
def situations(model, pipe):
    one = random_prompts(1, seed=4, shortest=9, longest=9)[0][None]
    batch = left_pad(random_prompts(3, seed=9, shortest=5, longest=12))
    assert 0 in batch[1]
    return {"one": Situation(model, pipe, one, torch.ones_like(one)), "batch": Situation(model, pipe, *batch)}


@pytest.fixture(params=["one", "batch"])
def situation(request, situations):
    return situations[request.param]


# ---- values with an effect


def leaning(ids, scores):
    """A processor that depends on the whole prefix."""
    scores = scores.clone()
    scores[:, (int(ids.sum()) * 7) % VOCABULARY] += 5.0
    return scores


def rows_leaning(ids, scores):
    return torch.cat([leaning(ids[r : r + 1], scores[r : r + 1]) for r in range(len(ids))])


def stops_at(*tokens):
    def criterion(ids, scores, **kwargs):
        return torch.isin(ids[:, -1], torch.tensor(tokens))

    return criterion


def word(token: int) -> str:
    return "abcdef"[token] if token < 6 else f"<{token}>"


def word_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE({word(i): i for i in range(VOCABULARY)}, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TOKENIZER = word_tokenizer()


def fingerprint(result: Any) -> Any:
    """All comparable parts of a result: its fields, the text, scores and logits, the length of the cache."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    cache = result.past_key_values
    parts = {"sequences": result.sequences.tolist(), "cache": None if cache is None else int(cache.get_seq_length())}
    for name in ("scores", "logits"):
        value = getattr(result, name)
        if value is not None:
            parts[name] = torch.stack(value)
    return parts


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a == b
    return a.keys() == b.keys() and all(
        torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-4, equal_nan=True) if isinstance(a[k], torch.Tensor) else a[k] == b[k]
        for k in a
    )  # fmt: skip


@dataclass
class Case:
    """``given()`` the argument (a new one for each call), in addition to ``common``; without it, ``instead``.

    ``seen``: what is compared: the result, or the effect of the call on the value; ``undo``: called afterwards.
    """

    given: Callable[[], dict[str, Any]]
    common: dict[str, Any] | None = None
    instead: dict[str, Any] | None = None
    seen: Callable[[dict[str, Any], Any], Any] | None = None
    undo: Callable[[], None] = lambda: None


def value(name: str, what: Any, **common: Any) -> Case:
    return Case(lambda: {name: what}, common)


def _inputs(s: Situation, name: str) -> Case:
    other = s.ids.clone()
    other[:, -1] = 2 + (other[:, -1] + 50) % 300
    if name == "inputs":
        return value("inputs", other)
    return Case(lambda: {"input_ids": other}, {"inputs": DROP}, {"input_ids": s.ids})


def _mask(s: Situation) -> Case:
    shorter = s.mask.clone()
    shorter[0, int(s.mask[0].argmax())] = 0  # the first token of the first row
    return Case(lambda: {"attention_mask": shorter}, instead={"attention_mask": s.mask})


def _pad(s: Situation) -> Case:
    if s.rows > 1:
        return value("pad_token_id", 5, eos_token_id=[row[3] for row in s.text[:2]])
    ids = torch.cat([torch.full((1, 3), 5), s.ids], dim=1)  # from which the mask is inferred
    return value("pad_token_id", 5, inputs=ids, attention_mask=DROP)


def _new_cache(s: Situation):
    return DynamicCache() if s.rows == 1 else DynamicCache(config=s.model.config)


def _cache(s: Situation) -> Case:
    return Case(
        lambda: {"past_key_values": _new_cache(s)},
        seen=lambda given, result: (
            (fingerprint(result), int(given["past_key_values"].get_seq_length()))
            if "past_key_values" in given
            else fingerprint(result)
        ),
    )


def _streamer(s: Situation) -> Case:
    def seen(given, result):
        return fingerprint(result), given["streamer"].record if "streamer" in given else None

    return Case(lambda: {"streamer": Recorder()}, seen=seen)


def _chunks(s: Situation) -> Case:
    """The target's first forward has the requested width."""
    widths: list[int] = []

    def given():
        widths.clear()
        # With a cache of the caller, because 5.0 refuses it without one.
        return {"prefill_chunk_size": 3, "past_key_values": _new_cache(s)}

    def seen(arguments, result):
        first = widths[0]
        widths.clear()
        return fingerprint(result), first

    def note(module, args):
        widths.append(args[0].shape[1])

    trust(note)
    handle = s.model.model.embed_tokens.register_forward_pre_hook(note)
    return Case(given, seen=seen, undo=handle.remove)


def _narrow(s: Situation) -> dict[str, Any]:
    return {"inputs": s.ids[:, -1:], "attention_mask": DROP}


def _with_end(s: Situation) -> int:
    return s.text[0][2]


_DICT = {"return_dict_in_generate": True}

CASES: dict[str, Callable[[Situation], Case | None]] = {
    "inputs": lambda s: _inputs(s, "inputs"),
    "input_ids": lambda s: _inputs(s, "input_ids"),
    "attention_mask": _mask,
    "generation_config": lambda s: value(
        "generation_config", GenerationConfig(max_new_tokens=NEW - 3, suppress_tokens=[s.text[0][1]], do_sample=False), max_new_tokens=DROP
    ),
    "logits_processor": lambda s: value("logits_processor", [rows_leaning]),
    "stopping_criteria": lambda s: value("stopping_criteria", [stops_at(*(row[4] for row in s.text))]),
    "prefix_allowed_tokens_fn": lambda s: value(
        "prefix_allowed_tokens_fn", lambda row, ids: list(range(20 * row + len(ids) % 7, 200))
    ),
    "streamer": _streamer,
    "tokenizer": lambda s: Case(
        lambda: {"tokenizer": TOKENIZER, "stop_strings": [word(row[4]) for row in s.text]}
    ),
    "past_key_values": _cache,
    "max_length": lambda s: value("max_length", s.width + 6, max_new_tokens=DROP),
    "max_new_tokens": lambda s: value("max_new_tokens", 5),
    "min_length": lambda s: value("min_length", s.width + 9, eos_token_id=_with_end(s)),
    "min_new_tokens": lambda s: value("min_new_tokens", 9, eos_token_id=_with_end(s)),
    "max_time": lambda s: value("max_time", 1e-9),
    "stop_strings": lambda s: value("stop_strings", [word(row[5]) for row in s.text], tokenizer=TOKENIZER),
    "eos_token_id": lambda s: value("eos_token_id", [s.late, *(row[3] for row in s.text[1:])]),
    "pad_token_id": _pad,
    "bos_token_id": lambda s: Case(
        lambda: {"bos_token_id": 7}, {"inputs": DROP, "attention_mask": DROP}, {"bos_token_id": 9}
    ) if s.rows == 1 else None,
    "repetition_penalty": lambda s: value("repetition_penalty", 1.8),
    "renormalize_logits": lambda s: value("renormalize_logits", True, output_scores=True, **_DICT),
    "no_repeat_ngram_size": lambda s: value("no_repeat_ngram_size", 1),
    "encoder_repetition_penalty": lambda s: value("encoder_repetition_penalty", 9.0),
    "encoder_no_repeat_ngram_size": lambda s: value(
        "encoder_no_repeat_ngram_size", 1, sequence_bias={(int(s.ids[0, -2]),): 40.0}
    ),
    "bad_words_ids": lambda s: value("bad_words_ids", [[s.text[0][0]], s.text[-1][2:4]]),
    "sequence_bias": lambda s: value("sequence_bias", {(s.text[0][0],): -30.0, tuple(s.text[-1][2:4]): -30.0}),
    "suppress_tokens": lambda s: value("suppress_tokens", [s.text[0][0], s.text[-1][3]]),
    "begin_suppress_tokens": lambda s: value("begin_suppress_tokens", [s.text[0][0]]),
    "forced_bos_token_id": lambda s: value("forced_bos_token_id", 77, **_narrow(s)),
    "forced_eos_token_id": lambda s: value("forced_eos_token_id", 77),
    "exponential_decay_length_penalty": lambda s: value("exponential_decay_length_penalty", (2, 2.0), eos_token_id=77),
    "remove_invalid_values": lambda s: value("remove_invalid_values", True, sequence_bias={(77,): math.nan}),
    "watermarking_config": lambda s: value("watermarking_config", WatermarkingConfig(bias=9.0)),
    "return_dict_in_generate": lambda s: value("return_dict_in_generate", True),
    "output_scores": lambda s: value("output_scores", True, suppress_tokens=[s.text[0][0]], **_DICT),
    "output_logits": lambda s: value("output_logits", True, suppress_tokens=[s.text[0][0]], **_DICT),
    "use_cache": lambda s: value("use_cache", False, **_DICT),
    "prefill_chunk_size": _chunks,
}  # fmt: skip
"""Honoured arguments whose effect on the greedy result transformers' generate() shows, too."""

# transformers applies these only when it samples. In greedy decoding it ignores them, and so must the pipeline.
SAMPLED = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.3, "top_h": 0.4, "typical_p": 0.4, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
}  # fmt: skip

# See test_sampling.py.
DRAWN = {"do_sample", "seed", "num_return_sequences"}
OWN = {"presence_penalty", "frequency_penalty", "logit_bias"}  # not of transformers, see test_processors.py
OWN |= {"grammar", "logprobs"}  # see test_grammar.py and test_logprobs.py

NO_EFFECT = {
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": 3,  # its own class where that exists
    "length_penalty": 2.0,
    "early_stopping": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "max_matching_ngram_size": 3,
    "decoder_start_token_id": 5,
    "transformers_version": "5.1.0",
    "logits_to_keep": 1,
    "trust_remote_code": True,
}

# The value, and a word of the suggested alternative.
REFUSED = {
    "custom_generate": ("transformers-community/dola", "custom_generate=pipe"),
    "synced_gpus": (True, "each rank its own pipeline"),
    "assistant_model": (random_llama(5, layers=1), "drafts="),
    "assistant_tokenizer": (TOKENIZER, "pass draft_tokenizers=... to Pipeline"),
    "negative_prompt_ids": (torch.ones(1, 3).long(), "second forward"),
    "negative_prompt_attention_mask": (torch.ones(1, 3).long(), "second forward"),
    "inputs_embeds": (torch.ones(1, 3, 64), "pass input_ids"),
    "position_ids": (torch.arange(9)[None] + 3, "derived from attention_mask"),
    "cache_position": (torch.arange(9), "derived from the cache"),
    "guidance_scale": (1.5, "second forward"),
    "output_attentions": (True, "over the finished text"),
    "output_hidden_states": (True, "over the finished text"),
    "cache_implementation": ("static", "caches of its own"),
    "cache_config": ({"backend": "quanto"}, "caches of its own"),
    "max_cache_len": (99, "caches of its own"),
    "low_memory": (True, "detach"),
    "token_healing": (True, "heal_tokens"),
    "num_beams": (4, "detach"),
    "num_beam_groups": (2, "detach"),
    "diversity_penalty": (0.5, "detach"),
    "constraints": ([object()], "detach"),
    "force_words_ids": ([[7]], "detach"),
    "penalty_alpha": (0.6, "contrastive"),
    "dola_layers": ("low", "DoLa"),
    "prompt_lookup_num_tokens": (3, "drafts"),
    "assistant_early_exit": (1, "drafts"),
    "use_mtp": (True, "drafts"),
    "speculation_type": ("dflash", "drafts"),
    "assistant_ensemble_weight": (0.5, "drafts"),
    "is_assistant": (True, "drafts"),
}


# ---- the table itself


def test_every_argument_is_classified_and_has_a_case(capsys):
    unknown = sorted(set(INSTALLED) - set(ARGUMENTS))
    assert not unknown, (
        f"this transformers has arguments that pipespec.api.arguments.ARGUMENTS does not classify: {unknown}"
    )
    honoured = of(How.HONOURED, How.FUSED, How.STEPWISE)
    assert sorted([*CASES, *SAMPLED, *DRAWN, *OWN]) == sorted(honoured)
    assert sorted(NO_EFFECT) == sorted(of(How.NO_EFFECT))
    assert sorted(REFUSED) == sorted(of(How.REFUSED))
    counts = Counter(argument.how.value for argument in ARGUMENTS.values())
    with capsys.disabled():
        print(f"\n{len(ARGUMENTS)} arguments of generate(), {len(set(INSTALLED))} of them installed:", dict(counts))


def test_an_unknown_argument_is_refused(situations, monkeypatch):
    """In a call, and as a field of a later transformers. Entries of the user's own are kept."""
    s = situations["one"]
    with pytest.raises(ValueError, match="'quantum_leap'"):
        s.call(s.pipe.generate, quantum_leap=3)
    config = GenerationConfig(max_new_tokens=3)
    config.quantum_leap = 3
    assert torch.equal(
        s.call(s.pipe.generate, generation_config=config), s.call(s.model.generate, generation_config=config)
    )

    class Later(GenerationConfig):
        def __init__(self, **kwargs):
            self.quantum_leap = None
            super().__init__(**kwargs)

    monkeypatch.setattr("pipespec.api.arguments.GenerationConfig", Later)
    config = Later(max_new_tokens=3)
    config.quantum_leap = 3
    with pytest.raises(NotImplementedError, match="quantum_leap=3"):
        s.call(s.pipe.generate, generation_config=config)


# ---- honoured


@pytest.mark.parametrize("name", CASES)
def test_honoured(name, situation):
    case = CASES[name](situation)
    if case is None:
        pytest.skip("has a meaning for one row only")
    assert name in INSTALLED
    common = case.common or {}
    seen = case.seen or (lambda given, result: fingerprint(result))
    try:
        given = case.given()
        wanted = seen(given, situation.call(situation.model.generate, **common | given))
        given = case.given()
        got = seen(given, situation.call(situation.pipe.generate, **common | given))
        without = seen({}, situation.call(situation.pipe.generate, **common | (case.instead or {})))
    finally:
        case.undo()
    assert same(got, wanted), f"{name}: transformers gives {wanted}, the pipeline {got}"
    assert not same(got, without), f"{name}: this value has no effect, so the test shows nothing"
    assert situation.pipe.report.stages[-1].accepted > 0  # blocks of several tokens were verified


@pytest.mark.parametrize("name", SAMPLED)
def test_of_sampling_only(name, situation):
    if name not in INSTALLED:
        pytest.skip("not in this transformers")
    given = {name: SAMPLED[name]}
    got = situation.call(situation.pipe.generate, **given)
    assert torch.equal(got, situation.call(situation.model.generate, **given))
    assert got[:, situation.width :].tolist() == situation.text


# ---- no effect


@pytest.mark.parametrize("name", NO_EFFECT)
def test_without_effect(name, situation):
    if name not in INSTALLED:
        with pytest.raises((TypeError, ValueError), match=name):
            situation.call(situation.pipe.generate, **{name: NO_EFFECT[name]})
        return
    what = NO_EFFECT[name]
    if name == "continuous_batching_config":
        from transformers import ContinuousBatchingConfig

        what = ContinuousBatchingConfig()
    config = GenerationConfig()
    setattr(config, name, what)
    for given in ({name: what}, {"generation_config": config}):
        got = situation.call(situation.pipe.generate, **given)
        assert torch.equal(got, situation.call(situation.model.generate, **given))
        assert got[:, situation.width :].tolist() == situation.text


# ---- refused


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, situations):
    s = situations["one"]
    what, way_out = REFUSED[name]
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=name) as caught:
        s.call(s.pipe.generate, **{name: what})
    assert way_out in str(caught.value)
    assert ARGUMENTS[name].note in str(caught.value)
    if name in _FIELDS:
        config = GenerationConfig()
        setattr(config, name, what)
        with pytest.raises(NotImplementedError, match=name):
            s.call(s.pipe.generate, generation_config=config)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_neutral_values(name, situations):
    """Values without an effect are accepted if transformers accepts them."""
    s = situations["one"]
    if name in ("input_ids", "inputs", "max_new_tokens", "do_sample", "attention_mask"):
        pytest.skip("part of every call here")
    for neutral in (None, *ARGUMENTS[name].neutral):
        if name in ("num_beams", "num_return_sequences") and neutral is None:
            with pytest.raises(TypeError):  # None is none of their values in transformers either
                s.call(s.model.generate, **{name: neutral})
            continue
        if neutral == "dynamic_full":  # a value of some versions of transformers
            try:
                s.call(s.model.generate, **{name: neutral})
            except ValueError:
                continue
        got = s.call(s.pipe.generate, **{name: neutral})
        assert got[:, s.width :].tolist() == s.text, f"{name}={neutral}"
