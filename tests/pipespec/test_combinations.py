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


def test_a_mutation_is_caught(monkeypatch) -> None:
    """A draft token more than the target chose."""
    from pipespec.engine.sampling import Sampler

    real = Sampler.__call__

    def call(self, *args):
        selected = real(self, *args)
        if self._is_target:
            selected[:, 0] = selected[:, 0].clamp(max=50)
        return selected

    monkeypatch.setattr(Sampler, "__call__", call)
    trial = Trial(0, "llama", drafts=["noisy"], options={"schedule": "lockstep"})
    trial.calls = [{"lengths": [3, 5], "prompt_seed": 1, "max_new_tokens": 14, "do_sample": False}]
    with pytest.raises(AssertionError, match=r"Trial\(seed="):
        combinations.run(trial)
