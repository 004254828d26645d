"""The end of a text by stop strings, criteria and the clock, checked at every token, also inside an accepted block.

The lookahead is twelve and the draft is always right. If criteria ran once per block, every text here would continue to the end of its block, as it
does in transformers' assisted decoding (measured there: 34 and 40 new tokens where plain decoding stops at 6).
"""

from __future__ import annotations

import time

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria

from pipespec import Pipeline
from tests.conftest import always_right, left_pad, noisy, random_prompts
from tests.trials import trials

NEW = 40
SCHEDULES = ["lockstep", "workers"]


@pytest.fixture(scope="module", params=SCHEDULES)
def chain(request, model):
    """Blocks of up to twelve accepted tokens. Under workers the first draft is sometimes wrong."""
    drafts = [always_right(model)] if request.param == "lockstep" else [noisy(model, 0.02), always_right(model)]
    with Pipeline(model, drafts, schedule=request.param, lookahead=12) as pipeline:
        yield pipeline


PROMPT = random_prompts(1, seed=5, shortest=6)[0][None]


class At(StoppingCriteria):
    """Stops at a length, or at a condition, and records its calls."""

    def __init__(self, stops, answer=bool):
        self.stops, self.answer, self.seen = stops, answer, []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.dtype == torch.long
        assert input_ids.ndim == 2
        self.seen += input_ids.tolist()
        return self.answer(self.stops(input_ids))


def tensor_answer(done: bool) -> torch.Tensor:
    return torch.tensor([done])


def same(chain, ids, **kwargs) -> torch.Tensor:
    """The chain's result, after a comparison with the target's own; ``criteria()`` makes new criteria for each."""
    criteria = kwargs.pop("criteria", list)
    wanted = chain.target.generate(ids, do_sample=False, stopping_criteria=StoppingCriteriaList(criteria()), **kwargs)
    got = chain.generate(ids, do_sample=False, stopping_criteria=criteria(), **kwargs)
    assert torch.equal(got, wanted), f"wanted {wanted.tolist()}, got {got.tolist()}"
    return got


def check_cut(chain, ids, **kwargs) -> None:
    """Report and returned cache have no token behind the end."""
    out = chain.generate(ids, do_sample=False, return_dict_in_generate=True, **kwargs)
    length = out.sequences.shape[1]
    assert out.speculation.tokens == length - ids.shape[1]
    assert out.past_key_values.get_seq_length() == length - 1
    # The cache holds the text: a call that continues it gives the same as a call without it.
    more = chain.generate(out.sequences, do_sample=False, max_new_tokens=6, past_key_values=out.past_key_values)
    assert torch.equal(more, chain.target.generate(out.sequences, do_sample=False, max_new_tokens=6))


# ---- criteria


@pytest.mark.parametrize("answer", [bool, tensor_answer])
def test_at_every_place_of_a_block(chain, answer):
    start = PROMPT.shape[1]
    for new in range(1, 29, trials(ci=3, nightly=1) if answer is bool else 5):
        out = same(
            chain,
            PROMPT,
            max_new_tokens=NEW,
            criteria=lambda new=new: [At(lambda ids: ids.shape[1] >= start + new, answer)],
        )
        assert out.shape[1] == start + new
        assert chain.report.tokens == new
    if chain.schedule == "lockstep":  # most of these were inside a block
        assert chain.report.stages[-1].accepted > 12


class AllRows(StoppingCriteria):
    """Evaluation harnesses stop the whole batch when every row contains the stop word."""

    def __init__(self, rows: int, words: list[int]):
        self.said, self.words = [False] * rows, words

    def __call__(self, input_ids, scores, **kwargs):
        assert len(input_ids) == len(self.said)
        for row, ids in enumerate(input_ids.tolist()):
            self.said[row] |= ids[-1] == self.words[row]
        return False not in self.said


def test_a_criterion_for_the_whole_batch(chain, model):
    ids, mask = left_pad(random_prompts(3, seed=9, shortest=4))
    texts = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, ids.shape[1] :]
    words = [int(texts[row, at]) for row, at in enumerate((3, 11, 7))]
    out = same(chain, ids, attention_mask=mask, max_new_tokens=NEW, criteria=lambda: [AllRows(3, words)])
    assert out.shape[1] < ids.shape[1] + NEW


def test_together_with_ends_of_text(chain):
    """The earlier one ends the text, at every distance between the two."""
    start = PROMPT.shape[1]
    text = chain.target.generate(PROMPT, do_sample=False, max_new_tokens=NEW)[0, start:].tolist()
    first_uses = [i for i, token in enumerate(text) if token not in text[:i]]
    for place in first_uses[2:12:3]:
        for new in (place, place + 1, place + 2, place + 8):
            out = same(
                chain,
                PROMPT,
                max_new_tokens=NEW,
                eos_token_id=[text[place], 319],
                pad_token_id=0,
                criteria=lambda new=new: [At(lambda ids: ids.shape[1] >= start + new)],
            )
            assert out.shape[1] == start + min(new, place + 1)
    check_cut(chain, PROMPT, max_new_tokens=NEW, eos_token_id=text[first_uses[5]])


