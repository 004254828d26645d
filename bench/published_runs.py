"""Published runs of PipeSpec (arXiv 2505.01572): the table re-derived, the behaviour of the runs, and the perf model's predictions.

    python -m bench.published_runs FOLDER            print the tables
    python -m bench.published_runs FOLDER --json     the same figures as JSON

``bench/published_logs.py`` describes and reads the files. ``chain`` is lockstep, ``async-chain`` the pipeline. The prediction of a pipeline uses
the lockstep and plain runs only, that of a lockstep run the other lockstep runs of these models, if there are any. A run that cannot be predicted is
listed with the reason.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.perf_model import Answers, Schedule, SimulatedPolicy, StageModel, simulate
from bench.published_logs import LONGEST, PublishedRun, load
from pipespec.process.progress import aligned

_UNKNOWN = -1
_EITHER = -2
"""This token is a disagreement, or this one is an agreement and the next one a disagreement."""
_SEPARABLE = 1.5
"""Minimum time of a step over draft tokens, in one-token steps, for which the time of a single step shows which of both it is."""

LOOKAHEADS = range(9)
"""Lookahead values that are tried in order to find the one that a pipeline ran with."""

MIN_DRAFT_TOKENS = (0, 4, 6, 8, 10, 12, 14, 16, 20, 24)
"""Values of ``min_draft_tokens`` that :func:`predict_protocol` tries."""

_FILLS = 3
"""Simulations per text, each with other random values for the positions that the logs leave open."""


# --- evidence of the plain and lockstep runs -----------------------------------------------------------------------


def step_times(lockstep: PublishedRun, plain: PublishedRun) -> tuple[float, float]:
    """Median seconds of the target's one-token step and of a step over draft tokens."""
    one = float(np.median(np.concatenate([s.steps_s[-1][1:] for s in plain.samples])))
    # A step that appends several tokens had draft tokens. A run without such a step shows no difference.
    several = np.concatenate([s.steps_s[-1][s.appended[-1] > 1] for s in lockstep.samples])
    return one, float(np.median(several)) if len(several) else one


def agreement(run: PublishedRun, one_token_s: float, wide_s: float) -> list[np.ndarray]:
    """Agreement of the draft with the target at each position of a two-stage lockstep run: 1, 0, or -1 for unknown, per sample.

    The rounds verify ``lookahead - 1`` draft tokens. A step that appends j + 1 tokens shows j agreements, then a disagreement. When
    all agree, the next step shows whether the draft predicted the bonus token. If it did not, its draft tokens are unusable and the target
    decodes a single token, which the time of the step shows. The agreement at that token is unknown. Where a step over draft tokens takes
    less than :data:`_SEPARABLE` one-token steps, its time does not show which of both a step of one token was: :data:`_EITHER`.
    """
    if run.kind != "lockstep" or len(run.models) != 2:
        raise ValueError(f"{run.name}: agreement is read from lockstep runs of two models")
    limit = np.sqrt(one_token_s * wide_s)
    out = []
    for sample in run.samples:
        appended, took = sample.appended[-1], sample.steps_s[-1]
        verified = took > limit if wide_s >= _SEPARABLE * one_token_s else appended > 1
        is_open = (appended == 1) & (wide_s < _SEPARABLE * one_token_s)
        if appended.max() > run.lookahead:
            raise ValueError(
                f"{run.name}: a round appended {appended.max()} tokens, more than its lookahead of {run.lookahead}"
            )
        bits = np.full(1 + int(appended.sum()) + 1, _UNKNOWN)
        position, bonus_open = 1, True  # the prefill gives the first token and the draft's prediction of it
        for n, wide, unknown in zip(appended.tolist(), verified.tolist(), is_open.tolist(), strict=True):
            if bonus_open:
                bits[position - 1] = _EITHER if unknown else int(wide)
            elif unknown:
                bits[position] = 0  # there were draft tokens, and the first was wrong
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
    """Share of agreements. Positions of :data:`_EITHER` count with their expectation at that share.

    Raises:
        ValueError: No position is known.
    """
    found = np.concatenate(list(bits)) if bits else np.empty(0)
    known, either = found[found >= 0], int((found == _EITHER).sum())
    if len(known) == 0:
        raise ValueError("no position is known: there is no acceptance rate")
    rate = float(known.mean())
    for _ in range(50):
        first = rate / (1 + rate)  # that the first of both agrees
        rate = float((known.sum() + either * first) / (len(known) + either * (1 + first)))
    return rate


