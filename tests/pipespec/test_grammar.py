"""Grammars: rows with and without one, and what matchers may do wrong. Texts: ``tests/same_text``; rules of acceptance: ``test_acceptance.py``."""

import functools
import json
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipespec import Pipeline, TokenMatcher
from pipespec.demo import family_path
from pipespec.engine.grammar import Grammar
from pipespec.engine.sampler import HostSampler
from pipespec.engine.sampling import SamplingParams, Step
from pipespec.schedules.base import StageFailure
from tests.conftest import left_pad, noisy, random_llama
from tests.docs.test_code_blocks import ROOT, blocks
from tests.support import grammars
from tests.support.forks import ran
from tests.support.grammars import END, Masks

VOCABULARY, NEW = 40, 24
Classes = functools.partial(grammars.Classes, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def target():
    return random_llama(21, vocabulary=VOCABULARY)


LENGTHS = (6, 9, 30)  # the first two rows end, the last one is cut


def matchers() -> list[grammars.Classes]:
    return [Classes(n) for n in LENGTHS]


@pytest.fixture(scope="module")
def call():
    generator = torch.Generator().manual_seed(3)
    ids, mask = left_pad([torch.randint(4, VOCABULARY, (n,), generator=generator) for n in (3, 9, 5)])
    return ids, {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": END}


@pytest.fixture(scope="module")
def expected(target, call):
    ids, options = call
    return target.generate(ids, **options, do_sample=False, logits_processor=[Masks(matchers())])


def check_obeys(ids: torch.Tensor, text: torch.Tensor) -> None:
    for row, matcher in enumerate(matchers()):
        for token in text[row, ids.shape[1] :].tolist():
            if matcher.is_terminated():
                break
            assert matcher.accept_token(token)
        assert matcher.is_terminated() == (row < 2)


def test_drafts_that_are_right_are_all_accepted(target, call) -> None:
    """Drafts in the same process have the masks, too. The matchers roll back with the drafts that the target has not verified yet."""
    ids, options = call
    own = matchers()
    with Pipeline(target, [noisy(target, 0.0)], lookahead=4, schedule="lockstep") as pipe:
        out = pipe.generate(ids, **options, do_sample=False, grammar=own)
        assert pipe.report.stages[-1].acceptance_rate == 1.0
    check_obeys(ids, out)
    assert all(matcher.rolled_back > 0 for matcher in own)


def test_rows_without_a_grammar(target, call, expected) -> None:
    ids, options = call
    free = target.generate(ids, **options, do_sample=False)
    with Pipeline(target, [noisy(target, 0.02)], lookahead=4, schedule="lockstep") as pipe:
        out = pipe.generate(ids, **options, do_sample=False, grammar=[None, *matchers()[1:]])
        assert torch.equal(out[1:], expected[1:, : out.shape[1]])
        assert torch.equal(out[0, : free.shape[1]], free[0, : out.shape[1]])
        assert torch.equal(pipe.generate(ids, **options, do_sample=False, grammar=[None] * 3), free)


class Silent(grammars.Classes):
    """Forbids everything after two tokens."""

    def allowed(self) -> list[int]:
        return [5] if len(self.tokens) < 2 else []


def test_a_grammar_without_a_way_on(target) -> None:
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 8, "eos_token_id": END, "pad_token_id": 0}
    with Pipeline(target, [noisy(target, 0.02)], schedule="lockstep") as pipe:
        with pytest.raises(ValueError, match="grammar of row 0 does not accept token 0, its generated token 2"):
            pipe.generate(ids, **options, do_sample=False, grammar=Silent(9, VOCABULARY))
        with pytest.raises(ValueError, match="no token can be drawn at position 5 of row 0"):
            pipe.generate(ids, **options, do_sample=True, seed=1, grammar=Silent(9, VOCABULARY))
        # A matcher that was used before, to its end. It would leave the text free.
        used = Classes(6)
        pipe.generate(ids, **options, do_sample=False, grammar=used)
        assert isinstance(used, TokenMatcher)
        used.tokens.append(END)
        with pytest.raises(
            ValueError,
            match=r"matcher of row 0 has reached its end before the first token: was it used for another call\?",
        ):
            pipe.generate(ids, **options, do_sample=False, grammar=used)


def test_a_draft_with_fewer_tokens() -> None:
    """The matcher fills masks of the target's vocabulary."""
    text = np.zeros((1, 9), dtype=np.int32)
    sampler = HostSampler(
        SamplingParams(), text, vocabulary=VOCABULARY, is_target=False, grammar=Grammar([Classes(3)], [4])
    )
    logits = torch.zeros(1, 1, 30)
    logits[0, 0, 29] = 1.0  # of a class that may not begin the text
    one = torch.ones(1, dtype=torch.int32)
    got = sampler(logits, Step(torch.zeros(1, 1, dtype=torch.int32), one * 3, one, one * 0))
    assert got.tolist() == [[5]]


class Narrow(grammars.Classes):
    """Of another vocabulary."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> bool:
        raise RuntimeError("should be (batch_size, 9)")


def test_a_grammar_for_another_vocabulary(target) -> None:
    with pytest.raises(
        ValueError, match=r"for the target's 40 tokens \(should be \(batch_size, 9\)\): make it for as many"
    ):
        Pipeline(target).generate(torch.tensor([[5, 6]]), max_new_tokens=2, grammar=Narrow(3, VOCABULARY))


class Forgetful(grammars.Classes):
    """Does not roll back."""

    def rollback(self, num_tokens: int = 1) -> None:
        raise RuntimeError("at most 0 tokens")


class Strict(grammars.Classes):
    def accept_token(self, token_id: int) -> bool:
        raise KeyError(token_id)


@pytest.mark.parametrize(
    ("matcher", "message"),
    [
        (
            Forgetful,
            r"row 1 does not take back its last tokens, \d of them \(at most 0 tokens\): .* a larger rollback limit",
        ),
        (Strict, r"row 1 fails at token \d+ \(\d+\): accept_token\(\) returns False"),
    ],
)
def test_a_matcher_that_raises(target, matcher, message) -> None:
    """The call is refused by name, also if the draft's step is the first to fail."""
    options = {"max_new_tokens": 9, "eos_token_id": END, "do_sample": False, "grammar": [None, matcher(9, VOCABULARY)]}
    with Pipeline(target, [noisy(target, 0.3)], schedule="lockstep", lookahead=4) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StageFailure)
            with pytest.raises(ValueError, match=message):
                pipe.generate(torch.tensor([[5, 6], [7, 8]]), **options)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("json", TypeError, "grammar must be a matcher with accept_token, rollback, .* not str"),
        ([Classes(3), 5], TypeError, "not int"),
        ([Classes(3)], ValueError, "1 matchers for 2 rows"),
        ([Classes(3)] * 2, ValueError, "one matcher for several rows"),
    ],
)
def test_wrong_values(target, given, error, message) -> None:
    if isinstance(given, list) and len(given) == 2 and given[0] is given[1]:
        given = [given[0]] * 2
    with pytest.raises(error, match=message):
        Pipeline(target).generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=2, grammar=given)


