"""Rejection sampling: the kernels against the oracle, and the oracle (on a GPU, the kernels) against the distribution."""

from __future__ import annotations

import math

import pytest
import torch

from pipespec_kernels import reference
from pipespec_kernels.noise import DRAFT, Noise
from pipespec_kernels.triton import Config, RowState, Streams, Workspace, rejection_sample, verify
from tests.trials import trials

from ..selection import DTYPES, ragged_counts
from .conftest import some

INDEPENDENT = Streams()


def noise_for(batch: int, generator: torch.Generator, stream: int = 0, **fields: torch.Tensor) -> Noise:
    return Noise(
        torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        torch.randint(0, 2**40, (batch,), generator=generator),
        torch.rand(batch, generator=generator) + 0.5,
        stream=stream,
        **fields,
    )


def drawn(logits: torch.Tensor, noise: Noise, stream: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Draft tokens as a draft draws them: column ``q + 1`` from ``logits[:, q]`` at the position that ``q`` chooses."""
    batch, width, vocab = logits.shape
    at = noise.positions[:, None] + torch.arange(width)
    counter_of = torch.arange(vocab) >> 2
    same = torch.zeros(batch, width, vocab, dtype=torch.int64)
    counter = [same + counter_of, same + (at & 0xFFFFFFFF)[..., None], same + (at >> 32)[..., None], same + stream]
    seeds = noise.seeds[:, None, None]
    words = torch.stack(reference.philox(counter, (seeds & 0xFFFFFFFF, seeds >> 32 & 0xFFFFFFFF)))
    r = words.gather(0, (same + (torch.arange(vocab) & 3))[None])[0]
    scale = noise.inv_temperature if scale is None else scale
    choice = (logits.double() * scale.double()[:, None, None] + reference.gumbel(r)).argmax(-1)
    return torch.cat([torch.zeros(batch, 1, dtype=torch.int64), choice[:, :-1]], 1)


def run(
    device, logits, tokens, query_lens, num_draft_tokens, draft_logits, noise, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels, with everything moved to the device and back."""

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    fields = (noise.seeds, noise.positions, noise.inv_temperature, noise.cutoff)
    moved = Noise(*(there(x) for x in fields))
    options = {"exact": True} | {name: there(value) for name, value in options.items()}
    selected, accepted = rejection_sample(
        *map(there, (logits, tokens, query_lens, num_draft_tokens, draft_logits)), moved, **options
    )
    return selected.cpu(), accepted.cpu()


@pytest.mark.parametrize(
    ("vocab", "certain"),
    some(
        [(4097, False), (4097, True), (1000, True), (1000, False), (7, False), (7, True), (1, True), (1, False)], 0, 2
    ),
)
def test_equals_the_oracle(vocab: int, certain: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for i, dtype in enumerate(DTYPES):
        batch, width = 3, 3
        logits = (torch.randn(batch, width, vocab, generator=generator) * 3).to(dtype)
        draft = (logits.float() + torch.randn(logits.shape, generator=generator)).to(DTYPES[i - 1])
        noise = noise_for(batch, generator)
        options: dict[str, torch.Tensor] = {}
        if i == 1:
            noise.cutoff = logits.float().amax(-1) - 4
            options["draft_cutoff"] = draft.float().amax(-1) - 4
        if i == 2:
            options["draft_inv_temperature"] = noise.inv_temperature * 0.75
        tokens = drawn(draft, noise, DRAFT, options.get("draft_inv_temperature"))
        query_lens, num_draft_tokens = ragged_counts(batch, width, generator)
        query_lens[0], num_draft_tokens[0] = 3, 2
        arguments = (logits, tokens, query_lens, num_draft_tokens, None if certain else draft, noise)
        expected = reference.rejection_sample(*arguments, **options)
        for config in (None, Config(512 if vocab > 100 else 8, 1, 3))[: 2 if i == 1 else 1]:
            got = run(device, *arguments, **options, config=config)
            assert [t.dtype for t in got] == [torch.int32, torch.int32]
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


def test_strides_state_and_replay(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    batch, width, vocab = 5, 3, 40
    workspace = Workspace(batch, width, device)
    state = RowState(*(torch.full((batch,), n, dtype=torch.int32, device=device) for n in (-7, 10, 0)))
    lengths, epochs = torch.full((batch,), 10), torch.zeros(batch)
    rejected = 0
    for _ in range(2):
        logits = torch.randn(width, batch, vocab + 3, generator=generator).transpose(0, 1)[..., 1 : vocab + 1] * 2
        draft = logits + torch.randn(logits.shape, generator=generator)
        noise = noise_for(batch, generator)
        tokens = drawn(draft, noise, DRAFT).t().contiguous().t()
        query_lens = torch.tensor([3, 0, 2, 1, 3], dtype=torch.int32)
        num_draft_tokens = torch.tensor([2, 0, 1, 0, 1], dtype=torch.int32)
        expected = reference.rejection_sample(logits, tokens, query_lens, num_draft_tokens, draft, noise)
        got = run(device, logits, tokens, query_lens, num_draft_tokens, draft, noise, state=state, workspace=workspace)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        busy = query_lens > 0
        lengths += torch.where(busy, expected[1] + 1, 0)
        epochs += busy & (expected[1] < num_draft_tokens)
        assert torch.equal(state.length.cpu(), lengths.int())
        assert torch.equal(state.epoch.cpu(), epochs.int())
        chosen = expected[0].gather(1, expected[1][:, None].long())[:, 0]
        assert torch.equal(state.next_token.cpu(), torch.where(busy, chosen, -7))
        assert not workspace.words.any()
        rejected += int((busy & (expected[1] < num_draft_tokens)).sum())
    assert rejected > 0


def test_rows_without_a_distribution(device: torch.device) -> None:
    nan, inf = math.nan, math.inf
    flat = [0.0] * 8
    logits = torch.tensor(
        [[[0, 1, nan, 0, 0, nan, 0, 0.0], flat], [flat, flat], [[-inf] * 7 + [0.0], flat], [flat, flat]]
    )
    draft = torch.tensor([[flat, flat], [[nan] * 8, flat], [flat, flat], [flat, flat]])
    tokens = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 99]])  # 99 is no id
    n = torch.full((4,), 2, dtype=torch.int32)
    noise = noise_for(4, torch.Generator().manual_seed(0))
    for drafts in (draft, None):
        selected, accepted = run(device, logits, tokens, n, n - 1, drafts, noise)
        assert selected[0].tolist() == [2, -1]  # the first NaN
        assert selected[2].tolist() == [7, -1]  # all that p allows
        assert accepted[[0, 2, 3]].tolist() == [0, 0, 0]
        assert 0 <= selected[3, 0] < 8
    # A draft without a distribution: the draft token is rejected, and the draw is from the target's row as if there were no draft token.
    selected, accepted = run(device, logits, tokens, n, n - 1, draft, noise)
    alone, _ = run(device, logits[:, :1], tokens[:, :1], n - 1, n * 0, None, noise)
    assert accepted[1] == 0
    assert selected[1, 0] == alone[1, 0]


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_bad_temperatures_on_the_device_stay_in_their_row(scale: float, which: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, draft = torch.randn(2, 4, 2, 5, generator=generator)
    noise = noise_for(4, generator)
    tokens = drawn(draft, noise, DRAFT)
    query_lens, num_draft_tokens = (
        torch.tensor([2, 2, 1, 0], dtype=torch.int32),
        torch.tensor([1, 1, 0, -1], dtype=torch.int32),
    )
    selected, accepted = run(device, logits, tokens, query_lens, num_draft_tokens, draft, noise)
    assert accepted[0] >= 0
    bad = noise.inv_temperature.clone()
    bad[1:] = scale
    options = {"draft_inv_temperature": bad} if which == "draft" else {}
    if which == "target":
        noise.inv_temperature, options["draft_inv_temperature"] = bad, noise.inv_temperature
    got = run(device, logits, tokens, query_lens, num_draft_tokens, draft, noise, **options, config=Config(8, 1, 1))
    assert torch.equal(got[0][0], selected[0])
    assert got[0][1:].eq(-1).all()
    assert got[1].tolist() == [accepted[0], -1, -1, 0]


def test_equal_distributions_accept_all(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 3, 12, generator=generator)
    noise = noise_for(6, generator)
    n = torch.full((6,), 3, dtype=torch.int32)
    _, accepted = run(device, logits, drawn(logits, noise, DRAFT), n, n - 1, logits, noise)
    assert accepted.tolist() == [2] * 6


# --- the distribution ------------------------------------------------------------------------------------------------

# Sixteen tokens, so that every bin has many draws, and a draft that prefers the target's unlikely tokens.
TARGET_LOGITS = torch.linspace(-1.5, 1.5, 16)
BIGGEST_CHI_SQUARE = 15 + 10 * math.sqrt(2 * 15)


def chi_square(ids: torch.Tensor, logits: torch.Tensor) -> float:
    expected = torch.softmax(logits.double(), -1) * len(ids)
    counts = torch.bincount(ids.long(), minlength=len(logits))
    return float(((counts - expected) ** 2 / expected).sum())


def rows_drawn(device: torch.device | None) -> int:
    """More rows on a GPU; the oracle would take half a minute for them."""
    return trials(ci=1 << 14, nightly=1 << 16) if device is None else 1 << 16


def sampled(
    streams: Streams, drawn_with: int, device: torch.device | None, certain: bool = False
) -> tuple[float, float]:
    """Chi-square of the first token of many rows with one adversarial draft token each, and how many draft tokens were accepted."""
    rows = rows_drawn(device)
    logits = TARGET_LOGITS.expand(rows, 2, 16)
    draft = -logits
    noise = Noise(torch.arange(rows) * 0x9E3779B97F4A7C15, torch.arange(rows) % 1000, torch.ones(rows))
    tokens = drawn(draft, noise, drawn_with)
    if certain:
        tokens = torch.full_like(tokens, 3)
    n = torch.full((rows,), 2, dtype=torch.int32)
    arguments = (logits, tokens, n, n - 1, None if certain else draft, noise)
    if device is None:
        selected, accepted = reference.rejection_sample(*arguments, streams=streams)
    else:
        part_size = rows // 4  # a launch takes 65535 rows
        parts = []
        for i in range(4):
            own = slice(i * part_size, (i + 1) * part_size)
            part = Noise(noise.seeds[own], noise.positions[own], noise.inv_temperature[own])
            given = (logits[own], tokens[own], n[own], n[own] - 1, None if certain else draft[own], part)
            parts.append(run(device, *given, streams=streams, exact=False))
        selected, accepted = (torch.cat(both) for both in zip(*parts, strict=True))
    return chi_square(selected[:, 0], TARGET_LOGITS), float(accepted.double().mean())


def check_distribution(device: torch.device | None) -> None:
    p = torch.softmax(TARGET_LOGITS.double(), -1)
    value, accepted = sampled(INDEPENDENT, DRAFT, device)
    overlap = float(torch.minimum(p, p.flip(0)).sum())
    assert value < BIGGEST_CHI_SQUARE
    assert abs(accepted - overlap) < 5 * math.sqrt(overlap / rows_drawn(device))
    value, accepted = sampled(INDEPENDENT, DRAFT, device, certain=True)
    assert value < BIGGEST_CHI_SQUARE
    assert abs(accepted - float(p[3])) < 5 * math.sqrt(float(p[3]) / rows_drawn(device))


def test_the_oracle_keeps_the_targets_distribution() -> None:
    check_distribution(None)


@pytest.mark.gpu
def test_the_kernels_keep_the_targets_distribution(device: torch.device) -> None:
    check_distribution(device)


@pytest.mark.gpu
def test_coupled_draws_are_the_targets(device: torch.device) -> None:
    """The fast noise of ``verify`` as well, on the same narrow distribution."""
    rows = 1 << 15
    ids = []
    one = torch.ones(rows, dtype=torch.int32, device=device)
    for i in range(8):
        seeds = torch.arange(i * rows, (i + 1) * rows, device=device)
        noise = Noise(seeds, seeds % 77, torch.ones(rows, device=device))
        logits = TARGET_LOGITS.to(device).expand(rows, 1, 16)
        tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        ids.append(verify(logits, tokens, one, one * 0, noise=noise)[0][:, 0].cpu())
    assert chi_square(torch.cat(ids), TARGET_LOGITS) < BIGGEST_CHI_SQUARE
