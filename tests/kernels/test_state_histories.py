"""Random histories of plan and commit: the native port against the model in lists, and a GPU's block against the host's."""

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pipespec_kernels import _native
from pipespec_kernels.device_state import DevicePort
from pipespec_kernels.state import Action, SharedMemory, StateBlock

from . import protocol_model as model

ACTIONS = {
    model.IDLE: Action.IDLE, model.STEP: Action.STEP, model.CATCH_UP: Action.CATCH_UP, model.WAIT: Action.WAIT, model.FINISHED: Action.FINISHED,
}  # fmt: skip


@dataclass
class Event:
    """An event: a plan, perhaps with its commit, or an action of the caller."""

    stage: int
    policy: tuple[int, int, int]
    commits: bool
    selected: np.ndarray
    ends_row: int | None
    alive: tuple[int, bool] | None


class History:
    """A block, its model, and a sequence of events, all from one seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.stages, self.rows, self.width = rng.randint(1, 4), rng.randint(1, 3), rng.randint(2, 6)
        self.spare_rows = rng.randint(0, 1)
        self.block = StateBlock.create(self.stages, self.rows + self.spare_rows, 64)
        starts = [rng.randint(1, 9) for _ in range(self.rows)]
        limits = [start + rng.choice([0, 3, 20, 60]) for start in starts]
        last = [rng.randint(0, 3) for _ in range(self.rows)]
        eos = rng.choice([[], [9], [0]])
        self.block.reset(starts, limits, last, eos)
        self.model = [model.Row(self.stages, *numbers, set(eos)) for numbers in zip(starts, limits, last, strict=True)]
        for row in self.model:
            # The stages' usual choices, so that they agree for a while.
            row.liked = [rng.choice([0, 1, 2, 3, 3, 3, 9]) for _ in range(200)]  # type: ignore[attr-defined]
        self.alive = [False] * self.stages
        for stage in range(self.stages):
            self.set_alive(stage, True)

    def set_alive(self, stage: int, alive: bool) -> None:
        self.alive[stage] = alive
        self.block.set_alive(stage, alive)

    def events(self, steps: int) -> Iterator[Event]:
        rng = self.rng
        for _ in range(steps):
            stage = rng.randrange(self.stages)
            policy = rng.choice([0, 1, 3, 8, 2**32 - 1]), rng.choice([0, 1, 4, 99]), rng.choice([0, 0, 0, 2])
            selected = np.full((self.rows + self.spare_rows, self.width), -1, np.int32)
            for r, row in enumerate(self.model):
                # The choices are random: which token precedes a column does not matter here.
                begin = len(row.texts[stage].tokens)
                for j in range(self.width):
                    likes = rng.random() < (0.97 if stage == self.stages - 1 else 0.85)
                    selected[r, j] = row.liked[begin + j] if likes else rng.choice([0, 1, 2, 9])  # type: ignore[attr-defined]
            yield Event(
                stage,
                policy,
                rng.random() < 0.9,
                selected,
                rng.randrange(self.rows) if rng.random() < 0.01 else None,
                (rng.randrange(self.stages), rng.random() < 0.6) if rng.random() < 0.05 else None,
            )

    def before(self, event: Event) -> None:
        if event.ends_row is not None:
            self.block.end_row(event.ends_row)
            row = self.model[event.ends_row]
            row.limit = len(row.texts[-1].tokens)
        if event.alive is not None:
            self.set_alive(*event.alive)

    def plan(self, event: Event) -> list[model.Fed]:
        alive = event.stage == 0 or self.alive[event.stage - 1]
        return [row.plan(event.stage, *event.policy, self.width, alive) for row in self.model]

    def check_texts(self, stage: int) -> None:
        for r, row in enumerate(self.model):
            text = row.texts[stage]
            assert self.block.length(stage, r) == len(text.tokens)
            assert self.block.tokens(stage, r, row.start - 1, len(text.tokens)) == text.tokens[row.start - 1 :]
            assert self.block._native.epoch(stage, r) == text.counts["rollbacks"]
            counters = self.block.counters(stage, r)
            assert {name: counters[name] for name in text.counts} == text.counts


def check_query_lens(fed: list[model.Fed], arrays: Any, width: int) -> None:
    for r, part in enumerate(fed):
        padded = part.tokens + [0] * (width - len(part.tokens))
        assert arrays.tokens[r].tolist() == padded
        selects = len(part.tokens) if part.action == model.STEP else 0
        got = [int(a[r]) for a in (arrays.kv, arrays.query_lens, arrays.num_draft_tokens, arrays.n_select)]
        assert got == [part.kv, len(part.tokens), part.num_draft_tokens, selects]


def together(fed: list[model.Fed]) -> Action:
    """The combined action of all rows."""
    if any(part.action == model.WAIT for part in fed):
        return Action.WAIT
    if any(part.tokens for part in fed):
        return Action.STEP
    return Action.FINISHED if all(part.action == model.FINISHED for part in fed) else Action.IDLE


def play(history: History, steps: int) -> dict[str, int]:
    """Run port and model side by side, and count the kinds of events."""
    ports = [history.block.port(stage, history.width) for stage in range(history.stages)]
    seen = dict.fromkeys([*(action.name for action in Action.__members__.values()), "rollback", "eos"], 0)
    for event in history.events(steps):
        history.before(event)
        port = ports[event.stage]
        fed = history.plan(event)
        assert port.plan(*event.policy) == together(fed)
        check_query_lens(fed, port, history.width)
        for part in fed:
            seen[ACTIONS[part.action].name] += 1
        if event.commits:
            port.commit(event.selected.ctypes.data, history.width)
            for r, (row, part) in enumerate(zip(history.model, fed, strict=True)):
                row.commit(event.stage, part, event.selected[r].tolist())
        history.check_texts(event.stage)
    for row in history.model:
        seen["rollback"] += sum(text.counts["rollbacks"] for text in row.texts)
        seen["eos"] += row.texts[-1].tokens[-1] in row.eos
    return seen


def play_all() -> dict[str, int]:
    seen: dict[str, int] = {}
    for seed in range(150):
        for name, count in play(History(seed), 120).items():
            seen[name] = seen.get(name, 0) + count
    return seen


def test_the_port_is_the_model() -> None:
    seen = play_all()
    assert min(seen.values()) > 20, seen  # everything that can happen has happened


# --- the device ------------------------------------------------------------------------------------------------------


def test_a_block_on_the_host_is_refused() -> None:
    block = torch.from_numpy(StateBlock.create(2, 1, 16).memory.array)
    with pytest.raises(ValueError, match=r"must be on a GPU or in pinned memory.*StateBlock\.port"):
        DevicePort(block, 0, 4)
    with pytest.raises(TypeError, match="contiguous uint8"):
        DevicePort(block.view(torch.int32), 0, 4)
    with pytest.raises(TypeError, match="block must be a tensor"):
        DevicePort(b"block", 0, 4)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_kernels_without_a_device_say_so() -> None:
    _cuda = pytest.importorskip("pipespec_kernels._cuda")
    with pytest.raises(RuntimeError, match=r"plan: .*CUDA error \d+"):
        _cuda.plan(0, _cuda.Scope.DEVICE, 0, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(RuntimeError, match=r"commit: .*CUDA error \d+"):
        _cuda.commit(0, _cuda.Scope.SYSTEM, 0, 1, 4, 0, 0, 0, 0, 0, 0, 0, 4, 0)


def without_controls(memory: np.ndarray, block: StateBlock) -> np.ndarray:
    """The block's bytes without the words that only the host writes: those of the caller after the header, parked words and bells."""
    callers, parked, *stages = parts_of(block)
    rest = memory.copy()
    rest[HEADER : callers + parked] = 0
    for stage, size in enumerate(stages):
        begin = callers + parked + stage * size
        rest[begin : begin + _native.LINE] = 0
    return rest


