"""The byte that says how sure a model is of a token: against the softmax in double, and its transport beside the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipespec_kernels import _native, ops
from pipespec_kernels.confidence import BINS, CENTRE, PER_LOGIT, confidence
from pipespec_kernels.state import Action, StateBlock


def confidence_of(probability: np.ndarray) -> np.ndarray:
    """The bytes of probabilities. NaN, and what is no probability, gives 0."""
    p = np.asarray(probability, dtype=np.float64)
    is_known = (p >= 0) & (p <= 1)
    safe = np.where(is_known, np.clip(p, 1e-12, 1 - 1e-12), 0.5)
    byte = np.clip(np.rint(CENTRE + PER_LOGIT * np.log(safe / (1 - safe))), 1, 255)
    return np.where(is_known, byte, 0).astype(np.uint8)


def by_softmax(logits, selected, query_lens, num_draft_tokens, inverse=None) -> np.ndarray:
    out = np.zeros(selected.shape, dtype=np.uint8)
    for r in range(len(selected)):
        first = int(query_lens[r]) - 1 - int(num_draft_tokens[r])
        for j in range(selected.shape[1]):
            if query_lens[r] == 0 or selected[r, j] < 0:
                continue
            scale = 1.0 if inverse is None else float(inverse[r])
            p = (logits[r, first + j].double() * scale).softmax(-1)[int(selected[r, j])]
            out[r, j] = confidence_of(p.numpy())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 37, 5000])
def test_equals_the_softmax(dtype, vocabulary) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    for scale in (0.1, 3.0, 12.0):
        # A slice: the vocabulary of the target may be smaller than the head.
        logits = (torch.randn(4, 5, vocabulary + 3, generator=generator) * scale).to(dtype)[:, :, :vocabulary]
        lens = np.array([5, 3, 0, 1], dtype=np.int32)
        drafts = np.array([4, 1, 0, 0], dtype=np.int32)
        tokens = ops.argmax(logits).roll(1, 1)  # each is what the column before selects
        selected, _ = ops.verify(logits, tokens, lens, drafts)
        inverse = torch.tensor([1.0, 0.5, 2.0, 1.7])
        for given in (None, inverse):
            got = confidence(logits, selected, lens, drafts, given).numpy().astype(int)
            wanted = by_softmax(logits, selected, lens, drafts, given).astype(int)
            assert np.abs(got - wanted).max() <= 1  # of a rounding
            assert ((got == 0) == (wanted == 0)).all()
        assert (selected[0] >= 0).all(), "the walk has several steps"


def test_the_byte_and_its_limits() -> None:
    p = torch.tensor([0.0, 0.5, 1.0, 0.9, 0.99, 0.999], dtype=torch.float64)
    logits = torch.stack([p, 1 - p], -1).log().float()[:, None]
    one, none = np.ones(len(p), dtype=np.int32), np.zeros(len(p), dtype=np.int32)
    found = confidence(logits, torch.zeros(len(p), 1, dtype=torch.int32), one, none)
    assert found[:, 0].tolist() == [1, 128, 255, 159, 192, 225]


def test_logits_that_are_no_distribution_give_no_confidence() -> None:
    logits = torch.zeros(2, 1, 8)
    logits[0, 0, 3] = float("nan")
    logits[1, 0, :] = float("-inf")
    one, none = np.array([1, 1], dtype=np.int32), np.array([0, 0], dtype=np.int32)
    selected, _ = ops.verify(logits, torch.zeros(2, 1, dtype=torch.int32), one, none)
    assert confidence(logits, selected, one, none).tolist() == [[0], [0]]


def test_bad_arguments() -> None:
    logits = torch.zeros(1, 1, 4)
    one, none = np.array([1], dtype=np.int32), np.array([0], dtype=np.int32)
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        confidence(logits, torch.tensor([[4]], dtype=torch.int32), one, none)
    with pytest.raises(ValueError, match="num_draft_tokens < query_lens"):
        confidence(logits, torch.tensor([[1]], dtype=torch.int32), one, one)


def make_chain(capacity: int = 64):
    block = StateBlock.create(2, 1, capacity)
    block.reset([1], [capacity - 2], [7], [])
    ports = [block.port(stage, 16) for stage in range(2)]
    for stage, port in enumerate(ports):
        block.set_alive(stage, True)
        port.use_confidence(True)
    return block, ports


def commit(port, tokens, values=None) -> None:
    selected = np.full((1, port.columns), -1, dtype=np.int32)
    selected[0, : len(tokens)] = tokens
    known = np.zeros((1, port.columns), dtype=np.uint8)
    known[0, : len(tokens)] = values if values is not None else 0
    port.commit(selected.ctypes.data, port.columns, known.ctypes.data if values is not None else 0)


def draft(port, count: int, value: int, lookahead: int = 32) -> int:
    """Draft up to ``count`` tokens, each the number of those before it. Returns how many there were to make."""
    for made in range(count):
        if port.plan(lookahead, 0, 0) != Action.STEP:
            return made
        commit(port, [100], [value])
    return count


def test_a_stage_publishes_and_learns() -> None:
    block, (small, target) = make_chain()
    assert draft(small, 4, 200) == 4
    assert block.confidence(0, 0) == [200] * 4
    assert target.plan(0, 16, 0) == Action.STEP
    commit(target, [100, 100, 5])  # keeps two, rejects the third, and has not compared the fourth
    learned = block.calibration(1)
    at = 200 // (256 // BINS)
    assert (learned["seen"][at], learned["kept"][at]) == (3, 2)
    assert sum(learned["seen"]) == learned["outcomes"] == 3
    stated = learned["stated"][at]
    assert learned["chance"][at] == pytest.approx((2 + 4 * stated) / 7)
    assert learned["squared_error"] > 0
    # It survives a new generation, and the growth of the block.
    block.reset([1], [30], [7], [])
    block.ensure(2, 500)
    assert block.calibration(1)["seen"] == learned["seen"]
    block.set_calibration(1, [0] * BINS, [0] * BINS)
    assert sum(block.calibration(1)["seen"]) == 0
    with pytest.raises(ValueError, match="32 bins"):
        block.set_calibration(1, [1], [1])


def test_the_learned_chance_replaces_the_stated_one() -> None:
    block, _ = make_chain()
    seen, kept = [0] * BINS, [0] * BINS
    seen[30], kept[30] = 400, 100  # sure, and mostly wrong
    block.set_calibration(1, seen, kept)
    learned = block.calibration(1)
    assert learned["chance"][30] == pytest.approx(0.25, abs=0.01)
    assert learned["chance"][29] == pytest.approx(learned["stated"][29])
    # More kept than seen is damage.
    block.set_calibration(1, [1] * BINS, [2**31] * BINS)
    assert max(block.calibration(1)["chance"]) <= 1


def known_costs(block, *, plain: float, wide: float, column: float = 0.0) -> _native.GainPolicy:
    policy = _native.GainPolicy()
    for width in (1, 2, 3, 5, 9, 17):
        for _ in range(8):
            block.note_step(policy, width, plain if width == 1 else wide + column * width, in_turn=False)
    return policy


def test_a_draft_stops_where_its_tokens_are_unlikely() -> None:
    for value, most in ((255, 32), (60, 1)):
        block, (small, _) = make_chain()
        known_costs(block, plain=1e-3, wide=1e-3, column=1e-4)  # of its own column each draft token costs
        assert draft(small, 40, value) == most
    # Without a reason to stop, the lookahead is the bound.
    block, (small, _) = make_chain()
    assert draft(small, 40, 60, lookahead=9) == 9


def test_a_target_verifies_what_gains() -> None:
    """A verification that costs four plain steps is worth it for many sure draft tokens, and not for a few unsure ones."""
    chosen = {}
    for value in (255, 100):
        block, (small, target) = make_chain()
        policy = known_costs(block, plain=1e-3, wide=4e-3)
        draft(small, 12, value)
        chosen[value] = target.choose(policy, 16, 0.0, False)[0]
    assert chosen == {255: 12, 100: 0}


def test_a_target_leaves_out_draft_tokens_that_do_not_pay() -> None:
    block, (small, target) = make_chain()
    policy = known_costs(block, plain=1e-3, wide=1e-3, column=2e-4)
    for value in (230, 230, 230, 20, 230):  # behind the fourth all are lost
        small.plan(32, 0, 0)
        commit(small, [100], [value])
    assert target.choose(policy, 16, 0.0, False)[0] == 3


def test_a_target_waits_only_for_drafts_that_work() -> None:
    block, (small, target) = make_chain()
    policy = known_costs(block, plain=50e-3, wide=50e-3)
    draft(small, 1, 255)
    _most, awaited, seconds = target.choose(policy, 16, 1e-3, True)
    assert awaited > 0
    assert seconds == pytest.approx(awaited * 1e-3)
    assert target.choose(policy, 16, 1e-3, False)[1] == 0  # its deadline has passed
    assert target.choose(policy, 16, 0.0, True)[1] == 0  # the draft works in turn
    block.set_alive(0, False)
    assert target.choose(policy, 16, 1e-3, True)[1] == 0


def test_what_a_verification_costs_is_measured_again() -> None:
    """One slow verification must not end all speculation."""
    block, (small, target) = make_chain()
    policy = known_costs(block, plain=1e-3, wide=1.0)
    draft(small, 4, 200)
    assert max(target.choose(policy, 16, 0.0, False)[0] for _ in range(31)) == 0
    assert target.choose(policy, 16, 0.0, False)[0] == 16


def test_arguments_that_do_not_fit_are_named() -> None:
    """Their addresses go to the native code."""
    logits, one = torch.zeros(2, 1, 8), np.ones(2, dtype=np.int32)
    selected = torch.zeros(2, 1, dtype=torch.int32)
    for bad in (selected.long(), selected[:1], torch.zeros(2, 2, dtype=torch.int32)[:, :1]):
        with pytest.raises(ValueError, match="selected must be contiguous int32"):
            confidence(logits, bad, one, one * 0)
    with pytest.raises(ValueError, match="query_lens must be"):
        confidence(logits, selected, one[:1], one * 0)
    with pytest.raises(TypeError, match="inv_temperature must be float32"):
        confidence(logits, selected, one, one * 0, torch.ones(2).double())