@dataclass(frozen=True)
class ChainEvidence:
    """Input of a prediction of a pipeline; no part of it comes from the pipeline's own run.

    Attributes:
        bits: ``bits[d][i]`` is the agreement of draft d with the target in sample i, as :func:`agreement` returns it.
        rates: Acceptance rate of each draft.
        same_mistake: Probability that two drafts which are both wrong choose the same token.
        start_s: Seconds of the target's prompt, per sample.
        same_text: Samples whose text has the same length in all runs.
    """

    stages: tuple[StageModel, ...]
    bits: tuple[list[np.ndarray], ...]
    rates: tuple[float, ...]
    same_mistake: float
    start_s: tuple[float, ...]
    same_text: tuple[int, ...]

    def answers(self, sample: int, seed: int) -> Answers:
        """Answers of the stages over the sample's text. Unknown positions are drawn at random."""
        rng = np.random.default_rng([seed, sample])
        length = min(len(bits[sample]) for bits in self.bits)
        filled = []
        for bits, rate in zip(self.bits, self.rates, strict=True):
            known = bits[sample][:length]
            right = np.where(known == _UNKNOWN, rng.random(length) < rate, known == 1)
            for i in np.flatnonzero(known == _EITHER):
                right[i] = rng.random() < rate / (1 + rate)
                if right[i] and i + 1 < length:
                    right[i + 1] = False
            filled.append(right)
        return Answers.from_bits(*filled, same_mistake=rng.random(length) < self.same_mistake)


def gather(runs: Sequence[PublishedRun], models: tuple[str, ...], but: PublishedRun | None = None) -> ChainEvidence:
    """Collect the evidence for a chain of ``models`` (two or three) from the lockstep and plain runs.

    Of several lockstep runs of the same models the one with the largest lookahead counts, which verifies the most tokens at once,
    and not the run ``but``, which is to be predicted, if there is another one.

    Raises:
        ValueError: A run that is needed is missing, or the logs do not fit together.
    """
    if not 2 <= len(models) <= 3:
        raise ValueError(f"chains of two or three models can be predicted, not {len(models)}")
    target, drafts = models[-1], models[:-1]
    plain = _found(runs, "plain", (target,))[0]
    choices = [_found(runs, "lockstep", chain, but) for chain in (*((draft, target) for draft in drafts), models)]
    failure = None
    for i in range(max(map(len, choices))):
        *pairs, whole = (found[min(i, len(found) - 1)] for found in choices)
        try:
            return _evidence(models, plain, pairs, whole)
        except ValueError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _evidence(
    models: tuple[str, ...], plain: PublishedRun, pairs: Sequence[PublishedRun], whole: PublishedRun
) -> ChainEvidence:
    """The evidence of a plain run of the target, the lockstep runs of each draft with it, and that of all models."""
    target, drafts = models[-1], models[:-1]
    if len({len(run.samples) for run in (*pairs, whole)}) != 1:
        raise ValueError(f"the lockstep runs with {target} have different numbers of samples")
    times = [step_times(pair, plain) for pair in pairs]
    bits = tuple(agreement(pair, *t) for pair, t in zip(pairs, times, strict=True))
    stages = [StageModel(float(np.median(np.concatenate([s.steps_s[0] for s in pairs[0].samples]))))]
    for i, draft in enumerate(drafts[1:], 1):
        own = float(np.median(np.concatenate([s.steps_s[0] for s in pairs[i].samples])))
        # A middle stage's log adds up a verification and the decoding after it. After a full lookahead there is nothing to decode.
        full = np.concatenate([s.steps_s[i][s.appended[i - 1] == whole.lookahead] for s in whole.samples])
        if len(full) == 0:
            raise ValueError(
                f"{whole.name}: {draft} has never accepted a full lookahead: the time of its verification is unknown"
            )
        stages.append(StageModel([own, float(np.median(full))]))
    stages.append(StageModel(list(times[-1])))
    start = [s.seconds - sum(float(t.sum()) for t in s.steps_s) for s in whole.samples]
    if min(start) < 0:
        raise ValueError(f"{whole.name}: its steps take longer than the whole")
    same = [i for i in range(len(whole.samples)) if len({run.samples[i].tokens for run in (*pairs, whole)}) == 1]
    if not same:
        raise ValueError(
            f"{whole.name}: no sample has the same length in all lockstep runs; they are not of the same prompts"
        )
    rates = tuple(acceptance(b) for b in bits)
    same_mistake = _same_mistake(whole, bits, same) if len(drafts) == 2 else 0.0
    return ChainEvidence(tuple(stages), bits, rates, same_mistake, tuple(start), tuple(same))


