"""Planner: from a profile and the drafts' agreement to the schedule, the drafts, the windows, and whether to speculate at all.

Every candidate is run in the simulator, which executes the product's own protocol; plain decoding is the reference. numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from pipespec.planning._checks import positive
from pipespec.planning.simulator import WIDTH, Answers, Policy, StageModel, simulate

MARGIN = 1.05
"""Speculate only where it is predicted to be this much faster than plain decoding."""

WAKE_S = 1e-4
"""From a publication to the look of a stage that slept, on average,"""
LATE_S = 3e-4
"""the same where other stages have all cores, and"""
BETWEEN_S = 4e-5
"""from the end of a step to the next: medians of traces, see docs/theory.md. Small beside a step, and about the same everywhere."""

WAIT_MARGIN = 1.05
"""A target sleeps for drafts only where that is predicted to be this much faster: predictions of two waits differ by as much from what is
measured, and a sleep is what costs when the machine is busier than it was."""

_THREADS_GAIN = 1.1
"""Fewer threads than the user allows are taken where they are this much faster: less is the machine's mood."""
_FEW_TOKENS, _MOST_TOKENS = 512, 2048  # of a simulation: of many settings, and of one
_PIECE = 64
_MOST_WIDTH = 34  # half of a step's columns, and own tokens
_MOST_DRAFTS = 3  # of which all subsets are tried; of more, each alone, all, and all without one
_WINDOWS = {"lockstep": (1, 2, 3, 4, 6, 8), "workers": (2, 4, 8, 16), "streams": (2, 4, 8, 16)}
_WAITS = (
    (0, False),
    (1, False),
    (2, False),
    (4, False),
    (6, False),
    (2, True),
    (4, True),
    (8, True),
)  # and decode meanwhile
_LADDER = (0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97)


Key = tuple[str, tuple[int, ...], int]
"""See :attr:`Candidate.key`."""


