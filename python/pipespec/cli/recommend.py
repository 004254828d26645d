"""``pipespec recommend``: which drafts to use, or none, for a target and the user's prompts."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.cli.options import DTYPES, Subparsers, flag, option, positive, read_text, require_models, require_text
from pipespec.config import SpeculationConfig
from pipespec.process.progress import aligned, quiet_transformers, say, working
from pipespec.process.records import parse_json
from pipespec.registry import LOCKSTEP, PLAIN

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MARGIN = 1.05
"""Minimum measured speed-up for which drafts are recommended."""
_MAX_PROMPTS = 4
_FIELDS = ("prompt", "text", "question", "turns")
_NGRAM = "ngram"
_BUILT_IN = (
    "The main reasons why a program is slower than expected are",
    "def median(values):\n    values = sorted(values)\n",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long is the journey? Answer:",
)


@dataclass(frozen=True)
class Candidate:
    """One way to run the target.

    Attributes:
        drafts: As ``Pipeline`` takes them; none: plain decoding.
        rate: Tokens per second.
        acceptance: Share of the draft tokens that the target has kept; None: there were none.
    """

    drafts: tuple[str, ...]
    rate: float
    acceptance: float | None = None

    def code(self, target: str, dtype: str) -> str:
        """The line of code that makes this pipeline."""
        arguments = [repr(target)]
        if self.drafts:
            arguments.append(f"drafts={list(self.drafts)!r}")
        arguments.append(f"schedule={(LOCKSTEP if self.drafts else PLAIN).name!r}")
        if dtype != "auto":
            arguments.append(f"dtype={dtype!r}")
        return f"pipe = pipespec.Pipeline({', '.join(arguments)})"


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser(
        "recommend", help="which drafts to use, or none, on your prompts", description=run.__doc__
    )
    parser.set_defaults(command=run)
    option(parser, "target", "PATH", str, "model that defines the text (default: the bundled family)")
    option(parser, "draft", "PATH", str, "a candidate; may be repeated", action="append", default=[])
    prompts = f"a text file, or JSON lines with prompts; the first {_MAX_PROMPTS} count (default: a few built-in ones)"
    option(parser, "prompts", "FILE", Path, prompts)
    option(parser, "new-tokens", "N", positive, "new tokens per prompt (%(default)s)", default=32)
    option(parser, "dtype", None, str, "default: as stored; float32 for the bundled family", choices=DTYPES)
    flag(parser, "trust-remote-code", "allow a model's own Python code to run")
    flag(parser, "json", "the figures as JSON")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Run candidates for the drafts of a target on the CPU, one after the other: none, prompt lookup (ngram), each --draft, and pairs of them. The last line
    is code to copy."""
    target, drafts, dtype = args.target, [d for d in args.draft if d != _NGRAM], args.dtype or "auto"
    require_models(target, *drafts)
    if target is None:
        from pipespec.demo import family_path

        target, dtype = str(family_path("target")), args.dtype or "float32"
        drafts += [str(family_path("small")), str(family_path("medium"))]
    prompts = None if args.prompts is None else read_prompts(args.prompts)
    with quiet_transformers():
        found = _measured(args, target, list(dict.fromkeys(drafts)), dtype, prompts)
    plain = next(c for c in found if not c.drafts)
    best = max(found, key=lambda c: c.rate)
    if best.rate < MARGIN * plain.rate:
        best = plain
    code = best.code(target, dtype)
    if args.json:
        named = [asdict(c) | {"speedup": c.rate / plain.rate} for c in found]
        print(json.dumps({"candidates": named, "chosen": asdict(best), "code": code}, indent=1))
    else:
        print(table(found, plain, best))
        print(f"\n{code}")
    return 0


def read_prompts(file: Path) -> list[str]:
    """The first prompts of JSON lines: strings, or objects with ``prompt``, ``text``, ``question``, or ``turns``, of which the first counts. Any other file is one
    prompt."""
    if not file.exists() or file.is_dir():
        raise FileNotFoundError(f"--prompts {str(file)!r} is no file: it names a text file, or JSON lines with prompts")
    text = read_text(file)
    if file.suffix != ".jsonl":
        return [text]
    found = []
    for number, line in enumerate((line for line in text.split("\n") if line.strip()), 1):
        try:
            record = parse_json(line)
            said = record if isinstance(record, str) else next(record[name] for name in _FIELDS if name in record)
            found.append(require_text(said if isinstance(said, str) else said[0], f"{file}, entry {number}"))
        except (ValueError, TypeError, LookupError, StopIteration, AttributeError) as error:
            raise ValueError(
                f"{file}, entry {number}, is no prompt: a string, or an object with {', '.join(_FIELDS)}"
            ) from error
        if number == _MAX_PROMPTS:
            break
    return found


