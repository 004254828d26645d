"""Planner: from a profile and the drafts' agreement to a schedule, its drafts and its lookahead, or to plain decoding.

Every candidate runs in the simulator, which executes the engine's own protocol. Plain decoding is the reference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import numpy as np

from pipespec.config import WIDTH
from pipespec.planning.profile import Profile
from pipespec.planning.simulator import Answers, SimulatedPolicy, StageModel, simulate
from pipespec.planning.validation import all_positive, positive
from pipespec.process.table import aligned

MARGIN = 1.05
"""Least predicted speed-up over plain decoding for which a plan speculates."""

WAKE_S = 1e-4
"""Seconds from a publication until a sleeping stage reads it: median of traces, see the docs page ``theory.md``."""
LATE_S = 3e-4
"""The same where other stages occupy all cores."""
BETWEEN_S, DRAFT_BETWEEN_S = 2e-5, 8e-6
"""Seconds from the end of a step to the start of the next, of the target and of a draft: medians of traces of all drivers."""

WAIT_MARGIN = 1.05
"""Least predicted gain for which a target sleeps until it has ``min_draft_tokens``. The predictions of two values differ by as much from the
measurement, and a sleep costs most on a busy machine."""

_THREADS_GAIN = 1.1
"""Least gain for which fewer threads than the user allows are taken."""
_FEW_TOKENS, _MOST_TOKENS = 512, 2048
"""Tokens of a simulation that compares many settings, and of one that predicts the result."""
_PIECE = 64
_MOST_WIDTH = 34
"""Half of a step's columns, and own tokens."""
_MOST_DRAFTS = 3
"""Of up to this many drafts all subsets are candidates. Of more: each alone, all, and all but one."""
_NGRAM_LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Of an n-gram index alone: its draft tokens cost no time, and where one is right, so are many."""
_NGRAM_LOOKAHEAD = 8
"""Of an n-gram index under other drafts."""
_LOOKAHEADS = {"lockstep": (1, 2, 3, 4, 6, 8), "workers": (2, 4, 8, 16), "streams": (2, 4, 8, 16)}
_MINIMA = ((0, False), (1, False), (2, False), (4, False), (6, False), (2, True), (4, True), (8, True))
"""Pairs of ``min_draft_tokens`` and ``decode_meanwhile``."""

_COLUMNS = (
    "", "schedule", "stages", "threads", "lookahead", "min_draft_tokens", "tokens/step", "tokens/s", "vs plain",
)  # fmt: skip

Setting = tuple[tuple[int, ...], int, bool]
"""``lookahead``, ``min_draft_tokens`` and ``decode_meanwhile``."""

Key = tuple[str, tuple[int, ...], int]
"""See :attr:`Candidate.key`."""


@dataclass(frozen=True)
class CallShape:
    """Shape of a call: ``rows`` prompts of ``prompt`` tokens, and ``tokens`` new tokens each.

    Raises:
        ValueError: A number is below 1.
    """

    rows: int = 1
    prompt: int = 64
    tokens: int = 128

    def __post_init__(self) -> None:
        if min(self.rows, self.prompt, self.tokens) < 1:
            raise ValueError(f"rows, prompt and tokens must be at least 1, not {self}")

    @property
    def context(self) -> float:
        """Mean number of tokens in the cache."""
        return self.prompt + self.tokens / 2


@dataclass(frozen=True)
class Candidate:
    """One way to run the chain.

    Attributes:
        schedule: ``"plain"``, ``"lockstep"``, ``"workers"`` or ``"streams"``.
        drafts: Indices into the profile's stages, in order.
        lookahead: Per draft, see :class:`pipespec.config.SpeculationConfig`, as for ``min_draft_tokens`` and ``decode_meanwhile``.
        threads: CPU threads of the target.
        rate: Predicted tokens per second of a whole call, prompt included.
        tokens_per_step: Predicted tokens per row and step of the target.
        ideal: The predicted rate if stages did not slow each other down, and if nothing but steps took time.
        captured: Its steps are CUDA graphs, as those of ``"streams"`` always are.
        step_s: Predicted seconds from one step of the target to the next.
        factor: Measured divided by predicted rate, which :func:`decide` puts into ``rate`` alone.
    """

    schedule: str
    drafts: tuple[int, ...]
    lookahead: tuple[int, ...]
    min_draft_tokens: int
    threads: int
    rate: float
    tokens_per_step: float = 1.0
    ideal: float = 0.0
    decode_meanwhile: bool = False
    captured: bool = False
    step_s: float = 0.0
    factor: float = 1.0

    @property
    def decoding_rate(self) -> float:
        """Tokens per second and row behind the prompt, with :attr:`factor`."""
        return self.factor * self.tokens_per_step / self.step_s

    @property
    def way(self) -> str:
        """Name of the schedule in reports."""
        return f"{self.schedule}, graphs" if self.captured and self.schedule != "streams" else self.schedule

    @property
    def waits(self) -> bool:
        """Whether its stages run concurrently, so that one can wait for another."""
        return self.schedule in ("workers", "streams")

    @property
    def is_timed(self) -> bool:
        """Whether its steps run alone on the host, so that a trace has their times."""
        return self.schedule in ("plain", "lockstep") and not self.captured

    @property
    def steering(self) -> dict[str, Any]:
        """The settings that can change between two steps, as fields of :class:`pipespec.config.SpeculationConfig`."""
        return {name: getattr(self, name) for name in ("lookahead", "min_draft_tokens", "decode_meanwhile")}

    @property
    def key(self) -> Key:
        """The settings that cannot change between two steps."""
        return (self.way, self.drafts, self.threads)


@dataclass(frozen=True)
class Plan:
    """A choice among candidates.

    Attributes:
        chosen: The candidate that runs.
        plain: The best plain decoding.
        candidates: The best lookahead of every schedule and subset of drafts, fastest first, plain decoding among them. Of ``"lockstep"`` with one
            thread and with all, since that depends on what else runs.
        names: Of the profile's stages.
        call: What was planned for.
        why: The reason for the choice.
    """

    chosen: Candidate
    plain: Candidate
    candidates: tuple[Candidate, ...]
    names: tuple[str, ...]
    call: CallShape
    why: str

    @property
    def speculates(self) -> bool:
        """Whether drafts run."""
        return self.chosen.schedule != "plain"

    def label(self, candidate: Candidate) -> str:
        """Names of the candidate's stages."""
        return " > ".join([*(self.names[i] for i in candidate.drafts), self.names[-1]])

    def __str__(self) -> str:
        return aligned([_COLUMNS, *(self._row(c) for c in self.candidates)], left=3) + f"\n{self.why}"

    def _row(self, c: Candidate) -> tuple[str, ...]:
        return (
            "->" if c == self.chosen else "",
            c.way,
            self.label(c),
            str(c.threads),
            "/".join(map(str, c.lookahead)) or "-",
            f"{c.min_draft_tokens}{'+' if c.decode_meanwhile else ''}" if c.waits else "-",
            f"{c.tokens_per_step:.2f}",
            f"{c.rate:.1f}",
            f"{c.rate / self.plain.rate:.2f}x",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return asdict(self)


def columns(candidate: Candidate, place: int, width: int) -> int:
    """Columns of the step in which the stage at ``place`` of the chain feeds ``width`` tokens per row.

    An eager step has ``width`` columns. ``streams`` launches the next of :func:`pipespec_kernels.scheduler.widths`. A captured round of
    ``lockstep`` has columns for the draft tokens of a full lookahead in each step.
    """
    if not candidate.captured:
        return width
    draft_tokens = [0, *(min(lookahead, WIDTH // 2) for lookahead in candidate.lookahead)]
    if candidate.schedule != "streams":
        return max(width, 1 + draft_tokens[place])
    from pipespec_kernels.scheduler import widths

    return next((w for w in widths(max(2, 1 + max(draft_tokens))) if w >= width), width)


def predict(
    profile: Profile,
    answers: Answers,
    candidate: Candidate,
    call: CallShape,
    *,
    seed: int = 0,
    ideal: bool = False,
    cores: int | None = None,
) -> Candidate:
    """Return ``candidate`` with its predicted rate.

    The slowdown of concurrent stages was measured for ``workers``. For ``streams`` it is a bound: stages on one GPU share the speed that one
    has alone, since decoding reads weights. Not modelled for captured rounds: stages in the middle take a fixed number of steps, where eager
    lockstep takes as many as fill the lookahead.

    Args:
        profile: Step times.
        answers: Agreement of all drafts of the profile. Of a table, up to 2048 positions are replayed.
        candidate: What to predict.
        call: Shape of the call.
        seed: Of the simulation.
        ideal: Predict :attr:`Candidate.ideal` instead.
        cores: Cores that worker processes share. None: one for each.

    Raises:
        ValueError: A step time is not positive, or the answers do not fit the profile.
    """
    rows, target = call.rows, len(profile.stages) - 1
    in_processes = candidate.schedule == "workers"
    # The times of captured steps contain what lies between them.
    between = (0.0, 0.0) if ideal or candidate.captured else (DRAFT_BETWEEN_S, BETWEEN_S)
    shape: dict[str, Any] = {"rows": rows, "captured": candidate.captured}
    models = profile.models(candidate.drafts)

    def prompt_s(i: int, threads: int) -> float:
        return profile.stages[i].prompt_s(call.prompt, threads=threads, **shape)

    # Until the target's first step: stages in one process read their prompts one after the other.
    start = sum(prompt_s(i, candidate.threads) for i in (*(() if in_processes else models), target))
    stages = []
    for place, i in enumerate((*candidate.drafts, target)):
        stage = profile.stages[i]
        if stage.ngram:
            # The time per token contains what lies between two of them. The next stage spends it.
            per_token = rows * stage.seconds(1, threads=1)
            stages.append(StageModel(positive(per_token, f"a step time of {stage.name}"), device=0, ngram=True))
            continue
        threads = candidate.threads if i == target or not in_processes else 1
        fed = range(1, 2 if candidate.schedule == "plain" else _MOST_WIDTH + 1)
        widths = [columns(candidate, place, w) for w in fed] if candidate.captured else fed
        seconds = stage.step_times(widths, context=call.context, threads=threads, **shape)
        all_positive(seconds, f"a step time of {stage.name}")
        beside = [profile.stages[j].burden for j in models] if i == target else [stage.contention]
        stages.append(
            StageModel(
                [t + between[i == target] for t in seconds],
                prompt_s(i, threads) if in_processes else start,
                device=stage.device if candidate.schedule == "streams" else 0,
                sensitivity=1.0 if candidate.schedule == "streams" else sum(beside) / max(1, len(beside)),
                cold_s=0.0 if candidate.waits or candidate.captured else stage.cold_s,
            )
        )
    if candidate.schedule == "plain":
        rate = rows * call.tokens / (start + call.tokens * stages[-1].times()[0])
        return replace(candidate, rate=rate, tokens_per_step=1.0, step_s=stages[-1].times()[0])
    own = _subset(answers, candidate.drafts, len(profile.stages))
    # Enough tokens for a mean over texts.
    many = max(1, min(max(_FEW_TOKENS, 0 if own.table is None else len(own.table)), _MOST_TOKENS) // rows)
    result = simulate(
        "workers" if candidate.waits else "lockstep",
        stages,
        own,
        many,
        policy=SimulatedPolicy(
            candidate.lookahead,
            candidate.min_draft_tokens,
            decode_meanwhile=candidate.decode_meanwhile,
            wake_s=0.0 if ideal or not candidate.waits else WAKE_S,
            late_s=0.0 if ideal or not candidate.waits else LATE_S,
        ),
        rows=rows,
        seed=seed,
        contention=0.0 if ideal else 1.0,
        cores=None if ideal or not in_processes else cores,
    )
    decoding = result.seconds - start
    return replace(
        candidate,
        rate=rows * call.tokens / (start + decoding * call.tokens / many),
        tokens_per_step=result.tokens_per_step,
        step_s=decoding * result.tokens_per_step / many,
    )


def predict_alone(
    profile: Profile,
    agreement: np.ndarray,
    candidate: Candidate,
    call: CallShape,
    *,
    seed: int = 0,
    ideal: bool = False,
    cores: int | None = None,
) -> Candidate:
    """:func:`predict` where only the agreement of the candidate's own drafts is known.

    Args:
        profile: Step times of all drafts.
        agreement: uint8 [positions, drafts of the candidate], see :class:`pipespec.planning.simulator.Answers`.
        candidate: What to predict.
        call: As the other arguments: see :func:`predict`.
    """
    chain = replace(profile, stages=(*(profile.stages[i] for i in candidate.drafts), profile.target))
    own = replace(candidate, drafts=tuple(range(len(candidate.drafts))))
    found = predict(chain, Answers(table=agreement), own, call, seed=seed, ideal=ideal, cores=cores)
    return replace(found, drafts=candidate.drafts)


def _subset(answers: Answers, drafts: Sequence[int], stages: int) -> Answers:
    """Answers of some of the drafts."""
    answers.check(stages)
    if answers.table is not None:
        return Answers(table=np.ascontiguousarray(answers.table[:, list(drafts)]))
    # Independent pairs: two stages agree where all pairs between them agree.
    bounds = [*drafts, stages - 1]
    return Answers(acceptance=tuple(math.prod(answers.acceptance[a:b]) for a, b in itertools.pairwise(bounds)))


def subsets(profile: Profile) -> list[tuple[int, ...]]:
    """Candidate subsets of the drafts, the fastest draft first. Those over an n-gram index follow those without it."""
    models = profile.models(range(len(profile.stages) - 1))
    order = sorted(models, key=lambda i: profile.stages[i].seconds(1, threads=1))
    if len(models) <= _MOST_DRAFTS:
        found = [s for n in range(1, len(models) + 1) for s in itertools.combinations(order, n)]
    else:
        found = [(i,) for i in order] + [tuple(order)] + [tuple(j for j in order if j != i) for i in order]
    found += [(0, *some) for some in ((), *found)] if profile.has_ngram else []
    return list(dict.fromkeys(found))


def _over_ngram(best: Candidate | None) -> list[Setting]:
    """The same over an n-gram index: beside the settings that are best without it, those with the last draft further ahead, since it drafts
    faster. None: of the index alone."""
    if best is None:
        return [((size,), 0, False) for size in _NGRAM_LOOKAHEADS]
    *first, last = best.lookahead
    sizes = _LOOKAHEADS[best.schedule]
    further = next((size for size in sizes if size > last), last)
    kept = (best.min_draft_tokens, best.decode_meanwhile)
    return [((_NGRAM_LOOKAHEAD, *first, size), *kept) for size in dict.fromkeys((last, further))]


def _grid(schedule: str, drafts: int) -> list[Setting]:
    """Candidate values of ``lookahead``, ``min_draft_tokens`` and ``decode_meanwhile``."""
    sizes = _LOOKAHEADS[schedule]
    minima = _MINIMA[:1] if schedule == "lockstep" else _MINIMA
    # One lookahead for all but the last draft keeps the product small.
    pairs = (
        [(w,) for w in sizes] if drafts == 1 else [(a,) * (drafts - 1) + (b,) for a in sizes[1:4] for b in sizes[1:]]
    )
    return [
        (lookahead, min_draft_tokens, meanwhile)
        for lookahead in pairs
        for min_draft_tokens, meanwhile in minima
        if min_draft_tokens <= lookahead[-1]
    ]


def plan(
    profile: Profile,
    answers: Answers,
    call: CallShape | None = None,
    *,
    schedules: Sequence[str] = ("lockstep", "workers"),
    captured: Sequence[str] = (),
    cores: int | None = None,
    seed: int = 0,
) -> Plan:
    """Find the fastest way to run the chain, by simulation.

    Args:
        profile: Step times.
        answers: Agreement of all drafts.
        call: Shape of the call. None: the defaults.
        schedules: Eager schedules beside plain decoding.
        captured: Schedules with captured steps, of ``"plain"``, ``"lockstep"`` and ``"streams"``. The profile must have their times.
        cores: No candidate has more processes than this.
        seed: Of the simulation.

    Raises:
        ValueError: A time or a probability is out of range.
    """
    call = call or CallShape()
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
        best: dict[tuple[str, tuple[int, ...]], Candidate] = {}
        for schedule, is_captured, threads in ways:
            if schedule == "workers" and cores is not None and cores < 2:
                continue
            for drafts in subsets(profile):
                models = profile.models(drafts)
                has_ngram = len(models) < len(drafts)
                # No captured step can follow an n-gram index. Alone it runs in the target's process.
                if has_ngram and (is_captured or (schedule == "workers" and not models)):
                    continue
                devices = {profile.stages[i].device for i in (*models, target)}
                if is_captured and schedule == "lockstep" and len(devices) > 1:
                    continue  # a round is one graph on one device
                own = Candidate(schedule, drafts, (), 0, threads, 0.0, captured=is_captured)
                if schedule == "workers":
                    own = replace(own, threads=max(1, profile.threads - len(models)))
                without = best.get((schedule, models))
                settings = _over_ngram(without) if has_ngram else _grid(schedule, len(models))
                tried = [predicted(_with(own, setting)) for setting in settings]
                best[schedule, drafts] = _best(tried)
                found.append(predicted(best[schedule, drafts], answers))
                if schedule == "lockstep" and not is_captured:
                    others = [n for n in counts if n != threads]
                    found += [predicted(replace(best[schedule, drafts], threads=n), answers) for n in others]
    found = [replace(c, ideal=predict(profile, answers, c, call, seed=seed, ideal=True).rate) for c in found]
    return decide(Plan(plain, plain, tuple(found), names, call, ""), {})


def again(profile: Profile, answers: Answers, made: Plan, *, cores: int | None = None, seed: int = 0) -> Plan:
    """Predict the candidates of a plan again, after step times or agreement have changed. :func:`plan` predicts many more.

    Each candidate keeps its lookahead. Only that of the fastest candidate is searched again. The plan's choice stays: :func:`decide` makes the next one.

    Args:
        profile: As the other arguments: see :func:`plan`.
        made: From :func:`plan`.
    """

    def predicted(c: Candidate, *, ideal: bool = False) -> Candidate:
        return predict(profile, answers, c, made.call, seed=seed, ideal=ideal, cores=cores)

    found = [predicted(c) for c in made.candidates]
    best = max((c for c in found if c.schedule != "plain"), key=lambda c: c.rate, default=None)
    if best is not None:
        models = profile.models(best.drafts)
        if len(models) < len(best.drafts):
            without = [c for c in found if c.drafts == models and c.schedule == best.schedule and models]
            settings = _over_ngram(max(without, key=lambda c: c.rate)) if without else _over_ngram(None)
        else:
            settings = _grid(best.schedule, len(models))
        tried = [predicted(_with(best, setting)) for setting in settings]
        found[found.index(best)] = _best([best, *tried])
    return replace(made, candidates=tuple(replace(c, ideal=predicted(c, ideal=True).rate) for c in found))


def following(profile: Profile, recent: np.ndarray, made: Plan, *, seed: int = 0) -> Plan:
    """The plan with another prediction of the n-gram index alone, from the newest texts.

    What it finds varies most from text to text, and a replay costs less than a millisecond. :func:`decide` makes the choice.

    Args:
        profile: That of the plan.
        recent: Agreement of the index alone, uint8 [positions, 1].
        made: With predicted rates, from :func:`plan`.
        seed: Of the simulation.
    """

    def predicted(candidate: Candidate, *, ideal: bool = False) -> Candidate:
        return predict_alone(profile, recent, candidate, made.call, seed=seed, ideal=ideal)

    def best(own: Candidate) -> Candidate:
        found = _best([predicted(replace(own, lookahead=lookahead)) for lookahead, *_ in _over_ngram(None)])
        return replace(found, ideal=predicted(found, ideal=True).rate)

    return replace(
        made, candidates=tuple(best(c) if profile.has_ngram and c.drafts == (0,) else c for c in made.candidates)
    )


def _with(candidate: Candidate, setting: Setting) -> Candidate:
    lookahead, min_draft_tokens, decode_meanwhile = setting
    return replace(candidate, lookahead=lookahead, min_draft_tokens=min_draft_tokens, decode_meanwhile=decode_meanwhile)


def _best(tried: Sequence[Candidate]) -> Candidate:
    """The fastest candidate, see :data:`WAIT_MARGIN`."""
    return max(tried, key=lambda c: c.rate / (WAIT_MARGIN if c.min_draft_tokens and not c.decode_meanwhile else 1.0))


def _thinned(answers: Answers) -> Answers:
    """Pieces of a long table, for the comparison of many settings."""
    table = answers.table
    if table is None or len(table) <= _FEW_TOKENS:
        return answers
    begins = np.linspace(0, min(len(table), _MOST_TOKENS) - _PIECE, _FEW_TOKENS // _PIECE).astype(int)
    return Answers(table=np.concatenate([table[b : b + _PIECE] for b in begins]))


def _plain(candidates: Sequence[Candidate]) -> Candidate:
    """The best plain decoding: eager with the user's threads, unless fewer threads or captured steps are faster by their margin."""
    found = sorted((c for c in candidates if c.schedule == "plain" and not c.captured), key=lambda c: -c.threads)
    fewer = max(found, key=lambda c: c.rate)
    eager = fewer if fewer.rate > _THREADS_GAIN * found[0].rate else found[0]
    captured = [c for c in candidates if c.schedule == "plain" and c.captured and c.rate > MARGIN * eager.rate]
    return max(captured, key=lambda c: c.rate, default=eager)


def plain_of(plan: Plan, candidate: Candidate) -> Candidate:
    """The plain candidate with the same kind of steps: how the candidate's driver decodes while its drafts rest."""
    if candidate.captured:
        return next((c for c in plan.candidates if c.schedule == "plain" and c.captured), plan.plain)
    return _plain([c for c in plan.candidates if not c.captured])


def eager_only(plan: Plan) -> Plan:
    """The plan without captured candidates, for a call whose steps need the host. :func:`decide` makes its choice."""
    return replace(plan, candidates=tuple(c for c in plan.candidates if not c.captured))


def common_factor(plan: Plan, factors: Mapping[Key, float]) -> float | None:
    """The measured divided by the predicted rate that candidates have in common, because they run on one machine: that of plain decoding, or the
    mean of all. None: nothing was measured."""
    known = [c for c in plan.candidates if c.schedule == "plain" and c.key in factors]
    if known:
        return factors[max(known, key=lambda c: c.rate * factors[c.key]).key]
    return mean(factors.values()) if factors else None


def decide(plan: Plan, factors: Mapping[Key, float], speeds: Mapping[Key, float] | None = None) -> Plan:
    """Choose among the same candidates, with measured rates.

    Args:
        plan: With predicted rates.
        factors: Measured rate divided by predicted rate, above 0. A candidate without a factor gets :func:`common_factor`, averaged with the speeds
            of its own schedule, whose predictions err alike.
        speeds: The factors without what single texts gave. None: ``factors``.
    """
    speeds = factors if speeds is None else speeds
    common = common_factor(plan, speeds) or 1.0

    def factor(candidate: Candidate) -> float:
        alike = [f for key, f in speeds.items() if key[0] == candidate.way and candidate.schedule != "plain"]
        return factors.get(candidate.key, mean([common, *alike]))

    corrected = [replace(c, rate=c.rate * factor(c), factor=factor(c)) for c in plan.candidates]
    plain = _plain(corrected)
    best = max((plain, *(c for c in corrected if c.schedule != "plain")), key=lambda c: c.rate)
    # Beside workers the target has fewer threads. A gain of fewer threads alone is not a gain of the drafts.
    alone = max(
        (c for c in corrected if c.schedule == "plain" and c.threads in (plain.threads, best.threads)),
        key=lambda c: c.rate,
    )
    gain = best.rate / alone.rate
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
        kind = "measured" if {best.key, alone.key} <= factors.keys() else "predicted"
        threads = f"{alone.threads} thread{'s' if alone.threads > 1 else ''}"
        gained = f"{kind} {gain:.2f}x of plain decoding with {threads}"
        why = f"{best.way}: {gained}, predicted {best.tokens_per_step:.2f} tokens per verification, with {plan.label(best)}"
    corrected.sort(key=lambda c: -c.rate)
    return replace(plan, chosen=chosen, plain=plain, candidates=tuple(corrected), why=why)
