"""The prediction of a training run: operations as torch counts them, hours by hand, recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipespec.spd.draft_module import DraftModule, DraftModuleConfig
from pipespec.spd.partition import Partition
from pipespec.spd.training import cost, recipe
from pipespec.spd.training.trainer import simulate, teach
from tests.conftest import random_llama

LENGTH = 24


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(("n", "layers", "types"), [(3, 2, None), (2, 1, None), (6, 3, 2)])
def test_operations_are_those_that_torch_counts(n: int, layers: int, types: int | None, freeze: bool) -> None:
    target = random_llama(0, layers=6)
    config = DraftModuleConfig.for_target(target, Partition.uniform(6, n).ranges, layers=layers, types=types)
    module = DraftModule.of_target(target, config)
    module.head.requires_grad_(not freeze)
    ids = torch.arange(LENGTH)[None] % target.config.vocab_size

    def counted(fill: int) -> tuple[int, int]:
        with sdpa_kernel(SDPBackend.MATH):  # the counter knows no kernel of the CPU
            with FlopCounterMode(display=False) as teacher:
                taught = teach(target, ids, config.anchors)
                target.get_output_embeddings()(taught.last)
            with FlopCounterMode(display=False) as student:
                simulate(module, taught.anchors.clone(), fill).sum().backward()
        return teacher.get_total_flops(), student.get_total_flops()

    found = [counted(fill) for fill in range(1, n + 1)]
    expected = cost.sequence_cost(config, LENGTH, full=1.0, freeze_head=freeze)
    assert (expected.teacher, expected.module) == found[-1]
    mixed = cost.sequence_cost(config, LENGTH, full=0.5, freeze_head=freeze)
    mean = 0.5 * found[-1][1] + 0.5 * sum(f for _, f in found[:-1]) / (n - 1)
    assert mixed.module == pytest.approx(mean, rel=1e-12)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert cost.trained_parameters(config, freeze_head=freeze) == trained


def test_hours() -> None:
    run = cost.RunCost(parameters=10**9, sequences=6400, tokens=6_400_000, flops=3600e15)
    hardware = cost.Hardware(peak=1000, utilisation=0.5, link=100)
    assert run.hours(1, 64, hardware) == pytest.approx(2.0)
    # 100 steps, each with 2 * 7/8 * 4 GB over 100 GB/s.
    assert run.hours(8, 64, hardware) == pytest.approx(2.0 / 8 + 100 * 0.07 / 3600)
    assert run.state_bytes() == 16 * 10**9
    for wrong in ({"peak": 0.0}, {"utilisation": 1.5}, {"link": -1.0}):
        with pytest.raises(ValueError, match="must"):
            cost.Hardware(**wrong)


def test_recipes(tmp_path: Path) -> None:
    assert "llama-8b" in recipe.names()
    file = tmp_path / "mine.toml"
    file.write_text("[options]\nstages = [1, 3]\namp = true\ntruncate = false\nrate = 2e-3\n[data]\nexamples = 5\n")
    loaded = recipe.load(file)
    assert loaded.arguments() == ["--stages", "1", "3", "--amp", "--rate", "0.002"]
    assert (loaded.name, loaded.examples, loaded.mean_tokens) == ("mine", 5, None)
    with pytest.raises(FileNotFoundError, match="neither a file nor one of llama-8b"):
        recipe.load("llama-9b")
    file.write_text("[options]\n[model]\n")
    with pytest.raises(ValueError, match="model unknown"):
        recipe.load(file)
    file.write_text("[options")
    with pytest.raises(ValueError, match="is not TOML"):
        recipe.load(file)
