"""Published runs of PipeSpec (arXiv 2505.01572), re-read: the table, what its runs really did, and what the simulator says.

One JSON file per run, as extracted from the authors' repository (BradMcDanel/pipespec, MIT licence)::

    {"strategy": "greedy" | "chain" | "async-chain", "lookahead_recorded": L,
     "models": [{"path": ".../Llama-3.1-8B-Instruct"}, ...],          smallest first, the target last
     "samples": [{"total_time_s": s, "tokens": n,
                  "token_times_ms": [...],                            greedy only
                  "stage_step_ms": [[...], ...],                      else, per stage, every step
                  "accepted_per_verification": [[...], ...]}]}        per verifying stage, tokens appended by each step

``chain`` is the lock step, ``async-chain`` the pipeline. The pipelines are predicted from the lock-step and plain runs alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipespec.planning.closed_form import best_policy
from pipespec.planning.simulator import Answers, Policy, Simulation, StageModel, simulate

_STRATEGIES = {"greedy": "plain", "chain": "lockstep", "async-chain": "pipeline"}
_UNKNOWN = -1

LOOKAHEADS = range(9)
"""Minimum windows that are tried to find the one that a pipeline ran with."""

WAITS = (0, 4, 6, 8, 10, 12, 14, 16, 20, 24)
"""Waits that are tried for our own protocol."""

_LONGEST = 100
"""Tokens that one step can append, in the reference as in our simulator's histograms."""

_FILLS = 3
"""Times that each text is simulated, each time with other guesses for the positions that the logs leave open."""


