"""Time to the first token of each turn of conversations, through servers with OpenAI's API: ``pipespec serve``, llama.cpp's ``llama-server`` and others.

    python -m bench.conversation ours=http://localhost:8000 llama.cpp=http://localhost:8080 --out turns.json

Start the servers first, with the same model and the same threads. One of them works at a time: the requests go to each server in turn. Three kinds:
``chat``, one conversation whose turns add a question each; ``agents``, one system prompt with other questions; ``alternating``, two conversations by turns.
Each server hears its own answers again, as a client sends them. The texts are lines of a file (default: docs/calls.md).
"""

import argparse
import json
import platform
import statistics
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Message = dict[str, str]
TURNS, SYSTEM_WORDS, QUESTION_WORDS = 6, 700, 25


def conversations(kind: str, words: list[str], system: int = SYSTEM_WORDS) -> Iterator[tuple[int, bool, str, str]]:
    """Per request: the conversation's number, whether it starts again, its system prompt, and the question."""
    for turn in range(TURNS):
        for number in range(2 if kind == "alternating" else 1):
            begin = number * system
            at = 2 * system + (turn * 2 + number) * QUESTION_WORDS
            question = "What do you make of this? " + " ".join(words[at : at + QUESTION_WORDS])
            yield number, kind == "agents" or turn == 0, " ".join(words[begin : begin + system]), question


def model_of(url: str) -> str:
    """The name of the first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


def ask(url: str, model: str, messages: list[Message], tokens: int) -> tuple[float, float, str, dict[str, Any]]:
    """Seconds to the first token and to the last one, the answer, and the usage that the server reports."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin, first, answer, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(request, timeout=600) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - begin
                    answer += text
    return first, time.perf_counter() - begin, answer, usage


def measure(servers: dict[str, tuple[str, str]], kind: str, words: list[str], tokens: int) -> list[dict[str, Any]]:
    """A row per server and request."""
    held: dict[tuple[str, int], list[Message]] = {}
    rows = []
    for at, (number, is_new, system, question) in enumerate(conversations(kind, words)):
        for name, (url, model) in servers.items():
            if is_new:
                held[name, number] = [{"role": "system", "content": system}]
            messages = [*held[name, number], {"role": "user", "content": question}]
            first, total, answer, usage = ask(url, model, messages, tokens)
            held[name, number] = [*messages, {"role": "assistant", "content": answer}]
            prompt, cached = usage.get("prompt_tokens"), (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            row = {"kind": kind, "server": name, "request": at + 1, "first": first, "total": total}
            rows.append(row | {"prompt": prompt, "cached": cached})
            print(f"{kind:12} {at + 1:3} {name:12} {first:7.2f} s of {prompt} tokens, cached {cached}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: seconds to the first token, of the first request and the median of the later ones."""
    lines = ["| kind | server | first request, s | later ones, median, s |", "|---|---|---:|---:|"]
    for kind, server in dict.fromkeys((row["kind"], row["server"]) for row in rows):
        seconds = [row["first"] for row in rows if (row["kind"], row["server"]) == (kind, server)]
        lines.append(f"| {kind} | {server} | {seconds[0]:.2f} | {statistics.median(seconds[1:]):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", help="the name that requests give (default: the first one that a server lists)")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs" / "calls.md")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--kinds", nargs="+", choices=("chat", "agents", "alternating"), default=["chat", "agents", "alternating"])  # fmt: skip
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    words = options.text.read_text(encoding="utf-8").split()
    urls = dict(given.split("=", 1) for given in options.servers)
    servers = {name: (url, options.model or model_of(url)) for name, url in urls.items()}
    rows = [row for kind in options.kinds for row in measure(servers, kind, words, options.tokens)]
    print(f"\n{table(rows)}")
    if options.out is not None:
        record = {"machine": platform.processor() or platform.machine(), "tokens": options.tokens, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
