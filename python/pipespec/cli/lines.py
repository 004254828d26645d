"""``pipespec generate --json-lines``: many prompts in, a line of JSON for each."""

from __future__ import annotations

import argparse
import json
from typing import Any


def prompt_of(line: str, number: int) -> dict[str, Any]:
    """A line of the input as an object with ``prompt``: a JSON object has it, a JSON string or any other line is it.

    Raises:
        ValueError: An object without a text as its ``prompt``.
    """
    try:
        found = json.loads(line)
    except ValueError:
        return {"prompt": line}
    if isinstance(found, str):
        return {"prompt": found}
    if not isinstance(found, dict):
        return {"prompt": line}
    if not isinstance(found.get("prompt"), str) or not found["prompt"]:
        raise ValueError(f'line {number}: the object has no text as its "prompt"')
    return found


def write_lines(args: argparse.Namespace, pipe: Any, tokenizer: Any, lines: list[str]) -> None:
    """Print, for each line that is not empty, its object with ``text``, ``finish_reason``, ``tokens`` and ``seconds``.

    Args:
        args: The options of ``pipespec generate``.
    """
    from pipespec.cli.generate import encode, sampling_options
    from pipespec.models.properties import end_tokens

    given = [prompt_of(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    options = sampling_options(args, tokenizer)
    ends = set(end_tokens(pipe.target))
    for entry in given:
        inputs = encode(tokenizer, entry["prompt"], args.chat).to(pipe.target.device)
        output = pipe.generate(**inputs, max_new_tokens=args.max_new_tokens, **options)
        new = output[0, inputs.input_ids.shape[1] :].tolist()
        is_cut = len(new) == args.max_new_tokens and new[-1] not in ends
        found = {
            "text": tokenizer.decode(new, skip_special_tokens=True),
            "finish_reason": "length" if is_cut else "stop",
            "tokens": len(new),
            "seconds": round(pipe.report.seconds, 3),
        }
        print(json.dumps(entry | found, ensure_ascii=False), flush=True)
