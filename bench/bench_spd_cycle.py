"""What a cycle of SPD's ranks costs beyond its slowest stage. ``python -m bench.bench_spd_cycle [--json FILE] [--docs FILE] [--ranks W ...]``

torchrun starts W ranks for W stages of the bundled target (the first stage is on rank 0), or for W - 1 stages. The draft tokens are those of the text
itself, so no draft is rejected and the pipeline stays full. The overhead is a cycle's wall clock less the time of its slowest stage: messages, their
wake-ups, verification, the machine's bookkeeping, and the wait for a core where ranks outnumber the cores.

``--stage-ms S`` (default 5) lets each stage wait until S milliseconds have passed since it began, without using a core. So the overhead can be measured
on a machine with fewer cores than ranks. ``0`` measures the stages as they are. The slowest stage is the one with the largest median of its own times, in
which a wait's delay by the system's timer counts.

The floor is what gloo itself takes: rank 0 sends a message of the same size to rank 1, which sends one back, with the blocking functions of
``torch.distributed`` and nothing else. Where stages wait, rank 1 waits as long between the two, so that cores and caches are as cold as in a cycle.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import markdown_table, replace_table, save
from pipespec.bench.machine import provenance
from pipespec.demo import family_path, load_family, prompts
from pipespec.process.progress import quiet_transformers, say
from pipespec.spd import Drafter, DraftRequest, RanksPipeline
from pipespec.spd.partition import LayerStage

_TIMEOUT_S = 60.0
_WARM_UP = 16
_PINGS = 100
_TAG = 1000
"""Of bare messages. The ranks use smaller tags."""

_PR_SET_TIMERSLACK = 29


class Known(Drafter):
    """Drafts a known text."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def draft(self, requests: list[DraftRequest]) -> list[int]:
        return [self.text[min(len(request.tokens), len(self.text) - 1)] for request in requests]


class Clock:
    """A streamer that notes when tokens come. In a full pipeline each cycle gives one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def cycles_ms(self, stages: int) -> list[float]:
        """Milliseconds per cycle in each round of ``stages`` cycles, without those in which the pipeline fills.

        Tokens of one round may come together, with a pause behind them, so that single cycles differ.
        """
        full = self.times[1 + stages :]
        return [1e3 * (b - a) / stages for a, b in zip(full, full[stages:], strict=False)]


def wait(began: float, seconds: float) -> None:
    """Sleep until ``seconds`` have passed since ``began``, a time of ``perf_counter``."""
    left = seconds - (time.perf_counter() - began)
    if left > 0:
        time.sleep(left)


def time_stages(seconds: float) -> list[float]:
    """Let each step of one column in this process take at least ``seconds``, without using a core for the rest of it. Return the list of their times."""
    step, times = LayerStage.step, []
    # Linux lets a sleep end later by this slack, 50 us as a rule. 1 ns is the least.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)

    def timed(self: LayerStage, fed: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        out = step(self, fed, *arguments, **options)
        wait(began, seconds)
        if fed.shape[1] == 1:
            times.append(time.perf_counter() - began)
        return out

    LayerStage.step = timed  # type: ignore[method-assign]
    return times


def bare_ms(rank: int, size: int, seconds: float) -> float | None:
    """On rank 0, the median milliseconds of a message to rank 1 and one back, ``size`` bytes each, less the time that rank 1 waits between them."""
    message = torch.zeros(size, dtype=torch.uint8)
    waited = message[:8].view(torch.float64).numpy()
    if rank == 1:
        for _ in range(_PINGS):
            dist.recv(message, 0, tag=_TAG)
            began = time.perf_counter()
            wait(began, seconds)
            waited[0] = time.perf_counter() - began
            dist.send(message, 0, tag=_TAG)
    if rank != 0:
        return None
    found = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        dist.send(message, 1, tag=_TAG)
        dist.recv(message, 1, tag=_TAG)
        found.append(time.perf_counter() - began - float(waited[0]))
    return 1e3 * median(found)


def prefer() -> None:
    """Give all threads of this process real-time priority. Raises ``PermissionError`` without the right to do so."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def rank(job: Path) -> None:
    """Main function of a rank."""
    torch.set_num_threads(1)
    work = json.loads(job.read_text())
    seconds = work["stage_ms"] / 1e3
    times = time_stages(seconds)
    drafter = Known(work["text"])
    options = {"stages": work["stages"], "timeout_s": _TIMEOUT_S, "dtype": torch.float32}
    with quiet_transformers(), RanksPipeline(work["target"], drafter, **options) as pipe:
        if work["realtime"]:
            prefer()
        bare = bare_ms(dist.get_rank(), work["message_bytes"], seconds)
        if not pipe.is_controller:
            pipe.serve()
        else:
            found: dict[str, Any] = {"bare_ms": bare, "calls": []}
            ids = torch.tensor([work["prompt"]])
            new_tokens = len(work["text"]) - ids.shape[1]
            pipe.generate(ids, max_new_tokens=min(_WARM_UP, new_tokens), do_sample=False)
            for _ in range(work["repeats"]):
                clock = Clock()
                out = pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
                report = pipe.report
                assert report is not None
                found["calls"].append(
                    {
                        "equal": out[0].tolist() == work["text"],
                        "cycles": report.rounds,
                        "tokens": report.tokens,
                        "flushes": report.flushes,
                        "cycles_ms": clock.cycles_ms(work["stages"]),
                    }
                )
            Path(work["folder"], "calls.json").write_text(json.dumps(found))
        own = 1e3 * median(times) if times else None  # rank 0 may have no stage
        Path(work["folder"], f"stage.{dist.get_rank()}.json").write_text(json.dumps(own))


