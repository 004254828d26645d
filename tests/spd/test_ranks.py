"""Ranks: the same text as in one process, each rank with its own layers; and no rank that hangs, whatever becomes of the others.

Processes are forked by a harness that has imported everything, but for one start with torchrun itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from pipespec.spd import SpeculativePipeline
from pipespec.spd import ranks as module
from pipespec.spd.ranks import RanksPipeline, ranks_of
from tests.conftest import noisy, random_llama
from tests.spd.drafters import Blind
from tests.spd.ranks_harness import LAYERS, calls, made

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_llama(3, layers=LAYERS).save_pretrained(folder)
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


CASES = ["3:2:model", "2:2:ngram", "3:3:reader", "1:1:reader"]
KILLS = 5
MISSING = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def incomplete(folder, tmp_path_factory):
    """A model that lacks a weight of the second stage's."""
    path = tmp_path_factory.mktemp("incomplete")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != MISSING}, path / "model.safetensors")
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path


@pytest.fixture(scope="module")
def found(folder, incomplete):
    """What the harness prints, line by line. One run of it for all tests: importing is what takes long."""
    commands = [[folder, "texts", *CASES], [folder, "kill", KILLS, 3], [incomplete, "fail"], [folder, "late"]]
    arguments = " -- ".join(" ".join(map(str, command)) for command in commands).split()
    command = [sys.executable, "-m", "tests.spd.ranks_harness", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


def test_the_text_of_one_process(folder, found):
    """n + 1 ranks, n ranks, one rank; several calls on the same ranks; streams that come from all of them."""
    for case, texts in zip(CASES, found, strict=False):
        _, stages, kind = case.split(":")
        pipeline = SpeculativePipeline(folder, made(kind), stages=int(stages))
        for (ids, options), (text, cycles, accepted, sums, busy) in zip(calls(), texts, strict=True):
            wanted = pipeline.generate(ids, **options)
            assert text == (wanted if isinstance(wanted, torch.Tensor) else wanted.sequences).tolist(), case
            assert (cycles, accepted) == (pipeline.report.cycles, pipeline.report.accepted)
            assert busy == int(stages)
            if kind == "reader":
                seen = sorted(pipeline.drafter.sums.items())
                assert [key for key, _ in sums] == [list(key) for key, _ in seen]
                assert [value for _, value in sums] == pytest.approx([value for _, value in seen], abs=1e-5)
            else:
                assert sums == []
        if kind == "model":
            assert accepted > 0 or cycles == 0


def test_torchrun(folder, tmp_path):
    noisy(random_llama(3, layers=LAYERS), 0.02).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    command += ["pipespec.spd.ranks", "--target", str(folder), "--drafter", str(tmp_path), "--stages", "1,2"]
    command += ["--prompt-ids", "5,6,7", "--max-new-tokens", "20"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    text, *report = done.stdout.splitlines()
    pipeline = SpeculativePipeline(folder, str(tmp_path), stages=[1, 2])
    wanted = pipeline.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False)
    assert [int(token) for token in text.split(",")] == wanted[0, 3:].tolist()
    assert f"{pipeline.report.accepted} of {pipeline.report.checked} drafts accepted" in "\n".join(report)


def test_a_rank_that_is_lost(found):
    """Killed or stopped at some cycle: the others end soon, not with status 0, and say why. (``python -m tests.spd.ranks_harness`` does it often.)"""
    trials = found[len(CASES) : len(CASES) + KILLS]
    assert {trial["how"] for trial in trials} == {"SIGKILL", "SIGSTOP"}
    for trial in trials:
        assert len(trial["others"]) == 2
        for status, seconds, words in trial["others"].values():
            assert status == 1, trial
            assert "rank" in words, trial
            # The promise is 10 s on a machine that has the time; wait_all() gives up after 30.
            assert seconds < 30, trial


def test_a_rank_that_cannot_load(found, incomplete):
    """All ranks say which one, and why."""
    ranks = found[len(CASES) + KILLS]
    assert len(ranks) == 3
    for status, words in ranks:
        assert status == 1
        assert f"rank 2 failed: ValueError: {incomplete}: its safetensors lack {MISSING}" in words


def test_a_rank_that_hangs(found):
    """Its process gives signs of life, and its messages do not come: all three end, that one, too."""
    ranks = found[len(CASES) + KILLS + 1]
    assert [status for status, _ in ranks] == [1, 1, 1]
    assert any("rank 2" in words and "took too long" in words for _, words in ranks)
    assert all(words for _, words in ranks)


# ---- refused before anything is loaded or connected


@pytest.fixture
def no_work(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("it went on")

    for name in ("Link", "load_stage", "load_ends", "resolve_drafter"):
        monkeypatch.setattr(module, name, started)


class TooDeep(Blind):
    features = (LAYERS + 1,)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("world", "options", "error", "match"),
    [
        (
            4,
            {"stages": 2},
            ValueError,
            "2 stages need 3 ranks, or 2 with the first stage beside the drafter; there are 4",
        ),
        (2, {"stages": 3}, ValueError, "3 stages need 4 ranks, .* there are 2"),
        (5, {"stages": 4}, ValueError, "3 layers can be cut into 1 to 3 stages, not 4"),
        (3, {"stages": [1, 1]}, ValueError, "2 layers together, the model has 3"),
        (3, {"stages": "balanced:2"}, ValueError, "no rank has all layers to measure"),
        (3, {"stages": 2, "drafter": TooDeep(320)}, ValueError, "no residual stream 4"),
    ],
)
def test_what_does_not_fit(folder, no_work, monkeypatch, rank, world, options, error, match):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(error, match=match):
        RanksPipeline(folder, **options)


def test_no_torchrun(folder, no_work, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start this with torchrun"):
        RanksPipeline(folder, stages=2)


def test_other_targets(tmp_path, no_work, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(TypeError, match="must be a path"):
        RanksPipeline(random_llama(1), stages=2)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="holds a gpt2 model"):
        RanksPipeline(tmp_path, stages=2)


def test_ranks_of_stages():
    assert ranks_of(3, 4) == [1, 2, 3]
    assert ranks_of(3, 3) == [0, 1, 2]
