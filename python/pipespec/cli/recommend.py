"""``pipespec recommend``: which drafts to use, or none, for a target and the user's prompts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.cli.options import DTYPES, Subparsers, at_least_one, read_text
from pipespec.config import SpeculationConfig
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.process.table import aligned
from pipespec.registry import LOCKSTEP, PLAIN

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from pipespec.planning.measure import Text
    from pipespec.planning.steps import StepTimes

MARGIN = 1.05
"""Least measured speed-up for which drafts are recommended."""
MEASURED = 3
"""Candidates that are run."""
_MOST_PROMPTS = 4
_LOOKAHEADS = range(1, 17)
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
        predicted: Tokens per second.
        agreement: Of each draft: share of the target's tokens that it chooses; of an n-gram index, of the positions where it has a match.
        lookahead: Draft tokens per verification that the prediction takes to be best.
        measured: Tokens per second; None: not run.
    """

    drafts: tuple[str, ...]
    predicted: float
    agreement: tuple[float, ...] = ()
    lookahead: int = 0
    measured: float | None = None

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
    """Add the command."""
    parser = commands.add_parser(
        "recommend", help="which drafts to use, or none, on your prompts", description=run.__doc__
    )
    parser.set_defaults(command=run)
    parser.add_argument("--target", metavar="PATH", help="model that defines the text (default: the bundled family)")
    parser.add_argument("--draft", metavar="PATH", action="append", default=[], help="a candidate; may be repeated")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help=f"a text, or prompts as `pipespec bench` reads them; the first {_MOST_PROMPTS} count (default: a few built-in ones)",
    )
    parser.add_argument("--new-tokens", metavar="N", type=int, default=32, help="new tokens per prompt (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as stored; float32 for the bundled family")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Compare candidates for the drafts of a target on the CPU: those of --draft, prompt lookup (ngram), and pairs of them. The target writes a short text
    behind each prompt; step times and each draft's agreement with these texts are measured, and the closed forms predict tokens per second. The best three
    are run. The last line is code to copy."""
    at_least_one(args, "new_tokens")
    target, drafts, dtype = _given(args)
    prompts = None if args.prompts is None else _read_prompts(args.prompts)[:_MOST_PROMPTS]
    with quiet_transformers():
        found, texts = _compare(args, target, drafts, dtype, prompts)
    best = max(found, key=lambda c: c.measured or 0.0)
    plain = next(c for c in found if not c.drafts)
    assert plain.measured is not None
    assert best.measured is not None
    if best.measured < MARGIN * plain.measured:
        best = plain
    code = best.code(target, dtype)
    if args.json:
        named = [asdict(c) | {"speedup": _speedup(c, plain)} for c in found]
        print(json.dumps({"candidates": named, "chosen": asdict(best), "code": code, "texts": texts}, indent=1))
    else:
        print(table(found, plain, best))
        print(f"\n{code}")
    return 0


def _given(args: argparse.Namespace) -> tuple[str, list[str], str]:
    """Target, candidates beside prompt lookup, and dtype."""
    drafts = [d for d in args.draft if d != _NGRAM]
    if args.target is not None:
        return args.target, list(dict.fromkeys(drafts)), args.dtype or "auto"
    from pipespec.demo import family_path

    drafts += [str(family_path("small")), str(family_path("medium"))]
    return str(family_path("target")), list(dict.fromkeys(drafts)), args.dtype or "float32"


def _read_prompts(file: Path) -> list[str]:
    """A dataset's prompts (their first turns), as ``pipespec bench`` reads them; any other file is one prompt."""
    from pipespec.bench import datasets

    if not datasets.is_dataset(file):
        return [read_text(file)]
    return [conversation.turns[0] for conversation in datasets.read(file)[1]]


