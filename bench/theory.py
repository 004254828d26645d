"""Formulas against simulation: the error tables and figures of docs/theory.md, and the simulator's speed.

python -m bench.theory                          print the tables
python -m bench.theory --docs docs              rewrite them in docs/theory.md, and the figures in docs/theory/
python -m bench.theory --docs docs --traces DIR also what `pipespec plan --traces DIR` says
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from zlib import crc32

import numpy as np

from bench.plot import Series, chart
from pipespec.planning import closed_form, traces
from pipespec.planning.simulator import Policy, StageModel, simulate, simulate_spd

_REPLICAS = 8


@dataclass(frozen=True)
class Comparison:
    """A formula's value and the mean of ``_REPLICAS`` simulations, with its standard error, as the speed of the same thing."""

    setting: dict[str, float]
    formula: float
    simulated: float
    standard_error: float

    @property
    def error(self) -> float:
        """Of the formula: positive where it promises too much."""
        return self.formula / self.simulated - 1.0

    @property
    def noise(self) -> float:
        return self.standard_error / self.simulated


def _compare(setting: dict[str, float], formula: float, rates: Iterable[float]) -> Comparison:
    values = np.fromiter(rates, float)
    return Comparison(setting, formula, float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def _two_stage_rates(
    a: float, draft: float, verify: float, plain: float, wait: int, handshake: float, ideal: bool, tokens: int
) -> Iterable[float]:
    """Tokens per time of our protocol; ``ideal``: with a draft that drops its step when corrected, as the formulas assume."""
    window = 2 * int(verify / draft) + 8  # binds nobody: what is being verified counts, and what piles up behind it
    policy = Policy(windows=window, width=2 * window, wait=wait, patience=float("inf"))
    stages = [StageModel(draft), StageModel([plain, verify])]
    # As many rejections with a good draft as with one that is right four times in five: they make the noise.
    tokens = int(tokens * max(1.0, 0.2 / (1.0 - a)))
    # Other seeds for each setting: errors of neighbours in a grid are then independent.
    first = crc32(repr((a, draft, verify, plain, wait, handshake)).encode())
    for seed in range(first, first + _REPLICAS):
        yield simulate(
            "workers", stages, [a], tokens, policy=policy, handshake_s=handshake, preempt=ideal, seed=seed
        ).rate


def published_grid(tokens: int) -> list[Comparison]:
    """The published form at g = c - 1, where its assumptions hold. 24 settings."""
    return [
        _compare(
            {"a": a, "c": c},
            closed_form.published_speedup(a, c),
            (r * c for r in _two_stage_rates(a, 1.0, c, c, 0, 0.0, True, tokens)),
        )
        for a, c in product((0.3, 0.5, 0.7, 0.8, 0.9, 0.95), (2, 5, 10, 20))
    ]


def generalised_grid(tokens: int, acceptance: Sequence[float] = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)) -> list[Comparison]:
    """The generalised form with a draft that is corrected at once: whole ratios, verify/plain 1 to 3.5, wait, handshake."""
    out = []
    for a, c, ratio, wait, handshake in product(acceptance, (4, 10, 20), (1, 1.5, 3.5), (0, 1, 2, 4, 6), (0.0, 0.5)):
        if wait <= c * ratio - 1:
            formula = closed_form.two_stage(a, 1.0, c * ratio, c, wait=wait, handshake=handshake).rate
            rates = _two_stage_rates(a, 1.0, c * ratio, c, wait, handshake, True, tokens)
            out.append(_compare({"a": a, "c": c, "ratio": ratio, "wait": wait, "handshake": handshake}, formula, rates))
    return out


