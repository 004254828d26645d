"""SpeculationConfig: how the models of a chain run. Apart from ``acceptance`` and ``kv_dtype``, the generated text depends on none of it.

This module imports neither torch nor the native module: the command line reads it before it loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from pipespec.registry import (
    LOCKSTEP,
    OPTIONS,
    PLAIN,
    SCHEDULES,
    Schedule,
    has_captured_form,
    names,
    with_draft,
    with_option,
)

ACCEPTANCES = ("coupled", "rejection")
"""Values of ``acceptance``."""

WEIGHT_FORMATS = ("q8_0", "q6_k", "q5_1", "q5_k", "q5_0", "q4_1", "q4_k", "q4_0", "iq4_nl", "iq4_xs", "mxfp4", "q3_k", "q2_k", "int8")  # fmt: skip
"""Values of ``weights=``: what :mod:`pipespec_kernels.formats` quantises to, and int8. Tests compare them with its table, which needs torch."""

KV_DTYPES = ("float8_e4m3fn",)
"""Values of ``kv_dtype``."""

WIDTH = 64
"""Maximum number of tokens that one row feeds in one step. A stage that lacks more catches up in several steps."""

_MAX_TOKENS = 2**31 - 1
"""Of lookahead: stages hold it in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How a chain runs: one object for pipeline, factory and driver. :meth:`of` builds it from the arguments of :class:`pipespec.Pipeline`.

    Attributes that are not explained at :class:`pipespec.Pipeline`, or have another form:
        drafts: A :class:`pipespec.engine.chain.DraftSpec` for each draft, in the order of the stages.
        lookahead: Per draft. 0: the draft rests.
        controlled: The controller chooses before each round which draft proposes tokens, and how many, see :mod:`pipespec.engine.controller`.
            ``lookahead`` then limits only drafts whose tokens another draft verifies.
    """

    schedule: str = LOCKSTEP.name
    drafts: tuple[Any, ...] = ()
    lookahead: tuple[int, ...] = ()
    graphs: bool = False
    trace: int = 0
    native: bool = True
    exact: bool = False
    acceptance: str = "coupled"
    controlled: bool = False
    prefix_cache: int | None = None
    kv_dtype: str | None = None

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
        if self.prefix_cache is not None:
            _require_number("prefix_cache", self.prefix_cache, 0, 2**63 - 1)
        if self.kv_dtype is not None:
            _require_one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        self._check_options()

    def _check_options(self) -> None:
        """Check the options in use, and each draft, against the table of schedules."""
        row, graphs = self.schedule_row, self.graphs or self.schedule_row.is_captured
        is_rejection = self.acceptance != "coupled" and row.has_drafts
        used = [name for name, is_used in (("graphs", graphs), ("acceptance", is_rejection)) if is_used]
        # What is used, the schedules that take it, and whether captured steps do.
        parts = [(OPTIONS[name], with_option(name), name == "graphs") for name in used]
        parts += [(draft.label, with_draft(draft), has_captured_form(draft)) for draft in self.drafts]
        for label, takers, is_captured in parts if row.has_drafts else ():
            if row not in takers:
                raise ValueError(f"{label} is for schedule={names(takers)}, not for {row.name!r}")
            if graphs and not is_captured:
                uncaptured = names([each for each in takers if not each.is_captured])
                raise ValueError(f"graphs=True does not support {label}: use schedule={uncaptured} without graphs")
        if is_rejection:
            if excluded := [*(draft.label for draft in self.drafts if not draft.draws), *["exact=True"] * self.exact]:
                raise ValueError(f"{OPTIONS['acceptance']} does not go with {excluded[0]}: leave one of the two out")
            if len(self.lookahead) > 1:
                raise ValueError(f"acceptance={self.acceptance!r} is for one draft model: use acceptance='coupled'")
        if self.exact and not self.native:
            raise ValueError("exact=True runs the target in the native or the fused form: leave native=False out")

    def _check_order(self) -> None:
        """Check that each draft can do what its place in the chain asks of it."""
        for i, draft in enumerate(self.drafts):
            if i > 0 and not draft.verifies:
                before, more = self.drafts[i - 1], ""
                if self.is_controllable and before.inline:
                    more = ", or leave lookahead out, so that the controller chooses between them"
                raise ValueError(
                    f"{self.names[i]} is {draft.label}, which can only be the first of the drafts, as it cannot verify the draft tokens of "
                    f"{before.label}: put it first, leave one of the two out{more}"
                )
        if self.graphs and not can_be_captured(self.drafts):
            raise ValueError(
                "graphs=True supports a draft that reads the target's hidden states only as the last of the drafts with a model: leave graphs out"
            )

    @property
    def schedule_row(self) -> Schedule:
        """Of its schedule, in the table."""
        return SCHEDULES[self.schedule]

    @classmethod
    def of(
        cls,
        drafts: Sequence[Any],
        *,
        schedule: str = LOCKSTEP.name,
        lookahead: int | Sequence[int] | None = None,
        graphs: bool | None = None,
        **options: Any,
    ) -> SpeculationConfig:
        """Build the configuration from a user's arguments; None stands for a default.

        Args:
            drafts: The spec of each draft. With none, every schedule is plain decoding.
            lookahead: One integer for all drafts, or one per draft, each at least 1. Default: ``controlled`` in lockstep where that is possible, also in
                captured rounds of at most one draft with a model, with 4 for drafts of drafts; otherwise 4 in lockstep, 8 in other schedules, or the default of the kind of draft. Under the controller the
                inline drafts are the last ones, in captured rounds behind a draft head.
            graphs: Default: only in schedules whose steps are all captured.
            **options: Other fields of the class. Those of drafts have no effect without drafts.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is out of range, or does not fit the schedule.
        """
        if graphs is not None:
            _require_bool("graphs", graphs)
        if options.get("prefix_cache") == 0:
            drafts = [draft.without_history() for draft in drafts]
        config = cls(schedule=schedule, drafts=tuple(drafts), graphs=bool(graphs), **options)
        row = config.schedule_row
        config = replace(config, graphs=config.graphs or row.is_captured)
        if not drafts or not row.has_drafts:
            kept = ("graphs", "trace", "native", "exact", "prefix_cache", "kv_dtype")
            of_target = {name: getattr(config, name) for name in kept}
            return cls(schedule=PLAIN.name, **of_target)
        if lookahead is None:
            if config.is_controllable:
                config = replace(config, controlled=True, drafts=tuple(sorted(drafts, key=lambda draft: draft.inline)))
            elif config.has_round_lengths:
                # A head verifies no draft tokens of an index: it comes first.
                is_last = any(not draft.verifies for draft in drafts if not draft.inline)
                ordered = sorted(drafts, key=lambda draft: draft.inline and is_last)
                config = replace(config, controlled=True, drafts=tuple(ordered))
            lookahead = [row.lookahead if draft.lookahead is None else draft.lookahead for draft in config.drafts]
        per_draft = tuple(lookahead) if isinstance(lookahead, Sequence) else (lookahead,) * len(drafts)
        if any(_is_integer(n) and n < 1 for n in per_draft):
            raise ValueError(f"lookahead must be at least 1, got {list(per_draft)}")
        config = replace(config, lookahead=per_draft)
        if len(config.lookahead) != len(drafts):
            raise ValueError(f"lookahead: one per draft, {len(drafts)}, not {len(config.lookahead)}")
        config._check_order()
        return config

    @property
    def own_text(self) -> str | None:
        """The option that gives a text which no other form of the models has; None: there is none."""
        kept = None if self.kv_dtype is None else f"kv_dtype={self.kv_dtype!r}"
        return "exact=True" if self.exact else kept

    @property
    def is_controllable(self) -> bool:
        """Whether the controller can choose the number of draft tokens."""
        is_plain_step = not self.graphs and self.acceptance == "coupled"
        return bool(self.schedule_row.controlled) and is_plain_step and can_be_controlled(self.drafts)

    @property
    def has_round_lengths(self) -> bool:
        """Whether the controller can choose the length of captured rounds: those of one draft model or head at most, and of an n-gram index."""
        models = sum(not draft.inline for draft in self.drafts)
        return bool(self.schedule_row.controlled) and self.graphs and self.acceptance == "coupled" and models <= 1

    # ---- the stages

    @property
    def names(self) -> list[str]:
        """Names of the stages, in reports and messages."""
        found: list[str] = []
        numbers = count()
        for i, draft in enumerate(self.drafts):
            name = draft.name or f"draft {next(numbers)}"
            found.append(f"{name} {i}" if name in found else name)
        return [*found, "target"]

    @property
    def model_stages(self) -> list[int]:
        """The stages with a model, the target last."""
        return [*(i for i, draft in enumerate(self.drafts) if not draft.inline), len(self.drafts)]

    def stages_of(self, stage: int) -> range:
        """The stages that run in the process of a stage with a model: the inline ones directly before it, and itself."""
        first = stage
        while first > 0 and self.drafts[first - 1].inline:
            first -= 1
        return range(first, stage + 1)

    def lookahead_of(self, stage: int) -> int:
        """How many tokens ``stage`` may be ahead of the next one; 0 for the target."""
        return self.lookahead[stage] if stage < len(self.lookahead) else 0

    def max_draft_tokens(self, stage: int) -> int:
        """Maximum number of draft tokens in a step of ``stage``: half of the columns stay free for its own tokens. 0 for the first stage."""
        return min(self.lookahead[stage - 1], WIDTH // 2) if 0 < stage <= len(self.lookahead) else 0


def can_be_captured(drafts: Sequence[Any]) -> bool:
    """Whether the steps of drafts can be captured: each has a captured form, and the one that reads the target's hidden states is the last one with a model."""
    *before, _ = [draft for draft in drafts if not draft.inline] or [None]
    return all(map(has_captured_form, drafts)) and not any(draft.reads_target for draft in before)


def can_be_controlled(drafts: Sequence[Any]) -> bool:
    """Whether the controller can choose between drafts: it has a rate for each of them, and at most one is inline."""
    return all(draft.source for draft in drafts) and sum(draft.inline for draft in drafts) <= 1


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
