"""The file formats in which datasets are published. Importing this module adds them to :data:`pipespec.bench.datasets.FORMATS`.

| format | file | prompt |
|---|---|---|
| ``humaneval`` | ``HumanEval.jsonl(.gz)``: ``task_id``, ``prompt`` | the function head |
| ``gsm8k`` | ``test.jsonl``: ``question``, ``answer`` | the question |
| ``mt-bench`` | ``question.jsonl``: ``question_id``, ``turns`` | one per turn |
| ``cnn-dailymail`` | ``article``, ``highlights``, ``id`` | the article, behind an instruction to summarise it |
| ``xsum`` | ``document``, ``summary``, ``id`` | as ``cnn-dailymail`` |
| ``mmlu`` | CSV without a header (question, A, B, C, D, answer), or ``question``, ``choices``, ``answer`` | the question with its choices |
"""

from __future__ import annotations

from functools import partial

from pipespec.bench.datasets import FORMATS, Conversation, Format, Record, turns_of
from pipespec.process.records import parse_json


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


FORMATS.update(
    {
        "humaneval": Format(("task_id", "prompt"), _human_eval, 160),
        "mt-bench": Format(("question_id", "turns"), _mt_bench, 80),
        "gsm8k": Format(("question", "answer"), _gsm8k, 60),
        "cnn-dailymail": Format(("article", "highlights"), partial(_summary, "article", ""), 900),
        "xsum": Format(("document", "summary"), partial(_summary, "document", " in one sentence"), 500),
        "mmlu": Format(("question", "choices", "answer"), _mmlu, 120, ("question", "A", "B", "C", "D", "answer")),
    }
)