def protocol_grid(tokens: int, acceptance: Sequence[float] = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)) -> list[Comparison]:
    """The generalised form with lag = draft/2 against our protocol as it is: steps run to their end, ratios are not whole.

    Each value is a mean over four ratios around c: with a single one draft and verifier keep a phase that happens to suit or not.
    """
    out = []
    for a, c, ratio, wait in product(acceptance, (5, 10, 20), (1, 1.5, 3.5), (0, 2, 4, 6)):
        if wait > c * ratio - 1:
            continue
        plains = [c + offset for offset in (0.13, 0.37, 0.61, 0.83)]
        formula = np.mean([closed_form.two_stage(a, 1.0, p * ratio, p, wait=wait, lag=0.5).rate * p for p in plains])
        rates = np.mean(
            [
                [r * p for r in _two_stage_rates(a, 1.0, p * ratio, p, wait, 0.0, False, tokens // len(plains))]
                for p in plains
            ],
            axis=0,
        )
        out.append(_compare({"a": a, "c": c, "ratio": ratio, "wait": wait}, float(formula), rates))
    return out


def chain_grid(tokens: int) -> list[tuple[Comparison, Comparison]]:
    """Three stages, steps 1 : 5 : 25, verify = plain: the published recursion, and the generalised one with waits of 2 and 4,
    both with drafts that are corrected at once."""
    out = []
    stages = [StageModel(1.0), StageModel(5.0), StageModel(25.0)]
    for pair in ((0.5, 0.5), (0.6, 0.8), (0.8, 0.6), (0.8, 0.8), (0.9, 0.9)):
        both = []
        for waits, formula in (
            ((0, 0), closed_form.published_chain_speedup(pair, (5, 5))),
            ((2, 4), 25 * closed_form.chain_rate(pair, 1.0, (5, 25), (5, 25), waits=(2, 4))),
        ):
            policy = Policy(windows=60, width=120, waits=waits, patience=float("inf"))
            rates = (
                25 * simulate("workers", stages, pair, tokens, policy=policy, preempt=True, seed=seed).rate
                for seed in range(_REPLICAS)
            )
            both.append(_compare({"a01": pair[0], "a12": pair[1]}, formula, rates))
        out.append((both[0], both[1]))
    return out


def spd_grid(tokens: int) -> list[Comparison]:
    """SPD's law against its state machine, in tokens per cycle."""
    return [
        _compare(
            {"a": a, "n": n},
            closed_form.spd_tokens_per_cycle(a, n),
            (simulate_spd([1.0] * n, a, tokens, seed=seed).rate for seed in range(_REPLICAS)),
        )
        for a, n in product((0.3, 0.5, 0.7, 0.8, 0.9, 0.95), (2, 4, 8, 16))
    ]


def speed(tokens: int = 500_000) -> list[tuple[str, float]]:
    """Simulated tokens per second of one core, three stages."""
    out = []
    for name, schedule, steps, pair in (
        ("ours, steps 1 : 5 : 10, a = .9", "workers", (1.0, 5.0, 10.0), (0.9, 0.9)),
        ("ours, steps 1 : 4 : 20, a = .8", "workers", (1.0, 4.0, 20.0), (0.8, 0.8)),
        ("reference, steps 1 : 4 : 20, a = .8", "reference", (1.0, 4.0, 20.0), (0.8, 0.8)),
    ):
        began = time.process_time()
        simulate(schedule, [StageModel(s) for s in steps], pair, tokens, lookahead=3)  # type: ignore[arg-type]
        out.append((name, tokens / (time.process_time() - began)))
    return out


# --- tables and figures --------------------------------------------------------------------------------------------


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]
    )


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
    summary = table_of(
        ["form", "settings", "mean error", "rms", "largest", "noise of the simulation"],
        [
            _summary("published, g = c - 1, corrected at once", published),
            _summary("generalised, corrected at once", generalised_grid(tokens)),
            _summary("generalised, lag = draft/2, our protocol as it is", protocol_grid(tokens)),
            _summary("published recursion, three stages", [c[0] for c in chains]),
            _summary("generalised recursion, three stages", [c[1] for c in chains]),
            _summary("SPD's law", spd_grid(tokens)),
        ],
    )
    by_setting = table_of(
        ["a", "c", "formula", "simulated", "error"],
        [
            [f"{r.setting['a']:g}", f"{r.setting['c']:g}", f"{r.formula:.3f}", f"{r.simulated:.3f}", f"{r.error:+.2%}"]
            for r in published
        ],
    )
    three = table_of(
        ["a01", "a12", "published", "simulated", "error", "generalised", "simulated", "error"],
        [
            [
                f"{p.setting['a01']:g}",
                f"{p.setting['a12']:g}",
                *(cell for r in (p, g) for cell in (f"{r.formula:.3f}", f"{r.simulated:.3f}", f"{r.error:+.1%}")),
            ]
            for p, g in chains
        ],
    )
    crossover = (5, 6, 8, 10, 15, 20, 40)
    lock = table_of(
        ["c", *map(str, crossover)],
        [["a*(c)", *(f"{closed_form.crossover_acceptance(c):.2f}" if c > 5 else "none" for c in crossover)]],
    )
    ratios = (1.0, 1.2, 1.5, 2.0, 3.5)
    even = table_of(
        ["verify / plain", *(f"{r:g}" for r in ratios)],
        [
            ["no wait", *(f"{closed_form.break_even_acceptance(1, 10 * r, 10):.2f}" for r in ratios)],
            ["wait 4", *(f"{closed_form.break_even_acceptance(1, 10 * r, 10, wait=4):.2f}" for r in ratios)],
        ],
    )
    fast = table_of(["setting", "million simulated tokens per second"], [[n, f"{v / 1e6:.1f}"] for n, v in speed()])
    return {
        "errors": summary,
        "published": by_setting,
        "chains": three,
        "crossover": lock,
        "break-even": even,
        "speed": fast,
    }


