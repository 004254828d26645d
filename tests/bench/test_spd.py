"""The table of a run of SPD, in one process and on ranks; ``bench.spd real`` on a tiny target, and the recipe of the real one."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from bench import run, systems
from bench import spd as bench
from pipespec.cli.main import main
from pipespec.demo import family_path
from tests.conftest import random_llama
from tests.support.torchrun import Torchrun
from tests.train.test_data import LLAMA, TALK

PROMPTS = ["Name a river.", "What is a prime number, and which is the smallest one?", "Count to five."]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    tokenizer.chat_template = LLAMA
    random_llama(0, layers=4, hidden=32, vocabulary=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_text_is_the_plain_choice_of_the_model(target: Path, tmp_path: Path) -> None:
    """Settings of a target's generation config, as Qwen's penalty, would change the text."""
    shutil.copytree(target, folder := tmp_path / "target")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "eos_token_id": [3, 5]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = bench.load_target(folder)
    assert model.generation_config.eos_token_id == [3, 5]
    text = bench.generated(model, torch.tensor([[7, 8, 9]]))
    with torch.no_grad():
        first = model(text).logits[0].argmax(-1)
    assert first[2:-1].tolist() == text[0, 3:].tolist()


def test_figures_of_a_module_by_the_recipe(target: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "ANSWER", 20)
    # A model that knows a language: its choices are among the tokens of the talks.
    shutil.copytree(family_path("target"), speaker := tmp_path / "speaker")
    AutoTokenizer.from_pretrained(target).save_pretrained(speaker)
    talks, asked, out = tmp_path / "talks.jsonl", tmp_path / "asked.jsonl", tmp_path / "out.json"
    talks.write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(12)))
    asked.write_text("\n".join(json.dumps({"turns": [p, "more"]}) for p in PROMPTS))
    module, recipe = tmp_path / "module-2", Path(bench.__file__).parent / "recipes" / "smollm2-135m.toml"
    given = ["--recipe", str(recipe), "--target", str(speaker), "--data", str(talks), "--out", str(module)]
    sizes = ["--stages", "2", "--vocabulary", "2048", "--validation", "0.5", "--steps", "1"]
    assert main(["spd", "train", *given, *sizes]) == 0
    bench.main(
        ["real", str(speaker), "--module", str(module), "--prompts", str(asked), "--decode", "3", "--json", str(out)]
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["stages"], row["prompts"], row["count"], len(row["by_fill"])) == (2, "asked", 3, 2)
    assert len(row["by_position"]) == 2
    for found in row["decoded"]:
        assert found["identical"]
        assert found["along_text"] == {
            "verified": found["drafts"], "accepted": found["accepted"], "cycles": found["cycles"], "tokens": found["drafts"],
        }  # fmt: skip


def test_the_table_of_a_run(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(systems, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Torchrun}))
    out, file = tmp_path / "run", tmp_path / "spd.json"
    sizes = ["--stages", "2", "--new-tokens", "6", "--samples", "3", "--threads", "1", "--tuning", "0"]
    assert run.main(["--systems", "plain", "spd", "spd-ranks", "--drafters", "ngram", *sizes, "--out", str(out)]) == 0
    assert bench.main(["table", str(out), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [row["ranks"] for row in found["rows"]] == [0, 2, 3]
    for row in found["rows"]:
        assert row["identical"] == row["runs"] == 1
        assert row["tokens"] == 6
        assert 5 <= row["cycles"] <= 5 + (row["stages"] - 1) * (1 + row["flushes"])
        assert row["law_speedup"] > 0
    assert [plain["threads"] for plain in found["plain"]] == [1, 1]
    assert "spd, 2 stages, ngram, 2 ranks" in capsys.readouterr().out
    kept = Path(bench.__file__).parent / "results" / "spd.json"
    assert bench.text(json.loads(kept.read_text())).count("\n") > 10