HEADER: int = _native.Block.bytes(0, 0, 1)


def parts_of(block: StateBlock) -> list[int]:
    sizes: list[int] = _native.Block.part_bytes(block.stages, block.rows, block.capacity, block.memory.alignment)
    return sizes


def device_history(seed: int, pinned: bool) -> None:
    """The same history on host and device, each in its own block. On the device one stream orders the steps."""
    history = History(seed)
    memory = torch.from_numpy(history.block.memory.array)
    there = memory.clone().pin_memory() if pinned else memory.cuda()
    ports = [history.block.port(stage, history.width) for stage in range(history.stages)]
    device = [DevicePort(there, stage, history.width) for stage in range(history.stages)]
    stream = torch.cuda.Stream()
    callers = slice(HEADER, parts_of(history.block)[0])
    with torch.cuda.stream(stream):
        for event in history.events(80):
            history.before(event)
            # The caller's words, which on the host are written in place.
            torch.cuda.synchronize()
            there[callers].copy_(memory[callers])
            port, other = ports[event.stage], device[event.stage]
            fed = history.plan(event)
            port.plan(*event.policy)
            other.set_policy(*event.policy)
            other.plan(stream.cuda_stream)
            stream.synchronize()
            check_query_lens(fed, other, history.width)
            assert other.action.tolist() == [part.action for part in fed] + [model.IDLE] * history.spare_rows
            if event.commits:
                port.commit(event.selected.ctypes.data, history.width)
                other.commit(torch.from_numpy(event.selected).to(other.device))
                for r, (row, part) in enumerate(zip(history.model, fed, strict=True)):
                    row.commit(event.stage, part, event.selected[r].tolist())
    torch.cuda.synchronize()
    same = without_controls(there.cpu().numpy(), history.block) == without_controls(memory.numpy(), history.block)
    assert same.all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
