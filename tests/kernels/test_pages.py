"""Weights that move into huge pages, at their own addresses."""

import gc
import threading
from pathlib import Path

import pytest
import torch

from pipespec_kernels._native import use_huge_pages
from pipespec_kernels.decoder import ANY

BYTES = (9 << 20) + 12345
HUGE = 2 << 20


def modes() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text() if path.is_file() else "[never]"


needs_huge_pages = pytest.mark.skipif("[never]" in modes(), reason="the system has no huge pages")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(torch.randint(0, 256, (BYTES,), dtype=torch.uint8).numpy().tobytes())
    return path


def mapped(path: Path, *, shared: bool = False) -> torch.Tensor:
    return torch.from_file(str(path), shared=shared, size=BYTES, dtype=torch.uint8)


def values(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def move(*tensors: torch.Tensor, room: int = ANY) -> int:
    return use_huge_pages([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], room, 2)


def lies_in(tensor: torch.Tensor, path: Path) -> int:
    """Bytes of a tensor that lie in a file."""
    found, begin = 0, tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            first, last = (int(at, 16) for at in line.split()[0].split("-"))
            found += max(0, min(last, begin + tensor.nbytes) - max(first, begin))
    return found


@needs_huge_pages
def test_everything_that_refers_to_the_weights_stays(file: Path) -> None:
    weights, expected, original = mapped(file), values(file), values(file)
    address, view, tied = weights.data_ptr(), weights[3 << 20 : 7 << 20], weights.detach()
    array, written = weights.numpy(), (5 << 20) + 7
    weights[written] = expected[written] = 255 - original[written]  # a page of the process, before the move
    moved = move(weights)
    assert moved >= BYTES - 2 * HUGE
    assert moved % HUGE == 0
    assert lies_in(weights, file) == BYTES - moved
    assert weights.data_ptr() == address
    assert torch.equal(weights, expected)
    assert torch.equal(view, expected[3 << 20 : 7 << 20])
    assert torch.equal(tied, expected)
    view[2 << 20] = 255 - view[2 << 20]
    assert weights[5 << 20] == tied[5 << 20] == array[5 << 20] == 255 - original[5 << 20]
    # The mapping is private: the file has what it had.
    assert torch.equal(values(file), original)


@needs_huge_pages
def test_only_what_is_asked_for_moves(file: Path) -> None:
    weights = mapped(file)
    parts = weights[: 5 << 20].chunk(2)
    moved = move(*parts)
    assert 0 < moved <= 5 << 20
    assert lies_in(weights, file) == BYTES - moved
    # Once it lies in huge pages, it stays there.
    assert move(*parts) <= moved
    assert lies_in(weights, file) == BYTES - moved
    assert torch.equal(weights, values(file))


def test_a_shared_mapping_stays(file: Path) -> None:
    weights, expected = mapped(file, shared=True), values(file)
    assert move(weights) == 0
    assert lies_in(weights, file) == BYTES
    weights[4 << 20] = expected[4 << 20] = 255 - expected[4 << 20]
    assert torch.equal(values(file), expected)


def test_weights_without_room_stay(file: Path) -> None:
    weights = mapped(file)
    assert move(weights, room=HUGE) == 0
    assert lies_in(weights, file) == BYTES
    assert torch.equal(weights, values(file))


def test_anonymous_memory_keeps_its_values() -> None:
    weights = torch.randint(0, 256, (BYTES,), dtype=torch.uint8)
    expected = weights.clone()
    assert 0 <= move(weights) <= BYTES
    assert torch.equal(weights, expected)


def test_small_tensors_stay() -> None:
    assert move(torch.zeros(1000), torch.zeros(0)) == 0


def test_readers_meanwhile_see_the_values(file: Path) -> None:
    weights, expected = mapped(file), values(file)
    done, differed = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            differed.append(not torch.equal(weights, expected))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        move(weights)
    finally:
        done.set()
        reader.join()
    assert not any(differed)


def test_moved_memory_is_given_back(file: Path) -> None:
    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    move(mapped(file))
    gc.collect()
    before = size()
    for _ in range(40):
        move(mapped(file))
    gc.collect()
    assert size() - before < 20 * BYTES
    assert str(file) not in Path("/proc/self/maps").read_text()
