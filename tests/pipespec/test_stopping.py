"""The end of a text by stop strings, criteria and the clock, checked at every token, also inside an accepted block.

The lookahead is twelve and the draft is always right. If criteria ran once per block, every text here would continue to the end of its block, as it
does in transformers' assisted decoding (measured there: 34 and 40 new tokens where plain decoding stops at 6).
"""

import functools
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria
from transformers.generation import MaxTimeCriteria

from pipespec import Pipeline
from pipespec.demo import family_path
from tests.conftest import always_right, left_pad, noisy, random_prompts
from tests.support.texts import one_prompt, own_text, same_text
from tests.trials import trials

NEW = 40
SCHEDULES = trials(ci=["lockstep"], nightly=["lockstep", "workers"])
"""With processes, too: the calls of ``tests/same_text`` with criteria and stop strings."""
PROMPT = one_prompt(5, 6, 24)
START = PROMPT.shape[1]


@pytest.fixture(scope="module", params=SCHEDULES)
def chain(request, model):
    """Blocks of up to twelve accepted tokens. Under workers the first draft is sometimes wrong."""
    drafts = [always_right(model)] if request.param == "lockstep" else [noisy(model, 0.02), always_right(model)]
    with Pipeline(model, drafts, schedule=request.param, lookahead=12) as pipeline:
        yield pipeline


def check_cut(chain, ids, **kwargs) -> None:
    """Report and returned cache have no token after the end."""
    out = chain.generate(ids, do_sample=False, return_dict_in_generate=True, **kwargs)
    length = out.sequences.shape[1]
    assert chain.report.tokens == length - ids.shape[1]
    assert out.past_key_values.get_seq_length() == length - 1
    # The cache holds the text: a call that continues it gives the same as a call without it.
    more = chain.generate(out.sequences, do_sample=False, max_new_tokens=6, past_key_values=out.past_key_values)
    assert torch.equal(more, own_text(chain.target, out.sequences, max_new_tokens=6))


def stops_at(new: int, answer=bool):
    """Arguments of a call that ends with this new token."""
    return lambda: {"stopping_criteria": [lambda ids, scores: answer(ids.shape[1] >= START + new)]}


@pytest.mark.parametrize("answer", [bool, lambda done: torch.tensor([done])], ids=["bool", "tensor"])
def test_at_every_place_of_a_block(chain, answer):
    for new in range(1, 29, trials(ci=3, nightly=1) if answer is bool else 5):
        out = same_text(chain, PROMPT, max_new_tokens=NEW, fresh=stops_at(new, answer))
        assert out.shape[1] == START + new
        assert chain.report.tokens == new
    if chain.schedule == "lockstep":  # most of these were inside a block
        assert chain.report.stages[-1].accepted > 12


VERDICTS = {
    "numpy": lambda done, rows: np.bool_(done),
    "numpy array": lambda done, rows: np.full(rows, done),
    "None": lambda done, rows: None,
    "list": lambda done, rows: [done] * rows,
    "0-D": lambda done, rows: torch.tensor(done),
    "column": lambda done, rows: torch.full((rows, 1), done),
    "row": lambda done, rows: torch.full((1, rows), done),
    "too many": lambda done, rows: torch.full((rows + 2,), done),
    "empty": lambda done, rows: torch.zeros(0, dtype=torch.bool),
    "int": lambda done, rows: int(done),
    "a number that is not one": lambda done, rows: 2 * done,
    "int64": lambda done, rows: torch.full((rows,), 3 * done),
    "uint8": lambda done, rows: torch.full((rows,), int(done), dtype=torch.uint8),
    "float": lambda done, rows: torch.full((rows,), float(done)),
    "one row at a time": lambda done, rows: torch.arange(rows) < rows * done - 1,
}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos", [None, 319])
def test_what_a_criterion_returns(chain, verdict, rows, eos):
    """Texts and errors are transformers'."""
    ids, mask = left_pad(random_prompts(rows, seed=14, shortest=4))
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}

    def result(generate):
        def criterion(ids, scores):
            return VERDICTS[verdict](ids.shape[1] >= mask.shape[1] + 5, rows)

        try:
            return generate(ids, **given, stopping_criteria=[criterion])
        except Exception as error:
            return error

    wanted, got = result(chain.target.generate), result(chain.generate)
    if isinstance(wanted, Exception):
        assert (type(got), str(got)) == (type(wanted), str(wanted))
    else:
        assert torch.equal(got, wanted)


class AllRows(StoppingCriteria):
    """Evaluation harnesses stop the whole batch when every row contains the stop word."""

    def __init__(self, words: list[int]):
        self.said, self.words = [False] * len(words), words

    def __call__(self, input_ids, scores, **kwargs):
        for row, ids in enumerate(input_ids.tolist()):
            self.said[row] |= ids[-1] == self.words[row]
        return False not in self.said


