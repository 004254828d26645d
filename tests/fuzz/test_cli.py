"""The command line with odd values for its own options: status 0, or 2 with one line, and no traceback."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.cli.main import _parser, main
from tests.conftest import random_llama
from tests.fuzz.mutations import examples
from tests.pipespec.test_cli import byte_tokenizer


def options_of() -> dict[str, list[argparse.Action]]:
    """Options of each command, as its parser has them."""
    found: dict[str, list[argparse.Action]] = {}

    def walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> None:
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for action in inner:
            for name, below in action.choices.items():
                walk(below, (*path, name))
        if not inner:
            found[" ".join(path)] = [a for a in parser._actions if a.dest not in ("help", "debug")]

    walk(_parser(), ())
    return {path: actions for path, actions in found.items() if path != "doctor"}


OPTIONS = options_of()
VALUES = st.sampled_from(
    ["0", "-1", "1", "2", "1e400", "nan", "inf", "0.5", str(2**31), str(2**63), str(10**30), "", " ", "x", "é\u2028", "\udce9", "/nowhere", ".", "/dev/null",
     "{target}", "{target}/config.json", "{target}/model.safetensors", "ngram", "balanced:0", "1,x", "float16", "a=b", "%s", "-", "--"]
)  # fmt: skip


class Reached(Exception):
    """The work would begin."""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    random_llama(0, hidden=16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@examples(40, 1500)
@given(data=st.data(), path=st.sampled_from(sorted(OPTIONS)))
def test_options_with_odd_values(target: Path, tmp_path: Path, monkeypatch, data, path) -> None:
    arguments = path.split()
    for action in data.draw(st.lists(st.sampled_from(OPTIONS[path]), max_size=5)):
        arguments += action.option_strings[-1:]
        if action.nargs != 0:
            value = data.draw(
                st.sampled_from(sorted(map(str, action.choices)))
                if action.choices and data.draw(st.booleans())
                else VALUES
            )
            arguments.append(value.replace("{target}", str(target)))
    check(arguments, tmp_path, monkeypatch)


def check(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command up to the loading of models; returns the message of its error, if it has one."""

    def work(*args: object, **kwargs: object) -> None:
        raise Reached

    for name in ("pipespec.models.loading.load_model", "pipespec.api.chain.load_chain", "pipespec.api.pipeline.Pipeline.__init__", "pipespec.bench.runner.prepare",
                 "pipespec.cli.demo.run", "pipespec.demo.run.load_family", "pipespec.models.loading.load_tokenizer"):  # fmt: skip
        with contextlib.suppress(AttributeError, ImportError):
            monkeypatch.setattr(name, work)
    monkeypatch.setattr("sys.stdin", io.StringIO("a prompt"))
    monkeypatch.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except SystemExit as end:  # argparse's
        status = int(str(end.code or 0))
    said = err.getvalue()
    assert status in (0, 1, 2), said
    assert "Traceback" not in said
    if status == 2:
        (line,) = [line for line in said.split("\n") if "error: " in line]
        message = line.partition("error: ")[2]
        assert message
        # Errors whose type comes first are bugs: `pipespec.cli.main` shows the type of those that do not describe the input.
        assert message.startswith("Reached") or not any(message.startswith(f"{kind.__name__}:") for kind in BUGS), line
        return message
    return ""


BUGS = (
    RuntimeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    ZeroDivisionError,
    OverflowError,
    RecursionError,
    UnicodeError,
)


@pytest.mark.parametrize(
    "line",
    [
        "bench --prompts a.jsonl --threads 0",
        "generate --system spd --device 0",
        "generate --system spd --device auto",
    ],
)
def test_lines_that_are_refused(target: Path, tmp_path: Path, monkeypatch, line) -> None:
    message = check(line.split(), tmp_path, monkeypatch)
    assert message
    assert not message.startswith("Reached")
