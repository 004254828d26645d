"""What lies after a rejected draft token is not read, and no result depends on whether a block of threads has seen the rejection.

In the interpreter, which runs one program after the other: here in any order, and it counts what they read."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from pipespec_kernels import reference
from pipespec_kernels.noise import DRAFT, Noise
from pipespec_kernels.triton import Config, Workspace, rejection_sample, verify
from pipespec_kernels.triton.launch import choose_config, cut, notes_pay
from pipespec_kernels.triton.philox import INTERPRETED
from tests.trials import trials

from ..cases import Draw, argmax_slowly, sample_by_hand
from ..selection import make_logits, ragged_counts

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="programs are put in order, and counted, in the interpreter")
MODES = ("greedy", "coupled", "cutoff")


def noise_for(mode: str, logits: torch.Tensor, seed: int) -> Noise | None:
    rows, columns, vocabulary = logits.shape
    draw = Draw(seed, logits.dtype, rows=rows, columns=columns, vocabulary=vocabulary)
    return None if mode == "greedy" else draw.noise(logits, mode == "cutoff")


def chosen_before(logits: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """In each column what the one before chooses."""
    return (argmax_slowly(logits) if noise is None else sample_by_hand(logits, noise)).long().roll(1, 1)


def drawn(draft: torch.Tensor, noise: Noise) -> torch.Tensor:
    """Draft tokens as a draft draws them."""
    return chosen_before(draft, replace(noise, stream=DRAFT, cutoff=None))


def as_on_a_gpu(count: int) -> list[int]:
    return list(range(count))


def shuffled(generator: torch.Generator) -> Callable[[int], list[int]]:
    return lambda count: torch.randperm(count, generator=generator).tolist()


@contextmanager
def ordered(order: Callable[[int], list[int]]) -> Iterator[None]:
    """The programs of each launch in this order of their numbers. As on a GPU, the first index of a grid counts fastest."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_dim, set_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    numbers: list[int] = []

    def begin(builder, *grid: int) -> None:
        numbers[:] = order(math.prod(grid))
        set_dim(builder, *grid)

    def place(builder, x: int, y: int, z: int) -> None:
        width, height, depth = builder.grid_dim
        number = numbers[(x * height + y) * depth + z]
        set_idx(builder, number % width, number // width % height, number // (width * height))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_dim", begin)
        patch.setattr(InterpreterBuilder, "set_grid_idx", place)
        yield


@contextmanager
def reads(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Counts how often each logit is read."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, count = InterpreterBuilder.create_masked_load, torch.zeros(logits.numel(), dtype=torch.int64)
    begin, end = logits.data_ptr(), logits.data_ptr() + logits.nbytes

    def counted(builder, pointers, mask, *rest):
        at = pointers.data[mask.data.astype(bool)]
        at = at[(at >= begin) & (at < end)]
        offsets = torch.from_numpy((at - begin).astype("int64")) // logits.element_size()
        count.index_add_(0, offsets, torch.ones_like(offsets))
        return load(builder, pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counted)
        yield count.view(logits.shape)


@pytest.mark.parametrize("mode", [*MODES, "drawn", "certain"])
def test_launches_in_any_order(mode: str, device: torch.device) -> None:
    """Verification, and rejection sampling of drawn and of certain draft tokens."""
    generator, verifies = torch.Generator().manual_seed(3), mode in MODES
    short, kinds = 0, ["normal", "few values", "nans", "minus inf"]
    for trial in range(trials(ci=4, nightly=300)):
        logits = make_logits(kinds[trial % 4], (2, 5, 37), torch.float32, generator)
        noise = noise_for(mode if verifies else "coupled", logits, trial)
        draft = logits + torch.randn(logits.shape, generator=generator)
        if verifies:
            tokens = chosen_before(logits, noise)
            tokens[torch.rand(tokens.shape, generator=generator) < 0.25] = 5
        else:
            tokens = drawn(draft, noise)
        tokens[0, 2 + trial // 4 % 3] = [-1, 37, 2**32, 5][trial % 4]
        counts = ragged_counts(2, 5, generator)
        counts[0][0], counts[1][0] = 5, 4
        workspace = Workspace(2, 5, device)
        options = {"workspace": workspace, "exact": True, "config": Config(16, 1, 3 - trial % 3)}
        given = logits, tokens, *counts
        with ordered(shuffled(generator)):
            if verifies:
                got, expected = verify(*given, noise=noise, **options), reference.verify(*given, noise)
            else:
                given = *given, None if mode == "certain" else draft, noise
                got, expected = rejection_sample(*given, **options), reference.rejection_sample(*given)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        assert not workspace.words.any()
        short += int((expected[1] < counts[1]).sum())
    assert short > 1


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_columns_behind_a_rejected_draft_token_are_not_read(mode: str, splits: int, device: torch.device) -> None:
    logits = make_logits("normal", (3, 6, 90), torch.float32, torch.Generator().manual_seed(4))
    noise = noise_for(mode, logits, 4)
    tokens = chosen_before(logits, noise)
    chosen = tokens.clone()
    # Rejected because another id of its span is better, because one of another span is, and because it is no id.
    row, column = torch.tensor([0, 1, 2]), torch.tensor([1, 3, 2])
    tokens[row, column + 1] = torch.stack([chosen[0, 2] ^ 1, (chosen[1, 4] + 45) % 90, torch.tensor(90)])
    query_lens = torch.full((3,), 6, dtype=torch.int32)
    with ordered(as_on_a_gpu), reads(logits) as count:
        got = verify(logits, tokens, query_lens, query_lens - 1, noise=noise, exact=True, config=Config(32, 1, splits))
    assert got[1].tolist() == column.tolist()
    assert torch.equal(got[0], reference.verify(logits, tokens, query_lens, query_lens - 1, noise)[0])
    needed = torch.arange(6) <= column[:, None]
    assert count[needed].eq(1).all()
    assert not count[~needed].any()

    if splits > 1:
        return
    # Where all blocks start at once, nothing is noted and everything is read.
    with ordered(as_on_a_gpu), reads(logits) as count, pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("pipespec_kernels.triton.verify"), "notes_pay", lambda *_: 0)
        again = verify(
            logits, tokens, query_lens, query_lens - 1, noise=noise, exact=True, config=Config(32, 1, splits)
        )
    assert torch.equal(again[0], got[0])
    assert count.eq(1).all()


def test_rejection_sampling_reads_the_columns_that_it_needs(device: torch.device) -> None:
    """Those up to the rejection, and the rejected one, or the one after all draft tokens, once more for its draw."""
    logits = torch.randn(2, 5, 90, generator=torch.Generator().manual_seed(5))
    draft = logits.clone()  # every draft token passes
    noise = noise_for("coupled", logits, 5)
    assert noise is not None
    tokens = drawn(draft, noise)
    tokens[0, 3] = 90
    n = torch.full((2,), 5, dtype=torch.int32)
    with ordered(as_on_a_gpu), reads(logits) as of_target, reads(draft) as of_draft:
        _, accepted = rejection_sample(logits, tokens, n, n - 1, draft, noise, exact=True, config=Config(32, 1, 3))
    assert accepted.tolist() == [2, 4]
    # Each draft token's logit is read once more.
    assert torch.minimum(of_target, torch.tensor(2)).amax(-1).tolist() == [[2, 2, 2, 0, 0], [2, 2, 2, 2, 1]]
    assert of_target.amin(-1).tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 1, 1]]
    # The draw after all draft tokens is from the target alone.
    assert of_draft.amin(-1).tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]]
    assert not of_draft[1, 4].any()


def test_blocks_are_short_where_most_of_them_start_late() -> None:
    for busy, tile in ((False, 4096), (True, 2048)):
        config = choose_config(64 * 5, 128256, 132, busy)
        assert config.block == tile
        assert cut(config, 128256).span <= (8 if tile == 4096 else 4) * tile
        # Where blocks are few, each has as much of a row as fills the device.
        assert cut(choose_config(16, 128256, 132, busy), 128256).splits * 16 <= 4 * 132
    assert notes_pay(10, torch.device("cpu")) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("pipespec_kernels.triton.launch"), "multiprocessors", lambda device: 132)
        assert [notes_pay(blocks, torch.device("meta")) for blocks in (528, 529)] == [0, 1]
