"""How soon does the first token of a prompt come? ``python -m bench.bench_prompt --models FOLDER [--quick] [--json FILE]``

Each folder NAME-hf in FOLDER is a HuggingFace model, and NAME.gguf beside it the same one with packed weights, whose rival is ``generate()`` in bfloat16.
Per model and dtype a child process measures plain decoding of one new token beside ``generate()``, in alternation, so that a busy machine affects both;
reported are medians. Two more children run one of the two alone with the longest prompt, for its peak memory.
Both sides read the prompt from an empty cache: the native form is chosen, and its weights are packed, before the first measurement.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.harness import choose_sizes, markdown_table, save
from bench.machine import provenance
from pipespec.registry import PLAIN

LENGTHS = (32, 150, 512, 2048)
PACKED = "gguf"
DTYPES = ("bfloat16", "float32", PACKED)
SIDES = ("ours", "generate")
RESULTS = Path(__file__).parent / "results" / "prompt.json"


def packed(folder: Path) -> Path:
    """The GGUF file beside a folder."""
    return folder.with_name(f"{folder.name.removesuffix('-hf')}.gguf")


def calls_of(folder: Path, dtype: str, sides: tuple[str, ...]) -> tuple[dict[str, Callable[[Any], object]], Any]:
    """Per side the call that reads ids and writes one token, and the model."""
    from transformers import AutoModelForCausalLM

    from pipespec import Pipeline

    model: Any = None
    if dtype != PACKED or "generate" in sides:
        own = torch.bfloat16 if dtype == PACKED else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=own).eval()
    calls: dict[str, Callable[[Any], object]] = {}
    if "ours" in sides:
        pipe = Pipeline(packed(folder) if dtype == PACKED else model, [], schedule=PLAIN.name)
        model = pipe.target if model is None else model
        calls["ours"] = lambda ids: pipe.generate(ids, max_new_tokens=1, do_sample=False)
    if "generate" in sides:
        calls["generate"] = lambda ids: model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
        )
    return calls, model


def child(folder: Path, dtype: str, lengths: list[int], sides: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Seconds per length and side, and the peak of the memory of this process in bytes."""
    calls, model = calls_of(folder, dtype, sides)
    random = torch.Generator().manual_seed(0)
    seconds: dict[int, dict[str, list[float]]] = {}
    for length in lengths:
        ids = torch.randint(model.config.vocab_size // 2, (1, length), generator=random)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(repeats + 1):
            for side in sides[:: 1 if repeat % 2 else -1]:
                begin = time.perf_counter()
                calls[side](ids)
                taken[side].append(time.perf_counter() - begin)
        # The first round is for learning.
        seconds[length] = {side: times[1:] for side, times in taken.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"seconds": seconds, "peak_bytes": peak}


def in_child(*job: Any) -> dict[str, Any]:
    """:func:`child` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(child, *job).result()


def measure(folder: Path, dtype: str, lengths: list[int], repeats: int, memory: bool) -> list[dict[str, Any]]:
    """One record per length."""
    seconds = in_child(folder, dtype, lengths, SIDES, repeats)["seconds"]
    records = []
    for length in lengths:
        taken = seconds[length]
        middle = {side: statistics.median(taken[side]) for side in SIDES}
        record = {"model": folder.name, "dtype": dtype, "tokens": length, "seconds": taken, "median": middle}
        record["ratio"] = middle["ours"] / middle["generate"]
        if memory and length == max(lengths):
            alone = {side: in_child(folder, dtype, [length], (side,), 1)["peak_bytes"] for side in SIDES}
            record["peak_bytes"] = alone
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Milliseconds to the first token, their ratio, and peaks of memory."""
    rows = []
    for r in records:
        peaks = [f"{r['peak_bytes'][side] >> 20}" if "peak_bytes" in r else "" for side in SIDES]
        times = [f"{1000 * r['median'][side]:.0f}" for side in SIDES]
        rows.append([r["model"], r["dtype"], str(r["tokens"]), *times, f"{r['ratio']:.2f}", *peaks])
    header = ("model", "dtype", "tokens", "ours, ms", "generate, ms", "ratio", "ours, MiB", "generate, MiB")
    return markdown_table(header, rows)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of HuggingFace folders")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, help="at least 3 for a median that counts")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks of memory out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    choose_sizes(options, repeats=(5, 3))
    record: dict[str, Any] = {"machine": provenance(), "repeats": options.repeats, "cells": []}
    for folder in sorted(path.parent for path in options.models.glob("*/config.json")):
        for dtype in options.dtypes:
            if dtype == PACKED and not packed(folder).is_file():
                continue
            record["cells"] += measure(folder, dtype, list(options.lengths), options.repeats, not options.no_memory)
            save(options.json, record)
    print(table(record["cells"]))


if __name__ == "__main__":
    main()
