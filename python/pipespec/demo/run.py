"""``pipespec demo``: an answer as it is committed, then a table of speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from pipespec.api.base import BasePipeline
from pipespec.api.pipeline import Pipeline
from pipespec.api.text import TextStream
from pipespec.demo import Family, load_family, prompts
from pipespec.process.progress import RemainingWork, aligned, quiet_transformers, working
from pipespec.registry import PLAIN


@dataclass(frozen=True)
class DemoSize:
    """How much the demo measures."""

    prompts: int
    new_tokens: int
    repeats: int


FULL = DemoSize(prompts=4, new_tokens=64, repeats=2)
"""About half a minute on two cores."""

QUICK = DemoSize(prompts=2, new_tokens=24, repeats=1)

Call = Callable[..., Any]
"""``generate`` of a model or of a pipeline."""


def rows_of(family: Family, opened: ExitStack) -> dict[str, Call]:
    """By label: transformers' ways, with numbers of draft tokens that ``bench.run`` finds best for the bundled family, and pipelines, which ``opened`` closes. The last
    one has a draft model beside the n-gram index."""
    target, found = family.target, dict[str, Call]()
    name, draft = list(family.drafts.items())[-1]
    draft.generation_config.update(
        num_assistant_tokens=20, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4
    )
    found["HF generate()"] = target.generate
    found[f"HF assisted, {name}"] = partial(target.generate, assistant_model=draft)
    found["HF prompt lookup"] = partial(target.generate, prompt_lookup_num_tokens=20)
    ours: dict[str, dict[str, Any]] = {
        "no drafts": {"schedule": PLAIN.name},
        "n-gram index (the default)": {},
        f"n-gram index + {name}": {"drafts": [draft]},
    }
    for label, options in ours.items():
        pipe = opened.enter_context(Pipeline(target, prefix_cache=0, **options))
        found[f"pipespec, {label}"] = pipe.generate
    return found


def pipe_of(generate: Call) -> Any:
    """The pipeline of a row."""
    return generate.__self__  # type: ignore[attr-defined]


def run_demo(size: DemoSize, prompt: str | None = None, folder: Path | None = None) -> bool:
    """Show the demo on stdout, its progress on stderr. Returns whether the text of every row was the one of ``generate()``.

    ``prompt``: the text to measure; default: function heads of the standard library. ``folder``: another family than the bundled one.
    """
    console = Console(highlight=False, soft_wrap=True)
    # Of all ways generate() of so small a model is fastest with one thread; several of them wait for each other on a busy machine.
    torch.set_num_threads(1)
    with ExitStack() as opened:
        opened.enter_context(quiet_transformers())
        with working("loading the models"):
            family = load_family(folder)
            ids = [family.encode(text) for text in ([prompt] if prompt else prompts(size.prompts))]
            room = family.target.config.max_position_embeddings - max(i.shape[1] for i in ids)
            if room < 1:
                raise ValueError(
                    f"the prompt is longer than the family's limit of {family.target.config.max_position_embeddings} tokens"
                )
            rows = rows_of(family, opened)
        pipe = pipe_of(list(rows.values())[-1])
        draft, target = (m.num_parameters() / 1e6 for m in (list(family.drafts.values())[-1], family.target))
        title = f"target of {target:.1f} M parameters; drafts by an n-gram index and a model of {draft:.1f} M"
        stream_text(console, family, pipe, ids[0], min(2 * size.new_tokens, room), title)
        return measure(console, rows, ids, min(size.new_tokens, room), size.repeats)


def measure(console: Console, rows: dict[str, Call], ids: list[torch.Tensor], new_tokens: int, repeats: int) -> bool:
    """Let the rows generate each prompt in turn, and print the table of medians; returns whether all texts are those of the first row."""
    seconds: dict[str, list[float]] = {label: [] for label in rows}
    texts: dict[str, list[list[int]]] = {label: [] for label in rows}
    with RemainingWork(len(rows) * (1 + repeats)) as bar:
        # The first round, of one prompt, packs weights.
        for repeat in range(1 + repeats):
            for label, generate in rows.items():
                bar.show(f"measuring: {label}")
                began = time.perf_counter()
                found = [
                    generate(i, attention_mask=torch.ones_like(i), max_new_tokens=new_tokens, do_sample=False)[
                        0, i.shape[1] :
                    ].tolist()
                    for i in (ids if repeat else ids[:1])
                ]
                if repeat:
                    seconds[label].append(time.perf_counter() - began)
                    texts[label] += found
                bar.done += 1
    first, *_ = rows
    rates = {label: sum(map(len, texts[label])) / repeats / median(seconds[label]) for label in rows}
    same = {label: sum(a == b for a, b in zip(texts[label], texts[first], strict=True)) for label in rows}
    lines = [
        [label, f"{rates[label]:.1f}", f"{rates[label] / rates[first]:.2f}x", f"{same[label]}/{len(texts[label])}"]
        for label in rows
    ]
    console.print(aligned([["", "tokens/s", "vs generate()", "same text"], *lines]), markup=False)
    console.print(
        f"Medians over repeats: {repeats}; prompts: {len(ids)}; up to {new_tokens} tokens each; fp32, one thread."
    )
    if different := [label for label in rows if same[label] < len(texts[label])]:
        console.print(
            f"NOT every row generated the same text: {'; '.join(different)}. This is a bug, please report it.",
            style="bold red",
        )
        return False
    best = max((label for label in rows if not label.startswith("HF")), key=rates.__getitem__)
    console.print(
        f"Every row generated the same text, token for token. Fastest row of pipespec: {best}, {rates[best] / rates[first]:.2f} times generate()."
    )
    return True


def stream_text(
    console: Console, family: Family, pipe: BasePipeline, ids: torch.Tensor, new_tokens: int, title: str
) -> None:
    """Generate for one prompt, showing the text as it is committed, in two colours, for accepted and for own tokens."""
    drafted_style, own_style = "green", "bold yellow"

    def write(text: str, drafted: bool) -> None:
        console.print(Text(text, style=drafted_style if drafted else own_style), end="")

    def decode(tokens: list[int]) -> str:
        text: str = family.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    pipe.generate(ids, max_new_tokens=1, do_sample=False)  # the first call packs the weights
    console.rule(title)
    console.print(Text("drafted and accepted", style=drafted_style), "/", Text("the target's own", style=own_style))
    console.print()
    console.print(Text(decode(ids[0].tolist()), style="dim"), end="")
    pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=TextStream(decode, write))
    console.print("\n")
    console.print(str(pipe.report), markup=False)
    console.rule()
