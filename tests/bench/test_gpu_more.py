"""What ``bench.gpu_more`` varies does vary, on a CPU."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import pytest
import torch

from bench import gpu_more, planted
from bench.gpu_more import AGREEMENT, More
from pipespec import Pipeline
from pipespec_kernels import ops


@pytest.fixture(scope="module")
def more() -> More:
    return More("cpu")


def test_the_acceptance_is_as_asked_and_the_draft_is_restored(more: More) -> None:
    prompts, before = planted.random_prompts(512, 6, 32, 1), more.small.lm_head.weight.clone()
    for rate in (AGREEMENT, 0.4, 0.3):
        with more.accepting(rate):
            figures = planted.measure((more.small, more.target), more.cycle, prompts, 32)
        assert abs(figures.agreement[0][1] - rate) < 0.12
        assert torch.equal(more.small.lm_head.weight, before)


def test_the_products_of_captures(more: More, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's take no launch of ours, and each pipeline keeps its own."""
    calls, small = [], ops.linear_small
    monkeypatch.setattr(ops, "linear_small", lambda *given, **options: calls.append(1) or small(*given, **options))
    with Pipeline(more.target, [more.small], graphs=True, lookahead=2, prefix_cache=0) as pipe:
        for own in (True, False, True):
            calls.clear()
            with more.products(own):
                pipe.generate(more.prompt(8), max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert bool(calls) == own


@pytest.mark.parametrize("only", [["figure"], ["rounds", "long 7"], ["batch of 8", "8"]])
def test_names_of_no_part_are_refused(
    only: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_more, "More", MagicMock())
    monkeypatch.setattr(sys, "argv", ["gpu_more", "--json", "nowhere", "--only", *only])
    with pytest.raises(SystemExit):
        gpu_more.main()
    assert f"no part is named {only[-1]}; the parts are rounds 0, " in capsys.readouterr().err
