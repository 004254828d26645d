"""The kernel of ``verify`` against the oracle, bit for bit: greedy and coupled."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import reference
from pipespec_kernels.noise import Noise
from pipespec_kernels.triton import Config, RowState, Workspace, select, verify
from tests.trials import trials

from ..selection import (
    DTYPES,
    INVALID_POSITIONS,
    KINDS,
    LAYOUTS,
    drafted_tokens,
    invalid_case,
    make_logits,
    ragged_counts,
    strided,
)
from .conftest import some

MODES = ["greedy", "coupled", "cutoff"]
VOCABS = [1, 7, 1000, 1024, 4097]  # and 128256, below


def make_noise(mode: str, logits: torch.Tensor, generator: torch.Generator, stream: int = 0) -> Noise | None:
    """Noise as the oracle takes it, on the CPU."""
    if mode == "greedy":
        return None
    batch, width, _ = logits.shape
    cutoff = None
    if mode == "cutoff":
        finite = torch.where(logits.isfinite(), logits.float(), 0.0)
        cutoff = finite.amax(-1) - 3 * torch.rand((batch, width), generator=generator)
        cutoff[torch.rand((batch, width), generator=generator) < 0.3] = -math.inf
    return Noise(
        seeds=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        positions=torch.randint(0, 2**40, (batch,), generator=generator),
        inv_temperature=torch.rand(batch, generator=generator) * 2 + 0.25,
        cutoff=cutoff,
        stream=stream,
    )


def on_device(noise: Noise | None, device: torch.device) -> Noise | None:
    if noise is None:
        return None
    cutoff = None if noise.cutoff is None else noise.cutoff.to(device)
    tensors = [t.to(device) for t in (noise.seeds, noise.positions, noise.inv_temperature)]
    return Noise(*tensors, cutoff, noise.stream, noise.offset)


def draft_tokens_for(
    logits: torch.Tensor, noise: Noise | None, agreement: float, generator: torch.Generator
) -> torch.Tensor:
    """Tokens that agree with what the mode selects, at the given rate: coupled rows must walk along draft tokens too."""
    if noise is None or 0 in logits.shape:
        return drafted_tokens(logits, agreement, generator, torch.int64)
    agreeing = torch.zeros_like(logits, dtype=torch.float32).scatter_(
        -1, reference.sample(logits, noise).long()[..., None], 1
    )
    return drafted_tokens(agreeing, agreement, generator, torch.int64)


def check_equal(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    query_lens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    noise: Noise | None,
    device: torch.device,
    layout: str = "plain",
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    expected = reference.verify(logits, tokens, query_lens, num_draft_tokens, noise)
    got = verify(
        strided(logits, layout).to(device) if layout == "plain" else strided(logits.to(device), layout),
        tokens.to(device),
        query_lens.to(device),
        num_draft_tokens.to(device),
        noise=on_device(noise, device),
        exact=True,
        **options,
    )
    assert [t.dtype for t in got] == [torch.int32, torch.int32]
    assert torch.equal(got[0].cpu(), expected[0])
    assert torch.equal(got[1].cpu(), expected[1])
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_equals_the_oracle(vocab: int, mode: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Coupled, each kind is tested with one vocabulary: all combinations would take the interpreter a minute.
    for i, kind in enumerate(KINDS if mode == "greedy" else KINDS[VOCABS.index(vocab) % 3 :: 3]):
        logits = make_logits(kind, (2, 4, vocab), DTYPES[i % 3], generator)
        noise = make_noise(mode, logits, generator)
        query_lens, num_draft_tokens = ragged_counts(2, 4, generator)
        query_lens[i % 2], num_draft_tokens[i % 2] = 4, 3
        check_equal(
            logits, draft_tokens_for(logits, noise, 0.9, generator), query_lens, num_draft_tokens, noise, device
        )


@pytest.mark.parametrize("mode", ["greedy", "cutoff"])
def test_a_real_vocabulary(mode: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = make_logits("normal", (2, 3, 128256), torch.bfloat16, generator)
    noise = make_noise(mode, logits, generator)
    query_lens, num_draft_tokens = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    tokens = draft_tokens_for(logits, noise, 1.0, generator)
    _, accepted = check_equal(
        logits, tokens, query_lens, num_draft_tokens, noise, device, config=Config(1 << 14, 8, splits=3)
    )
    assert accepted.tolist() == [2, 0]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_wide_and_ragged(mode: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = make_logits("few values", (8, 17, 1000 if mode == "greedy" else 200), torch.float16, generator)
    noise = make_noise(mode, logits, generator)
    tokens = draft_tokens_for(logits, noise, 0.95, generator)
    query_lens = torch.tensor([17, 0, 9, 1, 17, 5, 2, 16], dtype=torch.int32)
    num_draft_tokens = torch.tensor([16, 0, 4, 0, 0, 4, 1, 15], dtype=torch.int32)
    _, accepted = check_equal(logits, tokens, query_lens, num_draft_tokens, noise, device)
    assert accepted.max() >= 4


@settings(max_examples=trials(ci=8, nightly=25))
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from([1, 2, 3, 7, 33])),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    mode=st.sampled_from(MODES),
    token_dtype=st.sampled_from([torch.int32, torch.int64]),
    config=st.sampled_from([None, Config(16, 1, 1), Config(8, 1, 3), Config(32, 2, 2), Config(8, 1, 9)]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_layout(shape, dtype, kind, layout, mode, token_dtype, config, seed, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = make_logits(kind, shape, dtype, generator)
    noise = make_noise(mode, logits, generator)
    tokens = draft_tokens_for(logits, noise, 0.8, generator).to(token_dtype)
    if layout == "transposed":
        tokens = tokens.t().contiguous().t()
    query_lens, num_draft_tokens = ragged_counts(shape[0], shape[1], generator)
    check_equal(logits, tokens, query_lens, num_draft_tokens, noise, device, layout, config=config)


def test_ties_zeros_and_nans(device: torch.device) -> None:
    rows = [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-0.0, 0.0, -0.0, -1.0], 0),
        ([-1.0, 0.0, -0.0, 0.0], 1),
        ([-math.inf] * 4, 0),
        ([math.inf, math.nan, math.inf, math.nan], 1),
        ([-math.inf, -math.nan, math.nan, math.inf], 1),
        ([math.nan] * 4, 0),
        ([-1e-45, 1e-45, 0.0, 1e-45], 1),
    ]
    logits = torch.tensor([[row] for row, _ in rows], device=device)
    one = torch.ones(len(rows), dtype=torch.int32, device=device)
    tokens = torch.zeros(len(rows), 1, dtype=torch.int64, device=device)
    for config in (Config(8, 1, 1), Config(8, 1, 2), Config(16, 1, 1)):
        selected, _ = verify(logits.contiguous(), tokens, one, one * 0, config=config)
        assert selected[:, 0].tolist() == [choice for _, choice in rows]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_state_and_replay(dtype: torch.dtype, device: torch.device) -> None:
    """Many launches with one work space, on new inputs in the same memory, like the replay of a graph."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.empty(4, 4, 50, device=device)
    tokens = torch.empty(4, 4, dtype=torch.int64, device=device)
    query_lens, num_draft_tokens = (torch.empty(4, dtype=torch.int32, device=device) for _ in range(2))
    state = RowState(*(torch.full((4,), n, dtype=dtype, device=device) for n in (-7, 100, 5)))
    out = (torch.empty(4, 4, dtype=torch.int32, device=device), torch.empty(4, dtype=torch.int32, device=device))
    workspace = Workspace(6, 5, device)
    expected_next, expected_length, expected_epoch = [-7] * 4, [100] * 4, [5] * 4
    for _ in range(4):
        x = make_logits("normal", (4, 4, 50), torch.float32, generator)
        fed, draft_tokens = ragged_counts(4, 4, generator)
        logits.copy_(x)
        tokens.copy_(drafted_tokens(x, 0.7, generator, torch.int64))
        query_lens.copy_(fed)
        num_draft_tokens.copy_(draft_tokens)
        got = verify(
            logits,
            tokens,
            query_lens,
            num_draft_tokens,
            state=state,
            out=out,
            workspace=workspace,
            config=Config(16, 1, 2),
        )
        assert got[0] is out[0]
        assert got[1] is out[1]
        selected, accepted = reference.verify(x, tokens.cpu(), fed, draft_tokens)
        assert torch.equal(out[0].cpu(), selected)
        assert torch.equal(out[1].cpu(), accepted)
        for r in range(4):
            if fed[r] > 0:
                expected_next[r] = int(selected[r, accepted[r]])
                expected_length[r] += int(accepted[r]) + 1
                expected_epoch[r] += int(accepted[r] < draft_tokens[r])
        assert state.next_token.tolist() == expected_next
        assert state.length.tolist() == expected_length
        assert state.epoch.tolist() == expected_epoch
        assert not workspace.words.any()
    assert min(expected_length) > 100
    assert max(expected_epoch) > 5


