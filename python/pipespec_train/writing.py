"""Text that the target writes itself, as data of its drafts: prompts from templates, and answers in batches.

    python -m pipespec_train.writing --target PATH --prompts bench/recipes/qwen2.5-coder-0.5b-prompts.toml --out chats.jsonl

A killed run continues where the file ends.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipespec import Pipeline, load_tokenizer
from pipespec.process.progress import say
from pipespec.registry import PLAIN

_GROUP = {"templates", "topics", "source", "count"}


def prompts_of(file: Path, seed: int = 0) -> list[str]:
    """The prompts of a TOML file in an order that ``seed`` draws.

    A ``[[group]]`` has ``templates``, in which ``{}`` stands for a topic, and either ``topics`` or a ``source`` of them with their ``count``: ``functions``
    are those of Python's standard library, up to the end of their docstring, and ``paragraphs`` are of its docstrings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not TOML or has no such groups.
    """
    try:
        groups = tomllib.loads(file.read_text(encoding="utf-8")).get("group", [])
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    if not groups:
        raise ValueError(f"{file} has no [[group]] of templates and topics")
    draw, found = np.random.default_rng(seed), list[str]()
    for number, group in enumerate(groups, 1):
        if (
            group.keys() - _GROUP
            or "templates" not in group
            or ("topics" in group) == ({"source", "count"} <= group.keys())
        ):
            raise ValueError(f"{file}, group {number}: it needs templates, and either topics or source with count")
        topics = group["topics"] if "topics" in group else _read_here(group["source"], group["count"], draw)
        found += [template.replace("{}", topic) for template in group["templates"] for topic in topics]
    return [found[i] for i in draw.permutation(len(found))]


def _read_here(source: str, count: int, draw: np.random.Generator) -> list[str]:
    """``count`` topics of a source, at most all."""
    if source not in ("functions", "paragraphs"):
        raise ValueError(f"no source {source!r} of topics: functions or paragraphs")
    found = sorted({text for file in _library() for text in _documented(file, source == "functions")})
    return [found[i] for i in draw.permutation(len(found))[:count]]


def _library() -> Iterator[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.rglob("*.py")):
        if not {"test", "tests", "idlelib", "lib2to3", "site-packages"} & {*file.relative_to(folder).parts}:
            yield file


def _documented(file: Path, wants_functions: bool) -> Iterator[str]:
    """Functions up to the end of their docstring, or longer paragraphs of all docstrings."""
    text = file.read_text(encoding="utf-8", errors="replace")
    for node in ast.walk(ast.parse(text)):
        if (
            not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            or (said := ast.get_docstring(node)) is None
        ):
            continue
        if not wants_functions:
            yield from (each for each in said.split("\n\n") if 300 <= len(each) <= 1200)
        elif (
            isinstance(node, ast.FunctionDef) and node.col_offset == 0 and 60 <= len(said) <= 700 and len(node.body) > 1
        ):
            yield "\n".join(text.splitlines()[node.lineno - 1 : node.body[0].end_lineno]) + "\n"


def write_answers(
    pipe: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    out: Path,
    *,
    rows: int,
    new_tokens: int,
    temperature: float = 0.0,
) -> int:
    """Append conversations of a prompt and the target's answer to a JSON lines file, ``rows`` at a time. Prompts that the file has already are not answered again.

    Args:
        pipe: a pipeline of the target.
        tokenizer: with a chat template.
        out: a record ``{"messages": [...]}`` per line.
        new_tokens: maximum length of an answer.
        temperature: 0 is greedy.

    Returns:
        Tokens of the new answers.
    """
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True) if out.exists() else []
    if lines and not lines[-1].endswith("\n"):  # the run was killed while it wrote
        out.write_text("".join(lines := lines[:-1]), encoding="utf-8")
    done = {json.loads(line)["messages"][0]["content"] for line in lines}
    waiting = [prompt for prompt in dict.fromkeys(prompts) if prompt not in done]
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    written = 0
    for at in range(0, len(waiting), rows):
        asked = waiting[at : at + rows]
        turns = [[{"role": "user", "content": prompt}] for prompt in asked]
        ids = [tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in turns]
        batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
        given = batch["input_ids"]
        torch.manual_seed(len(done) + at)
        new = pipe.generate(given, attention_mask=batch["attention_mask"], max_new_tokens=new_tokens, **sampling)
        answers = new[:, given.shape[1] :]
        with out.open("a", encoding="utf-8") as file:
            for turn, answer in zip(turns, answers, strict=True):
                text = tokenizer.decode(answer, skip_special_tokens=True)
                written += len(tokenizer(text)["input_ids"])
                file.write(json.dumps({"messages": [*turn, {"role": "assistant", "content": text}]}) + "\n")
        say(f"{len(done) + at + len(asked)} of {len(done) + len(waiting)} prompts answered, {written:,} new tokens")
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pipespec_train.writing", description=__doc__)
    parser.add_argument("--target", required=True, metavar="PATH", help="the model that writes, also a GGUF file")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="TOML file of templates and topics")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON lines, which grow")
    parser.add_argument("--count", type=int, metavar="N", help="answer the first N prompts only")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="prompts in a batch (32)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts' order (0)")
    args = parser.parse_args(arguments)
    tokenizer = load_tokenizer(args.target)
    pipe = Pipeline(args.target, schedule=PLAIN.name)
    prompts = prompts_of(args.prompts, args.seed)[: args.count]
    how = {"rows": args.rows, "new_tokens": args.max_new_tokens, "temperature": args.temperature}
    write_answers(pipe, tokenizer, prompts, args.out, **how)


if __name__ == "__main__":
    main()
