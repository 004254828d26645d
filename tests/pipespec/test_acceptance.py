"""Rejection sampling in a pipeline: the target's distribution of texts, more accepted draft tokens, and errors by name."""

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.config import SpeculationConfig
from pipespec.engine.acceptance import RejectionAcceptance
from pipespec.engine.sampling import Step
from pipespec.engine.stage import ModelDraft
from pipespec_kernels.noise import Noise
from tests.conftest import left_pad, noisy, random_llama
from tests.support import grammars
from tests.trials import trials

IDS, NEW = 5, 4
TEXTS = trials(ci=3_000, nightly=100_000)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3}
PROMPT = torch.tensor([[1, 3]])


@pytest.fixture(scope="module")
def target():
    return random_llama(8, vocabulary=IDS, hidden=16, layers=1)


@pytest.fixture(scope="module")
def draft(target):
    return noisy(target, 0.25)


def exact(target, length: int, given: dict[str, Any], prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    """Probability of each text of ``length`` new tokens, float64 ``[IDS] * length``, by a forward of each."""
    texts = torch.tensor(list(itertools.product(range(IDS), repeat=length)))
    ids = torch.cat([prompt.expand(len(texts), -1), texts], 1)
    with torch.no_grad():
        logits = target(ids).logits.double()
    p = torch.ones(len(texts), dtype=torch.float64)
    for i in range(length):
        at = prompt.shape[1] + i
        x = logits[:, at - 1].clone()
        for row in range(len(texts)):
            for token in set(ids[row, :at].tolist()):
                penalty = given.get("repetition_penalty", 1.0)
                x[row, token] = x[row, token] * penalty if x[row, token] < 0 else x[row, token] / penalty
            for token in set(ids[row, prompt.shape[1] : at].tolist()):
                x[row, token] -= given.get("presence_penalty", 0.0)
            if i and "grammar" in given:
                x[row, texts[row, i - 1]] = -torch.inf
        p *= x.softmax(-1)[torch.arange(len(texts)), texts[:, i]]
    return p


def generated(pipe: Pipeline, count: int, **given) -> torch.Tensor:
    rows, found = 500, []
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | given
    for i in range(0, count, rows):
        own = {name: value(rows) if callable(value) else value for name, value in options.items()}
        out = pipe.generate(PROMPT.expand(rows, -1), seed=list(range(i, i + rows)), **own)
        found.append(out[:, PROMPT.shape[1] :])
    return torch.cat(found)


LENGTH = 3  # of the texts that are compared: 125 of them


def chi_square(texts: torch.Tensor, p: torch.Tensor) -> tuple[float, float]:
    """The statistic of the first tokens, and its threshold of ten standard deviations; rare texts are merged."""
    code = torch.zeros(len(texts), dtype=torch.int64)
    for i in range(LENGTH):
        code = code * IDS + texts[:, i]
    counts = torch.bincount(code, minlength=IDS**LENGTH).double()
    expected = p * len(texts)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None].clamp(min=1e-9)])
    df = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()), df + 10 * math.sqrt(2 * df)


class NoRepeats(grammars.Classes):
    """No token twice in a row."""

    def allowed(self) -> list[int]:
        return [t for t in range(self.vocabulary) if not self.tokens or t != self.tokens[-1]]

    def is_terminated(self) -> bool:
        return False


GIVEN = {"plain": {}, "penalties": PENALTIES, "grammar": {"grammar": lambda rows: [NoRepeats(99, IDS) for _ in range(rows)]}}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_texts_have_the_targets_distribution(target, draft, rule, given) -> None:
    pipe = Pipeline(target, draft, schedule="lockstep", lookahead=3, acceptance=rule)
    statistic, threshold = chi_square(generated(pipe, TEXTS, **given), exact(target, LENGTH, given))
    assert statistic < threshold
    assert pipe.report.stages[-1].accepted > 0


def test_more_draft_tokens_are_accepted_than_coupled(target, draft) -> None:
    per_step = {}
    for rule in ("coupled", "rejection"):
        pipe = Pipeline(target, draft, schedule="lockstep", lookahead=3, acceptance=rule)
        generated(pipe, 1000, temperature=1.0)
        last = pipe.report.stages[-1]
        per_step[rule] = last.accepted / last.steps
    assert per_step["coupled"] < per_step["rejection"]