def _compare(
    args: argparse.Namespace, path: str, drafts: Sequence[str], dtype: str, prompts: list[str] | None
) -> tuple[list[Candidate], int]:
    """Measure, predict, and run: plain decoding and the best candidates first; and the number of texts."""
    with working("loading the models"):
        from pipespec.api.chain import Loading, load_chain
        from pipespec.models.loading import load_model
        from pipespec.models.tokenizers import load_tokenizer
        from pipespec.planning.measure import agreement, step_times, written_by

        loading: dict[str, Any] = {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
        target = load_model(path, **loading)
        models: dict[str, PreTrainedModel] = {}
        for name in drafts:
            chain = load_chain(target, [name], SpeculationConfig(lookahead=(1,)), Loading(**loading))
            if chain.translation is None:
                models[name] = chain.models[0]
            else:
                say(f"skipped {name}: it has another tokenizer than the target")
        tokenizer = load_tokenizer(path, trust_remote_code=args.trust_remote_code)
        ids = [tokenizer(prompt).input_ids for prompt in prompts or _BUILT_IN]
        limit, longest = getattr(target.config, "max_position_embeddings", None), max(map(len, ids))
        if limit is not None and longest + args.new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {args.new_tokens} new ones pass the target's limit of {limit}: give shorter prompts, or "
                "fewer --new-tokens"
            )
    with working("the target writes a text behind each prompt"):
        texts = written_by(target, ids, args.new_tokens)
    with working("measuring step times and agreement"):
        steps = step_times(target, "target")
        measured = {name: (float(agreement(m, texts).mean()), step_times(m, name)) for name, m in models.items()}
    found = predictions(steps, measured, lookups(texts))
    best = [c for c in found if c.drafts][:MEASURED]
    rates: list[Candidate] = []
    for number, candidate in enumerate([next(c for c in found if not c.drafts), *best], 1):
        with working(f"running {' + '.join(candidate.drafts) or 'plain decoding'} ({number} of {1 + len(best)})"):
            rates.append(replace(candidate, measured=_rate(target, models, candidate, texts, args.new_tokens)))
    rates.sort(key=lambda c: -(c.measured or 0.0))
    return [*rates, *(c for c in found if c.drafts and c not in best)], len(texts)


def lookups(texts: Sequence[Text]) -> list[np.ndarray]:
    """What an n-gram index drafts at each new position of each text: 1 for the target's token, 0 for another one, -1 for none."""
    import numpy as np

    from pipespec.engine.ngram import NgramDraft

    found = []
    for text, first in texts:
        drafted = NgramDraft().followers(text, first)
        found.append(np.where(drafted < 0, -1, drafted == text[first:]))
    return found


def predictions(
    target: StepTimes, drafts: dict[str, tuple[float, StepTimes]], index: Sequence[np.ndarray]
) -> list[Candidate]:
    """Plain decoding, each draft, the index, the index beside each draft, and pairs of drafts, by predicted tokens per second.

    Args:
        target: Its step times.
        drafts: By name: agreement with the target, and step times.
        index: From :func:`lookups`.
    """
    plain_s = target.at(1)
    found = [Candidate((), 1 / plain_s)]
    drafted = [answer for text in index for answer in text if answer >= 0]
    share = sum(drafted) / len(drafted) if drafted else math.nan
    rate, ahead = lookup_rate(index, target, plain_s)
    found.append(Candidate((_NGRAM,), rate, (share,), ahead))
    alone: dict[str, Candidate] = {}
    for name, (a, times) in drafts.items():
        rate, ahead = best_lockstep(a, times.at(1), target)
        alone[name] = Candidate((name,), rate, (a,), ahead)
        beside, _ = lookup_rate(index, target, 1 / max(rate, 1 / plain_s))
        found += [alone[name], Candidate((_NGRAM, name), beside, (share, a), ahead)]
    for first, (a, times) in drafts.items():
        for second, (b, its_times) in drafts.items():
            if times.at(1) < its_times.at(1) and first != second:
                # Two drafts agree with each other at least as often as both with the target.
                inner, _ = best_lockstep(min(1.0, a / max(b, 1e-9)), times.at(1), its_times)
                rate, ahead = best_lockstep(b, 1 / inner, target)
                found.append(Candidate((first, second), rate, (a, b), ahead))
    return sorted(found, key=lambda c: -c.predicted)


