"""bench.quality on the bundled target."""

import json
from pathlib import Path

import pytest
import torch

from bench import quality
from pipespec.demo import family_path
from pipespec.models.loading import load_model


def test_finer_formats_are_nearer(tmp_path, capsys):
    file = tmp_path / "quality.json"
    options = ["--formats", "q8_0", "q4_0", "--tokens", "300", "--window", "128", "--json", str(file)]
    quality.main([str(family_path("target")), "--text", quality.__file__, *options])
    rows = json.loads(file.read_text())["rows"]
    assert [row["tokens"] for row in rows.values()] == [63 + 63] * 3  # nothing of a last window of 44
    assert {row["forward"] for row in rows.values()} == {"native"}
    assert rows["float32"]["mean_kl"] == 0
    assert 0 < rows["q8_0"]["mean_kl"] < rows["q4_0"]["mean_kl"] < 1
    assert rows["float32"]["same_token"] == 1 >= rows["q8_0"]["same_token"] >= rows["q4_0"]["same_token"]
    assert "| q4_0 |" in capsys.readouterr().out


def test_the_perplexity_is_that_of_one_forward():
    model = load_model(family_path("target"), dtype="float32")
    text = Path(quality.__file__).read_text()
    ids = torch.tensor(quality.load_tokenizer(family_path("target"))(text).input_ids)[:100]
    with torch.inference_mode():
        expected = float(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, 50:-1], ids[51:]).exp())
    found = quality.measure({"float32": model}, ids, 100)
    assert found["float32"]["perplexity"] == pytest.approx(expected, rel=1e-4)
