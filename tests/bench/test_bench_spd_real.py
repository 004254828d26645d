"""``bench/bench_spd_real.py`` from a target to figures, on a tiny target; the recipe of the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bench import bench_spd_real as bench
from pipespec.cli.main import main
from pipespec.demo import family_path
from tests.conftest import random_llama
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


def test_text_is_that_of_generate_with_its_states(target: Path) -> None:
    """Prompts of several lengths in one batch; the states are those of a forward over the text."""
    model, tok = bench.load_target(target)
    for ids, begin, states in bench.write_text(model, tok, PROMPTS, 8, True, [1, 3]):
        text = torch.from_numpy(ids)[None]
        asked = text[:, :begin]
        seen = torch.ones_like(asked)  # the first token is that of padding, too
        assert torch.equal(model.generate(asked, attention_mask=seen, max_new_tokens=8, do_sample=False), text)
        with torch.no_grad():
            hidden = model(text[:, :-1], output_hidden_states=True).hidden_states
        assert states.shape == (text.shape[1] - 1, 3, 32)
        for column, index in enumerate((1, 3, 4)):  # the last one is behind the final norm
            assert torch.allclose(torch.from_numpy(states[:, column]).float(), hidden[index][0], rtol=2e-3, atol=2e-3)


def test_text_is_the_plain_choice_of_the_model(target: Path, tmp_path: Path) -> None:
    """Settings of a target's generation config, as Qwen's penalty, would change the text that drafts learn from."""
    shutil.copytree(target, folder := tmp_path / "target")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "eos_token_id": [3, 5]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model, tok = bench.load_target(folder)
    assert bench.end_tokens(model) == [3, 5]
    for ids, begin, _ in bench.write_text(model, tok, PROMPTS, 8, True, []):
        with torch.no_grad():
            first = model(torch.from_numpy(ids)[None]).logits[0].argmax(-1)
        assert first[begin - 1 : -1].tolist() == ids[begin:].tolist()


def test_from_a_target_to_figures(target: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "own_prompts", lambda: [f"{p} ({i})" for i in range(8) for p in PROMPTS])
    monkeypatch.setattr(bench, "NEW_TOKENS", 12)
    monkeypatch.setattr(bench, "ANSWER", 20)
    recipe, asked, out = tmp_path / "r.toml", tmp_path / "asked.jsonl", tmp_path / "out.json"
    recipe.write_text("[options]\nlayers = 1\nvocabulary = 300\nbatch = 4\nrate = 1e-3\n")
    asked.write_text("\n".join(json.dumps({"turns": [p, "more"]}) for p in PROMPTS))
    common = [str(target), str(tmp_path / "work"), "--kept", "1", "2", "3"]
    for part in ("0", "1"):
        assert bench.main(["text", *common, "--part", part, "2"]) == 0
    assert bench.main(["train", *common, "--stages", "2", "--minutes", "0.02", "--recipe", str(recipe)]) == 0
    module = tmp_path / "work" / "module-2"
    given = ["--module", str(module), "--prompts", str(asked), "--count", "3", "--decode", "3", "--json", str(out)]
    assert bench.main(["evaluate", *common, *given]) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert record["text"]["answers"] == 24
    assert (row["stages"], row["prompts"], row["count"], len(row["by_fill"])) == (2, "asked", 3, 2)
    assert len(row["by_position"]) == 2
    for found in row["decoded"]:
        assert found["identical"]
        assert found["along_text"] == {
            "verified": found["drafts"], "accepted": found["accepted"], "cycles": found["cycles"], "tokens": found["drafts"],
        }  # fmt: skip


def test_prompts_are_many_and_differ() -> None:
    found = bench.own_prompts()
    assert len(set(found)) > 1000
    assert found == bench.own_prompts()


def test_the_recipe_has_options_of_the_command(target: Path, tmp_path: Path, capsys) -> None:
    # A model that knows a language: its choices are among the tokens of the talks.
    shutil.copytree(family_path("target"), speaker := tmp_path / "speaker")
    AutoTokenizer.from_pretrained(target).save_pretrained(speaker)
    talks = tmp_path / "talks.jsonl"
    talks.write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(12)))
    recipe = bench.PROMPTS.with_name("smollm2-135m.toml")
    out = tmp_path / "module"
    given = [
        "--target",
        str(speaker),
        "--data",
        str(talks),
        "--out",
        str(out),
        "--stages",
        "2",
        "--vocabulary",
        "2048",
        "--validation",
        "0.5",
    ]
    assert main(["spd", "train", "--recipe", str(recipe), *given, "--steps", "1"]) == 0
    assert "1 steps" in capsys.readouterr().out