def _same_mistake(run: PublishedRun, bits: tuple[list[np.ndarray], ...], same: Sequence[int]) -> float:
    """Probability that two wrong drafts agree: the agreements beyond "both right", divided by "both wrong"."""
    a, b = (np.concatenate([side[i] for i in same]) for side in bits)
    known = (a >= 0) & (b >= 0)
    both_right, both_wrong = np.mean(a[known] + b[known] == 2), np.mean(a[known] + b[known] == 0)
    counts = np.concatenate([s.appended[0] for s in run.samples])
    agree = (counts - 1).sum() / ((counts - 1).sum() + (counts < run.lookahead).sum())
    return float(np.clip((agree - both_right) / both_wrong, 0.0, 1.0)) if both_wrong > 0 else 0.0


def _found(
    runs: Sequence[PublishedRun], kind: str, models: tuple[str, ...], but: PublishedRun | None = None
) -> list[PublishedRun]:
    """The runs of these models, the largest lookahead first, and ``but`` last."""
    found = [run for run in runs if run.kind == kind and run.models == models]
    if not found:
        raise ValueError(f"the run '{kind} {'/'.join(models)}' is needed and not among the published runs")
    return sorted(found, key=lambda run: (run is but, -run.lookahead))


# --- predictions ---------------------------------------------------------------------------------------------------


def predict(
    evidence: ChainEvidence,
    run: PublishedRun,
    schedule: Schedule,
    *,
    lookahead: int = 0,
    policy: SimulatedPolicy | None = None,
    keep: Sequence[int] | None = None,
) -> tuple[float, np.ndarray]:
    """Simulate the texts of ``run``, of which only the lengths are used, or those of the samples in ``keep``.

    Returns:
        Milliseconds per token (sum over sum), and by n the share of the target's steps that appended n tokens.

    Raises:
        ValueError: ``run`` and the evidence have different numbers of samples.
    """
    if len(run.samples) != len(evidence.start_s):
        raise ValueError(f"{run.name} has {len(run.samples)} samples, the lockstep runs {len(evidence.start_s)}")
    chosen = range(len(run.samples)) if keep is None else keep
    seconds, histogram = 0.0, np.zeros(LONGEST + 1)
    *drafts, target = evidence.stages
    for i in chosen:
        stages = [*drafts, StageModel(target.step_s, start_s=evidence.start_s[i])]
        for fill in range(_FILLS):
            answers, tokens = evidence.answers(i, fill), run.samples[i].tokens
            result = simulate(schedule, stages, answers, tokens, policy=policy, lookahead=lookahead, seed=fill)
            seconds += result.seconds / _FILLS
            counts = result.stages[-1].histogram
            histogram[: len(counts)] += counts
    tokens = sum(run.samples[i].tokens for i in chosen)
    return 1e3 * seconds / tokens, histogram / histogram.sum()


def predict_protocol(evidence: ChainEvidence, run: PublishedRun) -> dict[str, Any]:
    """Predict the asynchronous schedules of this engine on the texts of ``run``, in ms/token.

    Returns:
        ``by_min_draft_tokens``: the target sleeps while it has fewer draft tokens; ``no_minimum_ms`` and ``best_ms`` are from there.
        ``by_min_draft_tokens_decode_meanwhile``: the target decodes one token instead; ``decode_meanwhile_ms`` is the best of these.
    """

    def ms(min_draft_tokens: int, meanwhile: bool) -> float:
        policy = SimulatedPolicy(lookahead=64, min_draft_tokens=min_draft_tokens, decode_meanwhile=meanwhile)
        return predict(evidence, run, "asynchronous", policy=policy)[0]

    sleeping = {w: ms(w, False) for w in MIN_DRAFT_TOKENS}
    meanwhile = {w: ms(w, True) for w in MIN_DRAFT_TOKENS if w > 0}
    best, best_meanwhile = min(sleeping, key=sleeping.__getitem__), min(meanwhile, key=meanwhile.__getitem__)
    return {
        "no_minimum_ms": sleeping[0],
        "best_min_draft_tokens": best,
        "best_ms": sleeping[best],
        "decode_meanwhile_min_draft_tokens": best_meanwhile,
        "decode_meanwhile_ms": meanwhile[best_meanwhile],
        "by_min_draft_tokens": {str(k): v for k, v in sleeping.items()},
        "by_min_draft_tokens_decode_meanwhile": {str(k): v for k, v in meanwhile.items()},
    }