def test_a_block_on_the_device_is_the_hosts_byte_for_byte(pinned: bool) -> None:
    pytest.importorskip("pipespec_kernels._cuda")
    for seed in range(30):
        device_history(seed, pinned)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bad_arguments_on_the_device() -> None:
    pytest.importorskip("pipespec_kernels._cuda")
    block = torch.from_numpy(StateBlock.create(2, 1, 16).memory.array).cuda()
    for message, arguments in (
        ("2 stages, none of number 2", (block, 2, 4)),
        ("width must be at least 1", (block, 0, 0)),
        ("fewer than its own header says", (block[:-1], 0, 4)),
        ("no pipespec state block", (torch.zeros_like(block), 0, 4)),
    ):
        with pytest.raises(ValueError, match=message):
            DevicePort(*arguments)
    port = DevicePort(block, 0, 4)
    with pytest.raises(TypeError, match="int32"):
        port.commit(torch.zeros(1, 4, device="cuda"))
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        port.commit(torch.zeros(1, 3, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match="32 bits"):
        port.set_policy(-1, 0)


# ---- hostile values


def test_stages_and_rows_that_do_not_exist():
    block = StateBlock.create(2, 3, 16)
    block.reset([1] * 3, [9] * 3, [5] * 3, [])
    before = block.memory.array.copy()
    for stage, row in [(2, 0), (99, 0), (0, 3), (1, 10**6), (2**32 - 1, 2**32 - 1)]:
        for method in (block.length, block.kv, block.counters, block._native.epoch):
            with pytest.raises(IndexError, match="of a block of"):
                method(stage, row)
        with pytest.raises(IndexError, match="of a block of"):
            block.tokens(stage, row, 0, 1)
    for stage in (2, 99, 2**32 - 1):
        for call in (block.is_alive, lambda s: block.set_alive(s, True)):
            with pytest.raises(IndexError, match=f"stage {stage} of a block of 2"):
                call(stage)
    for row in (3, 2**31):
        with pytest.raises(IndexError, match=f"row {row} of a block of 3"):
            block.end_row(row)
    assert (block.memory.array == before).all()


def test_a_port_keeps_its_block():
    block = StateBlock.create(1, 1, 1 << 20)  # a mapping of its own, which a release unmaps
    block.reset([1], [9], [5], [])
    port = block.port(0, 4)
    del block
    gc.collect()
    assert port.plan(0, 0, 0) == Action.STEP
    with pytest.raises(ValueError, match=r"commit.* needs their choices"):
        port.commit(0, 0)
    selected = np.array([[7]], dtype=np.int32)
    assert port.commit(selected.ctypes.data, 1) == 1


def test_rows_of_choices_that_are_wider_than_any_plan():
    """No row has more choices than a plan feeds tokens. With another distance between rows they would be read from elsewhere."""
    block = StateBlock.create(1, 3, 16)
    block.reset([1] * 3, [9] * 3, [5] * 3, [])
    port = block.port(0, 4)
    assert port.plan(0, 0, 0) == Action.STEP
    selected = np.array([[7, 0], [8, 0], [9, 0]], dtype=np.int32)
    for stride in (0, -1, 5, 10**9, 2**31, -(2**31), 2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=f"1 to 4 tokens, not {stride}"):
            port.commit(selected.ctypes.data, stride)
    assert port.commit(selected.ctypes.data, 2) == 3
    assert [block.tokens(0, row, 1, 2) for row in range(3)] == [[7], [8], [9]]


def test_sizes_are_integers_of_any_kind():
    block = StateBlock.create(2, np.int32(1), np.int64(7))
    assert (block.rows, block.capacity) == (1, 8)
    block.ensure(np.int16(2), np.uint8(9))
    assert (block.rows, block.capacity) == (2, 16)
    with pytest.raises(TypeError, match="float"):
        StateBlock.create(2, 1, 7.0)


def test_a_port_from_before_a_growth():
    block = StateBlock.create(1, 1, 16, SharedMemory.create([1]))
    port = block.port(0, 4)
    block.ensure(8, 1 << 16)
    block.reset([1] * 8, [9] * 8, [5] * 8, [])
    with pytest.raises(RuntimeError, match=r"has grown, .*make a new port"):
        port.plan(0, 0, 0)
