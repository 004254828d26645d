"""Long parts of prompts are read by the model's own modules: where, by which forwards, and that the text does not depend on who else is in the call."""

import pytest
import torch

from pipespec import Pipeline
from pipespec.config import WIDTH
from pipespec.engine import cached_text as text_module
from tests.conftest import left_pad, noisy, random_llama

WIDE, CHUNK, NEW = 5, 11, 12
LENGTHS = (3, 6, 17, 30)  # below the boundary, above it, and longer than one and two chunks


@pytest.fixture(autouse=True)
def boundary(monkeypatch):
    monkeypatch.setattr("pipespec.engine.forward.library_columns", lambda dtype: WIDE)
    monkeypatch.setattr("pipespec.engine.chain.PREFILL_CHUNK", CHUNK)


@pytest.fixture
def read(monkeypatch):
    """The forwards by the library, in order: row and columns."""
    found, own = [], text_module.forward_row

    def recorded(model, tokens, cache, row, keep):
        found.append((row, tokens.shape[1]))
        return own(model, tokens, cache, row, keep)

    monkeypatch.setattr(text_module, "forward_row", recorded)
    return found


def prompts(lengths=LENGTHS):
    random = torch.Generator().manual_seed(5)
    return [torch.randint(3, 100, (n,), generator=random) for n in lengths]


def target(dtype):
    return random_llama(7).to(dtype)


def wanted_forwards(length):
    """Of a prompt, up to its last token."""
    left, found = length, []
    while (q := min(CHUNK, left)) >= WIDE:
        found.append(q)
        left -= q
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_the_library_reads_wide_parts_only(read, length):
    model, (prompt,) = target(torch.float32), prompts([length])
    with Pipeline(model, []) as pipe:
        pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False)
    assert [q for _, q in read] == wanted_forwards(length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]])
def test_the_text_of_a_row_does_not_depend_on_batch_or_drafts(read, dtype, lengths):
    model = target(dtype)
    rows = prompts(lengths)
    with Pipeline(model, []) as plain:
        alone = [
            plain.generate(p[None], max_new_tokens=NEW, do_sample=False, eos_token_id=-1)[0, len(p) :] for p in rows
        ]
        ids, mask = left_pad(rows)
        batch = plain.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    draft = noisy(model, 0.02, seed=1)
    with Pipeline(model, [draft], schedule="lockstep", lookahead=4) as drafted:
        faster = drafted.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    assert read
    width = ids.shape[1]
    for row, text in enumerate(alone):
        assert torch.equal(batch[row, width:], text), row
        assert torch.equal(faster[row, width:], text), row


def test_steps_are_narrower_than_any_boundary_in_the_table(monkeypatch):
    """A step has at most WIDTH columns and does not ask for the boundary, so that drafts do not change the form of a target's forwards."""
    model, (prompt,) = target(torch.float32), prompts([3])
    asked = []
    monkeypatch.setattr(text_module, "wide_columns", lambda *args, **kwargs: asked.append(0))
    with Pipeline(model, [noisy(model, 0.02, seed=1)], schedule="lockstep", lookahead=WIDTH // 2) as pipe:
        pipe.generate(prompt[None], max_new_tokens=3 * NEW, do_sample=False, eos_token_id=-1)
    assert len(asked) <= 4  # per stage, one fill, and what its keys and values depend on


def test_exact_reads_natively(read):
    model, (prompt,) = target(torch.float32), prompts([30])
    with Pipeline(model, [], exact=True) as pipe:
        pipe.generate(prompt[None], max_new_tokens=2, do_sample=False)
    assert not read


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupted_prompt_is_read_again(monkeypatch, at):
    model, (prompt,) = target(torch.float32), prompts([30])
    own, calls = text_module.forward_row, []

    def interrupted(*args):
        calls.append(0)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return own(*args)

    with Pipeline(model, []) as fresh:
        wanted = fresh.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    monkeypatch.setattr(text_module, "forward_row", interrupted)
    with Pipeline(model, []) as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
        again = pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    assert torch.equal(again, wanted)


def test_the_first_token_comes_with_the_prompt(monkeypatch):
    """Where the library reads a prompt to its end, no forward of one column follows before the first token."""
    model, (prompt,) = target(torch.float32), prompts([30])
    with Pipeline(model, []) as pipe:
        wanted = pipe.generate(prompt[None], max_new_tokens=1, do_sample=False)
    monkeypatch.setattr(text_module, "forward", lambda *args, **kwargs: pytest.fail("a second forward"))
    with Pipeline(model, []) as pipe:
        assert torch.equal(pipe.generate(prompt[None], max_new_tokens=1, do_sample=False), wanted)
