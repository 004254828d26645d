"""``pipespec chat``, and ``pipespec generate --json-lines``."""

import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pipespec import Pipeline
from pipespec.cli.main import main
from pipespec.demo import family_path
from pipespec.models.tokenizers import load_tokenizer

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}def "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(family_path("target"), folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def answer(target: Path, messages: list[dict[str, str]], count: int) -> str:
    tokenizer = load_tokenizer(target)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with Pipeline(target, dtype="float32", schedule="plain") as pipe:
        output = pipe.generate(**inputs, max_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def chat(target: Path, monkeypatch: pytest.MonkeyPatch, typed: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["chat", "--target", str(target), "--dtype", "float32", "--max-new-tokens", "8", *options])


def test_a_conversation(target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on with what was said, and starts again after /reset."""
    system = {"role": "system", "content": "Write Python."}
    first = [system, {"role": "user", "content": "the mean"}]
    said = answer(target, first, 8)
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "the median"}]
    alone = answer(target, [system, second[-1]], 8)
    typed = "the mean\n\nthe median\n/reset\nthe median\n/what\n/exit\nunread\n"
    assert chat(target, monkeypatch, typed, "--system", "Write Python.") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{said}\n{answer(target, second, 8)}\n{alone}\nthere is no /what: /reset")
    assert shown.count("\n") == 1 + f"{said}\n{answer(target, second, 8)}\n{alone}\n".count("\n")


def test_a_stopped_answer(target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends the answer, and not the program."""
    own, calls = Pipeline.generate, []

    def generate(pipe: Any, *args: Any, **options: Any) -> Any:
        calls.append(options["input_ids"].shape[1])
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return own(pipe, *args, **options)

    monkeypatch.setattr(Pipeline, "generate", generate)
    assert chat(target, monkeypatch, "the mean\nthe median\n") == 0
    assert capsys.readouterr().out.startswith(" (stopped)\n")
    assert calls[1] > calls[0]


def test_a_model_without_a_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Path(family_path("target")), monkeypatch, "hi\n") == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["chat"]) == 2
    assert "needs --target" in capsys.readouterr().err


def test_lines(target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["def mean(values):", json.dumps({"prompt": "def mean(values):", "id": 7}), "", '"def mean(values):"', "[1, 2]"]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    options = ["--target", str(target), "--dtype", "float32", "--max-new-tokens", "6", "--json-lines", "--report"]
    assert main(["generate", *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["prompt"] for entry in found] == ["def mean(values):"] * 3 + ["[1, 2]"]
    assert len({entry["text"] for entry in found[:3]}) == 1
    assert found[1]["id"] == 7
    assert (found[0]["tokens"], found[0]["finish_reason"], found[0]["report"]["tokens"]) == (6, "length", 6)
    assert main(["generate", *options, "--prompt", '{"text": "a"}']) == 2
    assert "line 1: the object has no text" in capsys.readouterr().err
    assert main(["generate", *options[:-2], "--chat", "--prompt", "the mean"]) == 0
    assert "the answer has 6 tokens, the limit: --max-new-tokens" in capsys.readouterr().err
