"""One captured step, node by node: ``python -m bench.step_profile --json FILE [--svg FOLDER]``

For plain decoding by planted models of 8B and 1B, and for rounds of both: each launch of a step, in its order, with its time and the gap behind the launch before it, in
microseconds. They are medians over the steps of a call that torch's profiler (kineto, CUPTI) has recorded. Steps that found nothing to do are left out. ``busy`` is the sum of the
times and ``gaps`` that of the gaps: together they are the step. A launch that begins before the one ahead has ended, as dependent launches do, has a negative gap.

``--svg`` draws the last layer of each as a timeline. ``--dry-run``: small models on a CPU, whose "launches" are torch's operations.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench import plot
from bench.harness import refuse_without_gpu, save
from bench.machine import provenance
from bench.planted import plant, random_prompts
from pipespec import Pipeline
from pipespec.schedules import base
from pipespec.schedules.graphs.stage import GraphedStage

LAST = "CloseStepKernel"
"""Of the name of a step's last launch."""

ATTENTION = "attention"
"""Of the names of the launch that each layer has one of."""

STEPS = 12
"""Of the recorded call."""


class Span(NamedTuple):
    """A launch on the device, in microseconds."""

    name: str
    begin: float
    end: float


class Node(NamedTuple):
    """A launch of a typical step: its time, and the gap behind the launch before it."""

    name: str
    us: float
    gap: float


def spans_of(trace: dict[str, Any], kinds: Iterable[str]) -> list[Span]:
    """The events of some categories in a Chrome trace, by their beginning, without those within another one."""
    found: list[Span] = []
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in set(kinds)]
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        span = Span(event["name"], event["ts"], event["ts"] + event["dur"])
        if not found or span.end > found[-1].end:
            found.append(span)
    return found


def steps_of(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of each step: up to one that is named :data:`LAST`. What is behind the last one is no step."""
    steps: list[list[Span]] = [[]]
    for span in spans:
        steps[-1].append(span)
        if LAST in span.name:
            steps.append([])
    return steps[:-1]


def typical(steps: Sequence[Sequence[Span]]) -> list[Node]:
    """The nodes of the steps that take most of the time in all: those with one order of names, and at least half as long as the longest of them.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError(f"no launch of the recorded call is named {LAST}: its steps were no graphs of pipespec's")
    alike: defaultdict[tuple[str, ...], list[Sequence[Span]]] = defaultdict(list)
    for step in steps:
        alike[tuple(span.name for span in step)].append(step)

    def busy(step: Sequence[Span]) -> float:
        return sum(span.end - span.begin for span in step)

    chosen = max(alike.values(), key=lambda group: sum(map(busy, group)))
    longest = max(map(busy, chosen))
    chosen = [step for step in chosen if busy(step) >= longest / 2]
    nodes = []
    for i, span in enumerate(chosen[0]):
        gap = median(step[i].begin - step[i - 1].end for step in chosen) if i else 0.0
        nodes.append(Node(span.name, median(step[i].end - step[i].begin for step in chosen), gap))
    return nodes


def last_layer(nodes: Sequence[Node]) -> list[Node]:
    """The nodes from behind the last attention but one up to the last one; none with fewer than two layers."""
    at = [i for i, node in enumerate(nodes) if ATTENTION in node.name]
    return list(nodes[at[-2] + 1 : at[-1] + 1]) if len(at) > 1 else []


def summary(nodes: Sequence[Node]) -> dict[str, Any]:
    """What the results keep of a step."""

    def rounded(some: Sequence[Node]) -> list[tuple[str, float, float]]:
        return [(node.name[:80], round(node.us, 2), round(node.gap, 2)) for node in some]

    busy, gaps = sum(node.us for node in nodes), sum(node.gap for node in nodes)
    sums = {"us": round(busy + gaps, 1), "busy": round(busy, 1), "gaps": round(gaps, 1)}
    return sums | {"layer": rounded(last_layer(nodes)), "nodes": rounded(nodes)}


def recorded(pipe: Pipeline, prompt: torch.Tensor, dry: bool) -> list[Span]:
    """The launches of a call of a pipeline that has run before."""
    activity, kinds = (
        (ProfilerActivity.CPU, ["cpu_op", "user_annotation"]) if dry else (ProfilerActivity.CUDA, ["kernel"])
    )
    kinds += [] if dry else ["gpu_memcpy", "gpu_memset"]
    with profile(activities=[activity]) as recording:
        pipe.generate(prompt, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None)
        if not dry:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(file))
        return spans_of(json.loads(file.read_text(encoding="utf-8")), kinds)


def profiled(target: Any, drafts: Sequence[Any], lookahead: int | None, dry: bool) -> list[Node]:
    """The nodes of a step, or of a round with ``drafts``."""
    prompt = random_prompts(target.config.vocab_size, 1, 16, 7).to(target.device)
    with Pipeline(target, list(drafts), graphs=True, lookahead=lookahead, prefix_cache=0) as pipe:
        pipe.generate(prompt, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None)
        return typical(steps_of(recorded(pipe, prompt, dry)))


def _marked(body: Any) -> Any:
    """A step's body that marks the end of its step in the profile, as its last launch does on a GPU."""

    def run(stage: GraphedStage, *given: Any) -> Any:
        found = body(stage, *given)
        if stage.is_target:
            with record_function(LAST):
                pass
        return found

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures go, each as soon as it is there")
    parser.add_argument("--svg", type=Path, help="folder of the timelines")
    parser.add_argument("--lookahead", type=int, default=4, help="of the rounds; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="small models on a CPU")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry:
        refuse_without_gpu("bench.step_profile")
    names = ("tiny-small", "tiny-target") if dry else ("1B", "8B")
    place: dict[str, Any] = {"device": "cpu" if dry else "cuda", "dtype": torch.float32 if dry else torch.bfloat16}
    small, large = plant(names, 0.8, new_tokens=STEPS, texts=1, **place).models
    found: dict[str, Any] = {"machine": provenance(), "figures": {}, "steps": {}}
    cases = {"8B": (large, ()), "1B": (small, ()), "round of 1B and 8B": (large, (small,))}
    with ExitStack() as patches:
        if dry:
            base._runs_uncaptured = True
            torch.set_num_threads(1)
            patches.enter_context(mock.patch.object(GraphedStage, "body", _marked(GraphedStage.body)))
        for name, (target, drafts) in cases.items():
            step = summary(profiled(target, drafts, options.lookahead if drafts else None, dry))
            found["steps"][name] = step
            layer = [f"{node} {us} (+{gap})" for node, us, gap in step["layer"]]
            found["figures"][name] = {key: step[key] for key in ("us", "busy", "gaps")} | {"layer": layer}
            save(options.json, found)
            if options.svg and step["layer"]:
                options.svg.mkdir(parents=True, exist_ok=True)
                drawn = plot.timeline(f"The last layer of {name}: {step['us']:.0f} us in all", step["layer"])
                (options.svg / f"layer, {name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