def test_one_seed_one_text_for_one_configuration(target, draft) -> None:
    """Of a row, in any batch. Greedy calls, filters and processors by position are those of coupled calls."""
    target, draft = random_llama(3), noisy(random_llama(3), 0.05)
    pipe = Pipeline(target, draft, lookahead=4, acceptance="rejection")
    assert pipe.schedule == "lockstep"
    ids, mask = left_pad([torch.randint(4, 300, (n,)) for n in (5, 9)])
    options = {"max_new_tokens": 24, "pad_token_id": 0, "do_sample": True, "top_p": 0.9, "temperature": 0.8}
    texts = pipe.generate(ids, attention_mask=mask, seed=[4, 5], **options)
    assert torch.equal(pipe.generate(ids, attention_mask=mask, seed=[4, 5], **options), texts)
    alone = pipe.generate(ids[1:], seed=[5], **options)
    assert torch.equal(alone[0], texts[1][: alone.shape[1]])
    assert "acceptance=" in str(pipe.report)
    assert 0 < pipe.report.stages[-1].accepted < pipe.report.stages[-1].drafted
    greedy = {"max_new_tokens": 24, "pad_token_id": 0, "do_sample": False, "attention_mask": mask}
    assert torch.equal(pipe.generate(ids, **greedy), target.generate(ids, **greedy))
    assert pipe.report.decisions is None
    with pytest.raises(NotImplementedError, match="position by position, which acceptance='rejection'"):
        pipe.generate(ids, attention_mask=mask, **options, no_repeat_ngram_size=2)
    outputs = {"output_logits": True, "output_scores": True, "logprobs": 0, "return_dict_in_generate": True}
    logits = pipe.generate(ids[1:], seed=[5], **outputs, **options)
    assert torch.equal(logits.sequences, alone)
    transitions = target.compute_transition_scores(alone, logits.scores, normalize_logits=True)
    torch.testing.assert_close(logits.logprobs.chosen, transitions, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        plain = target(alone).logits[0, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(logits.logits), plain, atol=1e-4, rtol=1e-4)


def test_tokens_that_the_draft_does_not_have() -> None:
    """They have no draft probability."""
    acceptance = RejectionAcceptance(4)
    acceptance.begin(1, 64, torch.device("cpu"))
    one = torch.ones(1, dtype=torch.int32)
    noise = Noise(torch.arange(1), np.array([5]), torch.ones(1))
    acceptance.draw(torch.zeros(1, 1, 48), Step(torch.zeros(1, 1, dtype=torch.int32), one * 5, one, one * 0), noise)
    assert acceptance._logits[0, 5 % 5].softmax(-1).nonzero().flatten().tolist() == list(range(48))


def test_a_draft_without_a_distribution(target, monkeypatch) -> None:
    """The target draws by itself, now and then the token that it has rejected. Its own logits without a distribution are an error."""
    broken = noisy(target, 0.0)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    pipe = Pipeline(target, broken, schedule="lockstep", acceptance="rejection")
    texts = generated(pipe, TEXTS)
    statistic, threshold = chi_square(texts, exact(target, LENGTH, {}))
    assert statistic < threshold
    assert (texts == 0).any()  # the draft's token
    with pytest.raises(ValueError, match="no token can be drawn at position 2 of row 0"):
        generated(Pipeline(broken, target, schedule="lockstep", acceptance="rejection"), 500)
    # A commit of the rejected token would go on after it.
    monkeypatch.setattr("pipespec.engine.stage.drop_rejected", lambda *step: None)
    assert (generated(pipe, 500) < 0).any()


def test_without_drafts_it_has_no_effect() -> None:
    assert SpeculationConfig.of([], acceptance="rejection").acceptance == "coupled"
    assert SpeculationConfig.of([ModelDraft()], schedule="plain", acceptance="rejection").acceptance == "coupled"


def test_rows_that_end_early(target, draft) -> None:
    """The draft stops after an end token, and a row ends at it."""
    end, pad = 2, 0
    pipe = Pipeline(target, draft, schedule="lockstep", lookahead=3, acceptance="rejection")
    texts = generated(pipe, TEXTS, eos_token_id=end)
    p = exact(target, LENGTH, {}).view(*[IDS] * LENGTH)
    ended = p[end].sum(), p[:, end].sum(-1)
    p[:, end] = 0
    p[:, end, pad] = ended[1]
    p[end] = 0
    p[end, pad, pad] = ended[0]
    statistic, threshold = chi_square(texts, p.flatten())
    assert statistic < threshold


def test_what_runs_position_by_position_is_named():
    """A penalty that float32 holds only in steps is no longer fused."""
    target = random_llama(3)
    pipe = Pipeline(target, noisy(target, 0.02), acceptance="rejection", schedule="lockstep")
    call = functools.partial(pipe.generate, PROMPT, max_new_tokens=4, do_sample=True, seed=3)
    call(repetition_penalty=1.2)
    with pytest.raises(ValueError, match=r"RepetitionPenaltyLogitsProcessor: runs position by position, which acc"):
        call(repetition_penalty=1e38)
