"""What the kernels of verification have beyond the operation: divisions of a row, a work space, the state of rows, and bad numbers on the device."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import Noise
from pipespec_kernels.triton import Config, RowState, Workspace, cutoff, rejection_sample, select, verify

from ..cases import OPS, Arguments, Case, Draw, each
from ..selection import DTYPES, make_logits
from .conftest import some

CONFIGS = [Config(16, 1, 1), Config(8, 1, 3), Config(32, 2, 2), Config(8, 1, 9), Config(128, 1, 1)]
CHOOSE: dict[str, Any] = {"verify": verify, "rejection_sample": rejection_sample}


def case_on(
    device: torch.device, name: str, seed: int, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Case, Arguments]:
    """A call of verification with rows of three columns or more, and its arguments on the device."""
    case = Case(name, Draw(seed, dtype, kernels=True, **({"rows": 4, "columns": 3, "vocabulary": 50} | sizes)))
    return case, each(case.arguments, lambda _, x: x.to(device, copy=True))


@pytest.mark.parametrize(("name", "config"), some([*itertools.product(CHOOSE, CONFIGS)], 1, 2), ids=str)
def test_any_division_of_a_row(name: str, config: Config, device: torch.device) -> None:
    seed = CONFIGS.index(config) % 3
    case, given = case_on(device, name, seed, DTYPES[seed], vocabulary=(33, 100, 7)[seed])
    got = CHOOSE[name](**given, exact=True, config=config)
    for found, expected in zip(got, case.results, strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("name", "dtype"), [("verify", torch.int32), ("rejection_sample", torch.int64)])
def test_state_and_workspace_of_many_launches(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """One work space, in which each launch leaves zeros, and the state of the rows after each."""
    workspace, state = (
        Workspace(6, 5, device),
        RowState(*(torch.full((4,), n, dtype=dtype, device=device) for n in (-7, 100, 5))),
    )
    after = [torch.full((4,), n, dtype=dtype) for n in (-7, 100, 5)]
    for seed in range(4):
        case, given = case_on(device, name, seed)
        got = CHOOSE[name](**given, exact=True, state=state, workspace=workspace, config=Config(16, 1, 2))
        selected, accepted = case.results
        assert torch.equal(got[0].cpu(), selected)
        busy = case.arguments["query_lens"] > 0
        last = selected.gather(1, accepted[:, None].long())[:, 0].to(dtype)
        after[0] = torch.where(busy, last, after[0])
        after[1] += torch.where(busy, accepted + 1, 0)
        after[2] += busy & (accepted < case.arguments["num_draft_tokens"])
        for found, expected in zip((state.next_token, state.length, state.epoch), after, strict=True):
            assert torch.equal(found.cpu(), expected)
        assert not workspace.words.any()
    assert after[2].max() > 5


def test_words_are_zero_after_launches_beside_other_work(device: torch.device) -> None:
    """One work space for verifications of many shapes, which give what those with work spaces of their own give; on a GPU while copies keep the memory busy."""
    on_gpu, random = device.type == "cuda", np.random.default_rng(0)
    workspace, differ = Workspace(16, 9, device), torch.zeros((), dtype=torch.bool, device=device)
    source, side = torch.empty(1 << 28 if on_gpu else 1, device=device), torch.cuda.Stream() if on_gpu else None
    for trial in range(5000 if on_gpu else 8):
        if trial % 10 == 0:
            with torch.cuda.stream(side):
                source.clone()
        batch, width, vocabulary = random.integers(1, (17, 10, 8000) if on_gpu else (5, 5, 5)).tolist()
        logits = torch.randn((batch, width, 16 * vocabulary), device=device, dtype=torch.bfloat16)
        seeds = torch.arange(batch, device=device) + trial
        noise = Noise(seeds, 100 * seeds, torch.ones(batch, device=device)) if trial % 2 else None
        tokens, fed = (
            torch.zeros((batch, width), dtype=torch.int64, device=device),
            random.integers(0, width + 1, batch),
        )
        chosen = select(logits, noise=noise)[:, :-1]
        tokens[:, 1:] = torch.where(torch.rand(chosen.shape, device=device) < 0.8, chosen, 0)
        query_lens = torch.tensor(fed, dtype=torch.int32, device=device)
        given = logits, tokens, query_lens, (query_lens - 1).clamp(min=0)
        for one, other in zip(
            verify(*given, noise=noise), verify(*given, noise=noise, workspace=workspace), strict=True
        ):
            differ |= (one != other).any()
        differ |= workspace.words.any()
    assert not differ


def test_a_work_space_of_the_callers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = case_on(device, "verify", 3)
    workspace, small = Workspace(4, 5, device), Workspace(2, 4, device)
    monkeypatch.setattr(Workspace, "__init__", None)
    for _ in range(2):
        assert torch.equal(ops.verify(**given, workspace=workspace)[0].cpu(), case.results[0])
        assert not workspace.words.any()
    with pytest.raises(ValueError, match="the workspace is for 2 x 4 at most"):
        ops.verify(**given, workspace=small)
    case, given = case_on(device, "penalize", 0)
    table = torch.zeros(given["logits"].numel() + 5, dtype=torch.int32, device=device)
    ops.penalize(**given, workspace=table)
    assert not table.any()
    OPS["penalize"].close(given["logits"].cpu(), case.after["logits"], {})


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
@pytest.mark.parametrize("which", ["verify", "target", "draft"])
def test_bad_temperatures_on_the_device_stay_in_their_row(which: str, scale: float, device: torch.device) -> None:
    """Five ids in a block of eight: with such a temperature the padding would be chosen."""
    logits, draft = torch.randn(2, 4, 2, 5, generator=torch.Generator().manual_seed(8))
    tokens, query_lens, drafts = (torch.zeros(4, 2, dtype=torch.int64), torch.tensor([2, 2, 1, 0]).int(), torch.tensor([1, 1, 0, -1]).int())  # fmt: skip
    noise, ones = Noise(torch.arange(4) + 1, torch.arange(4) + 9, torch.ones(4)), torch.ones(4)
    fed = logits, tokens, query_lens, drafts
    expected = reference.verify(*fed, noise) if which == "verify" else reference.rejection_sample(*fed, draft, noise)
    bad = torch.tensor([1.0, *[scale] * 3], device=device)
    there = [x.to(device) for x in fed]
    noise = Noise(*(x.to(device) for x in (noise.seeds, noise.positions)), bad if which != "draft" else ones.to(device))
    workspace, state = Workspace(4, 2, device), RowState(*(torch.full((4,), 5, device=device) for _ in range(3)))
    options: dict[str, Any] = {"state": state, "workspace": workspace, "exact": True, "config": Config(8, 1, 1)}
    if which == "verify":
        got = verify(*there, noise=noise, **options)
        every = select(there[0], noise=noise, exact=True, config=Config(8, 1, 1))
        assert torch.equal(
            every[0].cpu(), reference.sample(logits, Noise(torch.arange(4) + 1, torch.arange(4) + 9, ones))[0]
        )
        assert every[1:].eq(-1).all()
    else:
        options["draft_inv_temperature"] = bad if which == "draft" else ones.to(device)
        got = rejection_sample(*there, draft.to(device), noise, **options)
    assert torch.equal(got[0][0].cpu(), expected[0][0])
    assert got[0][1:].eq(-1).all()
    assert got[1].tolist() == [int(expected[1][0]), -1, -1, 0]
    assert state.length.tolist() == [5 + int(expected[1][0]) + 1, 5, 5, 5]
    assert not workspace.words.any()


def test_counts_on_the_device_are_not_read_by_the_host(device: torch.device) -> None:
    """Bad counts affect only their own row. On the host they are an error."""
    logits = torch.zeros(3, 2, 5, device=device)
    tokens = torch.zeros(3, 2, dtype=torch.int64, device=device)
    query_lens, num_draft_tokens = (
        torch.tensor([2, 3, 0], dtype=torch.int32),
        torch.tensor([1, 1, 8], dtype=torch.int32),
    )
    out = torch.full((3, 2), -9, dtype=torch.int32), torch.full((3,), -9, dtype=torch.int32)
    with pytest.raises(ValueError, match="row 1: need 0 <= num_draft_tokens < query_lens"):
        ops.verify(logits, tokens, query_lens, num_draft_tokens, out=out)
    assert all((t == -9).all() for t in out)
    if device.type != "cpu":
        _, accepted = ops.verify(logits, tokens, query_lens.to(device), num_draft_tokens.to(device))
        assert accepted.tolist() == [1, -1, 0]


def test_float64_goes_to_the_reference(device: torch.device) -> None:
    logits = torch.randn(2, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = ops.argmax(logits.to(device))
    assert got.device == device
    assert torch.equal(got.cpu(), reference.argmax(logits))


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


# ---- how much is read


def passes(monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, **filters: float) -> float:
    """How often a call reads each logit, on average."""
    from triton.runtime.interpreter import InterpreterBuilder

    begin = logits.data_ptr()
    end = begin + logits.numel() * logits.element_size()
    load, read = InterpreterBuilder.create_masked_load, []

    def counted(builder, pointers, mask, *rest):
        at = pointers.data
        read.append(int(((at >= begin) & (at < end) & mask.data).sum()))
        return load(builder, pointers, mask, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", counted)
        cutoff(logits, **filters)
    return sum(read) / logits.numel()


def test_rows_are_read_once(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The search reads few groups of a language model's row. In a flat row it ends early."""
    if device.type != "cpu":
        pytest.skip("the interpreter counts")
    k, p, both = {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
    generator = torch.Generator().manual_seed(0)
    ranked = 12 - 2 * torch.arange(1, 128257).log() + 0.3 * torch.randn(128256, generator=generator)
    ranked = ranked[torch.randperm(128256, generator=generator)][None, None]
    for dtype, max_passes in ((torch.bfloat16, 1.3), (torch.float32, 1.7)):
        logits = ranked.to(dtype)
        for filters in (k, p, both, {"min_p": 0.02}):
            assert 1 <= passes(monkeypatch, logits, **filters) < max_passes, (dtype, filters)
    flat = torch.zeros(1, 1, 128256, dtype=torch.bfloat16)
    assert passes(monkeypatch, flat, **k) == 1
    assert passes(monkeypatch, flat, **p) == 2
    normal = torch.randn(1, 1, 128256, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    assert passes(monkeypatch, normal, **p) <= 10


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, Config(256, 4, 7), Config(4096, 8, 2)])
def test_fast_noise_regrets_nothing(config: Config | None, device: torch.device) -> None:
    """Without ``exact`` a near-tie may fall the other way; the choice is then as good as the oracle's to 1e-3."""
    generator = torch.Generator().manual_seed(7)
    logits = make_logits("normal", (64, 1, 32000), torch.bfloat16, generator) * 4
    noise = Noise(
        *torch.randint(0, 2**40, (2, 64), generator=generator), torch.rand(64, generator=generator) * 2 + 0.25
    )
    one = torch.ones(64, dtype=torch.int32, device=device)
    tokens = torch.zeros(64, 1, dtype=torch.int64, device=device)
    there = logits.to(device)
    selected, _ = verify(there, tokens, one, one * 0, noise=each(noise, lambda _, x: x.to(device)), config=config)
    small, _ = verify(
        there, tokens, one, one * 0, noise=each(noise, lambda _, x: x.to(device)), config=Config(512, 2, 1)
    )
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
