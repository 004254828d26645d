"""Rows of real models: which are there, what their texts are compared with, and the figures of a results file."""

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from bench import real, run
from bench.config import BenchConfig, with_prompts
from bench.samples import ResultsFolder, Sample, StepCounts
from bench.systems import Family, Workload, systems_of
from pipespec.demo import load_family


def test_rows_name_drafts_that_there_are(target: LlamaForCausalLM) -> None:
    config = BenchConfig(
        target="models/q15-hf", drafts=("models/q05-hf",), head="head", systems=tuple(real.ROWS), reference="plain"
    )
    rows = systems_of(config, ["q05-hf"])
    assert [row.key for row in rows] == ["plain", *real.ROWS]
    family = Family("q15-hf", target, {"q05-hf": "a draft"})
    made = {}
    for row in rows[1:]:
        row.workload = Workload(family, 4, 4, 1)
        made |= {name: row.draft(name) for name in row.drafts}
    assert {name: made[name] for name in ("ngram", "draft", "packed", "head")} == {
        "ngram": "ngram", "draft": "a draft", "packed": Path("models/q05.gguf"), "head": "head",
    }  # fmt: skip
    assert all(made[name].config.num_hidden_layers == target.config.num_hidden_layers for name in ("useless", "itself"))
    assert {row.target for row in rows[1:]} == {None, Path("models/q15.gguf")}


@pytest.mark.parametrize(
    ("system", "message"), [("default", "give --drafts"), ("head", "give --head"), ("llama.cpp", "give --llama"), ("OpenVINO", "give --openvino")],
)  # fmt: skip
def test_a_row_says_what_it_lacks(system: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        systems_of(BenchConfig(target="q15-hf", systems=(system,)), [])


def test_other_programs_read_the_files_next_to_the_models(tmp_path: Path) -> None:
    for name in ("q15-fp16", "q15-int4"):
        (tmp_path / name).mkdir()
    given = {"target": "models/q15-hf", "drafts": ("models/q05-hf",), "llama": "server", "openvino": ("python", str(tmp_path))}  # fmt: skip
    rows = {row.key: row for row in systems_of(BenchConfig(systems=("llama.cpp", "OpenVINO"), **given), ["q05-hf"])}
    plain = "llama.cpp Q4_K_M"
    assert list(rows) == [
        "hf",
        plain,
        f"{plain}, n-gram",
        f"{plain}, draft",
        "OpenVINO bfloat16",
        "OpenVINO int4",
        "OpenVINO int4, lookup",
        "OpenVINO int4, draft",
    ]
    assert "models/q15.gguf" in rows[plain].command
    assert "models/q05.gguf" in rows[f"{plain}, draft"].command
    assert str(tmp_path / "q05-int4") in rows["OpenVINO int4, draft"].command[-1]


def test_prompts_of_a_number_of_tokens_and_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A page.")
    tokenizer = load_family().tokenizer
    family = Family("test", load_family().target, {}, tokenizer)
    config = with_prompts(BenchConfig(), ["12", f"edit={tmp_path / 'page.md'}"])
    number, edit = (run.prompts_of(config, request, family) for request in config.dataset)
    assert [ids.shape for ids in number.prompts.values()] == [(1, 12)]
    assert tokenizer.decode(edit.prompts["0"][0]).endswith("unchanged otherwise.\n\nA page.")


@pytest.mark.parametrize(
    ("row", "plain"),
    [
        ("hf", None),
        ("HF assisted", "hf"),
        ("default", None),
        ("GGUF, plain", None),
        ("GGUF, default", "GGUF, plain"),
        ("llama.cpp Q4_K_M, n-gram", "llama.cpp Q4_K_M"),
        ("llama.cpp Q4_K_M", None),
        ("OpenVINO int8", None),
    ],
)
def test_a_text_is_compared_with_plain_decoding_by_its_program(row: str, plain: str | None) -> None:
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
    record = real.record_of(folder)
    found = {(row["row"], row["prompts"]): row for row in record["rows"]}
    assert [found["default", kind]["of_plain"] for kind in ("code", "chat", "all")] == pytest.approx([4.0, 0.5, 1.2])
    whole = found["default", "all"]
    assert (whole["worst_prompt_of_plain"], whole["same_text"], whole["first_token_ms"]) == (0.5, [2, 2], 625.0)
    assert (whole["tokens_per_step"], whole["steps_by_tokens"]) == (2.0, {1: 2, 3: 2})
    line = real.best_table(record).splitlines()[-1]
    assert line == "| pipespec, default, 0.5B draft | 4.0 | 4.00x | 1.0 | 0.50x | 625 | 2/2 |"
