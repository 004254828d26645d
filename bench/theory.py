"""Formulas against simulation: the error tables and figures of docs/theory.md.

python -m bench.theory                print the tables
python -m bench.theory --docs docs    rewrite them in docs/theory.md, and the figures in docs/theory/
python -m bench.theory --docs docs --published-runs DIR    also the output of `python -m bench.published_runs DIR`
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from zlib import crc32

import numpy as np

from bench import closed_form, published_runs
from bench.harness import markdown_table, replace_table
from bench.perf_model import SimulatedPolicy, StageModel, simulate, simulate_spd
from bench.plot import Panel, Series, chart
from pipespec_spd import law

_REPLICAS = 8
ACCEPTANCE = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Comparison:
    """Speed of one setting: the formula's value, and the mean of ``_REPLICAS`` simulations with its standard error."""

    setting: dict[str, float]
    formula: float
    simulated: float
    standard_error: float

    @property
    def error(self) -> float:
        """Relative error of the formula. Positive: the formula is too optimistic."""
        return self.formula / self.simulated - 1.0

    @property
    def noise(self) -> float:
        return self.standard_error / self.simulated

    def cells(self, digits: int) -> tuple[str, str, str]:
        return f"{self.formula:.3f}", f"{self.simulated:.3f}", f"{self.error:+.{digits}%}"


