"""Streamers get each committed token once and in order, and none that is rolled back. Partial texts after an interruption."""

import asyncio
import functools
import threading

import pytest
import torch
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

from pipespec import Pipeline
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import CALLS, Faulty
from tests.support.streamers import Recorder, failing
from tests.support.texts import one_prompt, own_text
from tests.trials import trials
from tests.waiting import SECONDS

NEW = 24


class Letters:
    """A tokenizer for streamers: every token is a word."""

    def decode(self, ids, **_) -> str:
        return "".join(f"{int(i)} " for i in ids)


@pytest.fixture(scope="module")
def model():
    return Faulty.like(random_llama(3))


@pytest.fixture(autouse=True)
def healthy(model):
    model.set()


SCHEDULES = trials(ci=["plain", "lockstep"], nightly=["plain", "lockstep", "workers"])
"""With processes, too: the calls of ``tests/same_text`` with a streamer, and the interrupted ones."""


@pytest.fixture(scope="module", params=SCHEDULES)
def chain(request, model):
    drafts = [] if request.param == "plain" else [noisy(model, 0.05), noisy(model, 0.01)]
    with Pipeline(model, drafts, schedule=request.param, lookahead=[4, 6][: len(drafts)] or None) as pipeline:
        yield pipeline


PROMPT = one_prompt(62, 5, 24)
BATCH, MASK = left_pad(random_prompts(4, seed=63, shortest=2))


def words(out: torch.Tensor, width: int) -> str:
    return Letters().decode(out[0, width:])


def wanted(chain, **kwargs) -> torch.Tensor:
    return own_text(chain.target, PROMPT, max_new_tokens=NEW, **kwargs)


# ---- one row


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_streamer(chain, capsys, skip_prompt):
    shown = []
    for generate in (chain.target.generate, chain.generate):
        streamer = TextStreamer(Letters(), skip_prompt=skip_prompt)
        out = generate(PROMPT, do_sample=False, max_new_tokens=NEW, streamer=streamer)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[1].strip() == words(out, PROMPT.shape[1] if skip_prompt else 0).strip()


def begun(chain, **kwargs):
    """A call in another thread, within an event loop, and its streamer."""
    streamer = AsyncTextIteratorStreamer(Letters(), skip_prompt=True, timeout=SECONDS)
    call = functools.partial(chain.generate, PROMPT, streamer=streamer, **{"max_new_tokens": NEW} | kwargs)
    return streamer, asyncio.get_running_loop().run_in_executor(None, call)


def test_async_text_iterator_streamer(chain):
    async def consume():
        streamer, running = begun(chain)
        return [piece async for piece in streamer], await running

    pieces, out = asyncio.run(consume())
    assert torch.equal(out, wanted(chain))
    assert "".join(pieces) == words(out, PROMPT.shape[1])


def test_the_first_token_comes_early(model, chain):
    """Before the rest is computed: the target waits inside its call until the consumer has a token."""
    got = threading.Event()
    seen = []

    class Waits(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) == 2:
                seen.append(self.values[1].numel())
                got.set()

    def late(ids, scores):
        if ids.shape[1] > PROMPT.shape[1] + 12:
            assert got.wait(SECONDS), "nothing was streamed before the thirteenth token"
        return scores

    out = chain.generate(PROMPT, max_new_tokens=NEW, streamer=Waits(), logits_processor=[late])
    assert torch.equal(out, wanted(chain))
    assert 1 <= seen[0] <= 7  # the tokens of one step
    assert chain.report.seconds_to_first_token < chain.report.seconds


# ---- a batch


def test_a_streamer_for_one_row_says_so(chain):
    with pytest.raises(ValueError, match="batch size 1"):
        chain.generate(BATCH, attention_mask=MASK, max_new_tokens=NEW, streamer=TextStreamer(Letters()))
    assert torch.equal(chain.generate(PROMPT, max_new_tokens=NEW), wanted(chain))


# ---- the end


def test_the_prompt_is_streamed_before_it_is_read(model, chain):
    """So the time from the prompt to the first token is that of the first step. A call that fails in it has streamed the prompt, as in transformers."""
    forwards = []

    class Counts(Recorder):
        def put(self, value):
            super().put(value)
            forwards.append(int(model.switches[CALLS]))

    chain.generate(PROMPT, max_new_tokens=NEW, streamer=Counts())
    assert forwards[0] == 0 < forwards[1]

    def fails(ids, scores):
        raise Enough

    for generate in (chain.generate, model.generate):
        recorder = Recorder()
        with pytest.raises(Enough):
            generate(PROMPT, max_new_tokens=NEW, do_sample=False, streamer=recorder, logits_processor=[fails])
        assert [value.tolist() for value in recorder.values] == [PROMPT.tolist()]


