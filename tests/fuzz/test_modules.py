"""Draft modules: their own files and the published ones, damaged."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from pipespec.spd.draft_module import CONFIG_FILE, WEIGHTS_FILE, DraftModule, DraftModuleConfig
from pipespec.spd.partition import Partition
from pipespec.spd.published import import_module
from tests.conftest import random_llama
from tests.fuzz.mutations import check_names, in_child
from tests.pipespec.tiny_models import model_of
from tests.spd.test_published import IDS, contents

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


MEMORY = 2 << 30
"""What a child may take beyond what this process has, so that a size from a file cannot fill the machine. In bytes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    target = random_llama(4, layers=4, hidden=16)
    config = DraftModuleConfig.for_target(target, Partition.uniform(4, 2).ranges, vocabulary=[3, 5, 7])
    DraftModule.of_target(target, config).save(folder)
    return folder


def check_no_memory(error: Exception) -> None:
    """Check that the refusal came before memory for the sizes of a file."""
    assert "MemoryError" not in str(error)
    assert "allocate" not in str(error)


def load_with(saved: Path, name: str, content: bytes) -> None:
    """Load the module after a change of one file, in a child: ValueError names the file, or there is a module that computes."""
    file = saved / name
    before = file.read_bytes()

    def load() -> None:
        try:
            module = DraftModule.load(saved)
        except ValueError as error:
            check_names(error, saved)
            check_no_memory(error)
            return
        config = module.config
        anchors = torch.zeros((1, len(config.anchors), config.hidden))
        assert module.logits(module.fuse(anchors, 0)).shape == (1, config.logits)

    try:
        file.write_bytes(content)
        in_child(load, memory=MEMORY)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 10**5},
        {"intermediate_size": 10**9},
        {"intermediate_size": 10**6, "hidden_size": 10**6},
        {"head_dim": 10**8},
        {"num_key_value_heads": 10**8},
        {"pad_token_id": 10**9},
        {"max_position_embeddings": 2**62},
    ],
)
def test_sizes_that_the_weights_do_not_have(saved: Path, change) -> None:
    """No memory is allocated for them."""
    record = json.loads((saved / CONFIG_FILE).read_bytes())
    load_with(saved, CONFIG_FILE, json.dumps(record | {"target": record["target"] | change}).encode())


def test_more_layers_than_there_are_weights(saved: Path) -> None:
    """Refused at once, however many a config says."""
    record = json.loads((saved / CONFIG_FILE).read_bytes())
    layers = 10**6
    record |= {
        "layers": layers,
        "stages": [[0, 2], [2, layers]],
        "target": record["target"] | {"num_hidden_layers": layers},
    }
    load_with(saved, CONFIG_FILE, json.dumps(record).encode())


@pytest.mark.parametrize("length", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_headers_of_weights_with_another_length(saved: Path, length) -> None:
    before = (saved / WEIGHTS_FILE).read_bytes()
    load_with(saved, WEIGHTS_FILE, struct.pack("<Q", length) + before[8:])


@pytest.mark.parametrize("size", [0, 7, 100, -100])
def test_weights_that_are_cut(saved: Path, size) -> None:
    load_with(saved, WEIGHTS_FILE, (saved / WEIGHTS_FILE).read_bytes()[:size])


# ---- published modules


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return contents("llama")


def import_content(folder: Path, content: bytes, vocabulary: bytes | None = None) -> None:
    file, ids = folder / "Tiny.pt", folder / "ids.json"
    file.write_bytes(content)
    if vocabulary is not None:
        ids.write_bytes(vocabulary)
    target = model_of("llama")

    def load() -> None:
        try:
            module = import_module(file, target, vocabulary=None if vocabulary is None else ids)
        except ValueError as error:
            check_names(error, file if vocabulary is None else folder)
            return
        anchors = torch.zeros((1, len(module.config.anchors), module.config.hidden))
        assert module.logits(module.fuse(anchors, 0)).shape == (1, module.config.logits)

    in_child(load, memory=MEMORY)


def as_file(record: Any) -> bytes:
    file = io.BytesIO()
    torch.save(record, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("within", "change"),
    [
        ("config", {"aggr_feature_bound": 5}),
        ("config", {"aggr_feature_bound": [0, 1, 2, "x"]}),
        ("config", {"aggr_feature_bound": []}),
        ("config", {"num_stages": None}),
        ("config", {"num_stages": 0}),
        ("config", {"num_stages": float("inf")}),
        ("config", {"draft_token_ids": 7}),
        ("config", {"draft_token_ids": [None]}),
        ("config", {"stage_layers": 4}),
        ("config", {"stage_layers": "1;x"}),
        ("config", {"num_spec_layers": [2]}),
        (None, {"config": 5}),
        (None, {"state_dict": 5}),
        (None, {"state_dict": {"lm_head.weight": 5}}),
        (None, {"state_dict": {5: torch.ones(1)}}),
    ],
    ids=str,
)
def test_published_entries_that_are_refused(published, tmp_path: Path, within, change) -> None:
    file = tmp_path / "Tiny.pt"
    file.write_bytes(as_file(published | (change if within is None else {within: published[within] | change})))
    with pytest.raises(ValueError, match=str(file)):
        import_module(file, model_of("llama"))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"token_ids": [NaN]}',
        b'{"token_ids": [Infinity]}',
        b'{"token_ids": [' + b"9" * 5000 + b"]}",
        json.dumps({"tokenizer_name": "t", "token_ids": IDS}).encode()[:-5],
    ],
    ids=range(5),
)
def test_published_vocabularies(published, tmp_path: Path, content) -> None:
    import_content(tmp_path, as_file(published), content)
