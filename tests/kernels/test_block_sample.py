"""Acceptance rules over whole texts: rejection sampling and block verification keep the target's distribution of texts, whatever the draft."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import ACCEPT, DRAFT, Noise, Streams
from tests.trials import trials

IDS, LENGTH, DRAFTED = 4, 3, 3
TEXTS = trials(ci=15_000, nightly=1_000_000)
GENERATOR = torch.Generator().manual_seed(2)
TARGET = torch.randn(IDS, IDS, generator=GENERATOR)  # logits behind each token
DRAFT_TABLE = 0.6 * TARGET + 0.9 * torch.randn(IDS, IDS, generator=GENERATOR)
RULES: dict[str, Callable[..., Any]] = {"rejection": ops.rejection_sample, "block": ops.block_sample}


def texts(
    rule: Callable[..., Any], rows: int, *, per_round: int = 2**40, drawn_with: int = DRAFT, scale: float = 1.0
) -> tuple[torch.Tensor, float]:
    """The texts of many rows, int64 ``[rows, LENGTH]``, and accepted draft tokens per verification.

    ``per_round``: how far apart the noise of two rounds is. ``scale``: of the draft's logits, as the rule sees them.
    """
    seeds, ones = torch.arange(rows) * 0x9E3779B97F4A7C15 + 1, torch.ones(rows)
    text = torch.zeros(rows, LENGTH + DRAFTED + 2, dtype=torch.int64)
    length = torch.ones(rows, dtype=torch.int64)
    every = torch.arange(rows)
    accepted_in_all = verified = 0
    for round_ in range(LENGTH):
        going = (length <= LENGTH).int()
        if not going.any():
            break
        at = length + round_ * per_round
        fed = [text[every, length - 1]]
        for i in range(DRAFTED):
            noise = Noise(seeds, at + i, ones, stream=drawn_with)
            fed.append(ops.sample(DRAFT_TABLE[fed[-1]][:, None], noise)[:, 0].long())
        tokens = torch.stack(fed, 1)
        query_lens = going * (DRAFTED + 1)
        selected, accepted = rule(
            TARGET[tokens], tokens, query_lens, going * DRAFTED, DRAFT_TABLE[tokens] * scale, Noise(seeds, at, ones)
        )
        for j in range(DRAFTED + 1):
            places = (length + j).clamp(max=text.shape[1] - 1)
            takes = selected[:, j] >= 0
            text[every[takes], places[takes]] = selected[takes, j].long()
        accepted_in_all += int(accepted.sum())
        verified += int(going.sum())
        length += (accepted + 1) * going
    return text[:, 1 : LENGTH + 1], accepted_in_all / verified


def chi_square(found: torch.Tensor) -> float:
    """Of whole texts."""
    p = TARGET.double().softmax(-1)
    expected = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten() * len(found)
    code = (found[:, 0] * IDS + found[:, 1]) * IDS + found[:, 2]
    counts = torch.bincount(code, minlength=IDS**LENGTH).double()
    return float(((counts - expected) ** 2 / expected).sum())


BIGGEST = IDS**LENGTH - 1 + 10 * math.sqrt(2 * (IDS**LENGTH - 1))  # ten standard deviations


def test_texts_have_the_targets_distribution() -> None:
    accepted = {}
    for name, rule in RULES.items():
        found, accepted[name] = texts(rule, TEXTS)
        assert chi_square(found) < BIGGEST, name
    assert accepted["block"] > accepted["rejection"] + 0.02


def test_block_verification_needs_new_noise_in_each_round() -> None:
    """The decision of a round used the draft tokens behind the last accepted one. Rejection sampling did not look at them."""
    assert chi_square(texts(ops.block_sample, TEXTS, per_round=0)[0]) > BIGGEST
    assert chi_square(texts(ops.rejection_sample, TEXTS, per_round=0)[0]) < BIGGEST


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wrong", [{"drawn_with": ACCEPT}, {"scale": 0.7}], ids=["shared noise", "another draft"])
def test_wrong_rules_are_caught(name: str, wrong: dict[str, Any]) -> None:
    assert chi_square(texts(RULES[name], TEXTS, **wrong)[0]) > BIGGEST


def test_each_length_is_accepted_with_the_probability_of_the_paper() -> None:
    """Against the formulas of Sun et al., algorithm 2, written out, for each block of three draft tokens."""
    rows, reached = 400, set()
    n = torch.full((rows,), 4, dtype=torch.int32)
    noise = Noise(torch.arange(rows), torch.full((rows,), 9), torch.ones(rows))
    for drafted in itertools.product(range(IDS), repeat=3):
        tokens = torch.tensor([0, *drafted])
        p, q = TARGET[tokens].double().softmax(-1), DRAFT_TABLE[tokens].double().softmax(-1)
        weight, chances = 1.0, []
        for i, token in enumerate(drafted, 1):
            weight = min(weight * float(p[i - 1, token] / q[i - 1, token]), 1.0)
            mass = float((weight * p[i] - q[i]).clamp(min=0).sum())
            chances.append(weight if i == 3 else mass / (mass + 1 - weight))
        expected, left = [0.0] * 4, 1.0
        for i in (3, 2, 1):
            expected[i], left = left * chances[i - 1], left * (1 - chances[i - 1])
        expected[0] = left
        fed = tokens.expand(rows, -1)
        _, accepted = ops.block_sample(TARGET[fed], fed, n, n - 1, DRAFT_TABLE[fed], noise)
        for i, chance in enumerate(expected):
            found = int((accepted == i).sum()) / rows
            assert abs(found - chance) <= 6 * math.sqrt(max(chance * (1 - chance), 0) / rows) + 1e-9, (drafted, i)
            if 0.1 < chance < 0.9:
                reached.add(i)
    assert reached == {0, 1, 2, 3}


def test_rows_without_draft_tokens_or_distributions() -> None:
    logits = TARGET[torch.tensor([[0, 1], [2, 3], [1, 1], [3, 0]])].clone()
    draft = logits.clone() * 0.5
    draft[2] = math.nan
    fed, drafted = (torch.tensor(n, dtype=torch.int32) for n in ([2, 1, 2, 0], [1, 0, 1, 0]))
    tokens = torch.tensor([[0, 99], [0, 0], [0, 1], [0, 0]])
    noise = Noise(torch.arange(4), torch.full((4,), 5), torch.ones(4))
    selected, accepted = ops.block_sample(logits, tokens, fed, drafted, draft, noise)
    assert accepted.tolist() == [0, 0, 0, 0]
    # The rejected token's place gets a draw from the target where there is no residual.
    alone = reference.sample(logits, Noise(noise.seeds, noise.positions, noise.inv_temperature, stream=3))
    assert selected[1, 0] == alone[1, 0]
    assert selected[2, 0] == alone[2, 0]
    assert (selected[:3, 0] >= 0).all()
    assert (selected[3] == -1).all()


def test_arguments_are_checked() -> None:
    n = torch.full((1,), 2, dtype=torch.int32)
    tokens, noise = torch.zeros(1, 2, dtype=torch.int64), Noise(torch.arange(1), torch.arange(1), torch.ones(1))
    logits = TARGET[tokens]
    for change, error, message in (
        ({"draft_logits": None}, TypeError, "draft_logits must be a tensor"),
        ({"draft_logits": logits[:, :1]}, ValueError, "draft_logits are"),
        ({"query_lens": n + 1}, ValueError, "row 0: need"),
        ({"streams": Streams(1, 1, 2)}, ValueError, "different"),
    ):
        given = {"logits": logits, "tokens": tokens, "query_lens": n, "num_draft_tokens": n - 1}
        with pytest.raises(error, match=message):
            ops.block_sample(**(given | {"draft_logits": logits, "noise": noise} | change))
