"""Text that a target writes: prompts from templates, answers in batches, and a run that continues."""

import json
import logging
import sysconfig
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import pipespec
from pipespec.demo import family_path
from pipespec_train import data
from pipespec_train.writing import prompts_of, write_answers

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def written(tmp_path, text: str):
    file = tmp_path / "prompts.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_template_takes_every_topic_in_an_order_of_the_seed(tmp_path):
    file = written(tmp_path, '[[group]]\ntemplates = ["a {}?", "b {}!"]\ntopics = ["{x}", "y", "z"]\n')
    prompts = prompts_of(file)
    assert sorted(prompts) == ["a y?", "a z?", "a {x}?", "b y!", "b z!", "b {x}!"]
    assert prompts == prompts_of(file)
    assert any(prompts != prompts_of(file, seed) for seed in range(1, 9))


def test_functions_end_with_their_docstring_and_paragraphs_are_long(tmp_path, monkeypatch):
    group = '[[group]]\ntemplates = ["{{}}"]\nsource = "{}"\ncount = 5\n'
    functions = prompts_of(written(tmp_path, group.format("functions").replace("{{}}", "{}")))
    assert len(functions) == 5
    assert all(each.startswith("def ") and each.rstrip().endswith(("'", '"')) for each in functions)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: Path(logging.__file__).parent)
    paragraphs = prompts_of(written(tmp_path, group.format("paragraphs").replace("{{}}", "{}")))
    assert paragraphs
    assert all(300 <= len(each) <= 1200 for each in paragraphs)


@pytest.mark.parametrize(
    "text",
    [
        "other = 1",
        "[[group]",
        '[[group]]\ntemplates = ["{}"]',
        '[[group]]\ntemplates = ["{}"]\nsource = "songs"\ncount = 1',
        '[[group]]\ntemplates = ["{}"]\nsource = "functions"',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"TOML|group|source"):
        prompts_of(written(tmp_path, text))


def test_answers_are_those_of_the_target_and_a_run_continues(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    pipe, out = pipespec.Pipeline(family_path("target"), schedule="plain"), tmp_path / "chats.jsonl"
    prompts = ["def mean(values):", "class Reader:", "import os"]
    how = {"rows": 2, "new_tokens": 8}
    write_answers(pipe, tokenizer, prompts[:1], out, **how)
    first = out.read_text(encoding="utf-8")
    out.write_text(first + first[:20], encoding="utf-8")  # a run that was killed while it wrote
    assert write_answers(pipe, tokenizer, prompts, out, **how) > 0
    assert out.read_text(encoding="utf-8").startswith(first)
    found = [json.loads(line)["messages"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted(turns[0]["content"] for turns in found) == sorted(prompts)
    ids = tokenizer(f"{prompts[2]}\n", add_special_tokens=False, return_tensors="pt")
    alone = pipe.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    said = {turns[0]["content"]: turns[1]["content"] for turns in found}
    assert said[prompts[2]] == tokenizer.decode(alone, skip_special_tokens=True)
    assert write_answers(pipe, tokenizer, prompts, out, **how) == 0
    assert data.load_examples([out], tokenizer, 64)[0]