def _measured(
    args: argparse.Namespace, path: str, drafts: Sequence[str], dtype: str, prompts: list[str] | None
) -> list[Candidate]:
    """All candidates, the fastest first."""
    with working("loading the models"):
        from pipespec.api.pipeline import Loading, given_drafts, load_chain
        from pipespec.models.loading import load_model
        from pipespec.models.tokenizers import load_tokenizer

        loading: dict[str, Any] = {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
        target = load_model(path, **loading)
        models: dict[str, PreTrainedModel] = {}
        for name in drafts:
            chain = load_chain(target, given_drafts(name), SpeculationConfig(), Loading(**loading))
            if any(draft.translates for draft in chain.drafts):
                say(f"skipped {name}: it has another tokenizer than the target")
            elif any(draft.reads_target for draft in chain.drafts):
                say(f"skipped {name}: it is a draft head")
            else:
                models[name] = chain.models[0]
        tokenizer = load_tokenizer(path, trust_remote_code=args.trust_remote_code)
        ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts or _BUILT_IN]
        limit, longest = getattr(target.config, "max_position_embeddings", None), max(i.shape[1] for i in ids)
        if limit is not None and longest + args.new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {args.new_tokens} new ones pass the target's limit of {limit}: give shorter prompts, or "
                "fewer --new-tokens"
            )
    found, chains = [], candidates({name: model.num_parameters() for name, model in models.items()})
    for number, chosen in enumerate(chains, 1):
        with working(f"running {' + '.join(chosen) or 'plain decoding'} ({number} of {len(chains)})"):
            found.append(_run(target, models, chosen, ids, args.new_tokens))
    return sorted(found, key=lambda c: -c.rate)


def candidates(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """No draft, the n-gram index, each draft, and pairs: the index or a smaller draft before a draft. ``sizes``: parameters by name."""
    ordered = sorted(sizes, key=sizes.__getitem__)
    return [(), (_NGRAM,), *((name,) for name in ordered), *itertools.combinations([_NGRAM, *ordered], 2)]


def _run(
    target: PreTrainedModel,
    models: dict[str, PreTrainedModel],
    chosen: tuple[str, ...],
    prompts: Sequence[torch.Tensor],
    new: int,
) -> Candidate:
    import torch

    from pipespec.api.pipeline import Pipeline

    tokens, seconds, drafted, accepted = 0, 0.0, 0, 0
    drafts = [models.get(name, name) for name in chosen]
    with Pipeline(target, drafts, schedule=(LOCKSTEP if drafts else PLAIN).name, prefix_cache=0) as pipe:
        # Caches and packed weights are there from the first call on.
        for number, ids in enumerate([prompts[0], *prompts]):
            pipe.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new if number else min(new, 4), do_sample=False
            )
            if number and (report := pipe.report) is not None:
                tokens, seconds = tokens + report.tokens, seconds + report.seconds
                drafted, accepted = drafted + report.stages[-1].drafted, accepted + report.stages[-1].accepted
    return Candidate(chosen, tokens / seconds, accepted / drafted if drafted else None)


def table(found: Sequence[Candidate], plain: Candidate, best: Candidate) -> str:
    """The candidates as a table, and the reason for the choice."""
    last = {name: Path(name).name for c in found for name in c.drafts}
    labels = last if len(set(last.values())) == len(last) else {name: name for name in last}
    lines: list[Sequence[str]] = [("", "drafts", "acceptance", "tokens/s", "vs plain")]
    lines += [
        (
            "->" if c is best else "",
            " + ".join(labels[name] for name in c.drafts) or "none",
            "-" if c.acceptance is None else f"{c.acceptance:.2f}",
            f"{c.rate:.1f}",
            f"{c.rate / plain.rate:.2f}x",
        )
        for c in found
    ]
    reason = "drafting pays" if best.drafts else f"do not draft: no candidate reaches {MARGIN:.2f}x of plain decoding"
    return f"{aligned(lines, left=2)}\n{reason}"