@dataclass(frozen=True)
class Sample:
    """One prompt. ``steps_s``: per stage, seconds of each step; ``appended``: per verifying stage, tokens of each step."""

    seconds: float
    tokens: int
    steps_s: tuple[np.ndarray, ...]
    appended: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Run:
    """One file. ``kind``: plain, lockstep or pipeline. ``models``: short names, the target last."""

    kind: str
    models: tuple[str, ...]
    lookahead: int
    samples: tuple[Sample, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {'/'.join(self.models)}"

    def ms_per_token(self, count: int | None = None, keep: Sequence[int] | None = None) -> float:
        """Sum of times over sum of tokens: of all samples, of the first ``count``, or of those in ``keep``."""
        chosen = [self.samples[i] for i in keep] if keep is not None else self.samples[:count]
        return 1e3 * sum(s.seconds for s in chosen) / sum(s.tokens for s in chosen)


# --- reading -------------------------------------------------------------------------------------------------------


def load(folder: Path | str) -> list[Run]:
    """All runs in ``folder``, plain ones first, then lock steps, then pipelines.

    Raises ``FileNotFoundError`` if there are none, ``ValueError`` for a file that is not such a run: no samples, times that are
    not positive, logs that do not fit together.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder}: no traces there (one .json file per run)")
    runs = [_read(file) for file in files]
    order = list(_STRATEGIES.values())
    return sorted(runs, key=lambda run: (order.index(run.kind), len(run.models), [(len(m), m) for m in run.models]))


def _read(file: Path) -> Run:
    try:
        return _run(json.loads(file.read_text(encoding="utf-8")))
    except KeyError as error:
        raise ValueError(f"{file.name}: {error} is missing; it is no trace of a run") from error
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name}: it is no trace of a run ({error})") from error
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _run(data: dict[str, Any]) -> Run:
    if data["strategy"] not in _STRATEGIES:
        raise ValueError(f"unknown strategy {data['strategy']!r}")
    models = tuple(_short_name(m["path"]) for m in data["models"])
    if not models or not data["samples"]:
        raise ValueError("no models" if not models else "no samples")
    samples = tuple(_sample(i, s, len(models)) for i, s in enumerate(data["samples"]))
    return Run(_STRATEGIES[data["strategy"]], models, int(data["lookahead_recorded"]), samples)


def _short_name(path: str) -> str:
    size = re.search(r"\d+(?:\.\d+)?B", path)
    return size.group() if size else path.rpartition("/")[2]


def _sample(index: int, data: dict[str, Any], stages: int) -> Sample:
    where = f"sample {index}: "
    seconds, tokens = float(data["total_time_s"]), int(data["tokens"])
    if not (np.isfinite(seconds) and seconds > 0) or tokens < 1:
        raise ValueError(f"{where}{tokens} tokens in {seconds} s")
    logged = [data["token_times_ms"]] if "token_times_ms" in data else data["stage_step_ms"]
    steps = tuple(np.asarray(s, dtype=float) / 1e3 for s in logged)
    appended = tuple(np.asarray(a, dtype=int) for a in data.get("accepted_per_verification", []))
    if len(steps) != stages or len(appended) != (0 if stages == 1 else stages - 1):
        raise ValueError(f"{where}the logs are not those of {stages} stages")
    for s in steps:
        if s.ndim != 1 or len(s) == 0 or not np.isfinite(s).all() or (s <= 0).any():
            raise ValueError(f"{where}step times must be positive numbers, at least one per stage")
    for a in appended:
        if a.ndim != 1 or len(a) == 0 or (a < 1).any():
            raise ValueError(f"{where}every step appends at least one token")
    if stages > 1 and len(appended[-1]) != len(steps[-1]):
        raise ValueError(f"{where}{len(steps[-1])} steps of the target, but {len(appended[-1])} counts of its tokens")
    return Sample(seconds, tokens, steps, appended)


# --- what the plain and lock-step runs say -------------------------------------------------------------------------


def step_times(lockstep: Run, plain: Run) -> tuple[float, float]:
    """Seconds of the target's one-token step and of a wider one: medians, told apart by their size.

    Raises ``ValueError`` where both take about as long, since the logs then cannot be read.
    """
    one = float(np.median(np.concatenate([s.steps_s[-1][1:] for s in plain.samples])))
    wide = float(np.median(np.concatenate([s.steps_s[-1] for s in lockstep.samples])))
    if wide < 1.5 * one:
        raise ValueError(
            f"{lockstep.name}: a step over drafts ({1e3 * wide:.1f} ms) cannot be told from one without ({1e3 * one:.1f} ms)"
        )
    return one, wide


def agreement(run: Run, one_token_s: float, wide_s: float) -> list[np.ndarray]:
    """Per sample of a two-stage lock step: does the draft say what the target says, position by position? 1, 0, or -1 for unknown.

    The rounds verify ``lookahead - 1`` drafts. A step that appends j + 1 tokens tells j agreements, then a disagreement; when all
    agreed, the next step tells about the bonus token: the draft has said it by itself, and if it said another one, its drafts
    are unusable and the target decodes a single token, which its time shows. About that token nothing is known.
    """
    if run.kind != "lockstep" or len(run.models) != 2:
        raise ValueError(f"{run.name}: agreement is read from lock steps of two models")
    limit = np.sqrt(one_token_s * wide_s)
    out = []
    for sample in run.samples:
        appended, verified = sample.appended[-1], sample.steps_s[-1] > limit
        if appended.max() > run.lookahead:
            raise ValueError(
                f"{run.name}: a round appended {appended.max()} tokens, more than its window of {run.lookahead}"
            )
        bits = np.full(1 + int(appended.sum()) + 1, _UNKNOWN)
        position, bonus_open = 1, True  # the first token comes from the prefill; so does the draft's opinion about it
        for n, wide in zip(appended.tolist(), verified.tolist(), strict=True):
            if bonus_open:
                bits[position - 1] = int(wide)
            if wide:
                bits[position : position + n - 1] = 1
                bonus_open = n == run.lookahead
                if not bonus_open:
                    bits[position + n - 1] = 0
            else:
                bonus_open = False
            position += n
        out.append(bits[: sample.tokens])
    return out


def acceptance(bits: Sequence[np.ndarray]) -> float:
    """Share of agreements among the known positions. Raises ``ValueError`` if none is known."""
    known = np.concatenate(list(bits)) if bits else np.empty(0)
    known = known[known != _UNKNOWN]
    if len(known) == 0:
        raise ValueError("no position is known: nothing can be said about acceptance")
    return float(known.mean())


@dataclass(frozen=True)
class Evidence:
    """All that a prediction of a pipeline is made from; nothing of it comes from the pipeline's own run.

    ``bits[d][i]``: agreement of draft d with the target in sample i; ``rates``: its mean per draft; ``same_mistake``: probability
    that two drafts which are both wrong say the same; ``start_s[i]``: the target's prompt in sample i.
    """

    models: tuple[str, ...]
    stages: tuple[StageModel, ...]
    bits: tuple[list[np.ndarray], ...]
    rates: tuple[float, ...]
    same_mistake: float
    start_s: tuple[float, ...]
    same_text: tuple[int, ...]  # samples whose text was equally long in all runs

    def answers(self, sample: int, seed: int) -> Answers:
        """The sample's text as the stages see it; what is unknown is drawn."""
        rng = np.random.default_rng([seed, sample])
        length = min(len(bits[sample]) for bits in self.bits)
        filled = []
        for bits, rate in zip(self.bits, self.rates, strict=True):
            known = bits[sample][:length]
            filled.append(np.where(known == _UNKNOWN, rng.random(length) < rate, known == 1))
        return Answers.from_bits(*filled, same_mistake=rng.random(length) < self.same_mistake)


def gather(runs: Sequence[Run], models: tuple[str, ...]) -> Evidence:
    """What the lock-step and plain runs say about a chain of ``models`` (two or three). Raises ``ValueError`` if one is missing."""
    if not 2 <= len(models) <= 3:
        raise ValueError(f"chains of two or three models can be predicted, not {len(models)}")
    target, drafts = models[-1], models[:-1]
    plain = _find(runs, "plain", (target,))
    pairs = [_find(runs, "lockstep", (draft, target)) for draft in drafts]
    whole = _find(runs, "lockstep", models)
    if len({len(run.samples) for run in (*pairs, whole)}) != 1:
        raise ValueError(f"the lock steps with {target} have different numbers of samples")
    times = [step_times(pair, plain) for pair in pairs]
    bits = tuple(agreement(pair, *t) for pair, t in zip(pairs, times, strict=True))
    stages = [StageModel(float(np.median(np.concatenate([s.steps_s[0] for s in pairs[0].samples]))))]
    for i, draft in enumerate(drafts[1:], 1):
        own = float(np.median(np.concatenate([s.steps_s[0] for s in pairs[i].samples])))
        # A middle stage's log adds up a verification and what it decodes after it; after a full window there is nothing
        # to decode.
        full = np.concatenate([s.steps_s[i][s.appended[i - 1] == whole.lookahead] for s in whole.samples])
        if len(full) == 0:
            raise ValueError(
                f"{whole.name}: {draft} has never accepted a full window: the time of its verification is unknown"
            )
        stages.append(StageModel([own, float(np.median(full))]))
    stages.append(StageModel(list(times[-1])))
    start = [s.seconds - sum(float(t.sum()) for t in s.steps_s) for s in whole.samples]
    if min(start) < 0:
        raise ValueError(f"{whole.name}: its steps take longer than the whole")
    same = [i for i in range(len(whole.samples)) if len({run.samples[i].tokens for run in (*pairs, whole)}) == 1]
    if not same:
        raise ValueError(f"{whole.name}: no sample is equally long in all lock steps; they are not of the same prompts")
    rates = tuple(acceptance(b) for b in bits)
    same_mistake = _same_mistake(whole, bits, same) if len(drafts) == 2 else 0.0
    return Evidence(models, tuple(stages), bits, rates, same_mistake, tuple(start), tuple(same))


def _same_mistake(run: Run, bits: tuple[list[np.ndarray], ...], same: Sequence[int]) -> float:
    """What is missing from "both right" to the agreement of the two drafts, spread over "both wrong"."""
    a, b = (np.concatenate([side[i] for i in same]) for side in bits)
    known = (a != _UNKNOWN) & (b != _UNKNOWN)
    both_right, both_wrong = np.mean(a[known] + b[known] == 2), np.mean(a[known] + b[known] == 0)
    counts = np.concatenate([s.appended[0] for s in run.samples])
    agree = (counts - 1).sum() / ((counts - 1).sum() + (counts < run.lookahead).sum())
    return float(np.clip((agree - both_right) / both_wrong, 0.0, 1.0)) if both_wrong > 0 else 0.0


def _find(runs: Sequence[Run], kind: str, models: tuple[str, ...]) -> Run:
    for run in runs:
        if run.kind == kind and run.models == models:
            return run
    raise ValueError(f"the run '{kind} {'/'.join(models)}' is needed and not among the traces")


# --- predictions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Milliseconds per token, sum over sum; ``histogram[n]``: share of the target's steps that appended n tokens."""

    ms_per_token: float
    histogram: np.ndarray
    per_sample_s: np.ndarray


def predict(
    evidence: Evidence,
    run: Run,
    schedule: str,
    *,
    lookahead: int = 0,
    policy: Policy | None = None,
    keep: Sequence[int] | None = None,
    fills: int = _FILLS,
) -> Predicted:
    """Simulate the texts of ``run`` (only their lengths are taken from it), each ``fills`` times."""
    if len(run.samples) != len(evidence.start_s):
        raise ValueError(f"{run.name} has {len(run.samples)} samples, the lock steps {len(evidence.start_s)}")
    chosen = range(len(run.samples)) if keep is None else keep
    seconds, histogram = [], np.zeros(_LONGEST + 1)
    for i in chosen:
        *drafts, target = evidence.stages
        stages = [*drafts, StageModel(target.step_s, start_s=evidence.start_s[i])]
        total = 0.0
        for fill in range(fills):
            result: Simulation = simulate(
                schedule,  # type: ignore[arg-type]
                stages,
                evidence.answers(i, fill),
                run.samples[i].tokens,
                policy=policy,
                lookahead=lookahead,
                seed=fill,
            )
            total += result.seconds / fills
            counts = result.stages[-1].histogram
            histogram[: len(counts)] += counts
        seconds.append(total)
    tokens = sum(run.samples[i].tokens for i in chosen)
    return Predicted(1e3 * sum(seconds) / tokens, histogram / histogram.sum(), np.array(seconds))


@dataclass(frozen=True)
class Verdict:
    """A pipeline's run against its prediction. ``by_lookahead``: ms/token and distance of the histograms of tokens per step
    (total variation, 0 to 1); ``lookahead``: the one with the smallest distance, i.e. what the run really used."""

    run: Run
    measured: float
    by_lookahead: dict[int, tuple[float, float]]
    lookahead: int
    predicted: Predicted
    same_text: tuple[float, float]  # measured, predicted: only texts of equal length in all runs

    @property
    def error(self) -> float:
        return self.predicted.ms_per_token / self.measured - 1.0


def judge(evidence: Evidence, run: Run) -> Verdict:
    """Predict a pipeline's run for each lookahead and find the one it had."""
    appended = np.concatenate([s.appended[-1] for s in run.samples])
    share = np.bincount(np.minimum(appended, _LONGEST), minlength=_LONGEST + 1) / len(appended)
    tried = {}
    for lookahead in LOOKAHEADS:
        predicted = predict(evidence, run, "reference", lookahead=lookahead)
        tried[lookahead] = (predicted, float(np.abs(predicted.histogram - share).sum() / 2))
    best = min(tried, key=lambda k: tried[k][1])
    same = predict(evidence, run, "reference", lookahead=best, keep=evidence.same_text)
    return Verdict(
        run,
        run.ms_per_token(),
        {lookahead: (p.ms_per_token, distance) for lookahead, (p, distance) in tried.items()},
        best,
        tried[best][0],
        (run.ms_per_token(keep=evidence.same_text), same.ms_per_token),
    )


def with_foresight(
    right: np.ndarray, tokens: int, draft: float, verify: float, plain: float, *, most_hints: int = 32
) -> float:
    """The fewest seconds in which two stages make ``tokens`` tokens if the target knew at each moment which drafts will hold.

    ``right``: is the draft right at this position? Positions past the end begin again. Exact dynamic programming from the last token
    backwards over (position, half draft steps of lead), rounded down; at each the target waits for half a draft step, decodes one token, or
    verifies. A draft that was wrong begins anew when the target says so. No rule, whatever it looks at, is faster, up to the rounding.
    """
    right = np.resize(np.asarray(right, dtype=bool), tokens + 1)
    lead = np.arange(4 * most_hints + 1)  # in half steps of the draft
    half = draft / 2

    def later(passed: float, used: np.ndarray | int) -> np.ndarray:
        return np.clip(lead + passed / half - 2 * used, 0, lead[-1]).astype(np.int64)

    run = np.zeros(tokens + 2, dtype=np.int64)
    for p in range(tokens, -1, -1):
        run[p] = run[p + 1] + 1 if right[p] else 0
    left = np.zeros((tokens + 1, len(lead)))  # seconds from there to the end
    for p in range(tokens - 1, -1, -1):
        after = left[p + 1]
        best = plain + (after[later(plain, 1)] if right[p] else after[0])
        best = np.broadcast_to(best, lead.shape).copy()
        hints = np.minimum(np.minimum(lead // 2, most_hints), tokens - p - 1)
        kept = np.minimum(hints, run[p])
        all_hold = (kept == hints) & right[np.minimum(p + kept, tokens)]
        then = np.where(all_hold, later(verify, hints + 1), 0)
        verified = verify + left[p + kept + 1, then]
        best = np.where(hints > 0, np.minimum(best, verified), best)
        # To wait for any time: the best of all larger leads, and the way there.
        left[p] = np.minimum.accumulate((best + half * lead)[::-1])[::-1] - half * lead
    return float(left[0, 0])


@dataclass(frozen=True)
class Ours:
    """Our protocol at the published latencies, ms/token. ``by_wait``: sleeping, ``meanwhile``: decoding while there
    are fewer hints than ``wait`` (``decode_meanwhile=True``); ``ceiling``: no rule that looks at the number of hints can be faster, if
    acceptance is independent and the last draft costs what the first one does; ``foresight``: of two stages, if the target knew which drafts
    will hold."""

    by_wait: dict[int, float]
    meanwhile: dict[int, float]
    ceiling: float
    foresight: float | None

    @property
    def best(self) -> tuple[int, float]:
        return min(self.by_wait.items(), key=lambda item: item[1])

    @property
    def best_meanwhile(self) -> tuple[int, float]:
        return min(self.meanwhile.items(), key=lambda item: item[1])


def ours(evidence: Evidence, run: Run) -> Ours:
    """What the ``workers`` schedule would give on the texts of ``run``, for each wait."""

    def ms(wait: int, meanwhile: bool) -> float:
        return predict(
            evidence, run, "workers", policy=Policy(windows=64, wait=wait, decode_meanwhile=meanwhile)
        ).ms_per_token

    fastest = min(stage.times()[0] for stage in evidence.stages)
    plain, verify = evidence.stages[-1].times()
    limit = best_policy(evidence.rates[-1], fastest, verify, plain).rate
    start = sum(evidence.start_s) / sum(s.tokens for s in run.samples)
    tokens = sum(s.tokens for s in run.samples)
    known = None
    if len(evidence.stages) == 2:
        seconds = 0.0
        for i, sample in enumerate(run.samples):
            answers = evidence.answers(i, 0).table
            assert answers is not None
            seconds += with_foresight(answers[:, 0] == 0, sample.tokens, fastest, verify, plain)
        known = 1e3 * (seconds / tokens + start)
    sleeping = {w: ms(w, False) for w in WAITS}
    return Ours(sleeping, {w: ms(w, True) for w in WAITS if w > 0}, 1e3 * (1.0 / limit + start), known)


# --- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableRow:
    """A line of the published table. ``speedup``: as published, over plain decoding of the target whatever samples each has;
    ``fair``: on the samples that both have, with its bootstrap 95 % interval."""

    name: str
    samples: int
    ms_per_token: float
    speedup: float
    fair: float
    interval: tuple[float, float]


def table(runs: Sequence[Run]) -> list[TableRow]:
    """The published table, re-derived: every run with a target that was also run plainly."""
    rows = []
    for run in runs:
        try:
            plain = _find(runs, "plain", run.models[-1:])
        except ValueError:
            continue
        count = min(len(plain.samples), len(run.samples))
        rng = np.random.default_rng(0)
        draws = rng.integers(count, size=(2000, count))
        ours_, theirs = (
            np.array([s.seconds for s in r.samples[:count]])[draws].sum(axis=1)
            / np.array([s.tokens for s in r.samples[:count]])[draws].sum(axis=1)
            for r in (run, plain)
        )
        low, high = np.percentile(theirs / ours_, [2.5, 97.5])
        rows.append(
            TableRow(
                run.name,
                len(run.samples),
                run.ms_per_token(),
                plain.ms_per_token() / run.ms_per_token(),
                plain.ms_per_token(count) / run.ms_per_token(count),
                (float(low), float(high)),
            )
        )
    return rows


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything, as plain numbers: the table, the evidence, predicted against measured, and ours."""
    out: dict[str, Any] = {"table": [vars(row) for row in table(runs)], "lockstep": [], "pipelines": []}
    for run in runs:
        if run.kind == "plain":
            continue
        evidence = gather(runs, run.models)
        if run.kind == "lockstep":
            predicted = predict(evidence, run, "reference-lockstep", lookahead=run.lookahead).ms_per_token
            measured = run.ms_per_token()
            out["lockstep"].append(
                {"run": run.name, "measured_ms": measured, "predicted_ms": predicted, "error": predicted / measured - 1}
            )
            continue
        verdict, own = judge(evidence, run), ours(evidence, run)
        out["pipelines"].append(
            {
                "run": run.name,
                "step_ms": [[1e3 * t for t in stage.times()] for stage in evidence.stages],
                "acceptance": list(evidence.rates),
                "same_mistake": evidence.same_mistake,
                "start_ms": 1e3 * float(np.mean(evidence.start_s)),
                "lookahead_recorded": run.lookahead,
                "lookahead_used": verdict.lookahead,
                "measured_ms": verdict.measured,
                "predicted_ms": verdict.predicted.ms_per_token,
                "error": verdict.error,
                "same_text": {
                    "samples": len(evidence.same_text),
                    "measured_ms": verdict.same_text[0],
                    "predicted_ms": verdict.same_text[1],
                },
                "by_lookahead": {
                    str(k): {"predicted_ms": ms, "histogram_distance": d} for k, (ms, d) in verdict.by_lookahead.items()
                },
                "reference_best": min((ms, k) for k, (ms, _) in verdict.by_lookahead.items()),
                "ours": {
                    "wait_0_ms": own.by_wait[0],
                    "best_wait": own.best[0],
                    "best_ms": own.best[1],
                    "decode_meanwhile_wait": own.best_meanwhile[0],
                    "decode_meanwhile_ms": own.best_meanwhile[1],
                    "ceiling_ms": own.ceiling,
                    "foresight_ms": own.foresight,
                    "by_wait": {str(k): v for k, v in own.by_wait.items()},
                    "by_wait_decode_meanwhile": {str(k): v for k, v in own.meanwhile.items()},
                },
            }
        )
    return out


def as_text(data: dict[str, Any]) -> str:
    """``report`` for people."""
    lines = ["The published table, re-derived (sum of times over sum of tokens)", ""]
    lines += _columns(
        ["run", "samples", "ms/token", "speed-up", "same samples", "95 % interval"],
        [
            [
                row["name"],
                str(row["samples"]),
                f"{row['ms_per_token']:.2f}",
                f"{row['speedup']:.2f}x",
                f"{row['fair']:.2f}x",
                f"{row['interval'][0]:.2f}-{row['interval'][1]:.2f}",
            ]
            for row in data["table"]
        ],
    )
    if data["lockstep"]:
        lines += ["", "Lock steps, simulated (two models: a check of the reading, the bits come from the same run)", ""]
        lines += _columns(
            ["run", "measured ms", "simulated ms", "error"],
            [
                [row["run"], f"{row['measured_ms']:.2f}", f"{row['predicted_ms']:.2f}", f"{row['error']:+.1%}"]
                for row in data["lockstep"]
            ],
        )
    if not data["pipelines"]:
        return "\n".join(lines)
    lines += ["", "Pipelines, predicted from the lock-step and plain runs", ""]
    lines += _columns(
        ["run", "measured ms", "predicted ms", "error", "lookahead recorded", "lookahead used"],
        [
            [
                p["run"],
                f"{p['measured_ms']:.2f}",
                f"{p['predicted_ms']:.2f}",
                f"{p['error']:+.1%}",
                str(p["lookahead_recorded"]),
                str(p["lookahead_used"]),
            ]
            for p in data["pipelines"]
        ],
    )
    lines += ["", "By lookahead: predicted ms/token (distance of the histograms of tokens per step, 0 to 1)", ""]
    lookaheads = list(data["pipelines"][0]["by_lookahead"])
    lines += _columns(
        ["run", *lookaheads],
        [
            [p["run"]]
            + [
                f"{v['predicted_ms']:.1f} ({v['histogram_distance']:.2f})"
                for v in (p["by_lookahead"][k] for k in lookaheads)
            ]
            for p in data["pipelines"]
        ],
    )
    lines += ["", "Our protocol at these step times and on these texts, ms/token (gain over the measured run)", ""]

    def gain(p: dict[str, Any], ms: float) -> str:
        return f"{ms:.2f} ({p['measured_ms'] / ms:.2f}x)"

    lines += _columns(
        [
            "run",
            "measured",
            "reference, simulated",
            "its best lookahead",
            "ours, no wait",
            "ours, best wait",
            "decoding meanwhile",
            "ceiling",
            "foresight",
        ],
        [
            [
                p["run"],
                f"{p['measured_ms']:.2f}",
                gain(p, p["predicted_ms"]),
                f"{gain(p, p['reference_best'][0])} L={p['reference_best'][1]}",
                gain(p, p["ours"]["wait_0_ms"]),
                f"{gain(p, p['ours']['best_ms'])} w={p['ours']['best_wait']}",
                f"{gain(p, p['ours']['decode_meanwhile_ms'])} w={p['ours']['decode_meanwhile_wait']}",
                gain(p, p["ours"]["ceiling_ms"]),
                "-" if p["ours"]["foresight_ms"] is None else gain(p, p["ours"]["foresight_ms"]),
            ]
            for p in data["pipelines"]
        ],
    )
    lines += [
        "",
        "no wait: no handshake, corrections reach all stages at once, bonus tokens are adopted.",
        "decoding meanwhile: with fewer than w hints the target decodes one token instead of sleeping.",
        "ceiling: no rule that chooses by the number of hints is faster, if acceptance is independent and drafts cost what the",
        "smallest model's cost.",
        "foresight: no rule at all is faster: the target knows which drafts will hold.",
    ]
    return "\n".join(lines)


def _columns(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
