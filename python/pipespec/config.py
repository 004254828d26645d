"""SpeculationConfig: how the models of a chain run. The generated text depends on none of it.

This module imports neither torch nor the native module: the command line reads it before it loads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SCHEDULES = ("plain", "lockstep", "workers", "streams", "ranks")
"""Values of ``schedule``."""

ACCEPTANCES = ("coupled", "rejection", "block")
"""Values of ``acceptance``."""

WIDTH = 64
"""Most tokens that one row feeds in one step. A stage that is further behind catches up in several steps."""

PATIENCE = 1.5
"""Deadline of the wait for ``min_draft_tokens``: this factor times the expected duration of the missing draft steps."""

_MOST_TOKENS = 2**31 - 1
"""Of lookahead and ``min_draft_tokens``: stages hold them in 32 bits."""

_LOOKAHEAD = {"lockstep": 4, "workers": 8, "streams": 8, "ranks": 8}
"""Lockstep pays for each draft token with its own time. Drafts with a device or a memory bus of their own run while the target works."""

_NGRAM_LOOKAHEAD = 8
"""Draft tokens of an n-gram index take no time, but a long verification of wrong ones does."""


_CONFIDENT_LOOKAHEAD = 16
"""A bound only: drafts that use their confidence stop where it says so."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How a chain runs: one object for pipeline, factory and driver.

    :meth:`of` builds it from the arguments of :class:`pipespec.Pipeline`. ``dataclasses.replace`` makes the one for
    :meth:`pipespec.drivers.Driver.steer`; ``lookahead``, ``min_draft_tokens`` and ``decode_meanwhile`` may change between any
    two steps.

    Args:
        schedule: One of :data:`SCHEDULES`.
        lookahead: Per draft, how many tokens it may be ahead of the next stage. 0: the draft rests.
        min_draft_tokens: Draft tokens that the target waits for if it has fewer. The wait has a deadline, see :data:`PATIENCE`.
        decode_meanwhile: During that wait, the target decodes one token at a time.
        graphs: Captured steps in ``"plain"`` and ``"lockstep"``; ``"streams"`` always captures.
        trace: Steps per stage that the trace of a call keeps. 0: no trace.
        native: Stages on the CPU run in the native form where there is one, see :mod:`pipespec.engine.native`; captured steps in the fused
            form, see :mod:`pipespec.engine.fused`.
        exact: The target runs in a form whose bits depend on neither batch nor width (on the CPU the native one, in captured steps the exact
            fused one), or a call is refused.
        ngram: The first draft, if it is an n-gram index instead of a model (:class:`pipespec.engine.ngram.NgramDraft`). It has its place in ``lookahead``.
        acceptance: One of :data:`ACCEPTANCES`, see :mod:`pipespec.engine.acceptance`.
        translation: The two tokenizers, if the first draft has another one than the target (:class:`pipespec.engine.translation.Translation`).
        confidence: Drafts publish how sure they are of their tokens. They stop, and the target verifies, decodes or waits, by what these tokens
            are expected to gain; ``lookahead`` and ``min_draft_tokens`` remain as bounds. In ``"lockstep"`` and ``"workers"``.
        controlled: The controller chooses before each round which draft proposes tokens, and how many, see :mod:`pipespec.engine.controller`. In
            ``"lockstep"`` without captured steps; ``lookahead`` holds for the drafts of drafts.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    schedule: str = "lockstep"
    lookahead: tuple[int, ...] = ()
    min_draft_tokens: int = 0
    decode_meanwhile: bool = False
    graphs: bool = False
    trace: int = 0
    native: bool = True
    exact: bool = False
    ngram: Any = None
    acceptance: str = "coupled"
    translation: Any = None
    confidence: bool = False
    controlled: bool = False

    def __post_init__(self) -> None:
        for name in ("decode_meanwhile", "graphs", "native", "exact", "confidence"):
            _require_bool(name, getattr(self, name))
        if not isinstance(self.schedule, str) or self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not one of {', '.join(map(repr, SCHEDULES))}")
        if not isinstance(self.lookahead, tuple) or not all(map(_is_integer, self.lookahead)):
            raise TypeError(f"lookahead must be an integer, or one integer per draft, not {self.lookahead!r}")
        if any(n < 0 for n in self.lookahead):
            raise ValueError(f"lookahead must be at least 1 (0: the draft rests), got {list(self.lookahead)}")
        if not _is_integer(self.min_draft_tokens):
            raise TypeError(f"min_draft_tokens must be a number of draft tokens, not {self.min_draft_tokens!r}")
        if self.min_draft_tokens < 0:
            raise ValueError(f"min_draft_tokens must not be negative, got {self.min_draft_tokens}")
        for name, most in (("lookahead", max(self.lookahead, default=0)), ("min_draft_tokens", self.min_draft_tokens)):
            if most > _MOST_TOKENS:
                raise ValueError(f"{name} must be at most {_MOST_TOKENS}, got {most}")
        if not _is_integer(self.trace):
            raise TypeError(f"trace must be a number of steps per stage, not {self.trace!r}")
        if self.trace:
            from pipespec_kernels.trace import MOST_ENTRIES

            if not 0 <= self.trace <= MOST_ENTRIES:
                raise ValueError(f"trace must be 0 to {MOST_ENTRIES} steps per stage, not {self.trace}")
        if self.graphs and self.schedule not in ("plain", "lockstep", "streams"):
            raise ValueError(f"graphs=True is for schedule='plain', 'lockstep' or 'streams', not for {self.schedule!r}")
        if self.ngram is not None and (self.graphs or self.schedule == "streams"):
            what = "schedule='streams'" if self.schedule == "streams" else "graphs=True"
            raise ValueError(
                f"{what} does not support an n-gram draft, as yet: use schedule='lockstep' or 'workers', or leave 'ngram' out of the drafts"
            )
        if not isinstance(self.acceptance, str) or self.acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance={self.acceptance!r} is not one of {', '.join(map(repr, ACCEPTANCES))}")
        if self.acceptance != "coupled":
            self._check_acceptance()
        if self.translation is not None and (self.graphs or self.schedule == "streams"):
            what = "schedule='streams'" if self.schedule == "streams" else "graphs=True"
            raise ValueError(
                f"{what} does not support a draft with another tokenizer, as yet: use schedule='lockstep' or 'workers', or drafts with the "
                "target's tokenizer"
            )
        if self.confidence and (self.graphs or self.schedule not in ("plain", "lockstep", "workers")):
            what = "graphs=True" if self.graphs else f"schedule={self.schedule!r}"
            raise ValueError(
                f"{what} does not support confidence=True, as yet: use schedule='lockstep' or 'workers' without graphs, or leave confidence out"
            )
        if self.exact and not self.native:
            raise ValueError("exact=True runs the target in the native or the fused form: leave native=False out")

    def _check_acceptance(self) -> None:
        """Check that the target can have both distributions of each draft token."""
        where = ""
        if self.schedule not in ("plain", "lockstep", "workers"):
            where = f"schedule={self.schedule!r}: use 'lockstep' or 'workers'"
        elif self.graphs:
            where = "graphs=True: leave it out"
        elif self.ngram is not None or len(self.lookahead) > 1:
            where = "a chain other than one draft model and the target"
        elif self.translation is not None:
            where = "a draft with another tokenizer, which has no distribution over the target's tokens"
        elif self.confidence:
            where = "confidence=True, which verifies fewer tokens than the draft drew"
        elif self.decode_meanwhile:
            where = "decode_meanwhile=True, which leaves out draft tokens that were drawn: leave it out"
        elif self.exact:
            where = "exact=True, as the text then depends on the draft"
        if where:
            raise ValueError(
                f"acceptance={self.acceptance!r} is not supported with {where}, or use acceptance='coupled'"
            )

    @classmethod
    def of(
        cls,
        num_drafts: int,
        *,
        schedule: str = "lockstep",
        lookahead: int | Sequence[int] | None = None,
        min_draft_tokens: int | None = None,
        decode_meanwhile: bool = False,
        graphs: bool | None = None,
        trace: int = 0,
        native: bool = True,
        exact: bool = False,
        ngram: Any = None,
        acceptance: str = "coupled",
        translation: Any = None,
        confidence: bool = False,
    ) -> SpeculationConfig:
        """Build the configuration from a user's arguments; None stands for a default.

        Args:
            num_drafts: Number of drafts, an n-gram index included. With none, every schedule is plain decoding.
            schedule: See the class, as for all that follow.
            lookahead: One integer for all drafts, or one per draft, each at least 1. Default: ``controlled`` in lockstep where that is possible, with
                4 for drafts of drafts; otherwise 4 in lockstep, 8 in other schedules and for an n-gram index, 16 with ``confidence``.
            min_draft_tokens: Default: 0, since a wide forward on a CPU costs more than a narrow one.
            decode_meanwhile: Needs an asynchronous schedule and ``min_draft_tokens``.
            graphs: See the class. Default: only in ``"streams"``.
            trace: See the class.
            native: See the class.
            exact: See the class.
            ngram: See the class.
            acceptance: See the class. Without drafts it has no effect.
            translation: See the class.
            confidence: See the class. Without drafts it has no effect.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is out of range, or does not fit the schedule.
        """
        if graphs is not None:
            _require_bool("graphs", graphs)
        config = cls(
            schedule=schedule,
            min_draft_tokens=0 if min_draft_tokens is None else min_draft_tokens,
            decode_meanwhile=decode_meanwhile,
            graphs=bool(graphs),
            trace=trace,
            native=native,
            exact=exact,
            ngram=None if schedule == "plain" else ngram,
            acceptance=acceptance,
            translation=None if schedule == "plain" else translation,
            confidence=confidence and schedule != "plain" if isinstance(confidence, bool) else confidence,
        )
        if schedule == "plain" or num_drafts == 0:
            captured = bool(graphs) or schedule == "streams"
            return cls(schedule="plain", graphs=captured, trace=trace, native=native, exact=exact)
        if lookahead is None:
            can_control = schedule == "lockstep" and not graphs and acceptance == "coupled" and not confidence
            config = replace(config, controlled=can_control)
            models = num_drafts - (ngram is not None)
            each = _CONFIDENT_LOOKAHEAD if confidence else _LOOKAHEAD[schedule]
            ngram_lookahead = _CONFIDENT_LOOKAHEAD if confidence else _NGRAM_LOOKAHEAD
            lookahead = [*[ngram_lookahead] * (num_drafts - models), *[each] * models]
        per_draft = tuple(lookahead) if isinstance(lookahead, Sequence) else (lookahead,) * num_drafts
        config = replace(config, lookahead=per_draft, graphs=bool(graphs) or schedule == "streams")
        if len(config.lookahead) != num_drafts:
            raise ValueError(f"lookahead: one per draft, {num_drafts}, not {len(config.lookahead)}")
        if min(config.lookahead) < 1:
            raise ValueError(f"lookahead must be at least 1, got {list(config.lookahead)}")
        if decode_meanwhile and (schedule not in ("workers", "streams", "ranks") or config.min_draft_tokens == 0):
            raise ValueError(
                "decode_meanwhile is for schedule='workers', 'streams' or 'ranks' and needs min_draft_tokens of at least 1"
            )
        return config

    def lookahead_of(self, stage: int) -> int:
        """How many tokens ``stage`` may be ahead of the next one; 0 for the target."""
        return self.lookahead[stage] if stage < len(self.lookahead) else 0

    def max_draft_tokens(self, stage: int) -> int:
        """Most draft tokens in a step of ``stage``: half of the columns stay free for its own tokens. 0 for the first stage."""
        return min(self.lookahead[stage - 1], WIDTH // 2) if 0 < stage <= len(self.lookahead) else 0

    @property
    def rests(self) -> bool:
        """Whether the target gets no draft tokens."""
        return self.max_draft_tokens(len(self.lookahead)) == 0


def default_schedule(
    devices: Sequence[str],
    graphs: bool | None = None,
    cores: int | None = None,
    *,
    nodes: int | None = None,
    ngram: bool = False,
    translated: bool = False,
    whole: bool = True,
) -> tuple[str, bool]:
    """Choose the schedule where the user names none, without measuring.

    All cores with one memory bus are one device: a stage that runs beside another on it slows it down by as much as it works. Processes pay where stages
    have memory buses of their own.

    | stages | schedule |
    |---|---|
    | no drafts | ``"plain"`` |
    | an n-gram index as the only draft | ``"lockstep"``, as it has no steps to overlap |
    | all on one GPU | ``"lockstep"``, captured rounds |
    | all on GPUs, more than one | ``"streams"`` |
    | all on the CPU, and a NUMA node for each stage | ``"workers"`` |
    | the target on a GPU, the drafts on the CPU, and a core for each stage | ``"workers"`` |
    | otherwise, so on a CPU with one node | ``"lockstep"`` |

    Beside an n-gram index or a draft with another tokenizer, and where a model is not whole on one device, no steps are captured.

    Args:
        devices: Per model, drafts first, target last: ``"cpu"``, ``"cuda:0"``, ...
        graphs: The user's choice of captured steps. None: captured on GPUs, not captured on the CPU.
        cores: CPU cores for this process. None: as the operating system reports.
        nodes: NUMA nodes on whose cores this process may run. None: likewise.
        ngram: Whether the first draft is an n-gram index.
        translated: Whether the first draft has another tokenizer than the target.
        whole: Whether each model lies whole on one device: not split, offloaded or sharded over processes.

    Returns:
        The schedule, and whether ``"plain"`` and ``"lockstep"`` run in captured steps.
    """
    *drafts, target = devices
    captured = whole and all(device.startswith("cuda") for device in devices) if graphs is None else graphs
    captured = captured and not ngram and not translated
    if not drafts:
        return "lockstep" if ngram else "plain", captured
    if captured:
        on_gpus = target.startswith("cuda") and len(set(devices)) > 1
        return ("streams" if on_gpus else "lockstep"), True
    if graphs is not None or any(device != "cpu" for device in drafts):
        return "lockstep", False
    if target == "cpu":
        places = numa_nodes() if nodes is None else nodes
    else:
        places = len(os.sched_getaffinity(0)) if cores is None else cores
    return ("workers" if places >= len(devices) else "lockstep"), False


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """Number of nodes on whose cores this process may run, at least 1.

    Args:
        folder: Where the kernel lists them, one folder ``node*`` with a file ``cpulist`` each.
    """
    own, found = os.sched_getaffinity(0), 0
    for file in folder.glob("node[0-9]*/cpulist"):
        with suppress(ValueError):  # a container may change it
            found += not own.isdisjoint(_cores(file.read_text()))
    return max(1, found)


def _cores(text: str) -> set[int]:
    """The cores of a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def takes_ngram(schedule: str, options: Mapping[str, Any]) -> bool:
    """Whether an n-gram index joins the drafts where the user names no schedule: where the controller can let it rest, it costs nothing."""
    is_controllable = schedule in ("plain", "lockstep") and not options["graphs"] and not options["confidence"]
    return (
        is_controllable
        and options["lookahead"] is None
        and options["ngram"] is None
        and options["acceptance"] == "coupled"
    )


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
