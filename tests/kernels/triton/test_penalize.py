"""``penalize``: the kernel against the oracle, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pipespec_kernels import ops
from pipespec_kernels.penalties import Penalties
from tests.trials import trials

from ..penalties import by_processors, case, same_bits


def moved(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    found = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in copy.deepcopy(given).items()}
    p = found["penalties"]
    found["penalties"] = Penalties(*(getattr(p, name).to(device) for name in Penalties.__slots__))
    return found


@pytest.mark.parametrize("seed", range(trials(ci=3, nightly=40)))
def test_bits_of_the_processors(seed: int, device: torch.device) -> None:
    # A history of several tiles, and a vocabulary of more than one.
    sizes = {"batch": 2, "most": 1500, "vocab": 1100} if seed == 0 else {"kind": ("normal", "any bits")[seed % 2]}
    given = case(seed, **sizes)
    expected = by_processors(given)
    there = moved(given, device)
    table = torch.zeros(given["logits"].numel() + 5, dtype=torch.int32, device=device)
    ops.penalize(**there, workspace=table)
    assert same_bits(there["logits"].cpu(), expected)
    assert not table.any()
    history = given["history"].clone()
    for row, n in enumerate(given["lengths"].tolist()):
        room = min(given["tokens"].shape[1], history.shape[1] - n)
        history[row, n : n + room] = given["tokens"][row, :room]
    assert torch.equal(there["history"].cpu(), history)


def test_all_columns_without_counts_or_masks(device: torch.device) -> None:
    given = case(8)
    full = torch.full_like(given["query_lens"], given["logits"].shape[1])
    given |= {"query_lens": full, "num_draft_tokens": full - 1, "bitmask": torch.full_like(given["bitmask"], -1)}
    expected = by_processors(given)
    there = moved(given, device)
    for name in ("query_lens", "num_draft_tokens", "bitmask"):
        del there[name]
    ops.penalize(**there)
    assert same_bits(there["logits"].cpu(), expected)
