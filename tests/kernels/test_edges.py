"""Calls with a reason of their own, by every implementation: ties, NaNs, infinities, empty rows, and numbers at the ends of their ranges."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import ALL_VALID, DRAFT, Noise

from .cases import EPS
from .implementations import INTERPRETED
from .selection import DTYPES, far_apart, int32

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered:RuntimeWarning"
)  # numpy's, of the NaNs of the interpreter
INF, NAN = math.inf, math.nan


def there(device: torch.device, *tensors: Tensor) -> Any:
    return [x.to(device) for x in tensors]


def noise_on(device: torch.device, rows: int, *, scale: float = 1.0, **more: Any) -> Noise:
    return Noise(*there(device, torch.arange(rows) + 3, torch.arange(rows) + 4, torch.full((rows,), scale)), **more)


# ---- choices

ROWS = [
    ([1.0, 3.0, 3.0, 2.0], 1),
    ([-0.0, 0.0, -0.0, -1.0], 0),
    ([-1.0, 0.0, -0.0, 0.0], 1),
    ([-INF] * 4, 0),
    ([INF, NAN, INF, NAN], 1),
    ([-INF, -NAN, NAN, INF], 1),
    ([NAN] * 4, 0),
    ([-1e-45, 1e-45, 0.0, 1e-45], 1),
]


def test_the_first_of_the_largest_and_a_nan_is_larger(everywhere: torch.device) -> None:
    logits = torch.tensor([[row] for row, _ in ROWS], device=everywhere)
    one = torch.ones(len(ROWS), dtype=torch.int32, device=everywhere)
    tokens = torch.zeros(len(ROWS), 1, dtype=torch.int64, device=everywhere)
    for chosen in (ops.argmax(logits), ops.verify(logits, tokens, one, one * 0)[0]):
        assert chosen[:, 0].tolist() == [choice for _, choice in ROWS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_from_ties_nans_and_infinities(dtype: torch.dtype, everywhere: torch.device) -> None:
    """At the ends of vectors and blocks."""
    noise = noise_on(everywhere, 1)

    def draw(cutoff: float | None = None, **values: float) -> int:
        logits = torch.full((1, 1, 10_000), -INF, dtype=dtype)
        for name, value in values.items():
            logits[0, 0, int(name[1:])] = value
        noise.cutoff = None if cutoff is None else torch.tensor([[cutoff]], device=everywhere)
        return int(ops.sample(logits.to(everywhere), noise))

    pairs = [(0, 1), (31, 32), (4095, 4096), (4096, 8200), (9998, 9999)]
    for first, second in pairs[2:4] if INTERPRETED else pairs:
        assert draw(**{f"v{first}": INF, f"v{second}": INF}) == first
        assert draw(**{f"v{first}": NAN, f"v{second}": -NAN, "v7777": INF}) == first
        assert draw(**{f"v{first}": -NAN, f"v{second}": NAN}, cutoff=INF) == first
        assert draw(**{f"v{second}": -1e4}) == second  # the only one that can be
        assert draw(**{f"v{first}": 1.0, f"v{second}": 2.0}, cutoff=1.5) == second
    # Nothing can be chosen.
    assert draw() == 0
    assert draw(v500=1.0, v600=2.0, cutoff=2.5) == 0
    # Noise vanishes in such a large sum, which leaves equal sums.
    noise.inv_temperature.fill_(1e30)
    assert draw(v17=3.0, v18=3.0, v9000=3.0) == 17


def test_verification_by_hand(everywhere: torch.device) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1]]), 6).float().to(everywhere)
    fed = torch.tensor([[7, 3, 1, 5]], device=everywhere)
    for first, count, drafts, selected, accepted in (
        (0, 4, 3, [3, 1, 4, -1], 2),
        # The same with fewer and with more own tokens before the draft tokens.
        (1, 3, 2, [1, 4, -1], 1),
        (0, 4, 2, [1, 4, -1, -1], 1),
        (0, 4, 0, [1, -1, -1, -1], 0),
    ):
        got = ops.verify(logits[:, first:], fed[:, first:], *there(everywhere, int32(count), int32(drafts)))
        assert (got[0].tolist(), got[1].tolist()) == ([selected], [accepted])
    # The low half of this id is the id 0 that would be selected.
    wide = torch.tensor([[0, 1 << 32]], device=everywhere)
    assert ops.verify(logits[:, :2] * 0, wide, *there(everywhere, int32(2), int32(1)))[1].item() == 0


def test_rows_that_idle_and_sizes_of_zero(everywhere: torch.device) -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=everywhere)
    for rows, columns in ((2, 3), (0, 3), (2, 0)):
        logits = torch.full((rows, columns, 4), NAN, device=everywhere)
        counts = there(everywhere, int32(0, 0)[:rows], int32(-1, 9)[:rows])
        noise = Noise(*there(everywhere, torch.tensor([1, 2]), torch.tensor([3, -4]), torch.tensor([1.0, NAN])))
        for given in (None, noise) if rows == 2 else (None,):  # the numbers of a row that idles are not looked at
            selected, accepted = ops.verify(logits, tokens[:rows, :columns], *counts, noise=given)
            assert (selected.tolist(), accepted.tolist()) == ([[-1] * columns] * rows, [0] * rows)


def test_tokens_that_no_distribution_gave(everywhere: torch.device) -> None:
    """``invalid_positions`` has the first position of each row whose chosen logit is not finite, and stays as it is elsewhere."""
    logits = torch.full((6, 3, 70), -50.0)
    logits[:, :, 0] = 50
    logits[0, 1] = -INF  # without draft tokens only the last column is read
    logits[1, 1:] = -INF  # the second token is the first that is not drawn
    logits[2, 0, 0] = NAN  # an earlier call has noted an earlier position
    logits[3, 2, 0] = INF
    logits[4, 2] = NAN  # the draft token before it is rejected
    logits[4, 1, 1] = 200
    logits[5] = NAN  # the row idles
    counts = there(everywhere, int32(3, 3, 3, 3, 3, 0), int32(0, 2, 2, 2, 2, 0))
    positions = torch.tensor([50, 99, 199, 297, 399, 499], dtype=torch.int32)
    noise = Noise(*there(everywhere, torch.arange(6), positions, torch.ones(6)), offset=1)
    tokens = torch.zeros(6, 3, dtype=torch.int64, device=everywhere)
    for dtype in DTYPES:
        invalid_positions = torch.tensor([ALL_VALID, ALL_VALID, 7, 10**6, ALL_VALID, ALL_VALID], device=everywhere)
        ops.verify(logits.to(everywhere, dtype), tokens, *counts, noise=noise, invalid_positions=invalid_positions)
        assert invalid_positions.tolist() == [ALL_VALID, 101, 7, 300, ALL_VALID, ALL_VALID]


def test_rejection_without_a_distribution(everywhere: torch.device) -> None:
    flat = [0.0] * 8
    logits = torch.tensor(
        [[[0, 1, NAN, 0, 0, NAN, 0, 0.0], flat], [flat, flat], [[-INF] * 7 + [0.0], flat], [flat, flat]]
    )
    draft = torch.tensor([[flat, flat], [[NAN] * 8, flat], [flat, flat], [flat, flat]])
    tokens = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 99]])  # 99 is no id
    logits, draft, tokens, n = there(everywhere, logits, draft, tokens, torch.full((4,), 2, dtype=torch.int32))
    noise = noise_on(everywhere, 4)
    for drafts in (None, draft):
        selected, accepted = ops.rejection_sample(logits, tokens, n, n - 1, drafts, noise)
        assert selected[0].tolist() == [2, -1]  # the first NaN
        assert selected[2].tolist() == [7, -1]  # all that p allows
        assert accepted[[0, 2, 3]].tolist() == [0, 0, 0]
        assert 0 <= selected[3, 0] < 8
    # A draft without a distribution: the draft token is rejected, and the draw is from the target's row as if there were no draft token.
    alone, _ = ops.rejection_sample(logits[:, :1], tokens[:, :1], n - 1, n * 0, None, noise)
    assert (accepted[1], selected[1, 0]) == (0, alone[1, 0])


def test_rejection_accepts_all_of_equal_distributions(everywhere: torch.device) -> None:
    logits = torch.randn(6, 3, 12, generator=torch.Generator().manual_seed(2)).to(everywhere)
    noise, n = noise_on(everywhere, 6), torch.full((6,), 3, dtype=torch.int32, device=everywhere)
    drawn = ops.sample(logits, noise_on(everywhere, 6, stream=DRAFT)).long().roll(1, 1)
    assert ops.rejection_sample(logits, drawn, n, n - 1, logits, noise)[1].tolist() == [2] * 6


def test_cutoffs_by_hand(everywhere: torch.device) -> None:
    row = torch.log(torch.tensor([[[0.1, 0.4, 0.05, 0.2, 0.25]]])).to(everywhere)

    def bar(values: list[float], dtype: torch.dtype = torch.float32, **filters: float) -> float:
        return float(ops.cutoff(torch.tensor([[values]], dtype=dtype, device=everywhere), **filters))  # type: ignore[arg-type]

    for filters, kept in (
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"top_p": 0.5}, [1, 4]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.2}, [0, 1, 3, 4]),
        ({"top_k": 3, "top_p": 0.7}, [1, 4]),  # of .4 .25 .2, that is of .85
    ):
        assert torch.nonzero(row[0, 0] >= ops.cutoff(row, **filters).item()).flatten().tolist() == kept  # type: ignore[arg-type]
    # Top-k keeps all tied logits, and probabilities are those after top-k.
    assert bar([1.0, 2.0, 2.0, 0.0], top_k=1) == bar([1.0, 2.0, 2.0, 0.0], top_k=1, top_p=0.4) == 2.0
    assert math.copysign(1, bar([-0.0, 0.0, -1.0], top_k=1)) == 1  # +0.0
    assert bar([NAN, 0.0], top_k=1) == bar([-INF] * 300, top_k=1, top_p=0.5, min_p=0.5) == -INF
    assert bar([INF, 5.0, INF], top_p=0.9) == INF
    # A value between two float32 numbers is rounded down, so that its logit stays.
    assert 0 <= 0.3 - bar([0.3, 0.1], torch.float64, top_k=1) < 1e-7
    # Only the columns that verification may read.
    ascending = torch.tensor([0.0, 1.0], device=everywhere).expand(3, 4, 2)
    counts = dict(
        zip(("query_lens", "num_draft_tokens"), there(everywhere, int32(4, 2, 0), int32(1, 0, -1)), strict=True)
    )
    found = ops.cutoff(ascending, top_k=1, **counts).tolist()
    assert found == [[-INF, -INF, 1, 1], [-INF, 1, -INF, -INF], [-INF] * 4]


def test_log_probabilities_at_the_ends(everywhere: torch.device) -> None:
    one = torch.ones(1, dtype=torch.int32, device=everywhere)
    # A score that overflows reaches the cutoff: its log-probability is -inf, and its id is not -1.
    logits = torch.tensor([[[torch.finfo(torch.float32).min] * 2 + [0.0]]], device=everywhere)
    found = ops.logprobs(logits, one[None], one, one * 0, inv_temperature=one * 2.0, top_n=3)
    assert (found[1].tolist(), found[2].tolist()) == ([[[2, 0, 1]]], [[[0.0, -INF, -INF]]])
    # Many small terms next to a large one, scores far from 0 and far apart, ascending and descending, and all of the vocabulary.
    rows = torch.randn(5, 1, 3001, generator=torch.Generator().manual_seed(1))
    rows[0, 0, 0], rows[1, 0, -1] = 9.0, 60.0
    rows[2] += 3000.0
    rows[3], rows[4] = torch.linspace(-90, 90, 3001), torch.linspace(5, -5, 3001).round()
    ids, ones = torch.tensor([[0], [3000], [5], [3000], [0]], dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    for top_n in (1, 40) if INTERPRETED else (1, 40, 3001):
        chosen, best, top = ops.logprobs(*there(everywhere, rows, ids, ones, ones * 0), top_n=top_n)
        wanted = rows.double().log_softmax(-1)
        order = torch.sort(rows, dim=-1, descending=True, stable=True).indices[..., :top_n]
        assert torch.equal(best.cpu().long(), order)
        is_float32 = everywhere.type == "cuda" or INTERPRETED  # of the sums
        close = {"atol": 3e-6 if is_float32 else 5e-7, "rtol": 3e-6 if is_float32 else 3e-7}
        torch.testing.assert_close(chosen.cpu().double()[..., None], wanted.gather(2, ids.long()[..., None]), **close)
        torch.testing.assert_close(top.cpu().double(), wanted.gather(2, order), **close)


# ---- addresses


def test_rows_further_apart_than_32_bits_count(everywhere: torch.device) -> None:
    """The stride fits 32 bits, and its product with the row index does not."""
    if everywhere.type != "cpu":
        pytest.skip("the memory is reserved only where it is touched")
    for shape, strides in (((3, 2, 50), (2**30 + 64, 64)), ((1, 3, 50), (64, 2**30 + 64))):
        logits = far_apart(shape, strides, torch.Generator().manual_seed(7))
        n, one = torch.full(shape[:1], shape[1], dtype=torch.int32), torch.ones(shape[0])
        noise = noise_on(everywhere, shape[0])
        tokens = reference.argmax(logits).long().roll(1, 1)  # right draft tokens: every column is read
        verified = logits, tokens, n, n - 1
        for got, expected in (
            (ops.argmax(logits), reference.argmax(logits)),
            (ops.sample(logits, noise), reference.sample(logits, noise)),
            (ops.verify(*verified)[0], reference.verify(*verified)[0]),
            (ops.verify(*verified, noise=noise)[0], reference.verify(*verified, noise)[0]),
            (
                ops.rejection_sample(*verified, logits, noise)[0],
                reference.rejection_sample(*verified, logits, noise)[0],
            ),
            (ops.cutoff(logits, top_k=3), reference.cutoff(logits, one, one.long() * 3, one, one * 0)),
        ):
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rows = 2**31 // 128256 + 2
    logits = torch.zeros(rows, 1, 128256, dtype=torch.bfloat16, device="cuda")
    logits[-1, 0, 77] = logits[-2, 0, 78] = 1
    one = torch.ones(rows, dtype=torch.int32, device="cuda")
    selected, _ = ops.verify(logits, torch.zeros(rows, 1, dtype=torch.int64, device="cuda"), one, one - 1)
    assert selected[-2:, 0].tolist() == [78, 77]
    assert not selected[:-2].any()


# ---- forms of arguments


def test_arrays_and_columns(everywhere: torch.device) -> None:
    """Numbers per row of numpy, columns of a matrix, positions in int32 with an offset."""
    generator = torch.Generator().manual_seed(9)
    logits, tokens = there(everywhere, torch.randn(2, 3, 50, generator=generator), torch.zeros(2, 3, dtype=torch.int64))
    lens, drafts, at = int32(3, 2), int32(2, 1), torch.tensor([7, 701])
    pairs, scales = torch.stack([lens, drafts], 1), torch.tensor([[1.0], [2.0]]).repeat(1, 2)
    expected = ops.verify(logits, tokens, lens, drafts, noise=Noise(lens.long(), at, scales[:, 0]))
    all_counts = [tuple(np.asarray(pairs).T), (lens.numpy(), drafts.numpy()), tuple(pairs.t())]
    for counts in all_counts[:1] if INTERPRETED else all_counts:
        noises = [
            Noise(lens.long(), at.int() - 1, scales.numpy()[:, 0], offset=1),
            Noise(lens.long(), at.numpy(), scales[:, 1]),
            Noise(lens.long(), at, scales[:, 0], torch.full((3, 2), -INF).t()),
        ]
        for noise in noises[:1] if INTERPRETED else noises:
            got = ops.verify(logits, tokens, *counts, noise=noise)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("scalar", [np.float32, np.float64, torch.tensor])
def test_filters_that_are_scalars(scalar: Any) -> None:
    """Of numpy and torch; the host reads them alike for all implementations."""
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(6))
    wanted = ops.cutoff(logits, inv_temperature=0.5, top_k=7, top_p=0.75, min_p=0.25)
    filters = {"inv_temperature": scalar(0.5), "top_p": scalar(0.75), "min_p": scalar(0.25)}
    for top_k in (np.int64(7), torch.tensor(7)):
        assert torch.equal(ops.cutoff(logits, top_k=top_k, **filters), wanted)


def test_another_default_device(everywhere: torch.device) -> None:
    logits, tokens, n = there(everywhere, torch.randn(2, 1, 9), torch.zeros(2, 1, dtype=torch.int64), int32(1, 1))

    def calls() -> list[Tensor]:
        found = [*ops.verify(logits, tokens, n, n - 1), ops.cutoff(logits, top_k=3)]
        return [*found, *ops.logprobs(logits, found[0], n, n - 1, top_n=2)]

    expected = calls()
    with torch.device("meta"):
        assert all(torch.equal(a, b) for a, b in zip(calls(), expected, strict=True))


# ---- attention and layers


def test_scores_that_overflow_and_vanish(everywhere: torch.device) -> None:
    """As torch's softmax: the largest score takes all; equal ones share; a NaN in a seen key is in the result."""
    keys, q = torch.zeros(1, 1, 40, 16, device=everywhere), torch.full((1, 1, 1, 16), 1e18, device=everywhere)
    keys[0, 0, 3], keys[0, 0, 35] = 1e18, -1e18
    values = torch.arange(40.0, device=everywhere)[:, None].repeat(1, 1, 1, 16)
    n = int32(39).to(everywhere)
    assert (ops.verify_attention(q, keys, values, n) == 3).all()
    even = ops.verify_attention(q * 0, keys, values, n)
    torch.testing.assert_close(even, torch.full_like(even, 19.5))
    keys[0, 0, 7] = NAN
    assert ops.verify_attention(q, keys, values, n).isnan().all()
    assert not ops.verify_attention(q * 0, keys, values, n - 33).isnan().any()


