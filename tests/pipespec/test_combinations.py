"""Random combinations of targets, drafts, options and calls. Nightly there are more, with worker processes among them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pipespec import combinations
from tests.pipespec.combinations import CHEAP, IN_THIS_PROCESS, Trial
from tests.trials import PROFILE, trials

SCHEDULES = IN_THIS_PROCESS if PROFILE == "ci" else CHEAP


@pytest.mark.parametrize("first", range(0, trials(ci=12, nightly=300), 4))
def test_the_text_is_the_targets(first) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + 4):
        combinations.run(Trial.of(seed, SCHEDULES), counts)
    assert counts["calls"] > 0
    assert counts["accepted"] > 0