def figures(tokens: int) -> dict[str, str]:
    """SVG by file name."""
    grid = np.linspace(0.3, 0.97, 68)
    marks = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
    c = 10.0

    def simulated(wait: int, a: float) -> float:
        return float(np.mean([c * r for r in _two_stage_rates(a, 1.0, c, c, wait, 0.0, False, tokens)]))

    waits = {a: closed_form.best_wait(a, 1.0, c, c, most=9)[0] for a in marks}
    speedups = chart(
        "Two stages, draft ten times as fast, verification as cheap as a plain step",
        "acceptance rate",
        "speed-up over plain decoding",
        [
            Series("published form", grid, [closed_form.published_speedup(a, c) for a in grid]),
            Series("ours, no wait (simulated)", marks, [simulated(0, a) for a in marks], marks=True),
            Series("best lock step", grid, [closed_form.best_lockstep(a, c)[1] for a in grid], 1, dashed=True),
            Series(
                "generalised, best wait", grid, [c * closed_form.best_wait(a, 1.0, c, c, most=9)[1] for a in grid], 2
            ),
            Series("ours, that wait (simulated)", marks, [simulated(waits[a], a) for a in marks], 2, marks=True),
        ],
        "The curves let a draft drop its step when it is corrected; the dots let it finish, as the engine does.",
    )
    # The published latencies of the 8B/70B pair, in ms: what waiting costs where verification is dear.
    a, draft, verify, plain = 0.952, 22.3, 427.5, 120.2
    steps = [StageModel(draft), StageModel([plain, verify])]
    at = range(25)

    def ms(wait: int, meanwhile: bool) -> float:
        policy = Policy(windows=64, width=128, wait=wait, decode_meanwhile=meanwhile)
        return float(
            np.mean([1 / simulate("workers", steps, [a], tokens, policy=policy, seed=s).rate for s in range(8)])
        )

    dear = chart(
        "A verification that costs 3.5 plain steps (8B/70B, NF4): ms per token",
        "hints awaited (w)",
        "ms per token",
        [
            Series(
                "generalised form, lag d/2",
                at,
                [1 / closed_form.two_stage(a, draft, verify, plain, wait=w, lag=draft / 2).rate for w in at],
            ),
            Series("ours, sleeping (simulated)", at, [ms(w, False) for w in at], marks=True),
            Series("ours, decoding meanwhile (simulated)", at, [ms(w, True) for w in at], 1, marks=True),
            Series(
                "no rule is better",
                [0, 24],
                [1 / closed_form.best_policy(a, draft, verify, plain).rate] * 2,
                4,
                dashed=True,
            ),
        ],
        "Independent acceptance of .952; prompts not included.",
    )
    stages = range(1, 25)
    spd = chart(
        "SPD: 28.4 ms per plain step, 2 ms fixed cost per cycle",
        "stages n",
        "speed-up over plain decoding",
        [
            s
            for i, a in enumerate((0.7, 0.8, 0.9))
            for s in (
                Series(f"law, a = {a:g}", stages, [closed_form.spd_speedup(a, n, 28.4, 2.0) for n in stages], i),
                Series(
                    "simulated",
                    (2, 4, 8, 16),
                    [28.4 * simulate_spd([28.4 / n] * n, a, tokens, cycle_s=2.0).rate for n in (2, 4, 8, 16)],
                    i,
                    marks=True,
                ),
            )
        ],
    )
    return {"speedup.svg": speedups, "dear_verification.svg": dear, "spd.svg": spd}


def replace_blocks(text: str, blocks: dict[str, str]) -> str:
    """``text`` with new contents between ``<!-- name -->`` and ``<!-- /name -->``. Raises ``ValueError`` for a missing block."""
    for name, content in blocks.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
        text, count = re.subn(pattern, lambda m, new=content: f"{m[1]}{new}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the block {name!r} is there {count} times, not once")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write into FOLDER/theory.md and FOLDER/theory/")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="also the published runs in FOLDER")
    parser.add_argument(
        "--tokens", type=int, default=20_000, help="per simulation, eight per setting (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    blocks = error_tables(args.tokens)
    if args.traces is not None:
        blocks["traces"] = f"```\n{traces.as_text(traces.report(traces.load(args.traces)))}\n```"
    if args.docs is None:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in blocks.items()))
        return 0
    page = args.docs / "theory.md"
    page.write_text(replace_blocks(page.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    folder = args.docs / "theory"
    folder.mkdir(exist_ok=True)
    for name, picture in figures(args.tokens).items():
        (folder / name).write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