def _compare(setting: dict[str, float], formula: float, rates: Iterable[float]) -> Comparison:
    values = np.fromiter(rates, float)
    return Comparison(setting, formula, float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def _two_stage_rates(
    a: float, verify: float, plain: float, minimum: int, tokens: int, *, handshake: float = 0.0, ideal: bool = False
) -> Iterable[float]:
    """Tokens per step of the draft by the engine's protocol. ``ideal``: a corrected draft drops its step, as the formulas assume."""
    # It never binds: it counts the tokens under verification, and those that pile up after them.
    lookahead = 2 * int(verify) + 8
    policy = SimulatedPolicy(lookahead, minimum, patience=float("inf"), width=2 * lookahead)
    stages = [StageModel(1.0), StageModel([plain, verify])]
    # Each setting has as many rejections as one with acceptance .8, because rejections dominate the noise.
    tokens = int(tokens * max(1.0, 0.2 / (1.0 - a)))
    # Different seeds per setting keep the errors of neighbours in a grid independent.
    first = crc32(repr((a, 1.0, verify, plain, minimum, handshake)).encode())
    given = {"policy": policy, "handshake_s": handshake, "preempt": ideal}
    return (simulate("asynchronous", stages, [a], tokens, seed=first + i, **given).rate for i in range(_REPLICAS))


def published_grid(tokens: int) -> list[Comparison]:
    """The published form at g = c - 1 with its assumptions fulfilled, 24 settings."""
    return [
        _compare(
            {"a": a, "c": c},
            closed_form.published_speedup(a, c),
            (r * c for r in _two_stage_rates(a, c, c, 0, tokens, ideal=True)),
        )
        for a, c in product(ACCEPTANCE, (2, 5, 10, 20))
    ]


def generalised_grid(tokens: int, acceptance: Sequence[float] = ACCEPTANCE) -> list[Comparison]:
    """The generalised form with a draft that is corrected at once: whole ratios, verify/plain 1 to 3.5, minimum, handshake."""
    out = []
    for a, c, ratio, w, s in product(acceptance, (4, 10, 20), (1, 1.5, 3.5), (0, 1, 2, 4, 6), (0.0, 0.5)):
        if w <= c * ratio - 1:
            setting = {"a": a, "c": c, "ratio": ratio, "min_draft_tokens": w, "handshake": s}
            formula = closed_form.two_stage(a, 1.0, c * ratio, c, min_draft_tokens=w, handshake=s)
            rates = _two_stage_rates(a, c * ratio, c, w, tokens, handshake=s, ideal=True)
            out.append(_compare(setting, formula, rates))
    return out


def protocol_grid(tokens: int, acceptance: Sequence[float] = ACCEPTANCE) -> list[Comparison]:
    """The generalised form with lag = draft/2 against the protocol of the engine: steps run to their end, ratios are not whole.

    Each value is a mean over four ratios around c. With a single ratio the draft and the verifier keep a fixed phase.
    """
    out = []
    for a, c, ratio, w in product(acceptance, (5, 10, 20), (1, 1.5, 3.5), (0, 2, 4, 6)):
        if w > c * ratio - 1:
            continue
        formulas, rates = [], []
        for p in (c + 0.13, c + 0.37, c + 0.61, c + 0.83):
            formulas.append(closed_form.two_stage(a, 1.0, p * ratio, p, min_draft_tokens=w, lag=0.5) * p)
            rates.append([r * p for r in _two_stage_rates(a, p * ratio, p, w, tokens // 4)])
        setting = {"a": a, "c": c, "ratio": ratio, "min_draft_tokens": w}
        out.append(_compare(setting, float(np.mean(formulas)), np.mean(rates, axis=0)))
    return out


def chain_grid(tokens: int) -> list[tuple[Comparison, Comparison]]:
    """Three stages, steps 1 : 5 : 25, verify = plain, drafts that are corrected at once.

    Each pair has the published recursion, and the generalised one with ``min_draft_tokens`` of 2 and 4.
    """
    out = []
    stages = [StageModel(1.0), StageModel(5.0), StageModel(25.0)]
    for pair in ((0.5, 0.5), (0.6, 0.8), (0.8, 0.6), (0.8, 0.8), (0.9, 0.9)):

        def compared(minimum: tuple[int, int], formula: float, pair: tuple[float, float] = pair) -> Comparison:
            policy = SimulatedPolicy(60, minimum, patience=float("inf"), width=120)
            runs = (
                simulate("asynchronous", stages, pair, tokens, policy=policy, preempt=True, seed=i)
                for i in range(_REPLICAS)
            )
            return _compare({"a01": pair[0], "a12": pair[1]}, formula, (25 * run.rate for run in runs))

        generalised = 25 * closed_form.chain_rate(pair, 1.0, (5, 25), (5, 25), min_draft_tokens=(2, 4))
        published = closed_form.published_chain_speedup(pair, (5, 5))
        out.append((compared((0, 0), published), compared((2, 4), generalised)))
    return out


def spd_grid(tokens: int) -> list[Comparison]:
    """SPD's formula against its state machine, in tokens per cycle."""
    return [
        _compare(
            {"a": a, "n": n},
            law.spd_tokens_per_cycle(a, n),
            (simulate_spd([1.0] * n, a, tokens, seed=seed).rate for seed in range(_REPLICAS)),
        )
        for a, n in product(ACCEPTANCE, (2, 4, 8, 16))
    ]


# --- tables and figures --------------------------------------------------------------------------------------------


def _summary(name: str, rows: Sequence[Comparison]) -> list[str]:
    errors = np.array([r.error for r in rows])
    worst = max(rows, key=lambda r: abs(r.error))
    where = ", ".join(f"{k} = {v:g}" for k, v in worst.setting.items())
    return [
        name,
        str(len(rows)),
        f"{errors.mean():+.2%}",
        f"{np.sqrt((errors**2).mean()):.2%}",
        f"{worst.error:+.2%} ({where})",
        f"{np.mean([r.noise for r in rows]):.2%}",
    ]


def error_tables(tokens: int) -> dict[str, str]:
    """Markdown by the name of the block that it fills."""
    published, chains = published_grid(tokens), chain_grid(tokens)
    ratios, crossover = (1.0, 1.2, 1.5, 2.0, 3.5), (5, 6, 8, 10, 15, 20, 40)
    return {
        "errors": markdown_table(
            ["form", "settings", "mean error", "rms", "largest", "noise of the simulation"],
            [
                _summary("published, g = c - 1, corrected at once", published),
                _summary("generalised, corrected at once", generalised_grid(tokens)),
                _summary("generalised, lag = draft/2, protocol of the engine", protocol_grid(tokens)),
                _summary("published recursion, three stages", [c[0] for c in chains]),
                _summary("generalised recursion, three stages", [c[1] for c in chains]),
                _summary("SPD", spd_grid(tokens)),
            ],
        ),
        "published": markdown_table(
            ["a", "c", "formula", "simulated", "error"],
            [[*(f"{v:g}" for v in r.setting.values()), *r.cells(2)] for r in published],
        ),
        "chains": markdown_table(
            ["a01", "a12", "published", "simulated", "error", "generalised", "simulated", "error"],
            [[*(f"{v:g}" for v in p.setting.values()), *p.cells(1), *g.cells(1)] for p, g in chains],
        ),
        "crossover": markdown_table(
            ["c", *map(str, crossover)],
            [["a*(c)", *(f"{closed_form.crossover_acceptance(c):.2f}" if c > 5 else "none" for c in crossover)]],
        ),
        "break-even": markdown_table(
            ["verify / plain", *(f"{r:g}" for r in ratios)],
            [
                [f"min_draft_tokens {w}"]
                + [f"{closed_form.break_even_acceptance(1, 10 * r, 10, min_draft_tokens=w):.2f}" for r in ratios]
                for w in (0, 4)
            ],
        ),
    }


def figures(tokens: int) -> dict[str, str]:
    """SVG by file name."""
    grid, c = np.linspace(0.3, 0.97, 68), 10.0

    def simulated(min_draft_tokens: int, a: float) -> float:
        return float(np.mean([c * r for r in _two_stage_rates(a, c, c, min_draft_tokens, tokens)]))

    def best(a: float) -> tuple[int, float]:
        return closed_form.best_min_draft_tokens(a, 1.0, c, c, limit=9)

    curves = [
        Series("published form", grid, [closed_form.published_speedup(a, c) for a in grid]),
        Series("workers, no minimum (simulated)", ACCEPTANCE, [simulated(0, a) for a in ACCEPTANCE], marks=True),
        Series("best lockstep", grid, [closed_form.best_lockstep(a, c)[1] for a in grid], 1, dashed=True),
        Series("generalised, best minimum", grid, [c * best(a)[1] for a in grid], 2),
        Series("workers, that minimum (simulated)", ACCEPTANCE, [simulated(best(a)[0], a) for a in ACCEPTANCE], 2, marks=True),
    ]  # fmt: skip
    speedups = chart(
        "Two stages, draft ten times as fast, verification as cheap as a plain step",
        [Panel(curves, x_label="acceptance rate", y_label="speed-up over plain decoding")],
        "Curves: a corrected draft drops its step. Dots: it finishes the step, as in the engine.",
    )
    # The published latencies of the 8B/70B pair in ms, where a verification is expensive.
    a, draft, verify, plain = 0.952, 22.3, 427.5, 120.2
    steps, at = [StageModel(draft), StageModel([plain, verify])], range(25)

    def ms(min_draft_tokens: int, meanwhile: bool) -> float:
        policy = SimulatedPolicy(lookahead=64, width=128, min_draft_tokens=min_draft_tokens, decode_meanwhile=meanwhile)
        runs = (simulate("asynchronous", steps, [a], tokens, policy=policy, seed=s) for s in range(8))
        return float(np.mean([1 / run.rate for run in runs]))

    def form(w: int) -> float:
        return 1 / closed_form.two_stage(a, draft, verify, plain, min_draft_tokens=w, lag=draft / 2)

    curves = [
        Series("generalised form, lag d/2", at, [form(w) for w in at]),
        Series("workers, sleeping (simulated)", at, [ms(w, False) for w in at], marks=True),
        Series("workers, decoding meanwhile (simulated)", at, [ms(w, True) for w in at], 1, marks=True),
    ]
    expensive = chart(
        "A verification that costs 3.5 plain steps (8B/70B, NF4): ms per token",
        [Panel(curves, x_label="min_draft_tokens (w)", y_label="ms per token")],
        "Independent acceptance of .952, prompts not included.",
    )
    stages, few, curves = range(1, 25), (2, 4, 8, 16), []
    for i, a in enumerate((0.7, 0.8, 0.9)):
        rates = [28.4 * simulate_spd([28.4 / n] * n, a, tokens, cycle_s=2.0).rate for n in few]
        curves.append(Series(f"formula, a = {a:g}", stages, [law.spd_speedup(a, n, 28.4, 2.0) for n in stages], i))
        curves.append(Series("simulated", few, rates, i, marks=True))
    spd = chart(
        "SPD: 28.4 ms per plain step, 2 ms fixed cost per cycle",
        [Panel(curves, x_label="stages n", y_label="speed-up over plain decoding")],
    )
    return {"speedup.svg": speedups, "expensive_verification.svg": expensive, "spd.svg": spd}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write into FOLDER/theory.md and FOLDER/theory/")
    parser.add_argument("--published-runs", type=Path, metavar="FOLDER", help="also the published runs in FOLDER")
    parser.add_argument(
        "--tokens", type=int, default=20_000, help="per simulation, eight per setting (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    blocks = error_tables(args.tokens)
    if args.published_runs is not None:
        found = published_runs.report(published_runs.load(args.published_runs))
        blocks["published-runs"] = f"```\n{published_runs.as_text(found)}\n```"
    if args.docs is None:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in blocks.items()))
        return 0
    for name, text in blocks.items():
        replace_table(args.docs / "theory.md", text, name)
    folder = args.docs / "theory"
    folder.mkdir(exist_ok=True)
    for name, picture in figures(args.tokens).items():
        (folder / name).write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