# ---- the clock


def test_the_clock_runs_while_it_generates(chain):
    """A criterion sleeps for the whole time limit: the text ends with that token, inside its block."""

    def sleeps(ids):
        if ids.shape[1] == PROMPT.shape[1] + 5:
            time.sleep(1.5)
        return False

    began = time.time()
    criteria = [At(sleeps), MaxTimeCriteria(1.5, initial_timestamp=began)]
    out = chain.generate(PROMPT, max_new_tokens=NEW, stopping_criteria=criteria)
    assert out.shape[1] <= PROMPT.shape[1] + 5
    assert torch.equal(out, same(chain, PROMPT, max_new_tokens=NEW)[:, : out.shape[1]])


# ---- stop strings


@pytest.fixture(scope="module")
def family():
    """The bundled target in float32, a copy that drafts for it, its tokenizer, and a text of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipespec.demo import family_path

    path = family_path("target")
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
    ids = torch.tensor([tokenizer(prompt).input_ids])
    whole = target.generate(ids, do_sample=False, max_new_tokens=24)
    return target, tokenizer, ids, whole[0, ids.shape[1] :]


@pytest.fixture(scope="module", params=SCHEDULES)
def code(request, family):
    with Pipeline(family[0], always_right(family[0]), schedule=request.param, lookahead=10) as pipeline:
        yield pipeline


def stopped(code, family, ids=None, new: int = 24, **kwargs) -> torch.Tensor:
    _, tokenizer, own, _ = family
    ids = own if ids is None else ids
    kwargs |= {"tokenizer": tokenizer, "do_sample": False, "max_new_tokens": new}
    wanted = code.target.generate(ids, **kwargs)
    got = code.generate(ids, **kwargs)
    assert torch.equal(got, wanted), f"wanted {wanted.tolist()}, got {got.tolist()}"
    return got[:, ids.shape[1] :]


def test_a_stop_string_at_every_token(code, family):
    """The string is a token's own text, or the end of one token and the beginning of the next."""
    _, tokenizer, _, text = family
    lengths = set()
    for i in range(0, 20, trials(ci=6, nightly=3)):
        one, two = (tokenizer.decode(t) for t in (text[i : i + 1], text[i + 1 : i + 2]))
        for stop in {one, one[-1:] + two[:1]} - {""}:
            out = stopped(code, family, stop_strings=stop)
            new = tokenizer.decode(out[0])
            lengths.add(out.shape[1])
            assert stop in new
            assert stop not in tokenizer.decode(out[0, :-1])  # not one token too many
            assert code.report.tokens == out.shape[1]
    assert len(lengths) > trials(ci=2, nightly=4)
    assert any(n % 11 for n in lengths)  # inside blocks


def test_a_stop_string_in_the_prompt_stops_nothing(code, family):
    _, tokenizer, ids, text = family
    assert "def add" in tokenizer.decode(ids[0])
    assert "def add" not in tokenizer.decode(text)
    assert stopped(code, family, stop_strings="def add").shape[1] == 24


def test_a_stop_string_begun_by_the_prompt(code, family):
    """As in transformers, a stop string may begin in the prompt, and counts when the text completes it."""
    _, tokenizer, ids, text = family
    tail = tokenizer.decode(ids[0, -2:])
    stop = tail[-2:] + tokenizer.decode(text[:2])[:1]
    assert stopped(code, family, stop_strings=stop).shape[1] <= 2


def test_where_stop_strings_may_be_given(code, family):
    target, tokenizer, ids, text = family
    stop = tokenizer.decode(text[6:8])
    short = stopped(code, family, stop_strings=stop)
    assert short.shape[1] <= 8
    assert torch.equal(stopped(code, family, generation_config=GenerationConfig(stop_strings=[stop])), short)
    try:
        target.generation_config.stop_strings = stop
        assert torch.equal(stopped(code, family), short)
    finally:
        target.generation_config.stop_strings = None
    with pytest.raises(ValueError, match="tokenizer"):
        code.generate(ids, stop_strings=stop, max_new_tokens=5)


def test_stop_strings_of_a_batch(code, family):
    target, tokenizer, ids, _ = family
    other = torch.tensor(tokenizer("import os\n\n\ndef main():\n    path = os.path.join(").input_ids)
    batch, mask = left_pad([ids[0], other], pad=target.generation_config.pad_token_id or 0)
    whole = target.generate(batch, attention_mask=mask, do_sample=False, max_new_tokens=24)[:, batch.shape[1] :]
    counts = set()
    for row in range(2):
        for i in (2, 11):
            out = stopped(
                code,
                family,
                batch,
                attention_mask=mask,
                stop_strings=tokenizer.decode(whole[row, i : i + 2]),
                pad_token_id=0,
                eos_token_id=1,
            )
            counts.add((out != 0).sum(1).tolist() == [24, 24])
    assert False in counts


def test_stop_strings_and_the_cache(code, family):
    _, tokenizer, ids, text = family
    check_cut(code, ids, max_new_tokens=24, stop_strings=tokenizer.decode(text[4:6]), tokenizer=tokenizer)
