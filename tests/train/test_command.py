"""``pipespec spd train``: from files to a module that loads; refusals; several processes."""

import json
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.demo import family_path
from pipespec_spd.draft_module import CONFIG_FILE, WEIGHTS_FILE, DraftModule, DraftModuleConfig
from pipespec_spd.partition import Partition
from pipespec_train import recipe
from pipespec_train import trainer as training
from tests.conftest import random_llama
from tests.support.forks import Fork
from tests.train.test_data import LLAMA, TALK
from tests.train.test_training import lines
from tests.waiting import SECONDS


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target with the bundled tokenizer and a chat template without markers."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    tokenizer.chat_template = LLAMA
    model = random_llama(0, layers=4, hidden=32, vocabulary=2048)
    # The target prefers the tokens of the conversation, which a small draft vocabulary covers.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]] *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": TALK[i % 2 :]}) for i in range(12)))
    return file


def spd_train(target: Path, data: Path, out: Path, *more: str) -> int:
    common = ["--steps", "4", "--batch", "2", "--validation", "0.2", "--validate-every", "2"]
    return main(["spd", "train", "--target", str(target), "--data", str(data), "--out", str(out), *common, *more])


def test_from_conversations_to_a_module(target: Path, talks: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "module"
    assert spd_train(target, talks, out, "--stages", "1", "3", "--vocabulary", "4", "--rate", "1e-3") == 0
    said = capsys.readouterr()
    assert "4 steps, held-out KL" in said.out
    assert "(none left out); 2 held out" in said.err
    expected = {CONFIG_FILE, WEIGHTS_FILE, training.CHECKPOINT, training.RECORD}
    assert {f.name for f in out.iterdir()} == expected
    module = DraftModule.load(out, target=target, stages=((0, 1), (1, 4)))
    assert module.config.logits == 4
    assert module.config.layers == 1
    assert str(tmp_path) not in (out / CONFIG_FILE).read_text()  # the file has no path of this machine
    assert spd_train(target, talks, out, "--stages", "1", "3") == 2
    assert "holds a draft module already" in capsys.readouterr().err
    assert spd_train(target, talks, out, "--stages", "1", "3", "--steps", "6", "--resume") == 0
    said = capsys.readouterr()
    assert "resumed at step 4" in said.err
    assert "6 steps" in said.out
    assert spd_train(target, talks, out, "--stages", "2", "--resume") == 2
    assert "trained for the stages 0-0 1-3, not for 0-1 2-3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stages", "2", "--out", "{file}"], "file is a file"),
        (["--stages", "2", "--out", "{file}/module"], "file is a file"),
        (["--stages", "2", "--target", "{empty}"], "holds no model with a tokenizer"),
        (["--stages", "2", "--anchors", "0", "2", "--types", "2"], "give --types or --anchors"),
        (["--stages", "5"], "a model of 4 layers can be cut into 1 to 4 stages, not 5"),
        (["--stages", "2", "--vocabulary", "5000"], "between 1 and the target's 2048"),
        (["--stages", "2", "--minutes", "1"], "exactly one of --steps, --epochs, --tokens and --minutes"),
        (["--stages", "2", "--warmup", "4"], "fewer steps than the run has"),
        (["--stages", "2", "--length", "3"], "at least 10"),
        (["--stages", "2", "--validation", "1"], "between 0 and 1"),
        (["--stages", "2", "--resume"], "nothing to resume"),
        (["--stages", "2", "--batch", "0"], "--batch must be at least 1"),
        (["--stages", "2", "--held-out", "nowhere"], "no file or folder nowhere"),
    ],
)
def test_refused_before_the_weights_are_loaded(
    target: Path, talks: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    monkeypatch.setattr("pipespec.models.loading.load_model", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    more = [word.format(file=tmp_path / "file", empty=tmp_path / "empty") for word in more]
    assert spd_train(target, talks, tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_chosen_anchors(target: Path, talks: Path, tmp_path: Path, capsys) -> None:
    """The embedding and the end of the first stage feed the module, and not the last layers. Others are refused."""
    out = tmp_path / "module"
    assert spd_train(target, talks, out, "--stages", "2", "2", "--anchors", "0", "2") == 0
    assert "anchors 0 2" in capsys.readouterr().err
    config = DraftModuleConfig.load(out)
    assert (config.anchors, config.types) == ((0, 2), (0, 1, 1))
    for given, message in (
        (("--anchors", "2", "3"), "anchors must ascend from 0"),
        (("--anchors", "0", "9"), "anchor 9 does not exist"),
    ):
        assert spd_train(target, talks, tmp_path / "other", "--stages", "2", *given) == 2
        assert message in capsys.readouterr().err
    assert spd_train(target, talks, out, "--stages", "2", "2", "--anchors", "0", "3", "--resume") == 2
    assert "has the anchors 0 2" in capsys.readouterr().err


def test_epochs_and_a_recipe(target: Path, talks: Path, tmp_path: Path, capsys) -> None:
    """Options of the command line count more than those of the recipe, and a run's length replaces the recipe's."""
    file, out = tmp_path / "mine.toml", tmp_path / "module"
    file.write_text(
        f'[options]\ntarget = "{target}"\nstages = [2]\nsteps = 50\nbatch = 3\nrate-schedule = "linear"\nwarmup = 2\n'
        "validation = 0.2\nfreeze-head = true\nclip = 0.5\nseed = 9\n"
    )
    given = ["spd", "train", "--recipe", str(file), "--data", str(talks), "--out", str(out), "--seed", "42"]
    assert main([*given, "--epochs", "2"]) == 0
    record = json.loads((out / training.RECORD).read_text())
    expected = {"seed": 42, "clip": 0.5, "rate_schedule": "linear", "freeze_head": True, "steps": 6}
    assert expected.items() <= record["settings"].items()
    assert record["steps"] == 6  # ten examples in batches of three, twice
    assert record["history"][-1]["rate"] == pytest.approx(1e-4 * (1 - 5 / 6) / (1 - 2 / 6))
    assert main([*given, "--epochs", "3", "--resume"]) == 0
    assert "resumed at step 6" in capsys.readouterr().err
    assert main([*given, "--epochs", "3", "--resume", "--length", "256", "--truncate", "--batch", "2"]) == 2
    assert "belongs to other data" in capsys.readouterr().err
    for options, message in (
        ("stage = [2]", "not options of this command: --stage 2"),
        ("stages = ['two']", "argument --stages: invalid int value"),
        ("stages = [2]", "--target is missing"),
    ):
        file.write_text(f"[options]\n{options}\n")
        assert main([*given, "--epochs", "2"]) == 2
        assert message in capsys.readouterr().err


def test_recipes(tmp_path: Path) -> None:
    assert "llama-8b" in recipe.names()
    assert recipe.load("llama-8b")["stages"] == [8]
    file = tmp_path / "mine.toml"
    file.write_text("[options]\nstages = [1, 3]\namp = true\ntruncate = false\nrate = 2e-3\n")
    assert recipe.arguments(recipe.load(file)) == ["--stages", "1", "3", "--amp", "--rate", "0.002"]
    with pytest.raises(FileNotFoundError, match="neither a file nor one of llama-8b"):
        recipe.load("llama-9b")
    for wrong, message in (("[options]\n[model]\n", "one table"), ("[options", "is not TOML")):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            recipe.load(file)


SETTINGS = training.TrainingSettings(steps=3, rate=2e-3, validate_every=3, seed=1)


def share(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS)
    )
    target = random_llama(0, layers=4, hidden=32)
    module = DraftModule.of_target(target, DraftModuleConfig.for_target(target, Partition.uniform(4, 2).ranges))
    training.train(target, module, lines, SETTINGS, Path(folder) / "shared")
    torch.save([p.detach() for p in module.parameters()], Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one_that_accumulates(tmp_path: Path) -> None:
    code = "import sys; from tests.train.test_command import share; share(1, sys.argv[1])"
    with Fork(["-c", code, tmp_path], stdin=subprocess.DEVNULL) as other:
        share(0, str(tmp_path))
        assert other.wait(SECONDS) == 0
    target = random_llama(0, layers=4, hidden=32)
    module = DraftModule.of_target(target, DraftModuleConfig.for_target(target, Partition.uniform(4, 2).ranges))
    alone = training.train(
        target, module, lines, training.TrainingSettings(**{**vars(SETTINGS), "accumulate": 2}), tmp_path / "alone"
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, module.parameters(), strict=True))
    together = json.loads((tmp_path / "shared" / training.RECORD).read_text())
    assert (together["steps"], together["processes"], together["tokens"]) == (3, 2, alone["tokens"])
