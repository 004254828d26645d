"""Is the speculative text the plain text, bit for bit? ``python -m bench.exact [--models FOLDER] [--device cuda] [--prompts N] [--json FILE] [--quick]``

The plain text of each prompt, decoded alone, is compared with the text of every way to decode it: schedules, drafts, batches, threads, caches that hold
the beginning of another text. Every other prompt is sampled, with a seed. Targets are the bundled one in each weight format, and the GGUF files in FOLDER,
whose drafts are the smaller files with their tokenizer. A text that differs is listed with the position of its first other token; the exit status is then 1.

On a GPU models have 16 bits, or weights in tiles, and all ways are captured steps. Batches are of so few rows that a step has at most 16 columns: those have the bits of one. The library's
products over their prompts have not, so batches are decoded with ``exact=True``, and so is the text that theirs is compared with.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pipespec
from bench.harness import choose_sizes, markdown_table, save
from bench.machine import provenance
from pipespec import Pipeline
from pipespec.checks.tokenizers import tokenizer_digest
from pipespec.demo import family_path
from pipespec.models.loading import load_model
from pipespec.models.tokenizers import load_tokenizer
from pipespec.registry import LOCKSTEP, PLAIN, STREAMS, WORKERS

RESULTS = Path(__file__).parent / "results" / "exact.json"
BLOCKS = ("q8_0", "q6_k", "q5_k", "q5_0", "q4_k", "q4_1", "q4_0")
FORMATS = {"cpu": ("float32", "int8", *BLOCKS), "cuda": ("bfloat16", *BLOCKS)}
"""By device, those of the bundled target. The first one is its dtype, in which it stays."""


class Way(NamedTuple):
    """One way to decode: drafts, options of the pipeline, prompts per call, threads, and whether the calls continue from one cache."""

    name: str
    drafts: list[Any]
    options: dict[str, Any]
    rows: int = 1
    threads: int | None = None
    reuse: bool = False


class Case(NamedTuple):
    """A target with its drafts, and the tokenizer of both."""

    name: str
    target: Any
    drafts: list[Any]
    tokenizer: Any
    weights: str | None = None


def ways(drafts: Sequence[Any]) -> list[Way]:
    """The ways to decode a target with these drafts, the best one last."""
    found = [
        Way("plain, batch", [], {"schedule": PLAIN.name}, rows=5),
        Way("plain, one thread", [], {"schedule": PLAIN.name}, threads=1),
        Way("plain, cache kept", [], {"schedule": PLAIN.name}, reuse=True),
        Way("n-gram, default", [], {}, rows=2),
    ]
    if drafts:
        best = drafts[-1]
        found += [
            Way("lockstep", [best], {"schedule": LOCKSTEP.name, "lookahead": 5}),
            Way("lockstep, batch", [best], {"schedule": LOCKSTEP.name, "lookahead": 3}, rows=4),
            Way("lockstep, cache kept", [best], {"schedule": LOCKSTEP.name, "lookahead": 4}, reuse=True),
            Way("n-gram and draft", ["ngram", best], {"schedule": LOCKSTEP.name, "lookahead": 4}, rows=3),
            Way("default", [best], {}),
            Way("workers", [best], {"schedule": WORKERS.name}, rows=2),
            Way("workers, one thread", [best], {"schedule": WORKERS.name}, threads=1),
        ]
    if len(drafts) > 1:
        found.append(Way("all drafts", list(drafts), {"schedule": LOCKSTEP.name, "lookahead": 3}, rows=2))
    return found


def captured_ways(drafts: Sequence[Any]) -> list[Way]:
    """The ways on a GPU, the default one last."""
    best = list(drafts[-1:])
    found = [
        Way("plain, batch", [], {"schedule": PLAIN.name}, rows=5),
        Way("plain, cache kept", [], {"schedule": PLAIN.name}, reuse=True),
        Way("n-gram", ["ngram"], {"schedule": LOCKSTEP.name, "lookahead": 5}),
    ]
    if best:
        found += [
            Way("rounds", best, {"schedule": LOCKSTEP.name, "lookahead": 5}),
            Way("rounds, batch", best, {"schedule": LOCKSTEP.name, "lookahead": 3}, rows=4),
            Way("rounds, cache kept", best, {"schedule": LOCKSTEP.name, "lookahead": 4}, reuse=True),
            Way("draft and n-gram", [*best, "ngram"], {"schedule": LOCKSTEP.name, "lookahead": 4}, rows=3),
            Way("streams", best, {"schedule": STREAMS.name, "lookahead": 4}, rows=2),
            Way("default", best, {"schedule": LOCKSTEP.name}),
        ]
    return [way._replace(options=way.options | {"graphs": True, "exact": way.rows > 1}) for way in found]


def prompts_of(tokenizer: Any, count: int, seed: int) -> list[torch.Tensor]:
    """Pieces of this package's sources, int64 ``[n]``, of 4 to 200 tokens."""
    files = sorted(Path(pipespec.__file__).parent.rglob("*.py"))
    draw, found = random.Random(seed), list[torch.Tensor]()
    while len(found) < count:
        text = draw.choice(files).read_text(encoding="utf-8")
        ids = tokenizer(text[(at := draw.randrange(max(1, len(text) - 2000))) : at + 2000]).input_ids
        length = round(4 * 50 ** draw.random())
        if len(ids) >= length:
            found.append(torch.tensor(ids[:length]))
    return found