def measure(world: int, stages: int, stage_ms: float, work: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        # Words of the head, positions and tokens, and one hidden state.
        size = 8 * (5 + 2 * stages) + work["hidden_bytes"]
        job.write_text(
            json.dumps(work | {"stages": stages, "stage_ms": stage_ms, "message_bytes": size, "folder": folder})
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command += ["-m", "bench.bench_spd_cycle", "--rank", str(job)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{world} ranks: torchrun ended with {done.returncode}:\n{done.stderr}")
        found = json.loads(Path(folder, "calls.json").read_text())
        times = [json.loads(file.read_text()) for file in Path(folder).glob("stage.*.json")]
    runs = found["calls"]
    cycles = sorted(ms for run in runs for ms in run["cycles_ms"])
    cycle, quick = median(cycles), cycles[len(cycles) // 10]
    slowest = max(ms for ms in times if ms is not None)
    return {
        "ranks": world,
        "stages": stages,
        "waits_ms": stage_ms,
        "cycle_ms": cycle,
        "stage_ms": slowest,
        "overhead_ms": cycle - slowest,
        "share": (cycle - slowest) / slowest,
        "tenth_overhead_ms": quick - slowest,
        "bare_ms": found["bare_ms"],
        "message_bytes": size,
        "equal": sum(run["equal"] for run in runs),
        "runs": len(runs),
        "flushes": sum(run["flushes"] for run in runs),
        "load_average": os.getloadavg()[0],
    }


HEADER = (
    "ranks",
    "stages",
    "each stage",
    "cycle ms",
    "slowest stage ms",
    "overhead ms",
    "of the stage",
    "overhead of the fastest tenth ms",
    "two bare messages ms",
    "equal texts",
)


def cells(r: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(r["ranks"]),
        str(r["stages"]),
        f"waits until {r['waits_ms']:g} ms" if r["waits_ms"] else "as it is",
        f"{r['cycle_ms']:.2f}",
        f"{r['stage_ms']:.2f}",
        f"{r['overhead_ms']:.2f}",
        f"{100 * r['share']:.0f} %",
        f"{r['tenth_overhead_ms']:.2f}",
        f"{r['bare_ms']:.2f}",
        f"{r['equal']} of {r['runs']}",
    )


def record(args: argparse.Namespace) -> dict[str, Any]:
    with quiet_transformers():
        family = load_family()
    prompt = family.encode(prompts(1)[0])
    torch.set_num_threads(1)
    text = family.target.generate(
        prompt, max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, do_sample=False
    )
    work = {
        "target": str(family_path("target")),
        "prompt": prompt[0].tolist(),
        "text": text[0].tolist(),
        "hidden_bytes": 4 * family.target.config.hidden_size,
        "repeats": args.repeats,
        "realtime": args.realtime,
    }
    rows = []
    for world in args.ranks:
        for stages in (world, world - 1):
            for stage_ms in dict.fromkeys((args.stage_ms, 0.0)):
                say(f"{world} ranks, {stages} stages, {stage_ms:g} ms")
                rows.append(measure(world, stages, stage_ms, work))
    return {
        "machine": provenance(1),
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "realtime": args.realtime,
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench_spd_cycle", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="W", help="torchrun's processes (2 4)")
    parser.add_argument("--stage-ms", type=float, default=5.0, metavar="S", help="shortest time of a stage (5)")
    parser.add_argument("--new-tokens", type=int, default=96, metavar="T", help="per call (96)")
    parser.add_argument("--repeats", type=int, default=5, metavar="R", help="medians are taken over these (5)")
    realtime = "real-time priority for the ranks once they have loaded, on a machine with other work; needs root"
    parser.add_argument("--realtime", action="store_true", help=realtime)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurement there")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="rewrite the table between its two comments there")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank:
        rank(args.rank)
        return 0
    found = record(args)
    m = found["machine"]
    priority = ", at real-time priority beside other work" if found["realtime"] else ""
    text = (
        f"{markdown_table(HEADER, map(cells, found['rows']))}\n\nMedians over rounds of cycles in {found['repeats']} calls of {found['new_tokens']} tokens, fp32, one thread "
        f"per rank{priority}. {m['cpu']}, {m['cores']} cores, shared. torch {m['torch']}. Load average {m['load_average'][0]}. Measured {m['date'][:10]}."
    )
    print(text)
    if args.docs:
        replace_table(args.docs, text, "cycle")
    save(args.json, found)
    return 0 if all(r["equal"] == r["runs"] for r in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
