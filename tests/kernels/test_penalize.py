"""``penalize`` on the CPU: native and reference against transformers' processors, and its arguments."""

from __future__ import annotations

import copy

import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.penalties import Penalties
from tests.trials import trials

from .penalties import by_processors, case, flat, same_bits


@pytest.mark.parametrize("kind", ["normal", "few values", "any bits"])
@pytest.mark.parametrize("seed", range(trials(ci=4, nightly=60)))
def test_bits_of_transformers_processors(kind: str, seed: int) -> None:
    given = case(seed, kind=kind, width=1 + seed % 5, vocab=(70, 33, 32)[seed % 3])
    expected = by_processors(given)
    native, slow = copy.deepcopy(given), copy.deepcopy(given)
    ops.penalize(**native)
    counts = slow["query_lens"], slow["num_draft_tokens"], slow["bitmask"]
    fed = [slow[name] for name in ("logits", "tokens", "history", "lengths")]
    reference.penalize(*fed, *flat(slow["penalties"]), *counts)
    assert same_bits(slow["logits"], expected)
    assert same_bits(native["logits"], expected)
    assert not same_bits(expected, given["logits"])
    # All tokens are in the history, as far as it has room.
    for row, n in enumerate(given["lengths"].tolist()):
        wanted = torch.cat([given["history"][row, :n], given["tokens"][row]])[: given["history"].shape[1]]
        wanted = torch.cat([wanted, given["history"][row, len(wanted) :]])
        assert torch.equal(native["history"][row], wanted)
        assert torch.equal(slow["history"][row], wanted)


def test_a_block_is_its_columns() -> None:
    """Columns with draft tokens give what steps of one token give, each with the tokens before it."""
    given = case(3, batch=2, width=5)
    del given["query_lens"], given["num_draft_tokens"]
    given["lengths"].fill_(11)
    block, stepped = copy.deepcopy(given), copy.deepcopy(given)
    ops.penalize(**block)
    for column in range(5):
        own = stepped["logits"][:, column : column + 1]
        ops.penalize(
            own,
            stepped["tokens"][:, column : column + 1],
            stepped["history"],
            stepped["lengths"] + column,
            stepped["penalties"],
            bitmask=stepped["bitmask"][:, column : column + 1].contiguous(),
        )
    assert same_bits(block["logits"], stepped["logits"])
    assert torch.equal(block["history"], stepped["history"])


def test_strided_logits_and_wide_tokens() -> None:
    given = case(5)
    expected = by_processors(given)
    given["tokens"] = given["tokens"].long().t().contiguous().t()
    given["logits"] = given["logits"].transpose(0, 1).contiguous().transpose(0, 1)
    ops.penalize(**given)
    assert same_bits(given["logits"], expected)


def test_what_is_off_changes_nothing() -> None:
    given = case(6)
    before = given["logits"].clone()
    ops.penalize(**given | {"penalties": None, "bitmask": None})
    assert same_bits(given["logits"], before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(5, 4, 70, dtype=torch.bfloat16)}, TypeError, "must be float32"),
        ({"history": torch.zeros(5, 9, dtype=torch.int64)}, TypeError, "history must be a tensor of torch.int32"),
        ({"lengths": torch.full((5,), 43, dtype=torch.int32)}, ValueError, r"row 0: lengths must be 0 .. 42, is 43"),
        ({"bitmask": torch.zeros(5, 4, 2, dtype=torch.int32)}, ValueError, r"bitmask must be contiguous \[5, 4, 3\]"),
        ({"num_draft_tokens": None}, ValueError, "go together"),
        ({"penalties": Penalties(repetition=torch.zeros(5))}, ValueError, "finite and positive, is 0"),
        ({"penalties": Penalties(bias=torch.zeros(5, 1))}, ValueError, "bias and penalties.bias_ids go together"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(change, error, message) -> None:
    given = case(7)
    before = copy.deepcopy(given)
    with pytest.raises(error, match=message):
        ops.penalize(**given | change)
    assert torch.equal(given["logits"], before["logits"])
    assert torch.equal(given["history"], before["history"])


VOCAB, COLUMNS = 12, 3