# ---- interruptions


class Enough(Exception):
    pass


def test_the_partial_of_a_batch(chain):
    kwargs = {"attention_mask": MASK, "max_new_tokens": NEW}
    whole = chain.generate(BATCH, **kwargs)
    with pytest.raises(Enough):
        chain.generate(BATCH, streamer=failing(13, Enough), **kwargs)
    partial = chain.partial
    assert BATCH.shape[1] < partial.shape[1] < whole.shape[1]
    complete = 0
    for got, right in zip(partial.tolist(), whole.tolist(), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(got))
        assert same > BATCH.shape[1]
        assert not any(got[same:])  # the pad token: this row was shorter
        complete += same == len(got)
    assert complete > 0
    assert torch.equal(chain.generate(BATCH, **kwargs), whole)


def test_an_interruption_inside_of_the_target(model, chain):
    """An error in the middle of a forward, like Ctrl-C."""
    whole = wanted(chain)
    recorder = Recorder()
    model.set(fail_at=4)
    with pytest.raises(ArithmeticError, match="made to fail"):
        chain.generate(PROMPT, max_new_tokens=NEW, streamer=recorder)
    model.set()
    assert recorder.ends == 0
    assert recorder.new == chain.partial[0, PROMPT.shape[1] :].tolist()
    assert torch.equal(chain.partial, whole[:, : chain.partial.shape[1]])
    assert 1 <= len(recorder.new) < NEW
    assert torch.equal(chain.generate(PROMPT, max_new_tokens=NEW), whole)


@pytest.mark.parametrize("how", ["target", "processor", "arguments", "cache"])
def test_a_waiting_consumer_gets_the_error(model, chain, how):
    """generate() fails in its thread. The loop over the streamer in the other thread ends with the same error."""

    def fail(ids, scores):
        raise Enough

    kwargs = {
        "target": {},
        "processor": {"logits_processor": [fail]},
        "arguments": {"num_beams": 4},
        "cache": {"past_key_values": object()},
    }[how]
    if how == "target":
        model.set(fail_at=5)
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=SECONDS)
    errors = []

    def work():
        try:
            chain.generate(PROMPT, max_new_tokens=NEW, streamer=streamer, **kwargs)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pieces = []
    with pytest.raises(RuntimeError, match=r"generate\(\) failed") as caught:
        pieces.extend(streamer)
    thread.join(SECONDS)
    model.set()
    assert caught.value.__cause__ is errors[0]
    kinds = {"target": ArithmeticError, "processor": Enough}
    assert isinstance(errors[0], kinds.get(how, Exception))
    assert words(wanted(chain), PROMPT.shape[1]).startswith("".join(pieces))
    assert bool(pieces) == (how == "target")


def test_a_streamer_whose_end_fails(chain):
    """The first error is raised; an error in end() is raised if it is the only one."""

    def ends():
        raise Enough("at the end")

    both, late = failing(3, KeyError, "in put"), Recorder()
    both.end = late.end = ends
    with pytest.raises(KeyError, match="in put"):
        chain.generate(PROMPT, max_new_tokens=NEW, streamer=both)
    with pytest.raises(Enough, match="at the end"):
        chain.generate(PROMPT, max_new_tokens=NEW, streamer=late)
    assert torch.equal(chain.partial, wanted(chain))
    assert torch.equal(chain.generate(PROMPT, max_new_tokens=NEW), wanted(chain))


# ---- readers of the streamer of a failed call


def late(ids, scores):
    if ids.shape[1] > PROMPT.shape[1] + 5:
        raise Enough("now")
    return scores


FAILURES = {"refused": {"num_beams": 2}, "at once": {"max_new_tokens": 0}, "late": {"logits_processor": [late]}}


@pytest.mark.parametrize("how", FAILURES)
def test_an_asynchronous_reader_gets_the_error(chain, how):
    async def consume():
        streamer, running = begun(chain, **FAILURES[how])
        with pytest.raises(RuntimeError, match=r"generate\(\) failed"):
            async for _ in streamer:
                pass
        with pytest.raises((NotImplementedError, ValueError, Enough)):
            await running

    asyncio.run(consume())
    # Servers take ``end()`` for the end of a text, and report errors themselves.
    recorder = Recorder()
    with pytest.raises((NotImplementedError, ValueError, Enough)):
        chain.generate(PROMPT, streamer=recorder, **{"max_new_tokens": NEW, **FAILURES[how]})
    assert recorder.ends == 0