def best_lockstep(a: float, draft_s: float, target: StepTimes) -> tuple[float, int]:
    """Tokens per second of a draft with the best number of draft tokens, and that number, by :func:`pipespec.planning.closed_form.lockstep_rate`."""
    from pipespec.planning.closed_form import lockstep_rate

    return max((lockstep_rate(a, k, draft_s, target.at(1 + k)), k) for k in _LOOKAHEADS)


def lookup_rate(index: Sequence[np.ndarray], target: StepTimes, otherwise_s: float) -> tuple[float, int]:
    """Tokens per second of an n-gram index, replayed along the texts, with the best lookahead, and that lookahead.

    Args:
        index: From :func:`lookups`.
        target: Its step times.
        otherwise_s: Seconds per token where the index has no match.
    """

    def rate(ahead: int) -> float:
        seconds, tokens = 0.0, 0
        for answers in index:
            at = 0
            while at < len(answers):
                if answers[at] < 0:
                    seconds, at = seconds + otherwise_s, at + 1
                    continue
                accepted = 0
                while accepted < ahead and at + accepted < len(answers) and answers[at + accepted] == 1:
                    accepted += 1
                seconds, at = seconds + target.at(1 + ahead), at + accepted + 1
            tokens += len(answers)
        return tokens / seconds

    return max((rate(ahead), ahead) for ahead in _LOOKAHEADS)


def _rate(
    target: PreTrainedModel, models: dict[str, PreTrainedModel], candidate: Candidate, texts: Sequence[Text], new: int
) -> float:
    """Tokens per second of a candidate on all prompts."""
    import torch

    from pipespec.api.pipeline import Pipeline

    tokens, seconds = 0, 0.0
    drafts = [models.get(name, name) for name in candidate.drafts]
    with Pipeline(target, drafts, schedule=(LOCKSTEP if drafts else PLAIN).name) as pipe:
        # Caches and packed weights are there from the first call on.
        for number, (text, first) in enumerate([texts[0], *texts]):
            ids = torch.from_numpy(text[None, :first].astype("int64"))
            mask = torch.ones_like(ids)
            pipe.generate(ids, attention_mask=mask, max_new_tokens=new if number else min(new, 4), do_sample=False)
            if number:
                assert pipe.report is not None
                tokens, seconds = tokens + pipe.report.tokens, seconds + pipe.report.seconds
    return tokens / seconds


def _speedup(candidate: Candidate, plain: Candidate) -> float:
    """Over plain decoding: measured, or predicted where it did not run."""
    if candidate.measured is None or plain.measured is None:
        return candidate.predicted / plain.predicted
    return candidate.measured / plain.measured


def table(found: Sequence[Candidate], plain: Candidate, best: Candidate) -> str:
    """The candidates as a table, and the reason for the choice."""
    last = {name: Path(name).name for c in found for name in c.drafts}
    labels = last if len(set(last.values())) == len(last) else {name: name for name in last}
    lines: list[Sequence[str]] = [
        ("", "drafts", "agreement", "draft tokens", "tokens/s, predicted", "measured", "vs plain")
    ]
    lines += [
        (
            "->" if c is best else "",
            " + ".join(labels[name] for name in c.drafts) or "none",
            "/".join("-" if math.isnan(a) else f"{a:.2f}" for a in c.agreement) or "-",
            str(c.lookahead or "-"),
            f"{c.predicted:.1f}",
            "-" if c.measured is None else f"{c.measured:.1f}",
            f"{_speedup(c, plain):.2f}x" + (" (predicted)" if c.measured is None else ""),
        )
        for c in found
    ]
    why = (
        "drafting pays"
        if best.drafts
        else f"do not draft: no measured candidate reaches {MARGIN:.2f}x of plain decoding"
    )
    return f"{aligned(lines, left=2)}\n{why}"
