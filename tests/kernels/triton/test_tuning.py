"""Tiles of products: results have the bits of the first one with any, and those that are measured stay in a file."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from pipespec_kernels import ops
from pipespec_kernels.formats import quantize
from pipespec_kernels.tiles import in_tiles
from pipespec_kernels.triton import linear, tuning
from pipespec_kernels.triton.tuning import Tile, Tuner

from .test_linear import HOW, Given

FACTS = {"gpu": "one", "triton": "3.6.0", "sources": "ab"}
CHOICES = tuple(Tile(rows, 64, 128, stages) for rows in (16, 32) for stages in (2, 3))
pytestmark = pytest.mark.usefixtures("sums_in_order")


def each(monkeypatch: pytest.MonkeyPatch, weights: int, in_blocks: bool) -> list[Tile]:
    """The tiles of a product; the calls after this one have the first of what is left of the list."""
    left = list(linear.tiles_for(weights, 2, in_blocks))
    assert len(left) == 6
    monkeypatch.setattr(tuning, "chosen", lambda device, key, choices, launch: left.pop(0))
    return left


@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how) or "plain")
def test_bits_do_not_depend_on_the_tile(how: dict, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given((40, 600), torch.bfloat16, device)
    left, found = each(monkeypatch, 40, False), []
    while left:
        found.append(given(ops.linear_small, slice(9), how))
    assert all(torch.equal(one, found[0]) for one in found)


def test_bits_of_quantised_queries_do_not_depend_on_the_tile(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given((3 * 32, 512), torch.bfloat16, device)
    matrix = in_tiles(quantize(given.weight.float().cpu(), "q4_k"), device)
    tables, lengths = [given.normal(12, 32) for _ in range(2)], torch.tensor([3, 0], device=device)
    left, found = each(monkeypatch, 96, True), []
    while left:
        stored = [torch.zeros(2, 1, 9, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
        found.append((ops.qkv_append(given.x[:6].view(2, 3, 512), matrix, None, *tables, *stored, lengths), *stored))
    for one in found:
        assert all(map(torch.equal, one, found[0]))


class Measure:
    """Gives the times of its argument, in turn, and counts."""

    def __init__(self, *times: list[float]) -> None:
        self.times, self.calls = list(times), 0

    def __call__(self, launch: object, choices: object) -> list[float]:
        self.calls += 1
        return self.times.pop(0)


def nothing(tile: Tile) -> None:
    """A launch."""


def test_a_product_is_measured_once(tmp_path: Path) -> None:
    measure = Measure([9.0, 8.0, 7.0, float("inf")], [9.0, 8.95, 9.0, 9.0])
    first = Tuner(tmp_path / "new", FACTS, measure)
    assert first.known("O", CHOICES) is None
    assert first.tile("O", CHOICES, nothing) == first.tile("O", CHOICES, nothing) == CHOICES[2]
    assert first.tile("down", CHOICES, nothing) == CHOICES[0], "what is within the noise stays"
    second = Tuner(tmp_path / "new", FACTS, measure)
    assert (second.known("O", CHOICES), second.known("down", CHOICES)) == (CHOICES[2], CHOICES[0])
    assert measure.calls == 2
    # A tile that products no longer have is measured again.
    assert second.known("O", CHOICES[:2]) == CHOICES[2]
    assert Tuner(tmp_path / "new", FACTS, measure).known("O", CHOICES[:2]) is None
    assert list((tmp_path / "new").iterdir()) == [first.file], "no temporary file is left"


@pytest.mark.parametrize("changed", FACTS)
def test_other_gpus_versions_and_sources_have_files_of_their_own(changed: str, tmp_path: Path) -> None:
    Tuner(tmp_path, FACTS, Measure([2.0, 1.0])).tile("O", CHOICES[:2], nothing)
    assert Tuner(tmp_path, FACTS | {changed: "x"}, Measure()).known("O", CHOICES[:2]) is None


def test_processes_add_to_one_file(tmp_path: Path) -> None:
    tuners = [Tuner(tmp_path, FACTS, Measure([2.0, 1.0])) for _ in range(2)]
    for tuner, key in zip(tuners, ("O", "down"), strict=True):
        tuner.tile(key, CHOICES[:2], nothing)
    last = Tuner(tmp_path, FACTS, Measure())
    assert last.known("O", CHOICES[:2]) == last.known("down", CHOICES[:2]) == CHOICES[1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tiles": 1, "facts": 2}', '{"tiles": {}, "facts": {}}'])
def test_a_damaged_file_is_left_out_with_one_line(content: str, tmp_path: Path) -> None:
    file = Tuner(tmp_path, FACTS, Measure()).file
    file.write_text(content)
    with pytest.warns(UserWarning, match="holds no tiles") as seen:
        tuner = Tuner(tmp_path, FACTS, Measure([2.0, 1.0]))
    assert len(seen) == 1
    with warnings.catch_warnings(action="error"):
        tuner.tile("O", CHOICES[:2], nothing)
    assert json.loads(file.read_text())["tiles"] == {"O": CHOICES[1]._asdict()}


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **options: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(tuning.tempfile, "NamedTemporaryFile", refused)
    tuner = Tuner(tmp_path, FACTS, Measure([2.0, 1.0]))
    with pytest.warns(UserWarning, match="PIPESPEC_TUNE=0"):
        assert tuner.tile("O", CHOICES[:2], nothing) == CHOICES[1]
    assert tuner.tile("O", CHOICES[:2], nothing) == CHOICES[1]


def test_nothing_is_measured_on_a_cpu() -> None:
    assert tuning.chosen(torch.device("cpu"), "O", CHOICES, nothing) == CHOICES[0]


@pytest.mark.gpu
def test_a_gpu_measures_and_remembers(device: torch.device, tmp_path: Path) -> None:
    given = Given((4096, 1024), torch.bfloat16, device)
    wanted = ops.linear_small(given.x, given.weight)
    tuner, tiles = Tuner(tmp_path, FACTS, tuning.measured), linear.tiles_for(4096, 2)
    launches: list[Tile] = []
    assert tuner.tile("O", tiles, launches.append) in tiles
    assert set(launches) == set(tiles)
    assert torch.equal(ops.linear_small(given.x, given.weight), wanted)
