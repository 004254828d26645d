"""Rows of real models: which are there, what their texts are compared with, and the figures of a results file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import real
from bench.samples import ResultsFolder, Sample, StepCounts


def test_rows_name_drafts_that_there_are() -> None:
    options = real.parser().parse_args(["--head", "head"])
    found = {system.key: system for system in real.our_rows(options)}
    assert {name for system in found.values() for name in system.drafts} == {
        "ngram", "draft", "useless", "itself", "packed", "head",
    }  # fmt: skip
    options = real.parser().parse_args(["--rows", "default"])
    assert [system.key for system in real.our_rows(options)] == ["plain", "default"]


@pytest.mark.parametrize(
    ("row", "plain"),
    [
        ("HF generate()", "plain"),
        ("HF assisted", "HF generate()"),
        ("default", "plain"),
        ("GGUF, default", "GGUF, plain"),
        ("llama.cpp Q4_K_M, n-gram", "llama.cpp Q4_K_M"),
        ("OpenVINO int8", "plain"),
    ],
)
def test_a_text_is_compared_with_plain_decoding_by_its_program(row: str, plain: str) -> None:
    assert real.own_plain(row) == plain


def test_a_results_file_has_rows_by_kind_of_prompt_and_over_all(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    systems = [{"key": key, "label": key} for key in ("plain", "default")]
    datasets = [{"name": name, "prompt_tokens": {"0": 7}} for name in ("code", "chat")]
    run = {"repeats": 1, "dtype": "bfloat16"}
    folder.write(
        "settings.json",
        {
            "version": 3,
            "machine": {},
            "family": {},
            "run": run,
            "systems": systems,
            "datasets": datasets,
            "ratio_to": "plain",
        },
    )
    for kind, seconds in (("code", {"plain": 4.0, "default": 1.0}), ("chat", {"plain": 2.0, "default": 4.0})):
        for key, s in seconds.items():
            target = StepCounts("target", 2, 4, 3, 2, histogram=(1, 0, 1))
            folder.add(
                Sample(
                    dataset=kind,
                    system=key,
                    sample="0",
                    tokens=[1] * 4,
                    seconds=s,
                    commits=[(s / 4, 1), (s, 4)],
                    stages=[target],
                    identical=True,
                )
            )
    record = real.record_of(folder, {"target": "q15"})
    found = {(row["row"], row["prompts"]): row for row in record["rows"]}
    assert [found["default", kind]["of_plain"] for kind in ("code", "chat", "all")] == pytest.approx([4.0, 0.5, 1.2])
    whole = found["default", "all"]
    assert (whole["worst_prompt_of_plain"], whole["same_text"], whole["first_token_ms"]) == (0.5, [2, 2], 625.0)
    assert (whole["tokens_per_step"], whole["steps_by_tokens"]) == (2.0, {1: 2, 3: 2})
    line = real.readme_table(record).splitlines()[-1]
    assert line == "| pipespec, default | 4.0 | 4.00x | 1.0 | 0.50x | 625 | 2/2 |"
