"""What is drawn has the target's distribution: coupled draws, and tokens of rejection sampling, whatever the draft. Texts: ``tests/pipespec/test_acceptance.py``."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipespec_kernels import ops
from pipespec_kernels.noise import DRAFT, TARGET, Noise
from tests.trials import trials

from .implementations import INTERPRETED, VARIANTS, simd

# ---- coupled draws

DRAWS = 200_000
BINS = 16
POSITIONS = torch.arange(DRAWS)


def target_logits() -> Tensor:
    return torch.randn(BINS, generator=torch.Generator().manual_seed(11)) * 1.5


def draw(logits: Tensor, positions: Tensor = POSITIONS, seed: int = 1, stream: int = TARGET) -> Tensor:
    """A token per position from the softmax of one row of logits."""
    n = len(positions)
    noise = Noise(torch.full((n,), seed), positions, torch.ones(n), None, stream)
    return ops.sample(logits.expand(n, 1, -1), noise)[:, 0].long()


def check_distribution(tokens: Tensor, logits: Tensor) -> None:
    expected = torch.softmax(logits.double(), -1) * len(tokens)
    assert expected.min() > 5
    chi2 = ((torch.bincount(tokens, minlength=len(logits)) - expected) ** 2 / expected).sum().item()
    df = len(logits) - 1
    assert chi2 < df + 10 * math.sqrt(2 * df)


def coupled_agreement(p: Tensor, q: Tensor) -> float:
    """Daliri, Musco, Suresh 2024, arXiv 2408.07978: how often two draws with the same noise are equal."""
    p, q = p.double(), q.double()
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return (1 / ratio.sum(1)).sum().item()


def check_acceptance(target: Tensor, draft: Tensor, drafted: Tensor, seed: int = 1) -> None:
    """A draft's tokens as the draft tokens of a verification: the target's choices, accepted as often as theory says."""
    n = len(drafted)
    tokens = torch.stack([torch.zeros_like(drafted), drafted], dim=1)
    noise = Noise(torch.full((n,), seed), POSITIONS[:n], torch.ones(n))
    logits = target.expand(n, 2, -1)
    two, one = torch.full((n,), 2, dtype=torch.int32), torch.ones(n, dtype=torch.int32)
    selected, accepted = ops.verify(logits, tokens, two, one, noise=noise)
    assert torch.equal(selected[:, 0].long(), draw(target, POSITIONS[:n], seed))  # whatever the draft proposed
    check_distribution(selected[:, 0].long(), target)
    p = coupled_agreement(torch.softmax(target, -1), torch.softmax(draft, -1))
    assert abs(accepted.double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_follow_the_softmax(variant: str) -> None:
    with simd(variant):
        check_distribution(draw(target_logits()), target_logits())
    assert torch.equal(draw(target_logits()), draw(target_logits()))


def test_draws_follow_temperature_and_cutoff() -> None:
    logits = target_logits()
    noise = Noise(torch.full((DRAWS,), 5), POSITIONS, torch.full((DRAWS,), 0.5), torch.full((DRAWS, 1), -0.5))
    tokens = ops.sample(logits.expand(DRAWS, 1, -1), noise)[:, 0].long()
    kept = logits >= -0.5
    assert kept[tokens].all()
    check_distribution(kept.cumsum(0)[tokens] - 1, 0.5 * logits[kept])


def test_many_seeds_at_one_position() -> None:
    noise = Noise(torch.arange(DRAWS), torch.full((DRAWS,), 9), torch.ones(DRAWS))
    check_distribution(ops.sample(target_logits().expand(DRAWS, 1, -1), noise)[:, 0].long(), target_logits())


def test_an_adversarial_draft_changes_nothing() -> None:
    target = target_logits()
    check_acceptance(target, -target, draw(-target))


def test_a_close_draft_is_accepted_as_often_as_theory_says() -> None:
    target = target_logits()
    draft = target + 0.3 * torch.randn(BINS, generator=torch.Generator().manual_seed(12))
    check_acceptance(target, draft, draw(draft))
    assert coupled_agreement(torch.softmax(target, -1), torch.softmax(draft, -1)) > 0.75


# ---- rejection sampling


def rejected(rows: int, certain: bool, device: torch.device) -> tuple[Tensor, float]:
    """The first token of many rows with one draft token each of a draft that prefers the target's unlikely tokens, and how many were accepted."""
    target = torch.linspace(-1.5, 1.5, BINS)  # so that every bin has many draws
    selected, accepted = [], []
    for part in torch.arange(rows).split(1 << 14):  # a launch takes 65535 rows
        n = torch.full((len(part),), 2, dtype=torch.int32, device=device)
        logits, given = (
            target.to(device).expand(len(part), 2, BINS),
            [x.to(device) for x in (part * 0x9E3779B97F4A7C15, part % 1000)],
        )
        ones = torch.ones(len(part), device=device)
        tokens = ops.sample(-logits, Noise(*given, ones, stream=DRAFT)).long().roll(1, 1)
        drafts = None if certain else -logits
        found = ops.rejection_sample(
            logits, tokens * 0 + 3 if certain else tokens, n, n - 1, drafts, Noise(*given, ones)
        )
        selected.append(found[0][:, 0].long().cpu())
        accepted.append(found[1].cpu())
    return torch.cat(selected), float(torch.cat(accepted).double().mean())


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_rejection_sampling_keeps_the_targets_distribution(certain: bool, device: torch.device) -> None:
    rows, target = trials(ci=1 << 14, nightly=1 << 16), torch.linspace(-1.5, 1.5, BINS)
    p = torch.softmax(target.double(), -1)
    rate = float(p[3] if certain else torch.minimum(p, p.flip(0)).sum())
    tokens, accepted = rejected(rows, certain, device)
    check_distribution(tokens, target)
    assert abs(accepted - rate) < 5 * math.sqrt(rate / rows)


@pytest.mark.gpu
def test_fast_noise_keeps_the_targets_distribution() -> None:
    """That of the kernels without ``exact``."""
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kernels: Any = importlib.import_module("pipespec_kernels.triton")
    rows, target, ids = 1 << 15, torch.linspace(-1.5, 1.5, BINS), []
    one = torch.ones(rows, dtype=torch.int32, device="cuda")
    for i in range(8):
        seeds = torch.arange(i * rows, (i + 1) * rows, device="cuda")
        noise, tokens = Noise(seeds, seeds % 77, one.float()), seeds[:, None] * 0
        ids.append(
            kernels.verify(target.cuda().expand(rows, 1, BINS), tokens, one, one * 0, noise=noise)[0][:, 0].cpu()
        )
    check_distribution(torch.cat(ids).long(), target)
