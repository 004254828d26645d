"""The training mask. `tests/spd/test_draft_module.py` compares what it makes of the rows with decoding."""

import pytest
import torch

from pipespec_train.students import depths, visible

SIZES = [(n, fill) for n in (1, 2, 3, 4, 8) for fill in range(1, n + 1)]


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
