"""Speculative pipeline decoding on this CPU against plain decoding: acceptance, times, and the prediction of the law.

Measure and write the results::

    python -m bench.bench_spd --json bench/results/spd.json --docs docs/spd.md

The bundled target in stages, on held-out prompts, greedily, in fp32; every drafter, in one process with all cores, and on
ranks (torchrun, gloo) with one thread each. ``--quick`` shows that it runs. Plain decoding is our own (``schedule="plain"``), which is
faster than ``generate()``; a row of ranks is compared with as many threads as it has ranks, at most one per core.

T is a token's time in plain decoding, c what a cycle takes beyond T/n; both are measured on prompts of their own, and the law's speed-up
follows from them and the measured acceptance. The simulation gets the measured times of the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from bench.harness import choose_sizes, markdown_table, replace_table, save
from bench.machine import provenance
from bench.perf_model import simulate_spd
from pipespec import Pipeline
from pipespec.demo import MODULE_STAGES, draft_module_path, family_path, load_family, prompts
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.registry import PLAIN
from pipespec_spd import RanksPipeline, SpeculativePipeline
from pipespec_spd.draft_module import DraftModuleConfig
from pipespec_spd.law import spd_accepted_length, spd_speedup, spd_tokens_per_cycle
from pipespec_spd.report import PHASES, SpeculativeReport

CALIBRATION, PROMPTS, REPEATS = 2, (4, 1), (2, 1)
"""Held-out function heads: to calibrate, to measure and, last, how often these; the second numbers are those of ``--quick``."""

_SIMULATIONS = 16
_TIMEOUT_S = 60.0


class StagedSetting(NamedTuple):
    """``drafter``: as :class:`SpeculativePipeline` takes it, models as paths. ``ranks``: 0 for one process."""

    label: str
    drafter: Any
    stages: int | tuple[int, ...]
    ranks: int = 0


@dataclass
class Calls:
    """Several calls of one setting, staged or plain: prompt and text of each as token ids, and the reports."""

    outputs: list[list[int]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def total(self, name: str) -> Any:
        """The sum of a field of the reports."""
        return sum(getattr(report, name) for report in self.reports)

    def phase(self, name: str) -> float:
        """Seconds of a phase of staged calls."""
        return sum(report.phases[name] for report in self.reports)

    @property
    def decided(self) -> int:
        """Tokens after the first of each text, which the prefill generates."""
        return sum(getattr(report, "verified", report.tokens) - 1 for report in self.reports)

    @property
    def decoding(self) -> float:
        """Seconds without the prefill."""
        is_staged = isinstance(self.reports[0], SpeculativeReport)
        return self.total("seconds") - (self.phase("prefill") if is_staged else self.total("seconds_to_first_token"))

    @property
    def step(self) -> float:
        """Seconds per token after the first of each text."""
        return self.decoding / self.decided


def settings(modules: Sequence[Path], quick: bool, ranks: Sequence[int]) -> Iterator[StagedSetting]:
    """The settings to measure."""
    medium, small = str(family_path("medium")), str(family_path("small"))
    trained = {DraftModuleConfig.load(folder).stages: str(folder) for folder in modules}
    for spans, folder in trained.items():
        yield StagedSetting(f"module, n = {len(spans)}", folder, tuple(end - begin for begin, end in spans))
    if not quick:
        yield StagedSetting("one stage, nothing drafted", "ngram", 1)
    for n in (MODULE_STAGES,) if quick else (2, MODULE_STAGES):
        yield StagedSetting(f"n-gram, n = {n}", "ngram", n)
    yield StagedSetting(f"medium, n = {MODULE_STAGES}", medium, MODULE_STAGES)
    if not quick:
        yield StagedSetting(f"small, n = {MODULE_STAGES}", small, MODULE_STAGES)
    for world in ranks:
        for spans, folder in trained.items():
            if len(spans) in (world - 1, world):
                yield StagedSetting(
                    f"module, n = {len(spans)}, {world} ranks", folder, tuple(e - b for b, e in spans), world
                )
        if world <= 3:
            yield StagedSetting(f"n-gram, n = 2, {world} ranks", "ngram", 2, world)
            if not quick:
                yield StagedSetting(f"small, n = 2, {world} ranks", small, 2, world)


# ---- measuring


def measure(
    pipe: Pipeline | SpeculativePipeline | RanksPipeline, ids: list[torch.Tensor], new_tokens: int, threads: int
) -> Calls:
    torch.set_num_threads(threads)
    calls = Calls()
    for prompt in ids:
        calls.outputs.append(pipe.generate(prompt, max_new_tokens=new_tokens, do_sample=False)[0].tolist())
        calls.reports.append(pipe.report)
    return calls


def measure_ranks(setting: StagedSetting, work: dict[str, Any]) -> list[Calls]:
    """Measure on ranks with torchrun: calibration, then each repeat."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result")
        stages = list(setting.stages) if isinstance(setting.stages, tuple) else setting.stages
        job.write_text(json.dumps(work | {"drafter": setting.drafter, "stages": stages, "result": str(result)}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(setting.ranks), "-m", "bench.bench_spd", "--rank", str(job)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{setting.label}: torchrun ended with {done.returncode}:\n{done.stderr}")
        return [Calls(*calls) for calls in torch.load(result, weights_only=False)]


def rank(job: Path) -> None:
    """Main function of a rank."""
    work = json.loads(job.read_text())
    options = {"stages": work["stages"], "timeout_s": _TIMEOUT_S, "dtype": torch.float32}
    with quiet_transformers(), RanksPipeline(work["target"], work["drafter"], **options) as pipe:
        if not pipe.has_target:
            pipe.serve()
            return
        calibration, prompts_ = ([torch.tensor([p]) for p in work[name]] for name in ("calibration", "prompts"))
        new_tokens = work["new_tokens"]
        measure(pipe, calibration[:1], min(8, new_tokens), 1)
        found = [measure(pipe, calibration, new_tokens, 1)]
        found += [measure(pipe, prompts_, new_tokens, 1) for _ in range(work["repeats"])]
        # This module is __main__ here and another one there.
        torch.save([(calls.outputs, calls.reports) for calls in found], work["result"])


def row(
    setting: StagedSetting,
    calibrated: Calls,
    repeats: list[Calls],
    fitted: dict[int, Calls],
    plain: dict[int, list[Calls]],
    threads: int,
    plain_threads: int,
) -> dict[str, Any]:
    """One setting, measured: medians over the repeats, counts of the first. None: does not apply.

    ``speedup``, ``law_speedup``: over plain decoding, prefill aside; ``ratio``: with it. ``step_ms``, ``cost_ms``: T and c of the law.
    ``simulated_seconds``, ``simulated_parallel_seconds``: of decoding, on one device and with everything at once; ``decoding_seconds``,
    ``parallel_seconds`` are what they predict.

    Args:
        setting: The setting.
        calibrated: Its calls on the prompts of the calibration.
        repeats: Its calls on the measured prompts.
        fitted: Plain decoding on the prompts of the calibration, by threads.
        plain: Plain decoding on the measured prompts, by threads.
        threads: Of each process, on which T is that of a plain token, and whose text it must be.
        plain_threads: Of the plain decoding that it is compared with.
    """
    n = setting.stages if isinstance(setting.stages, int) else len(setting.stages)
    first = repeats[0]
    tokens, cycles, drafts, accepted = (first.total(name) for name in ("verified", "cycles", "checked", "accepted"))
    a = accepted / drafts if drafts else 0.0
    step, rivals = fitted[threads].step, plain[plain_threads]
    cost = max(0.0, calibrated.decoding / calibrated.total("cycles") - step / n)
    simulated = together = parallel = None
    if not setting.ranks:
        # The stages are equal. The last one runs exactly in the cycles that verify a token.
        stage = median(sum(r.stage_seconds[-1] for r in c.reports) / c.decided for c in repeats)
        draft = median(c.phase("draft") / c.total("cycles") for c in repeats)
        fixed = median((c.phase("verify") + c.phase("other")) / c.total("cycles") for c in repeats)

        def simulation(shared: bool) -> float:
            parts: dict[str, Any] = {"draft_s": draft, "cycle_s": fixed, "shared": shared}
            runs = [simulate_spd([stage] * n, a, first.decided, seed=seed, **parts) for seed in range(_SIMULATIONS)]
            return fmean(run.seconds for run in runs)

        simulated, together = simulation(True), simulation(False)
        parallel = median(c.total("parallel_seconds") - c.phase("prefill") for c in repeats)
    seconds, decoding = median(c.total("seconds") for c in repeats), median(c.decoding for c in repeats)
    return {
        "label": setting.label,
        "stages": n,
        "ranks": setting.ranks,
        "threads": threads,
        "plain_threads": plain_threads,
        "tokens": tokens,
        "cycles": cycles,
        "drafts": drafts,
        "accepted": accepted,
        "flushes": first.total("flushes"),
        "acceptance": a,
        "tokens_per_cycle": first.decided / cycles,
        "law_tokens_per_cycle": spd_tokens_per_cycle(a, n),
        "accepted_length": n * first.decided / cycles,
        "law_accepted_length": spd_accepted_length(a, n),
        "seconds": seconds,
        "decoding_seconds": decoding,
        "tokens_per_second": tokens / seconds,
        "ratio": median(p.total("seconds") / c.total("seconds") for p, c in zip(rivals, repeats, strict=True)),
        "speedup": median(p.decoding / c.decoding for p, c in zip(rivals, repeats, strict=True)),
        "law_speedup": spd_speedup(a, n, step, cost) * fitted[plain_threads].step / step,
        "step_ms": step * 1e3,
        "cost_ms": cost * 1e3,
        "phases_ms": {
            name: 1e3
            * median(c.phase(name) / (len(c.outputs) if name == "prefill" else c.total("cycles")) for c in repeats)
            for name in PHASES
        },
        "simulated_seconds": simulated,
        "parallel_seconds": parallel,
        "simulated_parallel_seconds": together,
        "identical": sum(o == r for c in repeats for o, r in zip(c.outputs, plain[threads][0].outputs, strict=True)),
        "runs": sum(len(c.outputs) for c in repeats),
    }


def record(args: argparse.Namespace) -> dict[str, Any]:
    """A new measurement."""
    all_threads, count, repeats = args.threads, PROMPTS[args.quick], REPEATS[args.quick]
    texts = prompts(count + CALIBRATION)
    with quiet_transformers():
        with working("loading the models"):
            family = load_family()
        ids = [family.encode(text) for text in texts]
        calibration, measured = ids[count:], ids[:count]
        every = list(settings([draft_module_path(), *args.module], args.quick, args.ranks))
        local = [s for s in every if not s.ranks]
        threads = sorted({all_threads, 1, *(min(all_threads, s.ranks) for s in every if s.ranks)}, reverse=True)
        pipes = [SpeculativePipeline(family.target, s.drafter, stages=s.stages, dtype=torch.float32) for s in local]
        plainly = Pipeline(family.target, schedule=PLAIN.name)
        say("warming up and calibrating")
        for pipe, t in [*((plainly, t) for t in threads), *((pipe, all_threads) for pipe in pipes)]:
            measure(pipe, calibration[:1], 8, t)
        fitted = {t: measure(plainly, calibration, args.new_tokens, t) for t in threads}
        calibrated = [measure(pipe, calibration, args.new_tokens, all_threads) for pipe in pipes]
        plain: dict[int, list[Calls]] = {t: [] for t in threads}
        found: list[list[Calls]] = [[] for _ in pipes]
        for repeat in range(repeats):
            say(f"one process: repeat {repeat + 1} of {repeats}")
            for t in threads:
                plain[t].append(measure(plainly, measured, args.new_tokens, t))
            for pipe, calls in zip(pipes, found, strict=True):
                calls.append(measure(pipe, measured, args.new_tokens, all_threads))
        rows = [
            row(s, known, calls, fitted, plain, all_threads, all_threads)
            for s, known, calls in zip(local, calibrated, found, strict=True)
        ]
        work = {
            "target": str(family_path("target")),
            "calibration": [p[0].tolist() for p in calibration],
            "prompts": [p[0].tolist() for p in measured],
            "new_tokens": args.new_tokens,
            "repeats": repeats,
        }
        for s in (s for s in every if s.ranks):
            say(s.label)
            known, *calls = measure_ranks(s, work)
            rows.append(row(s, known, calls, fitted, plain, 1, min(all_threads, s.ranks)))
    return {
        "machine": provenance(all_threads),
        "threads": all_threads,
        "dtype": "float32",
        "prompts": count,
        "new_tokens": args.new_tokens,
        "repeats": repeats,
        "plain": [
            {
                "threads": t,
                "tokens_per_second": median(p.total("tokens") / p.total("seconds") for p in plain[t]),
                "step_ms": median(p.step for p in plain[t]) * 1e3,
            }
            for t in threads
        ],
        "rows": rows,
    }


# ---- showing

HEADER = (
    "", "a", "tokens/cycle (law)", "accepted length (law)", "tokens/s", "vs plain", "decoding (law)",
    "c ms", "draft / stages / verify / other ms per cycle", "simulated s (measured)", "at once s (measured)", "identical",
)  # fmt: skip


def cells(r: dict[str, Any]) -> tuple[str, ...]:
    """A :func:`row` under :data:`HEADER`; in brackets what is compared."""

    def both(one: str, other: str) -> str:
        return "-" if r[one] is None else f"{r[one]:.2f} ({r[other]:.2f})"

    return (
        r["label"],
        f"{r['acceptance']:.3f}",
        both("tokens_per_cycle", "law_tokens_per_cycle"),
        both("accepted_length", "law_accepted_length"),
        f"{r['tokens_per_second']:.1f}",
        f"{r['ratio']:.2f}x",
        f"{r['speedup']:.2f}x ({r['law_speedup']:.2f}x)",
        f"{r['cost_ms']:.2f}",
        " / ".join(f"{r['phases_ms'][name]:.2f}" for name in PHASES if name != "prefill"),
        both("simulated_seconds", "decoding_seconds"),
        both("simulated_parallel_seconds", "parallel_seconds"),
        f"{r['identical']}/{r['runs']}",
    )


def summary(found: dict[str, Any]) -> str:
    m = found["machine"]
    plain = ", ".join(f"{p['tokens_per_second']:.1f} tokens/s with {p['threads']} threads" for p in found["plain"])
    return (
        f"Plain decoding: {plain}. Medians of {found['repeats']} repeats over {found['prompts']} held-out prompts, {found['new_tokens']} tokens "
        f"each, greedy, fp32. {m['cpu']}, {m['cores']} cores; one process: {found['threads']} threads, ranks: one each. torch {m['torch']}, "
        f"transformers {m['transformers']}, Python {m['python']}. Load average {m['load_average'][0]}. Measured {m['date'][:10]}."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench_spd", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts, short texts, fewer drafters")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="per prompt (64; quick: 24)")
    ranks = "torchrun's processes (2 3 4, quick: 2; none: one process only)"
    parser.add_argument("--ranks", type=int, nargs="*", metavar="W", help=ranks)
    modules = "more draft modules of the bundled target"
    parser.add_argument("--module", type=Path, nargs="+", default=[], metavar="FOLDER", help=modules)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurement there")
    cores, threads = len(os.sched_getaffinity(0)), "of one process (all cores: %(default)s)"
    parser.add_argument("--threads", type=int, default=cores, metavar="T", help=threads)
    parser.add_argument("--docs", type=Path, metavar="FILE", help="rewrite the table between its two comments there")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank:
        rank(args.rank)
        return 0
    choose_sizes(args, new_tokens=(64, 24), ranks=([2, 3, 4], [2]))
    found = record(args)
    text = f"{markdown_table(HEADER, map(cells, found['rows']))}\n\n{summary(found)}"
    print(text)
    if args.docs:
        replace_table(args.docs, text)
    save(args.json, found)
    return 0 if all(r["identical"] == r["runs"] for r in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
