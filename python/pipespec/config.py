"""SpeculationConfig: how the models of a chain run. Apart from ``acceptance``, the generated text depends on none of it.

This module imports neither torch nor the native module: the command line reads it before it loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipespec.registry import EXCLUDED, LOCKSTEP, OPTIONS, PLAIN, SCHEDULES, UNCAPTURED, Schedule, names, with_option

ACCEPTANCES = ("coupled", "rejection")
"""Values of ``acceptance``."""

WIDTH = 64
"""Most tokens that one row feeds in one step. A stage that is further behind catches up in several steps."""

_MAX_TOKENS = 2**31 - 1
"""Of lookahead: stages hold it in 32 bits."""

_NGRAM_LOOKAHEAD = 8
"""Draft tokens of an n-gram index take no time, but a long verification of wrong ones does."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How a chain runs: one object for pipeline, factory and driver.

    :meth:`of` builds it from the arguments of :class:`pipespec.Pipeline`.

    Attributes that are not explained at :class:`pipespec.Pipeline`, or have another form:
        lookahead: Per draft. 0: the draft rests.
        ngram: The first draft, if it is an n-gram index instead of a model (:class:`pipespec.engine.ngram.NgramDraft`). It has its place in ``lookahead``.
        head: The draft, if it is a head that reads the target's hidden states: its path, or once it is loaded the
            :class:`pipespec.engine.head.DraftHead`. It has its place in ``lookahead``.
        translation: The two tokenizers, if the first draft has another one than the target (:class:`pipespec.engine.translation.Translation`).
        controlled: The controller chooses before each round which draft proposes tokens, and how many, see :mod:`pipespec.engine.controller`.
            ``lookahead`` then limits only drafts whose tokens another draft verifies.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    schedule: str = LOCKSTEP.name
    lookahead: tuple[int, ...] = ()
    graphs: bool = False
    trace: int = 0
    native: bool = True
    exact: bool = False
    ngram: Any = None
    head: Any = None
    acceptance: str = "coupled"
    translation: Any = None
    controlled: bool = False

    def __post_init__(self) -> None:
        for name in ("graphs", "native", "exact"):
            _require_bool(name, getattr(self, name))
        _require_one_of("schedule", self.schedule, SCHEDULES)
        _require_one_of("acceptance", self.acceptance, ACCEPTANCES)
        if not isinstance(self.lookahead, tuple) or not all(map(_is_integer, self.lookahead)):
            raise TypeError(f"lookahead must be an integer, or one integer per draft, not {self.lookahead!r}")
        for number in self.lookahead:  # 0: the draft rests
            _require_number("lookahead", number, 0, _MAX_TOKENS)
        if not (_is_integer(self.trace) and self.trace == 0):
            from pipespec_kernels.trace import MAX_ENTRIES

            _require_number("trace", self.trace, 0, MAX_ENTRIES)
        self._check_options()

    def _check_options(self) -> None:
        """Check the options in use against the table of schedules."""
        used = {name for name in (*OPTIONS, "exact") if getattr(self, name) not in (None, False, "coupled")}
        if self.schedule_row.is_captured:
            used.add("graphs")
        for option in OPTIONS if self.schedule_row.has_drafts else ():
            if option not in used:
                continue
            label = OPTIONS[option]
            if option not in self.schedule_row.options:
                takers = names(with_option(option))
                raise ValueError(f"{label} is for schedule={takers}, not for {self.schedule!r}")
            if option in UNCAPTURED and "graphs" in used:
                takers = names([row for row in with_option(option) if not row.is_captured])
                raise ValueError(f"graphs=True does not support {label}: use schedule={takers} without graphs")
            for other in EXCLUDED.get(option, ()):
                if other in used:
                    raise ValueError(
                        f"{label} does not go with {OPTIONS.get(other, f'{other}=True')}: leave one of the two out"
                    )
        if "acceptance" in used and len(self.lookahead) > 1:
            raise ValueError(f"acceptance={self.acceptance!r} is for one draft model: use acceptance='coupled'")
        if self.exact and not self.native:
            raise ValueError("exact=True runs the target in the native or the fused form: leave native=False out")

    @property
    def schedule_row(self) -> Schedule:
        """Of its schedule, in the table."""
        return SCHEDULES[self.schedule]

    @classmethod
    def of(
        cls,
        num_drafts: int,
        *,
        schedule: str = LOCKSTEP.name,
        lookahead: int | Sequence[int] | None = None,
        graphs: bool | None = None,
        **options: Any,
    ) -> SpeculationConfig:
        """Build the configuration from a user's arguments; None stands for a default.

        Args:
            num_drafts: Number of drafts, an n-gram index included. With none, every schedule is plain decoding.
            schedule: See the class.
            lookahead: One integer for all drafts, or one per draft, each at least 1. Default: ``controlled`` in lockstep where that is possible, with
                4 for drafts of drafts; otherwise 4 in lockstep, 8 in other schedules and for an n-gram index.
            graphs: See the class. Default: only in schedules whose steps are all captured.
            **options: Other fields of the class. Those of drafts have no effect without drafts.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is out of range, or does not fit the schedule.
        """
        if graphs is not None:
            _require_bool("graphs", graphs)
        config = cls(schedule=schedule, graphs=bool(graphs), **options)
        config = replace(config, graphs=config.graphs or config.schedule_row.is_captured)
        if num_drafts == 0 or not config.schedule_row.has_drafts:
            of_target = {name: getattr(config, name) for name in ("graphs", "trace", "native", "exact")}
            return cls(schedule=PLAIN.name, **of_target)
        if lookahead is None:
            config = replace(config, controlled=config.is_controllable)
            ngram = [_NGRAM_LOOKAHEAD] * (config.ngram is not None)
            lookahead = [*ngram, *[config.schedule_row.lookahead] * (num_drafts - len(ngram))]
        per_draft = tuple(lookahead) if isinstance(lookahead, Sequence) else (lookahead,) * num_drafts
        if any(_is_integer(n) and n < 1 for n in per_draft):
            raise ValueError(f"lookahead must be at least 1, got {list(per_draft)}")
        config = replace(config, lookahead=per_draft)
        if len(config.lookahead) != num_drafts:
            raise ValueError(f"lookahead: one per draft, {num_drafts}, not {len(config.lookahead)}")
        if config.head is not None and config.ngram is not None and not config.controlled:
            raise ValueError(
                "an n-gram draft beside a draft head needs the controller, which chooses between them: leave lookahead out"
            )
        return config

    @property
    def is_controllable(self) -> bool:
        """Whether the controller can choose the number of draft tokens."""
        return bool(self.schedule_row.controlled) and not self.graphs and self.acceptance == "coupled"

    def lookahead_of(self, stage: int) -> int:
        """How many tokens ``stage`` may be ahead of the next one; 0 for the target."""
        return self.lookahead[stage] if stage < len(self.lookahead) else 0

    def max_draft_tokens(self, stage: int) -> int:
        """Most draft tokens in a step of ``stage``: half of the columns stay free for its own tokens. 0 for the first stage."""
        return min(self.lookahead[stage - 1], WIDTH // 2) if 0 < stage <= len(self.lookahead) else 0


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def _require_one_of(name: str, value: object, values: Sequence[str] | Mapping[str, object]) -> None:
    if not isinstance(value, str) or value not in values:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, values))}")


def _require_number(name: str, value: object, low: int, high: int) -> None:
    if not _is_integer(value):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{name} must be {low} to {high}, not {value}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
