"""bench.exact: a small run of it, and that it notices a text that differs."""

import json

import torch

from bench import exact


def test_no_text_differs(tmp_path, capsys):
    file = tmp_path / "exact.json"
    assert exact.main(["--formats", "q8_0", "--prompts", "2", "--tokens", "12", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12
    assert all(row["equal"] == row["texts"] == 2 and row["forward"] == "native" for row in rows)
    assert "24 of 24 texts are the plain text" in capsys.readouterr().out


def test_no_captured_text_differs(monkeypatch):
    """As on a GPU, but that the models lie on the CPU."""
    real = exact.load_model
    monkeypatch.setattr(exact, "load_model", lambda path, *, dtype, device: real(path, dtype="float32"))
    monkeypatch.setitem(exact.FORMATS, "cuda", ("float32",))
    assert exact.main(["--device", "cuda", "--prompts", "2", "--tokens", "12"]) == 0


def test_a_text_that_differs_is_counted(monkeypatch, capsys):
    real = exact.texts

    def wrong(pipe, prompts, way, tokens):
        found = list(real(pipe, prompts, way, tokens))
        if way.name == "plain, batch":
            found[1][3] += 1
        return iter(found)

    monkeypatch.setattr(exact, "texts", wrong)
    monkeypatch.setattr(exact, "ways", lambda drafts: [exact.Way("plain, batch", [], {"schedule": "plain"}, rows=2)])
    assert exact.main(["--formats", "q4_0", "--prompts", "3", "--tokens", "6"]) == 1
    assert "2 of 3" in capsys.readouterr().out


def test_prompts_are_pieces_of_the_sources():
    tokenizer = exact.load_tokenizer(exact.family_path("target"))
    found = exact.prompts_of(tokenizer, 20, seed=3)
    assert all(4 <= len(prompt) <= 200 for prompt in found)
    assert len({len(prompt) for prompt in found}) > 5
    assert all(map(torch.equal, found, exact.prompts_of(tokenizer, 20, seed=3)))