def decode(pipe: Pipeline, prompts: Sequence[torch.Tensor], numbers: Sequence[int], tokens: int) -> list[list[int]]:
    """The new tokens of prompts in one call. Those of odd numbers are sampled, so a call has numbers of one kind."""
    longest, pad = max(map(len, prompts)), 0
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    ids, mask = ids.to(pipe.target.device), mask.to(pipe.target.device)
    how: dict[str, Any] = {"do_sample": False}
    if numbers[0] % 2:
        how = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0, "seed": list(numbers)}
    out = pipe.generate(ids, attention_mask=mask, max_new_tokens=tokens, eos_token_id=None, pad_token_id=pad, **how)
    return out[:, longest:].tolist()


def texts(pipe: Pipeline, prompts: Sequence[torch.Tensor], way: Way, tokens: int) -> Iterator[list[int]]:
    """The texts of all prompts, in order."""
    found: dict[int, list[int]] = {}
    for kind in (0, 1):
        numbers = list(range(kind, len(prompts), 2))
        for begin in range(0, len(numbers), way.rows):
            some = numbers[begin : begin + way.rows]
            if way.reuse:
                # The cache holds the beginning of this prompt, after it another text.
                decode(pipe, [prompts[some[0]][: max(1, len(prompts[some[0]]) // 2)]], [0], 3)
            found |= dict(zip(some, decode(pipe, [prompts[i] for i in some], some, tokens), strict=True))
    return (found[i] for i in range(len(prompts)))


def compare(case: Case, prompts: Sequence[torch.Tensor], tokens: int, captured: bool = False) -> list[dict[str, Any]]:
    """Per way: texts, equal texts, and where the others differ first. ``captured``: all of them in captured steps."""
    threads = torch.get_num_threads()
    target, weights, plain, form = case.target, case.weights, dict[bool, list[list[int]]](), ""
    for exact in (False, True)[: 1 + captured]:
        options: dict[str, Any] = {"graphs": True, "exact": exact} if captured else {}
        try:
            pipe = Pipeline(target, schedule=PLAIN.name, weights=weights, **options)
        except ValueError as error:
            if not exact:
                raise
            print(f"{case.name}: no exact form: {error}", file=sys.stderr, flush=True)
            continue
        with pipe:
            plain[exact] = list(texts(pipe, prompts, Way("plain", [], {}), tokens))
            form = form or (pipe.report.stages[-1].forward if pipe.report else "")
            target, weights = pipe.target, None
    rows, count = [], len(prompts)
    for way in (captured_ways if captured else ways)(case.drafts):
        if way.options.get("exact", False) not in plain:
            continue
        torch.set_num_threads(way.threads or threads)
        drafted = 0
        try:
            with Pipeline(target, way.drafts, **way.options) as pipe:
                others, wanted = [], plain[way.options.get("exact", False)]
                for i, (expected, found) in enumerate(zip(wanted, texts(pipe, prompts, way, tokens), strict=True)):
                    at = next(
                        (k for k, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None
                    )
                    if at is not None:
                        others.append([i, at])
                drafted = pipe.report.stages[-1].drafted if pipe.report else 0
        finally:
            torch.set_num_threads(threads)
        rows.append(
            {
                "target": case.name,
                "forward": form,
                "way": way.name,
                "texts": count,
                "equal": count - len(others),
            }
            | {"others": others, "drafted_in_last_call": drafted}
        )
        print(f"{case.name}: {way.name}: {rows[-1]['equal']} of {count}", file=sys.stderr, flush=True)
    return rows


def bundled(formats: Sequence[str], device: str) -> Iterator[Case]:
    """The bundled target in each format, with the bundled drafts."""
    tokenizer, dtype = load_tokenizer(family_path("target")), FORMATS[device][0]
    for name in formats:
        target, *drafts = (
            load_model(family_path(part), dtype=dtype, device=device) for part in ("target", "small", "medium")
        )
        yield Case(f"bundled, {name}", target, drafts, tokenizer, None if name == dtype else name)


def in_folder(folder: Path, device: str) -> Iterator[Case]:
    """The GGUF files of a folder."""
    files = sorted(folder.glob("*.gguf"), key=lambda file: file.stat().st_size)
    digests = {file: tokenizer_digest(file, None) for file in files}
    for i, file in enumerate(files):
        drafts = [other for other in files[:i] if digests[other] == digests[file]]
        given: list[Any] = [str(path) for path in (*drafts, file)]
        if device != "cpu":
            given = [load_model(path, device=device) for path in given]
        yield Case(file.name, given[-1], given[:-1], load_tokenizer(file))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exact", description=__doc__)
    parser.add_argument("--models", type=Path, help="a folder with GGUF files")
    parser.add_argument("--device", choices=list(FORMATS), default="cpu", help="default: %(default)s")
    parser.add_argument("--formats", nargs="*", default=None, help="weight formats of the bundled target")
    parser.add_argument("--prompts", type=int, help="per bundled target")
    parser.add_argument("--real-prompts", type=int, help="per GGUF file")
    parser.add_argument("--tokens", type=int, help="new tokens of a text")
    parser.add_argument("--quick", action="store_true", help="few prompts")
    parser.add_argument("--json", type=Path, default=None, help=f"where the counts go, for example {RESULTS}")
    options = parser.parse_args(arguments)
    choose_sizes(options, prompts=(100, 6), real_prompts=(8, 2), tokens=(64, 24))
    formats = FORMATS[options.device] if options.formats is None else options.formats
    rows: list[dict[str, Any]] = []
    record = {"benchmark": "exact", "machine": provenance(), "tokens": options.tokens, "rows": rows}
    for cases, count in (
        (bundled(formats, options.device), options.prompts),
        (in_folder(options.models, options.device) if options.models else (), options.real_prompts),
    ):
        for case in cases:
            prompts = prompts_of(case.tokenizer, count, seed=1)
            rows += compare(case, prompts, options.tokens, captured=options.device != "cpu")
            save(options.json, record)
    print(
        markdown_table(
            ("target", "forward", "way", "equal"),
            [(r["target"], r["forward"], r["way"], f"{r['equal']} of {r['texts']}") for r in rows],
        )
    )
    total, equal = sum(row["texts"] for row in rows), sum(row["equal"] for row in rows)
    print(f"\n{equal} of {total} texts are the plain text")
    return int(equal != total)


if __name__ == "__main__":
    sys.exit(main())
