"""Draft modules whose files are damaged."""

import json
from pathlib import Path

import pytest
import torch

from pipespec_spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig
from pipespec_spd.partition import Partition
from tests.conftest import random_llama
from tests.fuzz.mutations import check_names, in_child

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


def load_with(saved: Path, **changed: object) -> None:
    """Load the module after a change of its configuration, in a child: ValueError names the file, or there is a module that computes."""
    file = saved / CONFIG_FILE
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
        file.write_text(json.dumps(json.loads(before) | changed))
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
    load_with(saved, target=json.loads((saved / CONFIG_FILE).read_bytes())["target"] | change)


def test_more_layers_than_there_are_weights(saved: Path) -> None:
    """Refused at once, however many a config says."""
    target = json.loads((saved / CONFIG_FILE).read_bytes())["target"] | {"num_hidden_layers": 10**6}
    load_with(saved, layers=10**6, stages=[[0, 2], [2, 10**6]], target=target)