# --- the report ----------------------------------------------------------------------------------------------------


def table(runs: Sequence[PublishedRun]) -> list[dict[str, Any]]:
    """Re-derive the published table: every run whose target also has a plain run.

    ``speedup`` is as published, over plain decoding of the target, on all samples of each run; ``fair`` on the samples that both runs
    have, with its bootstrap 95 % ``interval``.
    """
    rows = []
    for run in runs:
        try:
            plain = _found(runs, "plain", run.models[-1:])[0]
        except ValueError:
            continue
        count = min(len(plain.samples), len(run.samples))
        draws = np.random.default_rng(0).integers(count, size=(2000, count))
        ours, theirs = (
            np.array([s.seconds for s in r.samples[:count]])[draws].sum(axis=1)
            / np.array([s.tokens for s in r.samples[:count]])[draws].sum(axis=1)
            for r in (run, plain)
        )
        row = {
            "name": run.label,
            "samples": len(run.samples),
            "ms_per_token": run.ms_per_token(),
            "speedup": plain.ms_per_token() / run.ms_per_token(),
            "fair": plain.ms_per_token(count) / run.ms_per_token(count),
            "interval": tuple(np.percentile(theirs / ours, [2.5, 97.5]).tolist()),
            "joules_per_token": run.joules_per_token(),
        }
        rows.append(row)
    return rows


