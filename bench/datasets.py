"""Readers of prompts: JSON lines, JSON, CSV or Parquet, also with ``.gz``. Parquet needs pyarrow. Nothing is downloaded.

| format | file | prompt |
|---|---|---|
| ``humaneval`` | ``HumanEval.jsonl(.gz)``: ``task_id``, ``prompt`` | the function head |
| ``gsm8k`` | ``test.jsonl``: ``question``, ``answer`` | the question |
| ``mt-bench`` | ``question.jsonl``: ``question_id``, ``turns`` | one per turn |
| ``cnn-dailymail`` | ``article``, ``highlights``, ``id`` | the article, after an instruction to summarise it |
| ``xsum`` | ``document``, ``summary``, ``id`` | as ``cnn-dailymail`` |
| ``mmlu`` | CSV without a header (question, A, B, C, D, answer), or ``question``, ``choices``, ``answer`` | the question with its choices |
| ``jsonl`` | any other | of ``prompt``, ``text``, ``question``, ``turns`` or ``messages``, or a string |
"""

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipespec.process.records import parse_json
from pipespec_train.record_files import records

Record = Mapping[str, Any]

FIELDS = "prompt, text, question, turns or messages"


@dataclass(frozen=True)
class Conversation:
    """One prompt of a dataset.

    Attributes:
        name: Identifier within the dataset.
        turns: What the user says, turn by turn. Only the first one is measured.
        system: A system message, for chat templates.
    """

    name: str
    turns: tuple[str, ...]
    system: str | None = None


def _first(record: Record, *names: str, default: Any = None) -> Any:
    """The first of these fields that a record has. ``KeyError`` without one, and without a default."""
    found = next((record[name] for name in names if record.get(name) is not None), default)
    if found is None:
        raise KeyError(names[0])
    return found


def _plain(record: Any, number: int) -> Conversation:
    if isinstance(record, str):
        return Conversation(str(number), (record,))
    name = str(_first(record, "id", "question_id", "task_id", default=number))
    if "messages" in record:
        roles = [(m["role"], m["content"]) for m in record["messages"]]
        system = next((text for role, text in roles if role == "system"), None)
        return Conversation(name, tuple(text for role, text in roles if role == "user"), system)
    if "turns" in record:
        return Conversation(name, turns_of(record))
    return Conversation(name, (_first(record, "prompt", "text", "question"),))


def turns_of(record: Record) -> tuple[str, ...]:
    if not isinstance(record["turns"], list):
        raise ValueError("turns must be a list")
    return tuple(record["turns"])


@dataclass(frozen=True)
class Format:
    """A file format. ``fields`` tell it apart from others, ``prompt_tokens`` are typical, for planted models. ``columns``: of a CSV without a header."""

    fields: tuple[str, ...]
    read: Callable[[Any, int], Conversation]
    prompt_tokens: int
    columns: tuple[str, ...] | None = None


def _human_eval(record: Record, number: int) -> Conversation:
    return Conversation(str(record["task_id"]), (record["prompt"],))


def _gsm8k(record: Record, number: int) -> Conversation:
    return Conversation(str(number), (record["question"],))


def _mt_bench(record: Record, number: int) -> Conversation:
    return Conversation(str(record["question_id"]), turns_of(record))


def _summary(article: str, how: str, record: Record, number: int) -> Conversation:
    prompt = f"Summarize the following article{how}.\n\n{record[article]}\n\nSummary:"
    return Conversation(str(record.get("id") or number), (prompt,))


def _mmlu(record: Record, number: int) -> Conversation:
    choices = record["choices"] if "choices" in record else [record[letter] for letter in "ABCD"]
    if isinstance(choices, str):  # in a CSV
        choices = parse_json(choices)
    subject = str(record.get("subject") or "").replace("_", " ")
    about = f" about {subject}" if subject else ""
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True)]
    head = f"The following is a multiple choice question{about}. Explain your answer."
    return Conversation(str(number), ("\n".join([head, "", record["question"], *lines, "Answer:"]),))


FORMATS: dict[str, Format] = {
    "jsonl": Format((), _plain, 128),
    "humaneval": Format(("task_id", "prompt"), _human_eval, 160),
    "mt-bench": Format(("question_id", "turns"), _mt_bench, 80),
    "gsm8k": Format(("question", "answer"), _gsm8k, 60),
    "cnn-dailymail": Format(("article", "highlights"), partial(_summary, "article", ""), 900),
    "xsum": Format(("document", "summary"), partial(_summary, "document", " in one sentence"), 500),
    "mmlu": Format(("question", "choices", "answer"), _mmlu, 120, ("question", "A", "B", "C", "D", "answer")),
}
"""By name. Of several formats whose fields a file has, the one with the most fields."""


def read(file: Path, form: str | None = None) -> tuple[str, list[Conversation]]:
    """Read all prompts of a file.

    Args:
        file: JSON lines, JSON, CSV or Parquet, also compressed (``.gz``).
        form: One of :data:`FORMATS`; None: by the fields of the first record.

    Returns:
        The format, and the prompts in the order of the file.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The file is Parquet, and pyarrow is not installed.
        ValueError: The file is empty, damaged, or not of this format.
    """
    if form is not None and form not in FORMATS:
        raise ValueError(f"no format {form!r} of prompts: there are {', '.join(FORMATS)}")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    entries = list(records(file, lambda text: _csv(text, form)))
    if not entries:
        raise ValueError(f"{file} has no prompts")
    form = form or guessed(entries[0])
    if isinstance(entries[0], dict) and "turns" in entries[0] and not set(FORMATS[form].fields) <= set(entries[0]):
        form = guessed(entries[0])  # HumanEval and GSM8K are also published in the format of MT-Bench
    found: list[Conversation] = []
    for number, record in enumerate(entries):
        try:
            conversation = FORMATS[form].read(record, number)
            if not conversation.turns or not all(isinstance(t, str) and t.strip() for t in conversation.turns):
                raise ValueError("the prompt is empty")
            for text in (*conversation.turns, *([] if conversation.system is None else [conversation.system])):
                text.encode()  # half of a surrogate pair is no text, and no tokenizer takes it
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"lacks the field {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
            needed = ", ".join(FORMATS[form].fields) or FIELDS
            raise ValueError(
                f"{file}: entry {number + 1} {what}; the format {form!r} has the fields {needed}"
            ) from error
        found.append(conversation)
    names = [c.name for c in found]
    if len(set(names)) < len(names):  # several subjects or splits in one file
        found = [Conversation(str(i), c.turns, c.system) for i, c in enumerate(found)]
    return form, found


def guessed(record: Any) -> str:
    """The format of a record, by its fields."""
    known = [
        name for name, f in FORMATS.items() if f.fields and isinstance(record, dict) and set(f.fields) <= set(record)
    ]
    return max(known, key=lambda name: len(FORMATS[name].fields), default="jsonl")


def _csv(text: str, form: str | None) -> list[Any]:
    rows = list(csv.reader(io.StringIO(text)))
    for name, known in FORMATS.items():
        columns = known.columns
        is_headless = columns and rows and len(rows[0]) == len(columns) and rows[0][0] != columns[0]
        if columns and is_headless and form in (None, name) and rows[0][-1].strip() in "ABCD":  # a right choice
            return [{"question": r[0], "choices": r[1:5], "answer": r[5]} for r in rows if len(r) == len(columns)]
    return list(csv.DictReader(io.StringIO(text)))


def messages(conversation: Conversation) -> list[dict[str, str]]:
    """The first turn as the messages of a chat template."""
    found = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    return [*found, {"role": "user", "content": conversation.turns[0]}]
