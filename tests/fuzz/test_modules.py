"""Draft modules: their own files and the published ones, damaged."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pipespec.spd.draft_module import CONFIG_FILE, WEIGHTS_FILE, DraftModule, DraftModuleConfig
from pipespec.spd.partition import Partition
from pipespec.spd.published import import_module
from tests.conftest import random_llama
from tests.fuzz.mutations import VALUES, check_names, examples, in_child, mutated, mutated_bytes, mutated_json
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


@examples(8, 1000)
@given(data=st.data())
def test_configs_of_modules(saved: Path, data) -> None:
    load_with(saved, CONFIG_FILE, data.draw(mutated_json(json.loads((saved / CONFIG_FILE).read_bytes()))))


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


@examples(8, 1000)
@given(data=st.data())
def test_weights_of_modules(saved: Path, data) -> None:
    before = (saved / WEIGHTS_FILE).read_bytes()
    (size,) = struct.unpack("<Q", before[:8])
    header, rest = before[8 : 8 + size], before[8 + size :]
    if data.draw(st.booleans()):
        text = json.dumps(data.draw(mutated(json.loads(header)))).encode("utf-8", "surrogatepass")
    else:
        text = data.draw(mutated_bytes(header))
    length = data.draw(
        st.one_of(st.just(len(text)), st.sampled_from([0, 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2000))
    )
    rest = data.draw(st.one_of(st.just(rest), st.just(rest[:100]), st.just(rest + b"\0" * 8)))
    load_with(saved, WEIGHTS_FILE, struct.pack("<Q", length) + text + rest)


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


@examples(8, 1000)
@given(data=st.data())
def test_bytes_of_published_modules(published, tmp_path: Path, data) -> None:
    import_content(tmp_path, data.draw(mutated_bytes(as_file(published))))


@examples(8, 1000)
@given(data=st.data())
def test_entries_of_published_modules(published, tmp_path: Path, data) -> None:
    record = published | {"config": data.draw(st.one_of(mutated(published["config"]), st.just(published["config"])))}
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(published["state_dict"])))
        value = data.draw(
            st.one_of(
                VALUES, st.sampled_from([torch.zeros(()), torch.zeros(0), torch.zeros((2, 2, 2)), torch.ones(3) > 0])
            )
        )
        record["state_dict"] = published["state_dict"] | {name: value}
    if data.draw(st.integers(0, 9)) == 0:
        record = data.draw(
            st.one_of(
                VALUES, VALUES.map(lambda v: record | {"state_dict": v}), VALUES.map(lambda v: record | {"config": v})
            )
        )
    import_content(tmp_path, as_file(record))


@pytest.mark.parametrize(
    "change",
    [
        {"aggr_feature_bound": 5},
        {"aggr_feature_bound": [0, 1, 2, "x"]},
        {"aggr_feature_bound": []},
        {"num_stages": None},
        {"num_stages": 0},
        {"num_stages": float("inf")},
        {"draft_token_ids": 7},
        {"draft_token_ids": [None]},
        {"stage_layers": 4},
        {"stage_layers": "1;x"},
        {"num_spec_layers": [2]},
    ],
    ids=str,
)
def test_published_entries_that_are_refused(published, tmp_path: Path, change) -> None:
    file = tmp_path / "Tiny.pt"
    file.write_bytes(as_file(published | {"config": published["config"] | change}))
    with pytest.raises(ValueError, match=str(file)):
        import_module(file, model_of("llama"))


@pytest.mark.parametrize(
    "change",
    [{"config": 5}, {"state_dict": 5}, {"state_dict": {"lm_head.weight": 5}}, {"state_dict": {5: torch.ones(1)}}],
    ids=str,
)
def test_published_dictionaries_that_are_refused(published, tmp_path: Path, change) -> None:
    file = tmp_path / "Tiny.pt"
    file.write_bytes(as_file(published | change))
    with pytest.raises(ValueError, match=str(file)):
        import_module(file, model_of("llama"))


@examples(8, 1000)
@given(content=mutated_json({"tokenizer_name": "t", "token_ids": IDS}))
@example(content=b"[" * 100_000)
@example(content=b'{"token_ids": [NaN]}')
@example(content=b'{"token_ids": [Infinity]}')
@example(content=b'{"token_ids": [' + b"9" * 5000 + b"]}")
def test_published_vocabularies(published, tmp_path: Path, content) -> None:
    import_content(tmp_path, as_file(published), content)