def test_caps_of_any_size(everywhere: torch.device) -> None:
    """A large cap changes nothing, a small one makes all scores equal; 1 - e^(-2 x) cancels where x is small."""
    generator = torch.Generator().manual_seed(1)
    q, *caches = (torch.randn(1, 2, n, 64, generator=generator) * (3 if n == 3 else 1) for n in (3, 40, 40))
    for cap in (1e-30, 0.5, 1e8) if INTERPRETED else (1e-30, 1e-3, 0.5, 30.0, 1e4, 1e6, 1e8, 1e30):
        got = ops.verify_attention(*there(everywhere, q, *caches, int32(30)), softcap=cap).cpu()
        wanted = reference.verify_attention(*(x.double() for x in (q, *caches)), int32(30), softcap=cap).float()
        torch.testing.assert_close(got, wanted, atol=2e-6 if cap < 1e4 else 1e-5, rtol=1e-5)


def test_nan_and_infinity_stay(everywhere: torch.device) -> None:
    x = torch.tensor([[1.0, NAN], [INF, 1.0], [0.0, 0.0]], device=everywhere)
    for dtype in DTYPES:
        rows, weight = x.to(dtype), torch.ones(2, dtype=dtype, device=everywhere)
        assert ops.silu_mul(rows).isnan().tolist() == [[True], [False], [False]]
        normed, total = ops.add_rms_norm(rows, torch.zeros_like(rows), weight, EPS)
        assert normed.isnan().tolist() == [[True, True], [True, False], [False, False]]
        torch.testing.assert_close(total, rows, rtol=0, atol=0, equal_nan=True)
    # NaNs of all kinds stay NaNs in 16 bits, in each number that is rounded.
    bits = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF, 0x7F800000, 0x3F808000, 0x3F818000], dtype=torch.int32)
    up = bits.view(torch.float32).bfloat16()
    got = ops.silu_mul(torch.cat([torch.full((6,), 80.0).bfloat16(), up])[None].to(everywhere))[
        0
    ].cpu()  # silu(80) = 80
    assert got.isnan().tolist() == [True, True, True, False, False, False]
    assert torch.equal(got[3:], (80.0 * up.float()).bfloat16()[3:])