class Stage(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def contention(self) -> float: ...
    @property
    def burden(self) -> float: ...
    @property
    def cold_s(self) -> float: ...
    @property
    def device(self) -> int: ...
    def prompt_s(self, tokens: int, *, threads: int, rows: int = 1, captured: bool = False) -> float: ...
    def seconds(
        self, width: float, *, threads: int, rows: int = 1, context: float = 64, captured: bool = False
    ) -> float: ...


class Chain(Protocol):
    """What the planner asks of a profile: :class:`pipespec.planning.profile.Profile`, or a test's own."""

    @property
    def stages(self) -> Sequence[Stage]: ...
    @property
    def threads(self) -> int: ...
    @property
    def slowness(self) -> float: ...


@dataclass(frozen=True)
class Call:
    """The shape of a call that is planned for: ``rows`` prompts of ``prompt`` tokens, ``tokens`` new ones each."""

    rows: int = 1
    prompt: int = 64
    tokens: int = 128

    def __post_init__(self) -> None:
        if min(self.rows, self.prompt, self.tokens) < 1:
            raise ValueError(f"rows, prompt and tokens must be at least 1, not {self}")

    @property
    def context(self) -> float:
        return self.prompt + self.tokens / 2


@dataclass(frozen=True)
class Candidate:
    """One way to run the chain. ``drafts``: indices into the profile's stages, in order; ``rate``: predicted tokens per second of a
    whole call, prompt included; ``ideal``: the same if steps took as long beside other stages as they take alone, and nothing but steps took
    time; ``decode_meanwhile``: what a target with fewer hints than ``wait`` does, else it sleeps; ``captured``: its steps are CUDA graphs, as
    those of ``streams`` always are."""

    schedule: str
    drafts: tuple[int, ...]
    windows: tuple[int, ...]
    wait: int
    threads: int
    rate: float
    tokens_per_step: float = 1.0
    ideal: float = 0.0
    decode_meanwhile: bool = False
    captured: bool = False

    @property
    def way(self) -> str:
        """Its schedule, as it is told to the user."""
        return f"{self.schedule}, graphs" if self.captured and self.schedule != "streams" else self.schedule

    @property
    def waits(self) -> bool:
        """Whether its stages run at the same time, so that one can wait for another."""
        return self.schedule in ("workers", "streams")

    @property
    def key(self) -> Key:
        """What cannot be changed while it runs."""
        return (self.way, self.drafts, self.threads)


@dataclass(frozen=True)
class Rung:
    """What to do where drafts are accepted at this rate: by simulation."""

    acceptance: float
    windows: tuple[int, ...]
    wait: int
    rate: float


@dataclass(frozen=True)
class Plan:
    """``chosen`` of ``candidates``, which holds the best windows of every schedule and subset, fastest first, ``plain`` among them."""

    chosen: Candidate
    plain: Candidate
    candidates: tuple[Candidate, ...]
    names: tuple[str, ...]
    call: Call
    why: str
    ladder: tuple[Rung, ...] = ()

    @property
    def speculates(self) -> bool:
        return self.chosen.schedule != "plain"

    def label(self, candidate: Candidate) -> str:
        return " > ".join([*(self.names[i] for i in candidate.drafts), self.names[-1]])

    def __str__(self) -> str:
        head = ("", "schedule", "stages", "threads", "windows", "wait", "tokens/step", "tokens/s", "vs plain")
        lines = [head]
        for c in self.candidates:
            lines.append(
                (
                    "->" if c == self.chosen else "",
                    c.way,
                    self.label(c),
                    str(c.threads),
                    "/".join(map(str, c.windows)) or "-",
                    f"{c.wait}{'+' if c.decode_meanwhile else ''}" if c.waits else "-",
                    f"{c.tokens_per_step:.2f}",
                    f"{c.rate:.1f}",
                    f"{c.rate / self.plain.rate:.2f}x",
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        left = 3  # columns of words
        shown = [
            "  ".join(
                cell.ljust(w) if i < left else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*shown, self.why])

    def to_dict(self) -> dict[str, Any]:
        return {
            "why": self.why,
            "chosen": _as_dict(self.chosen),
            "candidates": [_as_dict(c) for c in self.candidates],
            "names": list(self.names),
            "call": {"rows": self.call.rows, "prompt": self.call.prompt, "tokens": self.call.tokens},
        }


def _as_dict(c: Candidate) -> dict[str, Any]:
    return {**vars(c), "drafts": list(c.drafts), "windows": list(c.windows)}


def _pace(profile: Chain, candidate: Candidate) -> float:
    """How much longer things last than the profile says: captured steps know nothing of the host's moods."""
    return 1.0 if candidate.captured else profile.slowness


def step_s(profile: Chain, stage: Stage, width: int, candidate: Candidate, call: Call, threads: int) -> float:
    """Seconds of a step that feeds ``width`` columns, as ``candidate`` runs it."""
    shape = {"threads": threads, "rows": call.rows}
    return _pace(profile, candidate) * stage.seconds(width, context=call.context, captured=candidate.captured, **shape)


def prompt_s(profile: Chain, stage: Stage, candidate: Candidate, call: Call, threads: int) -> float:
    """Seconds that the call's prompts take one stage."""
    shape = {"threads": threads, "rows": call.rows}
    return _pace(profile, candidate) * stage.prompt_s(call.prompt, captured=candidate.captured, **shape)


def start_s(profile: Chain, candidate: Candidate, call: Call) -> float:
    """Seconds until the target takes its first step: stages in one process read their prompts in turn."""
    read = () if candidate.schedule == "workers" else candidate.drafts
    return sum(prompt_s(profile, profile.stages[i], candidate, call, candidate.threads) for i in (*read, -1))


def between_s(candidate: Candidate) -> float:
    """From the end of a step to the next; the time of a captured step has it."""
    return 0.0 if candidate.captured else BETWEEN_S


def columns(candidate: Candidate, place: int, width: int) -> int:
    """Columns of the step in which the stage at ``place`` of the chain feeds ``width``.

    An eager step has no more than it needs; ``streams`` launches the next of :func:`pipespec_kernels.scheduler.widths`, and a captured round of
    ``lockstep`` has room for all hints of a full window in each step.
    """
    if not candidate.captured:
        return width
    hints = [0, *(min(window, WIDTH // 2) for window in candidate.windows)]
    if candidate.schedule != "streams":
        return max(width, 1 + hints[place])
    from pipespec_kernels.scheduler import widths

    return next((w for w in widths(max(2, 1 + max(hints))) if w >= width), width)


def predict(
    profile: Chain,
    answers: Answers,
    candidate: Candidate,
    call: Call,
    *,
    seed: int = 0,
    ideal: bool = False,
    cores: int | None = None,
) -> Candidate:
    """``candidate`` with its predicted rate. ``answers`` are of all drafts of the profile; a table is replayed as a whole, up to
    2048 positions. ``ideal``: see :class:`Candidate`. ``cores``: that processes share (None: one for each).

    What stages at once cost each other was measured of ``workers``. Of ``streams`` it is a bound: stages on one GPU share what one alone has,
    since decoding is reading weights; kernels that leave room for others do better. Not modelled of captured rounds: stages in the middle
    take a fixed number of steps, where lockstep asks for as many as fill the window.
    """
    rows, target = call.rows, len(profile.stages) - 1
    between = 0.0 if ideal else between_s(candidate)
    in_processes = candidate.schedule == "workers"
    start = start_s(profile, candidate, call)
    stages = []
    for place, i in enumerate((*candidate.drafts, target)):
        stage = profile.stages[i]
        threads = candidate.threads if i == target or not in_processes else 1
        most = range(1, 2 if candidate.schedule == "plain" else _MOST_WIDTH + 1)
        times = [step_s(profile, stage, columns(candidate, place, w), candidate, call, threads) for w in most]
        for t in times:
            positive(t, f"a step time of {stage.name}")
        beside = [profile.stages[j].burden for j in candidate.drafts] if i == target else [stage.contention]
        stages.append(
            StageModel(
                [t + between for t in times],
                prompt_s(profile, stage, candidate, call, threads) if in_processes else start,
                device=stage.device if candidate.schedule == "streams" else 0,
                sensitivity=1.0 if candidate.schedule == "streams" else sum(beside) / max(1, len(beside)),
                cold_s=0.0 if candidate.waits or candidate.captured else profile.slowness * stage.cold_s,
            )
        )
    if candidate.schedule == "plain":
        rate = rows * call.tokens / (start + call.tokens * stages[-1].times()[0])
        return replace(candidate, rate=rate, tokens_per_step=1.0)
    own = _subset(answers, candidate.drafts, len(profile.stages))
    # Enough of them for the mean, not one text's luck.
    many = max(1, min(max(_FEW_TOKENS, 0 if own.table is None else len(own.table)), _MOST_TOKENS) // rows)
    result = simulate(
        "workers" if candidate.waits else "lockstep",
        stages,
        own,
        many,
        policy=Policy(
            candidate.windows,
            candidate.wait,
            decode_meanwhile=candidate.decode_meanwhile,
            wake_s=0.0 if ideal or not candidate.waits else WAKE_S,
            late_s=0.0 if ideal or not candidate.waits else LATE_S,
        ),
        rows=rows,
        seed=seed,
        contention=0.0 if ideal else 1.0,
        cores=None if ideal or not in_processes else cores,
    )
    seconds = start + (result.seconds - start) * call.tokens / many
    return replace(candidate, rate=rows * call.tokens / seconds, tokens_per_step=result.tokens_per_step)


def _subset(answers: Answers, drafts: Sequence[int], stages: int) -> Answers:
    """The answers of some of the drafts."""
    answers.check(stages)
    if answers.table is not None:
        return Answers(table=np.ascontiguousarray(answers.table[:, list(drafts)]))
    # Independent pairs: neighbours that are further apart agree where all between them do.
    bounds = [*drafts, stages - 1]
    return Answers(acceptance=tuple(math.prod(answers.acceptance[a:b]) for a, b in itertools.pairwise(bounds)))


def subsets(profile: Chain) -> list[tuple[int, ...]]:
    """Which drafts, in which order: quickest first."""
    count = len(profile.stages) - 1
    order = sorted(range(count), key=lambda i: profile.stages[i].seconds(1, threads=1))
    if count <= _MOST_DRAFTS:
        return [s for n in range(1, count + 1) for s in itertools.combinations(order, n)]
    found = [(i,) for i in order] + [tuple(order)] + [tuple(j for j in order if j != i) for i in order]
    return list(dict.fromkeys(found))


def _grid(schedule: str, drafts: int) -> list[tuple[tuple[int, ...], int, bool]]:
    """Windows, waits, and whether to decode meanwhile, to try."""
    sizes = _WINDOWS[schedule]
    waits = _WAITS[:1] if schedule == "lockstep" else _WAITS
    # The same window for all but the last draft: the product of all would be too many.
    pairs = (
        [(w,) for w in sizes] if drafts == 1 else [(a,) * (drafts - 1) + (b,) for a in sizes[1:4] for b in sizes[1:]]
    )
    return [(windows, wait, meanwhile) for windows in pairs for wait, meanwhile in waits if wait <= windows[-1]]


def plan(
    profile: Chain,
    answers: Answers,
    call: Call | None = None,
    *,
    schedules: Sequence[str] = ("lockstep", "workers"),
    captured: Sequence[str] = (),
    corrections: dict[Key, float] | None = None,
    cores: int | None = None,
    seed: int = 0,
) -> Plan:
    """The fastest way to run the chain, by simulation.

    ``answers``: of all drafts. ``schedules``: that are considered beside plain decoding, eager; ``captured``: with captured steps, ``"plain"``,
    ``"lockstep"`` and ``"streams"``, for which the profile must have times. ``corrections``: measured over predicted, per
    :attr:`Candidate.key`. ``cores``: more processes than this are not considered. Raises ``ValueError`` for times or probabilities that make
    no sense.
    """
    call = call or Call()
    corrections = corrections or {}
    target = len(profile.stages) - 1
    names = tuple(stage.name for stage in profile.stages)
    counts = sorted({1, profile.threads}, reverse=True)

    thin = _thinned(answers)

    def predicted(c: Candidate, answers: Answers = thin) -> Candidate:
        return predict(profile, answers, c, call, seed=seed, cores=cores)

    found = [predicted(Candidate("plain", (), (), 0, n, 0.0)) for n in counts]
    plain = _plain(found)
    ways = [(schedule, False, plain.threads) for schedule in schedules]
    for schedule in captured:
        if schedule == "plain":
            found.append(predicted(Candidate("plain", (), (), 0, profile.threads, 0.0, captured=True)))
        else:
            ways.append((schedule, True, profile.threads))
    if target > 0:
        answers.check(len(profile.stages))
        for schedule, is_captured, threads in ways:
            if schedule == "workers" and cores is not None and cores < 2:
                continue
            for drafts in subsets(profile):
                devices = {profile.stages[i].device for i in (*drafts, target)}
                if is_captured and schedule == "lockstep" and len(devices) > 1:
                    continue  # a round is one graph
                own = Candidate(schedule, drafts, (), 0, threads, 0.0, captured=is_captured)
                if schedule == "workers":
                    own = replace(own, threads=max(1, profile.threads - len(drafts)))
                tried = [
                    predicted(replace(own, windows=windows, wait=wait, decode_meanwhile=meanwhile))
                    for windows, wait, meanwhile in _grid(schedule, len(drafts))
                ]
                found.append(predicted(_best(tried), answers))
    found = [replace(c, ideal=predict(profile, answers, c, call, seed=seed, ideal=True).rate) for c in found]
    return decide(Plan(plain, plain, tuple(found), names, call, ""), corrections)


def _best(tried: Sequence[Candidate]) -> Candidate:
    """The fastest of some windows and waits; see :data:`WAIT_MARGIN`."""
    return max(tried, key=lambda c: c.rate / (WAIT_MARGIN if c.wait and not c.decode_meanwhile else 1.0))


def _thinned(answers: Answers) -> Answers:
    """A long table, for the many settings that are compared: pieces of it."""
    table = answers.table
    if table is None or len(table) <= _FEW_TOKENS:
        return answers
    begins = np.linspace(0, min(len(table), _MOST_TOKENS) - _PIECE, _FEW_TOKENS // _PIECE).astype(int)
    return Answers(table=np.concatenate([table[b : b + _PIECE] for b in begins]))


def _plain(candidates: Sequence[Candidate]) -> Candidate:
    """Plain decoding: eager, with the threads that the user allows unless fewer are clearly faster; captured, where that is faster by the margin."""
    found = sorted((c for c in candidates if c.schedule == "plain" and not c.captured), key=lambda c: -c.threads)
    fewer = max(found, key=lambda c: c.rate)
    eager = fewer if fewer.rate > _THREADS_GAIN * found[0].rate else found[0]
    captured = [c for c in candidates if c.schedule == "plain" and c.captured and c.rate > MARGIN * eager.rate]
    return max(captured, key=lambda c: c.rate, default=eager)


def plain_of(plan: Plan, candidate: Candidate) -> Candidate:
    """What ``candidate``'s driver does while its drafts rest: plain decoding in steps of its kind."""
    if candidate.captured:
        return next((c for c in plan.candidates if c.schedule == "plain" and c.captured), plan.plain)
    return _plain([c for c in plan.candidates if not c.captured])


def eager_only(plan: Plan) -> Plan:
    """What there is of it for a call whose steps need the host; to be decided anew."""
    return replace(plan, candidates=tuple(c for c in plan.candidates if not c.captured))


def decide(plan: Plan, corrections: dict[Key, float]) -> Plan:
    """The same candidates, their rates corrected by what was measured, and the choice anew. Cheap.

    What has not been measured is taken to be as far off as plain decoding: the machine is what they have in common.
    """
    known = [c for c in plan.candidates if c.schedule == "plain" and c.key in corrections]
    common = corrections[max(known, key=lambda c: c.rate * corrections[c.key]).key] if known else 1.0
    corrected = [replace(c, rate=c.rate * corrections.get(c.key, common)) for c in plan.candidates]
    plain = _plain(corrected)
    best = max((plain, *(c for c in corrected if c.schedule != "plain")), key=lambda c: c.rate)
    # A worker's target has fewer threads: what they alone would give is no merit of the drafts'.
    alone = max(c.rate for c in corrected if c.schedule == "plain" and c.threads in (plain.threads, best.threads))
    gain = best.rate / alone
    if best.schedule == "plain":
        chosen = plain
        others = [c for c in corrected if c.schedule != "plain"]
        cause = "there are no drafts" if not others else "no chain of drafts is predicted to be faster"
        why = f"{plain.way}: {cause}"
    elif gain < MARGIN:
        chosen, why = (
            plain,
            f"{plain.way}: {best.way} would gain {100 * (gain - 1):.0f} %, less than the margin of {100 * (MARGIN - 1):.0f} %",
        )
    else:
        chosen = best
        why = f"{best.way}: predicted {gain:.2f}x of plain decoding, {best.tokens_per_step:.2f} tokens per verification"
    corrected.sort(key=lambda c: -c.rate)
    return replace(plan, chosen=chosen, plain=plain, candidates=tuple(corrected), why=why)


def ladder(
    profile: Chain, answers: Answers, candidate: Candidate, call: Call, *, cores: int | None = None
) -> tuple[Rung, ...]:
    """The best windows and wait of ``candidate`` for acceptance rates other than the expected one: what it is steered by.

    The last draft's agreement with the target varies, that of drafts with each other stays. None for a captured round: it is a graph with
    windows of its own.
    """
    if candidate.schedule == "plain" or (candidate.captured and candidate.schedule == "lockstep"):
        return ()
    between = neighbours(answers, candidate.drafts, len(profile.stages))
    rungs = []
    waits = sorted({0, 2, 4, candidate.wait}) if candidate.waits else [0]
    settings = [
        ((*candidate.windows[:-1], window), wait)
        for window in _WINDOWS[candidate.schedule]
        for wait in waits
        if wait <= window
    ]
    for a in _LADDER:
        own = Answers(acceptance=(*between[:-1], a))
        best = _best(
            [
                _predict_subset(profile, own, replace(candidate, windows=windows, wait=wait), call, cores)
                for windows, wait in settings
            ]
        )
        rungs.append(Rung(a, best.windows, best.wait, best.rate))
    return tuple(rungs)


@dataclass(frozen=True)
class _Sub:
    """Some stages of a profile."""

    whole: Chain
    stages: Sequence[Stage] = field(default_factory=tuple)

    @property
    def threads(self) -> int:
        return self.whole.threads

    @property
    def slowness(self) -> float:
        return self.whole.slowness


def _predict_subset(profile: Chain, answers: Answers, candidate: Candidate, call: Call, cores: int | None) -> Candidate:
    stages = [profile.stages[i] for i in candidate.drafts] + [profile.stages[-1]]
    own = replace(candidate, drafts=tuple(range(len(candidate.drafts))))
    return replace(predict(_Sub(profile, stages), answers, own, call, cores=cores), drafts=candidate.drafts)


def neighbours(answers: Answers, drafts: Sequence[int], stages: int) -> list[float]:
    """Acceptance rate between neighbours of a chain of some drafts."""
    own = _subset(answers, drafts, stages)
    if own.table is None:
        return list(own.acceptance)
    columns = [*own.table.T, np.zeros(len(own.table), dtype=np.uint8)]
    return [float(np.mean(a == b)) for a, b in itertools.pairwise(columns)]
