"""Recommendation: which drafts in which schedule, from measured step times and the agreement on a user's prompts; or no drafts at all."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipespec.planning.planner import MARGIN, Plan
from pipespec.planning.simulator import NOTHING
from pipespec.process.table import aligned

_COLUMNS = ("", "drafts", "schedule", "lookahead", "min", "agreement", "step", "tokens/step", "tokens/s, predicted", "measured", "vs plain")  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A draft that was measured.

    Attributes:
        given: How ``--draft`` names it.
        agreement: Share of the target's tokens that it chooses, teacher-forced; for an n-gram index the share of its draft tokens that are right.
        step_s: Seconds of its step.
        options: Options of the command line that change it, such as ``("--draft-dtype", "int8")``.
        label: Its name in tables; empty: ``given``.
    """

    given: str
    agreement: float
    step_s: float
    options: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """Its name in tables, with the options."""
        return " ".join([self.label or self.given, *(o.removeprefix("--draft-") for o in self.options)])


@dataclass(frozen=True)
class Option:
    """One way to run the target.

    Attributes:
        drafts: None of them: plain decoding.
        schedule: How the stages run.
        lookahead: Per draft.
        min_draft_tokens: See :class:`pipespec.config.SpeculationConfig`.
        decode_meanwhile: Likewise.
        tokens_per_step: Tokens per step of the target.
        rate: Predicted tokens per second.
        measured: Measured tokens per second, or None.
    """

    drafts: tuple[Draft, ...]
    schedule: str
    lookahead: tuple[int, ...] = ()
    min_draft_tokens: int = 0
    decode_meanwhile: bool = False
    tokens_per_step: float = 1.0
    rate: float = 0.0
    measured: float | None = None

    @property
    def name(self) -> str:
        """Names of the drafts."""
        return " > ".join(draft.name for draft in self.drafts) or "none"

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``pipespec generate`` for it, without the target."""
        found = [a for draft in self.drafts for a in ("--draft", draft.given)]
        found += self.drafts[-1].options if self.drafts else ()  # the first may be an n-gram index, which has none
        found += ["--schedule", self.schedule]
        if self.drafts:
            found += ["--lookahead", *map(str, self.lookahead)]
        if self.min_draft_tokens:
            found += ["--min-draft-tokens", str(self.min_draft_tokens)]
        return [*found, *(["--decode-meanwhile"] if self.decode_meanwhile else [])]


@dataclass(frozen=True)
class Recommendation:
    """The ways to run a target, the fastest first, and the choice among them.

    Measured rates count where there are any: an option that was not measured is then not chosen.

    Attributes:
        options: All of them, plain decoding included.
        target: How ``--target`` names the target.
        loading: Further arguments of the command line, such as ``("--dtype", "float32")``.
    """

    options: tuple[Option, ...]
    target: str
    loading: tuple[str, ...] = ()

    @property
    def plain(self) -> Option:
        """Plain decoding."""
        return next(option for option in self.options if not option.drafts)

    @property
    def best(self) -> Option:
        """The fastest option with drafts, or plain decoding if there are none."""
        known = [option for option in self.options if option.drafts and self._is_comparable(option)]
        return max(known, key=self._rate, default=self.plain)

    @property
    def chosen(self) -> Option:
        """The best option if its drafts gain at least :data:`MARGIN`, otherwise plain decoding."""
        return self.best if self.gain(self.best) >= MARGIN else self.plain

    @property
    def speculates(self) -> bool:
        """Whether drafts are recommended."""
        return bool(self.chosen.drafts)

    def _is_comparable(self, option: Option) -> bool:
        return self.plain.measured is None or option.measured is not None

    def _rate(self, option: Option) -> float:
        return option.rate if option.measured is None else option.measured

    def gain(self, option: Option) -> float:
        """Rate divided by that of plain decoding: both measured, or both predicted."""
        plain = self.plain
        if plain.measured is not None and option.measured is not None:
            return option.measured / plain.measured
        return option.rate / plain.rate

    @property
    def command(self) -> str:
        """The command line for the choice."""
        words = ["pipespec", "generate", "--target", self.target, *self.loading, *self.chosen.arguments]
        return shlex.join(words) + " --prompt-file FILE"

    @property
    def why(self) -> str:
        """The reason for the choice."""
        kind = "predicted" if self.plain.measured is None else "measured"
        if not self.best.drafts:
            return "do not speculate: there is no draft to choose from"
        gain = self.gain(self.best)
        if self.speculates:
            return f"{self.chosen.name}, {self.chosen.schedule}: {kind} {gain:.2f}x of plain decoding"
        return (
            f"do not speculate: the best drafts ({self.best.name}, {self.best.schedule}) reach {gain:.2f}x of plain decoding ({kind}), less than "
            f"the margin of {MARGIN:.2f}x{self._untried}"
        )

    @property
    def _untried(self) -> str:
        """A remark about options that were not measured and whose predictions exceed the margin."""
        count = sum(o.measured is None and self.gain(o) >= MARGIN for o in self.options if o.drafts)
        if self.plain.measured is None or count == 0:
            return ""
        return f"; {count} more with better predictions {'was' if count == 1 else 'were'} not measured (--measure)"

    def __str__(self) -> str:
        chosen = self.chosen
        lines = [_COLUMNS, *(self._row(option, "->" if option is chosen else "") for option in self._sorted())]
        return "\n".join([aligned(lines, left=3), self.why, "", self.command])

    def _sorted(self) -> list[Option]:
        # Measured ones first: their gains do not compare with predicted ones.
        return sorted(self.options, key=lambda option: (option.measured is None, -self.gain(option)))

    def _row(self, option: Option, mark: str) -> tuple[str, ...]:
        return (
            mark,
            option.name,
            option.schedule,
            "/".join(map(str, option.lookahead)) or "-",
            f"{option.min_draft_tokens}{'+' if option.decode_meanwhile else ''}"
            if option.schedule == "workers"
            else "-",
            "/".join("-" if math.isnan(d.agreement) else f"{d.agreement:.2f}" for d in option.drafts) or "-",
            "/".join(f"{1e3 * d.step_s:.2f}" for d in option.drafts) + " ms" if option.drafts else "-",
            f"{option.tokens_per_step:.2f}",
            f"{option.rate:.1f}",
            "-" if option.measured is None else f"{option.measured:.1f}",
            f"{self.gain(option):.2f}x",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "options": [asdict(o) | {"name": o.name, "gain": self.gain(o)} for o in self._sorted()],
            "chosen": asdict(self.chosen),
            "why": self.why,
            "command": self.command,
        }


def options_of(plan: Plan, drafts: Sequence[Draft], plain: float) -> list[Option]:
    """The candidates of a plan that have drafts, as options.

    Args:
        plan: From one profile.
        drafts: Those of the profile, in order.
        plain: Rate of plain decoding. The plan's rates are scaled to it, since profiles that were measured one after the other saw a machine of
            different speed.
    """
    # Who follows a recommendation has all threads.
    most = {(c.schedule, c.drafts): c.threads for c in sorted(plan.candidates, key=lambda c: c.threads)}
    return [
        Option(
            tuple(drafts[i] for i in c.drafts),
            c.schedule,
            c.lookahead,
            c.min_draft_tokens,
            c.decode_meanwhile,
            c.tokens_per_step,
            c.rate * plain / plan.plain.rate,
        )
        for c in plan.candidates
        if c.schedule != "plain" and c.threads == most[c.schedule, c.drafts]
    ]


def measure_options(
    options: Sequence[Option], run: Callable[[Option], tuple[int, float]], most: int
) -> tuple[Option, ...]:
    """Measure plain decoding and the options with the best predictions.

    Args:
        options: All options.
        run: Runs one and returns tokens and seconds.
        most: Options with drafts that are measured; 0: none, and not plain decoding either.
    """
    if most == 0:
        return tuple(options)
    drafted = sorted((o for o in options if o.drafts), key=lambda o: -o.rate)[:most]
    found = []
    for option in options:
        if not option.drafts or any(option is other for other in drafted):
            tokens, seconds = run(option)
            option = replace(option, measured=tokens / seconds)
        found.append(option)
    return tuple(found)


def best_drafts(options: Sequence[Option], count: int) -> list[Draft]:
    """The ``count`` drafts with the best predictions alone, all with the command line's options of the first."""
    single = [o.drafts[0] for o in sorted(options, key=lambda o: -o.rate) if len(o.drafts) == 1]
    return list(dict.fromkeys(draft for draft in single if draft.options == single[0].options))[:count]


def ngram_agreement(answers: np.ndarray) -> float:
    """Share of the draft tokens of an n-gram index that are right; NaN if there are none.

    Args:
        answers: Its column of a table of agreement, uint8 [positions].
    """
    drafted = answers != NOTHING
    return float((answers[drafted] == 0).mean()) if drafted.any() else math.nan


def mean_context(texts: Sequence[tuple[np.ndarray, int]]) -> tuple[int, int]:
    """Mean number of prompt tokens and of new tokens of texts."""
    prompts = [first for _, first in texts]
    new = [len(text) - first for text, first in texts]
    return max(1, round(sum(prompts) / len(texts))), max(1, round(sum(new) / len(texts)))