def test_a_criterion_for_the_whole_batch(chain, model):
    ids, mask = left_pad(random_prompts(3, seed=9, shortest=4))
    texts = own_text(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    words = [int(texts[row, at]) for row, at in enumerate((3, 11, 7))]
    call = {"attention_mask": mask, "max_new_tokens": NEW}
    out = same_text(chain, ids, **call, fresh=lambda: {"stopping_criteria": [AllRows(words)]})
    assert out.shape[1] < ids.shape[1] + NEW


def test_together_with_ends_of_text(chain):
    """The earlier one ends the text, at every distance between the two."""
    text = own_text(chain.target, PROMPT, max_new_tokens=NEW)[0, START:].tolist()
    first_uses = [i for i, token in enumerate(text) if token not in text[:i]]
    for place in first_uses[2:12:3]:
        ends = {"eos_token_id": [text[place], 319], "pad_token_id": 0}
        for new in (place, place + 1, place + 2, place + 8):
            out = same_text(chain, PROMPT, max_new_tokens=NEW, **ends, fresh=stops_at(new))
            assert out.shape[1] == START + min(new, place + 1)
    check_cut(chain, PROMPT, max_new_tokens=NEW, eos_token_id=text[first_uses[5]])


def test_the_clock_runs_while_it_generates(chain):
    """A criterion sleeps for the whole time limit: the text ends with that token, inside its block."""

    def sleeps(ids, scores):
        if ids.shape[1] == START + 5:
            time.sleep(1.5)
        return False

    criteria = [sleeps, MaxTimeCriteria(1.5, initial_timestamp=time.time())]
    out = chain.generate(PROMPT, max_new_tokens=NEW, stopping_criteria=criteria)
    assert out.shape[1] <= START + 5
    assert torch.equal(out, same_text(chain, PROMPT, max_new_tokens=NEW)[:, : out.shape[1]])


# ---- stop strings


@functools.cache
def bundled():
    """The bundled target in float32, its tokenizer, a prompt, and a text of it."""
    target = AutoModelForCausalLM.from_pretrained(family_path("target"), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    ids = torch.tensor([tokenizer("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n").input_ids])
    return target, tokenizer, ids, own_text(target, ids, max_new_tokens=24)[0, ids.shape[1] :]


@pytest.fixture(scope="module", params=SCHEDULES)
def code(request):
    target = bundled()[0]
    with Pipeline(target, always_right(target), schedule=request.param, lookahead=10) as pipeline:
        yield pipeline


def stopped(code, ids=None, **kwargs) -> torch.Tensor:
    _, tokenizer, own, _ = bundled()
    ids = own if ids is None else ids
    return same_text(code, ids, tokenizer=tokenizer, max_new_tokens=24, **kwargs)[:, ids.shape[1] :]


def test_a_stop_string_at_every_token(code):
    """The string is a token's own text, or the end of one token and the beginning of the next."""
    _, tokenizer, _, text = bundled()
    lengths = set()
    for i in range(0, 20, trials(ci=6, nightly=3)):
        one, two = (tokenizer.decode(t) for t in (text[i : i + 1], text[i + 1 : i + 2]))
        for stop in {one, one[-1:] + two[:1]} - {""}:
            out = stopped(code, stop_strings=stop)
            lengths.add(out.shape[1])
            assert stop in tokenizer.decode(out[0])
            assert stop not in tokenizer.decode(out[0, :-1])  # not one token too many
            assert code.report.tokens == out.shape[1]
    assert len(lengths) > trials(ci=2, nightly=4)
    assert any(n % 11 for n in lengths)  # inside blocks


def test_stop_strings_and_the_prompt(code):
    """As in transformers: one in the prompt stops nothing; one that begins in the prompt counts when the text completes it."""
    _, tokenizer, ids, text = bundled()
    assert "def add" in tokenizer.decode(ids[0])
    assert "def add" not in tokenizer.decode(text)
    assert stopped(code, stop_strings="def add").shape[1] == 24
    stop = tokenizer.decode(ids[0, -2:])[-2:] + tokenizer.decode(text[:2])[:1]
    assert stopped(code, stop_strings=stop).shape[1] <= 2


def test_where_stop_strings_may_be_given(code):
    target, tokenizer, ids, text = bundled()
    stop = tokenizer.decode(text[6:8])
    short = stopped(code, stop_strings=stop)
    assert short.shape[1] <= 8
    assert torch.equal(stopped(code, generation_config=GenerationConfig(stop_strings=[stop])), short)
    try:
        target.generation_config.stop_strings = stop
        assert torch.equal(stopped(code), short)
    finally:
        target.generation_config.stop_strings = None
    with pytest.raises(ValueError, match="tokenizer"):
        code.generate(ids, stop_strings=stop, max_new_tokens=5)
    check_cut(code, ids, max_new_tokens=24, stop_strings=tokenizer.decode(text[4:6]), tokenizer=tokenizer)


def test_stop_strings_of_a_batch(code):
    target, tokenizer, ids, _ = bundled()
    other = torch.tensor(tokenizer("import os\n\n\ndef main():\n    path = os.path.join(").input_ids)
    batch, mask = left_pad([ids[0], other], pad=target.generation_config.pad_token_id or 0)
    whole = own_text(target, batch, attention_mask=mask, max_new_tokens=24)[:, batch.shape[1] :]
    counts, ends = [], {"attention_mask": mask, "pad_token_id": 0, "eos_token_id": 1}
    for row in range(2):
        for i in (2, 11):
            out = stopped(code, batch, stop_strings=tokenizer.decode(whole[row, i : i + 2]), **ends)
            counts.append((out != 0).sum(1).tolist())
    assert any(count != [24, 24] for count in counts)
