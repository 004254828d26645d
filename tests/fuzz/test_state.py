"""The state block: attached to damaged memory, and used while any word in it may be any number."""

import warnings

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipespec_kernels import _native
from pipespec_kernels.state import PrivateMemory, SharedMemory, StateBlock
from tests.fuzz.mutations import examples, in_child

STAGES, ROWS, CAPACITY = 3, 2, 64
HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("bytes", "<u8"),
        ("stages", "<u4"),
        ("rows", "<u4"),
        ("active_rows", "<u4"),
        ("capacity", "<u4"),
        ("alignment", "<u4"),
    ]
)
WORDS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 63, 64, 65, 2**16, 2**30, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def a_block(memory) -> StateBlock:
    block = StateBlock.create(STAGES, ROWS, CAPACITY, memory)
    block.reset([3, 5], [40, 60], [7, 8], [2])
    for stage in range(STAGES):
        block.set_alive(stage, True)
        if stage < STAGES - 1:
            block.set_lookahead(stage, 4)
    block.start(1)
    return block


SIZE = a_block(PrivateMemory()).memory.array.size
SPANS = 384
"""Where the rows' spans begin."""
TARGET_WORDS = sum(_native.Block.part_bytes(STAGES, ROWS, CAPACITY, _native.LINE)[:-1]) + _native.LINE
"""Where the target's published words begin."""


def bound_the_target(memory) -> None:
    """Give the target a length, and rows an end, below 2^16. Only the caller writes these words. A plan walks to the length, so that a random one costs
    seconds."""
    for row in range(ROWS):
        memory.array[SPANS + row * _native.LINE :][4:8].view(np.uint32)[0] &= 0xFFFF
        memory.array[TARGET_WORDS + row * _native.LINE :][:4].view(np.uint32)[0] &= 0xFFFF


def test_the_header_is_where_it_is_changed_here() -> None:
    header = a_block(PrivateMemory()).memory.array[: HEADER.itemsize].view(HEADER)[0]
    assert header["bytes"] == SIZE
    assert list(header)[2:] == [STAGES, ROWS, ROWS, CAPACITY, _native.LINE]


def test_the_words_of_the_target_are_where_they_are_bound_here() -> None:
    block = a_block(PrivateMemory())
    for row in range(ROWS):
        block.memory.array[TARGET_WORDS + row * _native.LINE :][:4].view(np.uint32)[0] = 77 + row
        assert block.length(STAGES - 1, row) == 77 + row
        assert list(block.memory.array[SPANS + row * _native.LINE :][:8].view(np.uint32)) == [[3, 40], [5, 60]][row]


@pytest.mark.parametrize("kind", [PrivateMemory, lambda: SharedMemory.create([1])], ids=["private", "shared"])
@examples(25, 2000)
@given(header=st.fixed_dictionaries({}, optional=dict.fromkeys(HEADER.names, WORDS)), consistent=st.booleans())
# 2^30 rows of 2^31 tokens: the size in bytes passes 2^64 and comes out small.
@example(header={"stages": 1, "rows": 2**30, "capacity": 2**31}, consistent=True)
@example(header={"rows": 2**30, "capacity": 2**30}, consistent=True)
@example(header={"alignment": 65536}, consistent=True)
@example(header={"stages": 32, "rows": 2**32 - 1, "capacity": 2**31, "alignment": 2**31}, consistent=True)
def test_attached_to_a_header_with_other_sizes(kind, header, consistent) -> None:
    """Refused, or the memory really has these sizes."""

    def attach() -> None:
        memory = a_block(kind()).memory
        found = memory.array[: HEADER.itemsize].view(HEADER)
        for name, value in header.items():
            found[name] = value
        if consistent:
            sizes = [int(found[name][0]) for name in ("stages", "rows", "capacity", "alignment")]
            found["bytes"] = _native.Block.bytes(*sizes)
        try:
            block = StateBlock(memory)
        except (ValueError, OSError, MemoryError):
            return
        assert int(found["bytes"][0]) >= block.stages * block.rows * block.capacity * 4
        assert sum(memory.sizes) >= int(found["bytes"][0]) if isinstance(memory, SharedMemory) else True

    in_child(attach)


def use(memory, width: int) -> None:
    """Everything that the owner of the block and its stages do."""
    try:
        block = StateBlock(memory)
    except (ValueError, OSError, MemoryError):
        return
    if (block.stages, block.rows, block.capacity) != (STAGES, ROWS, CAPACITY):
        return
    for stage in range(STAGES):
        block.is_alive(stage)
        for row in range(ROWS):
            length = block.length(stage, row)
            block.kv(stage, row), block.counters(stage, row)
            for begin, end in ((0, length), (max(0, length - CAPACITY), length), (length, 0)):
                try:
                    assert len(block.tokens(stage, row, begin, end)) == end - begin
                except IndexError:
                    pass
    for stage in range(STAGES):
        port = block.port(stage, width)
        for _ in range(2):
            try:
                action = port.plan(4, min(4, width - 1), 0)
            except (RuntimeError, ValueError):
                break
            assert 0 <= port.columns <= width
            assert (port.query_lens <= width).all()
            if action == _native.Action.STEP:
                selected = np.full((ROWS, width), 9, dtype=np.int32)
                port.commit(selected.ctypes.data, width)
    block.end_row(0)
    block.start(0)


@examples(40, 6000)
@given(
    changes=st.lists(st.tuples(st.integers(0, SIZE // 4 - 1), WORDS), min_size=1, max_size=12),
    width=st.sampled_from([1, 2, 8]),
)
def test_used_with_any_words(changes, width) -> None:
    def run() -> None:
        memory = a_block(PrivateMemory()).memory
        words = memory.array.view(np.uint32)
        for at, value in changes:
            words[at] = value
        bound_the_target(memory)
        use(memory, width)

    in_child(run)


@examples(10, 2000)
@given(seed=st.integers(0, 2**32 - 1), begin=st.sampled_from([0, HEADER.itemsize, SPANS]))
def test_used_with_noise_everywhere(seed, begin) -> None:
    def run() -> None:
        memory = a_block(PrivateMemory()).memory
        memory.array[begin:] = np.random.default_rng(seed).integers(0, 256, SIZE - begin, dtype=np.uint8)
        bound_the_target(memory)
        use(memory, 8)

    in_child(run)


def test_a_block_of_another_version_is_refused() -> None:
    memory = a_block(PrivateMemory()).memory
    memory.array[0] ^= 1
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match="no pipespec state block, or one of another version"),
    ):
        StateBlock(memory)