def report(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """All figures as plain numbers: the table, the evidence, predictions and measurements, and the runs without a prediction."""
    out: dict[str, Any] = {"table": table(runs), "lockstep": [], "pipelines": [], "failed": []}
    for run in runs:
        if run.kind == "plain":
            continue
        try:
            if run.kind == "pipeline":
                out["pipelines"].append(_pipeline_entry(runs, run))
                continue
            evidence, measured = gather(runs, run.models, but=run), run.ms_per_token()
            predicted = predict(evidence, run, "reference-lockstep", lookahead=run.lookahead)[0]
            figures = {"measured_ms": measured, "predicted_ms": predicted, "error": predicted / measured - 1}
            out["lockstep"].append({"run": run.label, **figures})
        except ValueError as error:
            out["failed"].append({"run": run.label, "reason": str(error)})
    return out


def _pipeline_entry(runs: Sequence[PublishedRun], run: PublishedRun) -> dict[str, Any]:
    """A pipeline's run and its prediction. The lookahead that it used is the one whose histogram of tokens per step is the nearest."""
    evidence, measured = gather(runs, run.models), run.ms_per_token()
    appended = np.concatenate([s.appended[-1] for s in run.samples])
    share = np.bincount(np.minimum(appended, LONGEST), minlength=LONGEST + 1) / len(appended)
    tried = {}
    for lookahead in sorted({*LOOKAHEADS, run.lookahead}):
        ms, histogram = predict(evidence, run, "reference", lookahead=lookahead)
        distance = float(np.abs(histogram - share).sum() / 2)  # total variation, 0 to 1
        tried[lookahead] = {"predicted_ms": ms, "histogram_distance": distance}
    used = min(tried, key=lambda k: tried[k]["histogram_distance"])
    predicted, same = tried[used]["predicted_ms"], evidence.same_text
    return {
        "run": run.label,
        "step_ms": [[1e3 * t for t in stage.times()] for stage in evidence.stages],
        "acceptance": list(evidence.rates),
        "same_mistake": evidence.same_mistake,
        "start_ms": 1e3 * float(np.mean(evidence.start_s)),
        "lookahead_recorded": run.lookahead,
        "lookahead_used": used,
        "measured_ms": measured,
        "predicted_ms": predicted,
        "error": predicted / measured - 1,
        "same_text": {
            "samples": len(same),
            "measured_ms": run.ms_per_token(keep=same),
            "predicted_ms": predict(evidence, run, "reference", lookahead=used, keep=same)[0],
        },
        "by_lookahead": {str(k): found for k, found in tried.items()},
        "reference_best": min((found["predicted_ms"], k) for k, found in tried.items()),
        "ours": predict_protocol(evidence, run),
    }


def as_text(data: dict[str, Any]) -> str:
    """Format :func:`report` as tables."""

    def table(title: str, header: str, row: str, found: Sequence[dict[str, Any]]) -> str:
        """Cells of ``header`` and of the format ``row`` are separated by ``|``."""
        return f"{title}\n\n" + aligned([header.split("|"), *(row.format(**entry).split("|") for entry in found)])

    parts = [
        table(
            "The published table, re-derived (sum of times over sum of tokens)", "run|samples|ms/token|speed-up|same samples|95 % interval|J/token",
            "{name}|{samples}|{ms_per_token:.2f}|{speedup:.2f}x|{fair:.2f}x|{interval[0]:.2f}-{interval[1]:.2f}|{joules}",
            [r | {"joules": "-" if r["joules_per_token"] is None else f"{r['joules_per_token']:.1f}"} for r in data["table"]],
        ),
    ]  # fmt: skip
    if data["lockstep"]:
        parts += [
            table(
                "Lockstep runs, simulated (a run of its own models and lookahead alone: a check of the reading, the bits come from it)",
                "run|measured ms|simulated ms|error",
                "{run}|{measured_ms:.2f}|{predicted_ms:.2f}|{error:+.1%}",
                data["lockstep"],
            )
        ]
    if data["failed"]:
        parts += [table("Runs without a prediction", "run|reason", "{run}|{reason}", data["failed"])]
    if not data["pipelines"]:
        return "\n\n".join(parts)
    lookaheads = list(data["pipelines"][0]["by_lookahead"])
    shown = []
    for p in data["pipelines"]:
        ours, (best, at) = p["ours"], p["reference_best"]
        figures = {
            "simulated": p["predicted_ms"],
            "reference": best,
            **{name.removesuffix("_ms"): ms for name, ms in ours.items() if name.endswith("_ms")},
        }
        gains = {k: "-" if ms is None else f"{ms:.2f} ({p['measured_ms'] / ms:.2f}x)" for k, ms in figures.items()}
        shown.append(p | {"gain": gains, "at": at})
    parts += [
        table(
            "Pipelines, predicted from the lockstep and plain runs",
            "run|measured ms|predicted ms|error|lookahead recorded|lookahead used",
            "{run}|{measured_ms:.2f}|{predicted_ms:.2f}|{error:+.1%}|{lookahead_recorded}|{lookahead_used}",
            shown,
        ),
        table(
            "By lookahead: predicted ms/token (distance of the histograms of tokens per step, 0 to 1)",
            "|".join(["run", *lookaheads]),
            "{run}" + "".join(f"|{{by_lookahead[{k}][0]:.1f}} ({{by_lookahead[{k}][1]:.2f}})" for k in lookaheads),
            [p | {"by_lookahead": {int(k): list(v.values()) for k, v in p["by_lookahead"].items()}} for p in shown],
        ),
        table(
            "This engine's protocol at these step times and on these texts, ms/token (gain over the measured run)",
            "run|measured|reference, simulated|its best lookahead|no minimum|best minimum (w)|decoding meanwhile",
            "{run}|{measured_ms:.2f}|{gain[simulated]}|{gain[reference]} L={at}|{gain[no_minimum]}"
            "|{gain[best]} w={ours[best_min_draft_tokens]}"
            "|{gain[decode_meanwhile]} w={ours[decode_meanwhile_min_draft_tokens]}",
            shown,
        ),
        _NOTES,
    ]
    return "\n\n".join(parts)


_NOTES = """\
no minimum: min_draft_tokens = 0, no handshake, corrections reach all stages at once, bonus tokens are adopted.
best minimum: the target sleeps while it has fewer than w draft tokens.
decoding meanwhile: with fewer than w draft tokens the target decodes one token instead."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "published_runs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="logged runs, one .json file each")
    parser.add_argument("--json", action="store_true", help="the same figures as JSON")
    args = parser.parse_args(arguments)
    try:
        found = report(load(args.folder))
    except (FileNotFoundError, ValueError) as error:
        print(f"published_runs: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if args.json else as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