def test_bad_counts_on_the_device_stay_in_their_row(device: torch.device) -> None:
    bad = [(-1, 0), (4, 0), (2, 2), (3, -1), (1, 5), (2**31 - 1, 2**31 - 2)]
    query_lens = torch.tensor([2, *(fed for fed, _ in bad), 0], dtype=torch.int32, device=device)
    num_draft_tokens = torch.tensor(
        [1, *(draft_tokens for _, draft_tokens in bad), 77], dtype=torch.int32, device=device
    )
    logits = torch.nn.functional.one_hot(torch.full((8, 3), 4), 10).float().to(device)
    tokens = torch.full((8, 3), 4, device=device)
    state = RowState(*(torch.zeros(8, dtype=torch.int64, device=device) for _ in range(3)))
    workspace = Workspace(8, 3, device)
    selected, accepted = verify(logits, tokens, query_lens, num_draft_tokens, state=state, workspace=workspace)
    assert selected.tolist() == [[4, 4, -1]] + [[-1] * 3] * 7
    assert accepted.tolist() == [1] + [-1] * 6 + [0]
    assert state.length.tolist() == [2] + [0] * 7
    assert state.next_token.tolist() == [4] + [0] * 7
    assert not workspace.words.any()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_bad_temperatures_on_the_device_stay_in_their_row(scale: float, device: torch.device) -> None:
    """Five ids in a block of eight: with such a temperature the padding would be chosen."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(3, 2, 5, generator=generator)
    noise = make_noise("coupled", logits, generator)
    assert noise is not None
    query_lens = torch.tensor([2, 2, 0], dtype=torch.int32)
    tokens = draft_tokens_for(logits, noise, 1.0, generator)
    expected, accepted = reference.verify(logits, tokens, query_lens, query_lens - 1, noise)
    expected[1], accepted[1] = -1, -1
    noise.inv_temperature[1:] = scale
    state = RowState(*(torch.full((3,), 5, device=device) for _ in range(3)))
    workspace = Workspace(3, 2, device)
    there = on_device(noise, device)
    arguments = [x.to(device) for x in (logits, tokens, query_lens, query_lens - 1)]
    got = verify(*arguments, noise=there, state=state, workspace=workspace, exact=True, config=Config(8, 1, 1))
    assert torch.equal(got[0].cpu(), expected)
    assert torch.equal(got[1].cpu(), accepted)
    assert state.length.tolist() == [5 + int(accepted[0]) + 1, 5, 5]
    assert not workspace.words.any()
    every = select(arguments[0], noise=there, exact=True, config=Config(8, 1, 1)).cpu()
    assert torch.equal(every[:1], expected[:1])
    assert every[1:].eq(-1).all()


@pytest.mark.parametrize(
    ("dtype", "config"), some([*itertools.product(DTYPES, [Config(16, 1, 3), Config(128, 1, 1)])], 0, 3), ids=str
)
def test_tokens_that_no_distribution_gave(dtype: torch.dtype, config: Config, device: torch.device) -> None:
    """In the same launch, whatever the division of the row, and with positions in int32."""
    invalid_positions, logits, noise, counts = (
        x.to(device) if isinstance(x, torch.Tensor) else x for x in invalid_case(dtype)
    )
    noise = on_device(noise, device)
    tokens = torch.zeros(6, 3, dtype=torch.int64, device=device)
    counts = [count.to(device) for count in counts]
    workspace = Workspace(6, 3, device)
    got = verify(
        logits, tokens, *counts, noise=noise, invalid_positions=invalid_positions, workspace=workspace, config=config
    )
    assert invalid_positions.tolist() == INVALID_POSITIONS
    assert not workspace.words.any()
    assert torch.equal(got[0], verify(logits, tokens, *counts, noise=noise, config=config)[0])


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("the workspace is for 1 x 3 at most", {"workspace": (1, 3)}),
        ("the workspace is for 2 x 2 at most", {"workspace": (2, 2)}),
        ("power of two", {"config": Config(12, 1, 1)}),
        ("must be on", {"logits": torch.zeros(2, 3, 5, device="meta")}),
        ("at most 65535 rows", {"logits": torch.zeros(1, 1, 5).expand(1 << 16, 3, 5)}),
    ],
)
def test_what_a_launch_cannot_take_touches_nothing(
    message: str, changed: dict[str, object], device: torch.device
) -> None:
    """All other arguments are checked by :mod:`pipespec_kernels.ops`."""
    three = torch.full((2,), 3, dtype=torch.int32, device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    state = RowState(*(torch.full((2,), -9, device=device) for _ in range(3)))
    out = (
        torch.full((2, 3), -9, dtype=torch.int32, device=device),
        torch.full((2,), -9, dtype=torch.int32, device=device),
    )
    given = {"logits": torch.zeros(2, 3, 5, device=device)} | changed
    if "workspace" in changed:
        given["workspace"] = Workspace(*changed["workspace"], device)  # type: ignore[misc]
    with pytest.raises(ValueError, match=message):
        verify(tokens=tokens, query_lens=three, num_draft_tokens=three - 1, state=state, out=out, **given)  # type: ignore[arg-type]
    assert all((tensor == -9).all() for tensor in (*state, *out))


# --- what only a device can show -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_in_a_graph(mode: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    shape = (4, 5, 32000)
    logits = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    tokens = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    query_lens = torch.ones(4, dtype=torch.int32, device=device)
    num_draft_tokens = torch.zeros_like(query_lens)
    noise = make_noise(mode, logits.cpu(), generator)
    there = on_device(noise, device)
    workspace = Workspace(4, 5, device)
    verify(logits, tokens, query_lens, num_draft_tokens, noise=there, workspace=workspace, exact=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected, accepted = verify(
            logits, tokens, query_lens, num_draft_tokens, noise=there, workspace=workspace, exact=True
        )
    for _ in range(5):
        x = make_logits("normal", shape, torch.bfloat16, generator)
        fed, draft_tokens = ragged_counts(4, 5, generator)
        ids = draft_tokens_for(x, noise, 0.8, generator)
        for there_, here in ((logits, x), (tokens, ids), (query_lens, fed), (num_draft_tokens, draft_tokens)):
            there_.copy_(here)
        graph.replay()
        expected = reference.verify(x, ids, fed, draft_tokens, noise)
        assert torch.equal(selected.cpu(), expected[0])
        assert torch.equal(accepted.cpu(), expected[1])


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    vocab = 128256
    rows = 2**31 // vocab + 2
    logits = torch.zeros(rows, 1, vocab, dtype=torch.bfloat16, device=device)
    logits[-1, 0, 77] = 1
    logits[-2, 0, 78] = 1
    one = torch.ones(rows, dtype=torch.int32, device=device)
    selected, _ = verify(logits, torch.zeros(rows, 1, dtype=torch.int64, device=device), one, one - 1)
    assert selected[-2:, 0].tolist() == [78, 77]
    assert not selected[:-2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, Config(256, 4, 7), Config(4096, 8, 2)])
def test_fast_noise_regrets_nothing(config: Config | None, device: torch.device) -> None:
    """Without ``exact`` a near-tie may fall the other way; the choice is then as good as the oracle's to 1e-3."""
    generator = torch.Generator().manual_seed(7)
    logits = make_logits("normal", (64, 1, 32000), torch.bfloat16, generator) * 4
    noise = make_noise("coupled", logits, generator)
    assert noise is not None
    one = torch.ones(64, dtype=torch.int32, device=device)
    tokens = torch.zeros(64, 1, dtype=torch.int64, device=device)
    there = logits.to(device)
    selected, _ = verify(there, tokens, one, one * 0, noise=on_device(noise, device), config=config)
    small, _ = verify(there, tokens, one, one * 0, noise=on_device(noise, device), config=Config(512, 2, 1))
    assert torch.equal(selected, small)
    same = 0
    for r in range(64):
        r_noise = reference.gumbel(
            reference.philox_draw(int(noise.seeds[r]), int(noise.positions[r]), 0, torch.arange(32000))
        )
        scores = logits[r, 0].float() * noise.inv_temperature[r] + r_noise
        same += int(selected[r, 0] == scores.argmax())
        assert scores.max() - scores[selected[r, 0].item()] < 1e-3
    assert same >= 62