# ---- xgrammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "rank": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["loop", "leaf"]},
    },
    "required": ["name", "rank", "kind"],
    "additionalProperties": False,
}


class _Json(NamedTuple):
    xgrammar: Any
    tokenizer: Any
    model: Any
    compiled: Any
    inputs: dict[str, torch.Tensor]
    options: dict[str, Any]
    wanted: torch.Tensor


@pytest.fixture(scope="module")
def as_json():
    """The bundled family, a schema, and transformers' text with xgrammar's own processor, of a batch."""
    xgrammar = pytest.importorskip("xgrammar", reason="needs the package xgrammar (pip install xgrammar)")
    path = family_path("target")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(json.dumps(SCHEMA))
    inputs = tokenizer(["def mean(values):", "node = "], return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    options["eos_token_id"] = tokenizer.eos_token_id
    wanted = model.generate(**inputs, **options, logits_processor=[xgrammar.contrib.hf.LogitsProcessor(compiled)])
    return _Json(xgrammar, tokenizer, model, compiled, inputs, options, wanted)


@pytest.mark.parametrize("how", ["lockstep", "workers", "streams"])
@pytest.mark.filterwarnings("ignore::pipespec.schedules.base.SpeedWarning")
def test_json_schema_of_xgrammar(as_json, how) -> None:
    """Matchers, and in lockstep xgrammar's processor as it is, position by position."""
    xgrammar, tokenizer, model, compiled, inputs, options, wanted = as_json

    def fresh() -> list[Any]:
        return [xgrammar.GrammarMatcher(compiled) for _ in range(2)]

    with Pipeline(model, str(family_path("small")), schedule=how, lookahead=4) as pipe:
        got = pipe.generate(**inputs, **options, grammar=fresh())
        assert torch.equal(got, wanted)
        if how == "lockstep":
            assert pipe.report.stages[-1].accepted > 0
            processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
            assert torch.equal(pipe.generate(**inputs, **options, logits_processor=[processor]), wanted)
        sampled = pipe.generate(**inputs, **options | {"do_sample": True}, seed=4, grammar=fresh())
    for text in (*got, *sampled):
        found = json.loads(tokenizer.decode(text[inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        assert set(found) == {"name", "rank", "kind"}
        assert 1 <= found["rank"] <= 99


def test_example_of_the_documents(tmp_path) -> None:
    pytest.importorskip("xgrammar", reason="needs the package xgrammar (pip install xgrammar)")
    examples = [block for block in blocks(ROOT / "docs/how-to/sampling.md") if "xgrammar" in block.source]
    assert len(examples) == 1
    done = ran("-c", examples[0].source, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'rank'" in done.stdout
