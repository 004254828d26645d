"""SPD: the figures of a run of :mod:`bench.run` next to its law and its simulation, and what trained draft modules reach on prompts that they have not seen.

    python -m bench.run --systems plain spd spd-ranks --stages 1 2 4 --tuning 0 --new-tokens 64 --repeats 2 --out build/bench/spd
    python -m bench.spd table build/bench/spd --json bench/results/spd.json --docs docs/spd.md
    python -m bench.spd real TARGET --module FOLDER ... --prompts FILE.jsonl ... --json bench/results/spd_real.json

``table``: T is a token's time in plain decoding (``schedule="plain"``, which is faster than ``generate()``), c what a cycle takes beyond T/n; both are measured
on the first prompts of the run, and the law's speed-up on the others follows from them and the measured acceptance. The simulation gets the measured times of the
parts.

``real``: TARGET is a folder with a chat template. Of each file of prompts (:mod:`bench.datasets`) evenly chosen first turns are answered greedily. All drafts along
these answers are counted, and the first answers are also decoded, which must give the same counts.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from bench import datasets
from bench.baselines import staged_sample
from bench.harness import replace_table, save, table
from bench.machine import provenance
from bench.perf_model import simulate_spd
from bench.run import encode
from bench.samples import ResultsFolder, Sample
from pipespec.models.loading import load_model
from pipespec.process.progress import quiet_transformers, say
from pipespec_spd import RanksPipeline, SpeculativePipeline
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from pipespec_spd.law import spd_accepted_length, spd_speedup, spd_tokens_per_cycle
from pipespec_spd.report import PHASES
from pipespec_train.acceptance import Acceptance, drafts_right, replay
from pipespec_train.trainer import RECORD

CALIBRATION = 2
"""First prompts of a run that calibrate the law. The table has the others."""

ANSWER = 64
"""New tokens of an answer of a real target."""

_SIMULATIONS = 16
_TIMEOUT_S = 60.0


def rank(job: str) -> None:
    """Main function of a process of :class:`bench.baselines.RanksSystem`. Rank 0 answers each line of the standard input."""
    given = json.loads(job)
    options = {"stages": given["stages"], "timeout_s": _TIMEOUT_S, "dtype": getattr(torch, given["dtype"])}
    with quiet_transformers(), RanksPipeline(given["target"], given["drafter"], **options) as pipe:
        if not pipe.has_target:
            pipe.serve()
            return
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            ids, new_tokens = json.loads(line)
            out = pipe.generate(torch.tensor(ids), max_new_tokens=new_tokens, **given["sampling"])
            assert pipe.report is not None
            sample = staged_sample(Sample(tokens=out[0, len(ids[0]) :].tolist()), pipe.report)
            sample.commits = [(pipe.report.phases["prefill"], 1)]
            print(json.dumps(asdict(sample)), flush=True)


# ---- the table of a run


class Calls(list[Sample]):
    """The texts of one system in one repeat, staged or plain."""

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self)

    @property
    def decided(self) -> int:
        """Tokens after the first of each text, which the prefill generates."""
        return sum((s.verified or len(s.tokens)) - 1 for s in self)

    @property
    def cycles(self) -> int:
        return sum(s.cycles or 0 for s in self)

    def phase(self, name: str) -> float:
        """Seconds of a phase of staged calls."""
        return sum((s.phases or {})[name] for s in self)

    @property
    def decoding(self) -> float:
        """Seconds without the prefill."""
        return self.seconds - sum(s.phases["prefill"] if s.phases else s.first_token or 0.0 for s in self)

    @property
    def step(self) -> float:
        """Seconds per token after the first of each text."""
        return self.decoding / self.decided


class Run:
    """The samples of a run: ``calls[system]`` by repeat, and ``fitted[system]``, all of the prompts that calibrate."""

    def __init__(self, folder: ResultsFolder) -> None:
        self.settings = folder.settings()
        first = {
            (d["name"], name) for d in self.settings["datasets"] for name in list(d["prompt_tokens"])[:CALIBRATION]
        }
        self.calls: dict[str, list[Calls]] = {}
        self.fitted: dict[str, Calls] = {}
        for system in self.settings["systems"]:
            own = [s for s in folder.samples.values() if s.system == system["key"] and s.error is None]
            self.fitted[system["key"]] = Calls(s for s in own if (s.dataset, s.sample) in first)
            rest = [s for s in own if (s.dataset, s.sample) not in first]
            repeats = sorted({s.repeat for s in rest})
            self.calls[system["key"]] = [Calls(s for s in rest if s.repeat == repeat) for repeat in repeats]


def row(system: dict[str, Any], run: Run) -> dict[str, Any]:
    """One system, measured: medians over the repeats, counts of the first. None: does not apply.

    ``speedup``, ``law_speedup``: over plain decoding, prefill aside; ``ratio``: with it. ``step_ms``, ``cost_ms``: T and c of the law.
    ``simulated_seconds``, ``simulated_parallel_seconds``: of decoding, on one device and with everything at once; ``decoding_seconds``,
    ``parallel_seconds`` are what they predict. ``threads``: of each process, on which T is that of a plain token; ``plain_threads``: of the plain decoding
    that it is compared with.
    """
    n, ranks, all_threads = system["axes"]["stages"], system.get("ranks", 0), run.settings["run"]["threads"]
    repeats, calibrated, rivals = run.calls[system["key"]], run.fitted[system["key"]], run.calls["plain"]
    first, step = repeats[0], run.fitted["plain-one-thread" if ranks else "plain"].step
    drafts, accepted = (sum(getattr(s.stages[-1], name) for s in first) for name in ("drafted", "accepted"))
    a = accepted / drafts if drafts else 0.0
    cost = max(0.0, calibrated.decoding / calibrated.cycles - step / n)
    seconds, tokens = median(c.seconds for c in repeats), sum(s.verified or 0 for s in first)
    simulated = together = parallel = None
    if not ranks:
        # The stages are equal. The last one runs exactly in the cycles that verify a token.
        stage = median(sum((s.stage_seconds or [0.0])[-1] for s in c) / c.decided for c in repeats)
        draft = median(c.phase("draft") / c.cycles for c in repeats)
        fixed = median((c.phase("verify") + c.phase("other")) / c.cycles for c in repeats)

        def simulation(shared: bool) -> float:
            parts: dict[str, Any] = {"draft_s": draft, "cycle_s": fixed, "shared": shared}
            runs = [simulate_spd([stage] * n, a, first.decided, seed=seed, **parts) for seed in range(_SIMULATIONS)]
            return fmean(each.seconds for each in runs)

        simulated, together = simulation(True), simulation(False)
        parallel = median(sum(s.parallel_seconds or 0.0 for s in c) - c.phase("prefill") for c in repeats)
    return {
        "label": system["label"],
        "stages": n,
        "ranks": ranks,
        "threads": 1 if ranks else all_threads,
        "plain_threads": all_threads,
        "tokens": tokens,
        "cycles": first.cycles,
        "drafts": drafts,
        "accepted": accepted,
        "flushes": sum(s.stages[-1].rollbacks for s in first),
        "acceptance": a,
        "tokens_per_cycle": first.decided / first.cycles,
        "law_tokens_per_cycle": spd_tokens_per_cycle(a, n),
        "accepted_length": n * first.decided / first.cycles,
        "law_accepted_length": spd_accepted_length(a, n),
        "seconds": seconds,
        "decoding_seconds": median(c.decoding for c in repeats),
        "tokens_per_second": tokens / seconds,
        "ratio": median(p.seconds / c.seconds for p, c in zip(rivals, repeats, strict=True)),
        "speedup": median(p.decoding / c.decoding for p, c in zip(rivals, repeats, strict=True)),
        "law_speedup": spd_speedup(a, n, step, cost) * run.fitted["plain"].step / step,
        "step_ms": step * 1e3,
        "cost_ms": cost * 1e3,
        "phases_ms": {
            name: 1e3 * median(c.phase(name) / (len(c) if name == "prefill" else c.cycles) for c in repeats)
            for name in PHASES
        },
        "simulated_seconds": simulated,
        "parallel_seconds": parallel,
        "simulated_parallel_seconds": together,
        "identical": sum(bool(s.identical) for c in repeats for s in c),
        "runs": sum(map(len, repeats)),
    }


def figures(folder: Path) -> dict[str, Any]:
    """The record of a run.

    Raises:
        ValueError: The run has no texts of plain decoding, or too few of a system.
    """
    run = Run(ResultsFolder(folder))
    given = run.settings["run"]
    systems = [
        s for s in run.settings["systems"] if s["kind"] in ("spd", "spd-ranks") and "stages" in s.get("axes", {})
    ]
    plain = [(given["threads"], run.calls.get("plain")), (1, run.calls.get("plain-one-thread"))]
    if not run.calls.get("plain"):
        raise ValueError(f"{folder} has no plain decoding: add --systems plain, and more than {CALIBRATION} prompts")
    names = ("threads", "dtype", "new_tokens", "repeats")
    return {
        "machine": run.settings["machine"],
        **{name: given[name] for name in names},
        "prompts": len(run.calls["plain"][0]),
        "plain": [
            {
                "threads": threads,
                "tokens_per_second": median(sum(len(s.tokens) for s in c) / c.seconds for c in calls),
                "step_ms": median(c.step for c in calls) * 1e3,
            }
            for threads, calls in plain
            if calls
        ],
        "rows": [row(s, run) for s in systems if run.calls[s["key"]]],
    }


def both(one: str, other: str) -> Any:
    """A cell: a figure, and in brackets what it is compared with."""
    return lambda r: "-" if r[one] is None else f"{r[one]:.2f} ({r[other]:.2f})"


COLUMNS = {
    "": "{label}",
    "a": "{acceptance:.3f}",
    "tokens/cycle (law)": both("tokens_per_cycle", "law_tokens_per_cycle"),
    "accepted length (law)": both("accepted_length", "law_accepted_length"),
    "tokens/s": "{tokens_per_second:.1f}",
    "vs plain": "{ratio:.2f}x",
    "decoding (law)": "{speedup:.2f}x ({law_speedup:.2f}x)",
    "c ms": "{cost_ms:.2f}",
    "draft / stages / verify / other ms per cycle": "{phases_ms[draft]:.2f} / {phases_ms[stages]:.2f} / {phases_ms[verify]:.2f} / {phases_ms[other]:.2f}",
    "simulated s (measured)": both("simulated_seconds", "decoding_seconds"),
    "at once s (measured)": both("simulated_parallel_seconds", "parallel_seconds"),
    "identical": "{identical}/{runs}",
}


def text(found: dict[str, Any]) -> str:
    """The table of a record, also of ``bench/results/spd.json``, and the line below it."""
    m = found["machine"]
    plain = ", ".join(f"{p['tokens_per_second']:.1f} tokens/s with {p['threads']} threads" for p in found["plain"])
    return (
        f"{table(COLUMNS, found['rows'])}\n\n"
        f"Plain decoding: {plain}. Medians of {found['repeats']} repeats over {found['prompts']} held-out prompts, {found['new_tokens']} tokens "
        f"each, greedy, {found['dtype']}. {m['cpu']}, {m['cores']} cores; one process: {found['threads']} threads, ranks: one each. torch {m['torch']}, "
        f"transformers {m['transformers']}, Python {m['python']}. Load average {m['load_average'][0]}. Measured {m['date'][:10]}."
    )


# ---- a real target


def load_target(folder: Path) -> PreTrainedModel:
    """The model. Of the generation config only the tokens stay: a penalty, say, would change the text."""
    model = load_model(folder, dtype="float32")
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(model.generation_config, name) for name in tokens})
    return model


def counted(right: list[np.ndarray], begins: list[int]) -> dict[str, Any]:
    """Figures of drafts along texts: ``right`` has a table ``[n, S]`` per text, ``begins`` the position of its first token in flight.

    ``by_fill``: share of right drafts with 1 to n tokens in flight, over all positions. ``by_position``: with n, for each 16 tokens of the answer.
    """
    n = len(right[0])
    counts = sum((replay(table, begin) for table, begin in zip(right, begins, strict=True)), Acceptance(0, 0, 0, 0))
    answers = [table[:, begin:] for table, begin in zip(right, begins, strict=True)]
    parts = [np.concatenate([a[-1, at : at + 16] for a in answers]) for at in range(0, ANSWER, 16)]
    return {
        **counts._asdict(),
        "acceptance": counts.rate,
        "tokens_per_cycle": counts.tokens / counts.cycles,
        "accepted_length": counts.length(n),
        "by_fill": np.concatenate(answers, axis=1).mean(1).tolist(),
        "by_position": [float(p.mean()) for p in parts if len(p)],
    }


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)


def real(args: argparse.Namespace) -> dict[str, Any]:
    """Drafts along the answers of a real target."""
    model, tokenizer = load_target(args.target), AutoTokenizer.from_pretrained(args.target)
    texts: dict[str, list[tuple[torch.Tensor, int]]] = {}
    for file in args.prompts:
        asked = datasets.read(file)[1]
        chosen = [encode(tokenizer, c, True) for c in asked[:: max(1, len(asked) // args.count)][: args.count]]
        texts[file.stem] = [(generated(model, ids), ids.shape[1]) for ids in chosen]
    rows, runs = [], {}
    for folder in args.module:
        runs[folder.name] = json.loads((folder / RECORD).read_text())
        config = DraftModuleConfig.load(folder)
        trained = DraftModule.load(folder, target=model, stages=config.stages)
        sizes = [end - begin for begin, end in config.stages]
        pipe = SpeculativePipeline(model, str(folder), stages=sizes, dtype="float32")
        for name, answers in texts.items():
            say(f"{folder.name}, {name}")
            tables = [drafts_right(model, trained, text)[0] for text, _ in answers]
            about: dict[str, Any] = {"stages": config.n, "prompts": name, "count": len(answers)}
            about |= counted(tables, [begin for _, begin in answers]) | {"decoded": []}
            for (text, begin), right in list(zip(answers, tables, strict=True))[: args.decode]:
                found: dict[str, Any] = {"identical": torch.equal(generated(pipe, text[:, :begin]), text)}
                found |= {"drafts": pipe.report.checked, "accepted": pipe.report.accepted, "cycles": pipe.report.cycles}  # type: ignore[union-attr]
                about["decoded"].append(found | {"along_text": replay(right, begin)._asdict()})
            rows.append(about)
            say(json.dumps(about))
    about = {"new_tokens": ANSWER, "dtype": "float32", "greedy": True, "target": args.target.name}
    return {"machine": provenance(), **about, "training": runs, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.spd", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("table", help="the figures of a run").add_argument
    add("folder", type=Path, help="folder of bench.run")
    add("--docs", type=Path, metavar="FILE", help="rewrite the table between its two comments there")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add = commands.add_parser("real", help="what trained modules reach on a real target").add_argument
    add("target", type=Path)
    add("--module", type=Path, nargs="+", required=True, metavar="FOLDER")
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE")
    add("--count", type=int, default=12, metavar="N", help="prompts of each file (%(default)s)")
    add("--decode", type=int, default=1, metavar="N", help="of them decoded, too (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the measurement there")
    commands.add_parser("rank").add_argument("job")
    args = parser.parse_args(arguments)
    if args.command == "rank":
        rank(args.job)
    elif args.command == "real":
        save(args.json, real(args))
    else:
        found = figures(args.folder)
        print(text(found))
        if args.docs:
            replace_table(args.docs, text(found))
        save(args.json, found)
        return int(any(r["identical"] != r["runs"] for r in found["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
