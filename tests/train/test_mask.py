"""The training mask against decoding itself, replayed on symbols, element by element."""

from __future__ import annotations

import random

import pytest
import torch

from pipespec_train.students import depths, visible
from tests.spd.replay import Call, trace

SIZES = [(n, fill) for n in (1, 2, 3, 4, 8) for fill in range(1, n + 1)]


def seen_in(call: Call) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Row -> the rows it sees, itself included: causal over the cache and what is fed."""
    rows = call.cached + call.fed
    return {row: set(rows[: i + 1]) for i, row in enumerate(rows) if i >= len(call.cached)}


def calls(n: int, length: int) -> list[Call]:
    """Calls of many runs, flushes at every fill level included."""
    draw = random.Random(n)
    found = []
    for prompt in (1, 2, n, n + 3):
        for often in (1.0, 0.8, 0.3, 0.0):
            outcomes = [draw.random() < often for _ in range(6 * n + 10)]
            found += [c for c in trace(n, prompt, outcomes) if c.newest < length]
    return found


def mismatches(mask: torch.Tensor, n: int, fill: int, length: int) -> tuple[int, int]:
    """The number of elements that differ from decoding, and of rows compared, over all calls with that fill."""
    kinds = depths(fill, n)
    wrong, compared = 0, set()
    for call in calls(n, length):
        if call.fill != fill:
            continue
        for (position, depth), sees in seen_in(call).items():
            row = mask[kinds.index(depth) * length + position].tolist()
            got = {(i % length, kinds[i // length]) for i, value in enumerate(row) if value}
            wrong += len(got ^ sees)
            compared.add((position, depth))
    return wrong, len(compared)


@pytest.mark.parametrize(("n", "fill"), SIZES)
def test_mask_is_what_decoding_sees(n: int, fill: int) -> None:
    length = 2 * n + 8
    wrong, compared = mismatches(visible(length, fill, n), n, fill, length)
    assert wrong == 0
    assert compared >= 3 * fill


@pytest.mark.parametrize(("n", "fill"), SIZES)
def test_one_row_per_earlier_position(n: int, fill: int) -> None:
    """This also holds for queries that decoding never has: each row sees one row per position up to its own."""
    length, kinds = n + 5, depths(fill, n)
    mask = visible(length, fill, n)
    assert mask.shape == (len(kinds) * length,) * 2
    times = torch.arange(length).repeat(len(kinds))
    assert all(sorted(times[row].tolist()) == list(range(times[i] + 1)) for i, row in enumerate(mask))


def test_fill_outside_of_the_pipe() -> None:
    for fill in (0, 5):
        with pytest.raises(ValueError, match="in flight"):
            visible(4, fill, 4)
