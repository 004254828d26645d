"""Whole generations on one GPU: ``python -m bench.gpu_more --json FILE [--only PART ...]``

With planted models of 1B and 8B: rounds of 0 to 6 draft tokens at several acceptances, with our products and the library's; the first token by the prompt's length;
decoding after long prompts; a batch of eight; sampled texts; a round with a draft head; weights in the formats of GGUF files; and the quantised linear modules of torchao
where it is installed. Ours in captured steps, medians of three calls. ``--dry-run``: small models on a CPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.harness import save
from bench.machine import provenance
from bench.planted import SHAPES, plant, random_prompts
from pipespec import Pipeline
from pipespec.engine.forward import choose_fused
from pipespec.models.tiled import TiledLinear
from pipespec.schedules import base
from pipespec_kernels.block_layouts import half_bytes
from pipespec_kernels.formats import FORMATS, QuantizedMatrix
from pipespec_kernels.tiles import WIDTH, TiledMatrix, float8_in_tiles, in_tiles
from pipespec_train.heads import head_for

GREEDY = {"do_sample": False, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "pad_token_id": 0}
AGREEMENT = 0.8
"""Of the draft with the target, as planted."""
RATES = (AGREEMENT, 0.4, 0.3)
"""Of acceptance."""
NUMBERS = ("0", "4", "controlled", "1", "2", "3", "5", "6")
"""Of draft tokens. The first ones matter most."""


class More:
    """The figures, over one pair of models on ``device``."""

    def __init__(self, device: str) -> None:
        self.dry = device == "cpu"
        self.names, self.tokens = (("tiny-small", "tiny-target"), 8) if self.dry else (("1B", "8B"), 128)
        self.place: dict[str, Any] = {"device": device, "dtype": torch.float32 if self.dry else torch.bfloat16}
        # Planted models have room for 8,192 positions, and the smallest too few layers for a head.
        shapes = {name: replace(SHAPES[name], max_position_embeddings=1 << 18) for name in self.names}
        if self.dry:
            shapes[self.names[1]] = replace(shapes[self.names[1]], num_hidden_layers=8)
        self.place["known"] = shapes
        chain = plant(self.names, AGREEMENT, new_tokens=32, texts=4, **self.place)
        (self.small, self.target), self.cycle = chain.models, chain.cycle
        self.text: torch.Tensor | None = None  # of plain decoding

    def prompt(self, tokens: int, rows: int = 1) -> torch.Tensor:
        return random_prompts(self.target.config.vocab_size, rows, tokens, 7).to(self.place["device"])

    def timed(self, generate: Callable[..., Any], ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, float]:
        """The text of ``generate`` and the seconds of a call, after one that captures."""
        seconds = []
        for _ in range(4):
            torch.manual_seed(0)
            began = time.perf_counter()
            text = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options).cpu()
            seconds.append(time.perf_counter() - began)
        return text, statistics.median(seconds[1:])

    def rates(self, target: Any, rows: int, new: int, **options: Any) -> dict[str, Any]:
        """Tokens per second of ``generate()``, of plain decoding and of rounds, and whether the texts of these two are the same."""
        ids, texts = self.prompt(64, rows), []
        found: dict[str, Any] = {"generate()": rows * new / self.timed(target.generate, ids, new, **options)[1]}
        for name, given in (("plain", []), ("rounds", [self.small])):
            with Pipeline(target, given, graphs=True, prefix_cache=0) as pipe:
                text, seconds = self.timed(pipe.generate, ids, new, **options)
                found[name] = rows * new / seconds
                found[f"{name}, forward"] = [stage.forward for stage in pipe.report.stages]  # type: ignore[union-attr]
                texts.append(text)
        return found | {"same text": torch.equal(*texts)}

    @contextmanager
    def accepting(self, rate: float) -> Iterator[None]:
        """The draft agrees with the target at this rate: for a share of the tokens its head has the rows of their mates, so of the two it chooses the other one."""
        share, head = (AGREEMENT - rate) / (2 * AGREEMENT - 1), self.small.lm_head.weight
        tokens = self.cycle.order[: len(self.cycle.order) // 2]
        tokens = tokens[torch.rand(len(tokens), generator=torch.Generator().manual_seed(0)) < share]
        mates = self.cycle.mate(tokens)
        here, there = (torch.cat(pair).to(head.device) for pair in ((tokens, mates), (mates, tokens)))
        try:
            head[here] = head[there]
            yield
        finally:
            head[here] = head[there]

    @contextmanager
    def products(self, own: bool) -> Iterator[None]:
        """Captures in the context have our products of few rows, or those of the library alone. The latter while a pipeline of the models is open, which have fused forms then."""
        models = () if own else (self.small, self.target)
        forms = [form for model in models if (form := choose_fused(model)) is not None]
        before = [form.narrow_rows for form in forms]
        try:
            for form in forms:
                form.narrow_rows = 0
            yield
        finally:
            for form, rows in zip(forms, before, strict=True):
                form.narrow_rows = rows

    def rounds(self, number: str) -> dict[str, Any]:
        """With this number of draft tokens, or "controlled", by the acceptance: tokens per second with our products and with the library's, whose calls take turns, the accepted length, and
        whether our text is that of plain decoding."""
        ids, found, drafts = self.prompt(64), dict[str, Any](), [self.small] * (number != "0")
        lookahead = int(number) or None if number.isdigit() else None
        options: dict[str, Any] = {"graphs": True, "lookahead": lookahead, "prefix_cache": 0}
        if self.text is None:
            with Pipeline(self.target, [], **options | {"lookahead": None}) as plain:
                self.text = plain.generate(ids, max_new_tokens=self.tokens, **GREEDY)
        with ExitStack() as pipes:
            pipe, same = {}, True
            for own in (True, False):
                with self.products(own):
                    pipe[own] = pipes.enter_context(Pipeline(self.target, drafts, **options))
            for rate in RATES[: 3 if number == "controlled" else 2 if drafts else 1]:
                speeds: dict[bool, list[float]] = {True: [], False: []}
                for own in (True, False) * 3:
                    with self.accepting(rate), self.products(own):
                        text = pipe[own].generate(ids, max_new_tokens=self.tokens, **GREEDY)
                    report: Any = pipe[own].report
                    speeds[own].append(report.tokens_per_second)
                    same = same and (not own or torch.equal(text, self.text))
                ours, library = (statistics.median(speeds[own][1:]) for own in (True, False))
                found[f"at {rate}"] = {"ours": ours, "library": library, "length": report.mean_acceptance_length}
        return found | {"same text": same}

    def long(self, tokens: int) -> dict[str, Any]:
        """Of a call after so many tokens: tokens per second behind the first one, and the seconds until that."""
        found = {}
        for name, drafts in (("plain", []), ("rounds", [self.small])):
            options: dict[str, Any] = {"graphs": True, "lookahead": 4 if drafts else None, "prefix_cache": 0}
            with Pipeline(self.target, drafts, **options) as pipe:
                pipe.generate(self.prompt(tokens), max_new_tokens=96, **GREEDY)
                report: Any = pipe.report
            found[name] = {"tokens/s": report.decoding_tokens_per_second, "first": report.seconds_to_first_token}
        return found

    def first_token(self) -> dict[str, float]:
        """Milliseconds of a call for one token."""
        found, target = {}, self.target
        fresh: dict[str, Any] = {"graphs": True, "prefix_cache": 0}
        with Pipeline(target, [], **fresh) as plain, Pipeline(target, [self.small], **fresh) as rounds:
            for tokens in (8,) if self.dry else (64, 512, 2048, 8192):
                for name, model in (("generate()", target), ("plain", plain), ("rounds", rounds)):
                    found[f"{name}, {tokens}"] = 1e3 * self.timed(model.generate, self.prompt(tokens), 1, **GREEDY)[1]
        return found

    def head(self) -> dict[str, Any]:
        """Milliseconds of a round whose one or three draft tokens are wrong: the head is not trained."""
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            head_for(self.target, range(0, self.target.config.vocab_size // 2, 2)).save(folder, self.target)
            for tokens in (0, 1, 3):
                with Pipeline(self.target, folder if tokens else [], graphs=True, lookahead=tokens or None) as pipe:
                    _, seconds = self.timed(pipe.generate, self.prompt(64), self.tokens, **GREEDY)
                    found[f"{tokens} draft tokens"] = 1e3 * seconds / pipe.report.stages[-1].steps  # type: ignore[union-attr]
        return found

    def formats(self) -> dict[str, Any]:
        """Tokens per second with weights in formats of GGUF files and in floats of 8 bits: of plain decoding with random ones, whose text means nothing, and of rounds of a target and a draft
        in 4 bits. And the bytes of the target's weights."""
        ids, found = self.prompt(64), dict[str, Any]()
        for name in ("q4_0", "e4m3") if self.dry else ("q8_0", "e4m3", "q4_k", "q6_k", "mxfp4"):
            model = plant(self.names[1:], texts=0, **self.place).models[0]
            for at, linear in list(model.named_modules()):
                if isinstance(linear, torch.nn.Linear):
                    tiles = random_tiles(name, *linear.weight.shape, self.place["device"])
                    model.set_submodule(at, TiledLinear(tiles, self.place["dtype"]))
            with Pipeline(model, [], graphs=True, prefix_cache=0) as pipe:
                _, seconds = self.timed(pipe.generate, ids, self.tokens, **GREEDY)
                found[name] = {"plain": self.tokens / seconds, "forward": pipe.report.stages[0].forward}  # type: ignore[union-attr]
            found[name]["bytes"] = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        if not self.dry:  # weights= brings them into tiles on a GPU alone
            with Pipeline(self.target, [self.small], weights="q4_0", graphs=True, lookahead=4, prefix_cache=0) as pipe:
                _, seconds = self.timed(pipe.generate, ids, self.tokens, **GREEDY)
                report: Any = pipe.report
                found["q4_0, rounds"] = {"rounds": self.tokens / seconds, "steps": report.stages[-1].steps}
        return found

    def quantised(self) -> dict[str, Any]:
        if not find_spec("torchao"):
            return {"left out": "torchao is not installed"}
        from torchao import quantization as ao

        found, kinds = {}, {"int8": ao.Int8WeightOnlyConfig(), "fp8": ao.Float8DynamicActivationFloat8WeightConfig()}
        for name, kind in list(kinds.items())[: 1 if self.dry else 2]:
            model = plant(self.names[1:], texts=0, **self.place).models[0]
            ao.quantize_(model, kind, filter_fn=lambda m, at: isinstance(m, torch.nn.Linear) and "lm_head" not in at)
            found[name] = self.rates(model, 1, 48, **GREEDY)
        return found


def random_tiles(name: str, rows: int, columns: int, device: Any) -> TiledMatrix:
    """A matrix of random codes, whose scales are small numbers, in tiles."""
    noise = torch.Generator().manual_seed(0)
    if name == "e4m3":
        codes = torch.randint(0, 127, (rows, columns), generator=noise, dtype=torch.uint8, device="cpu")
        scale = torch.full((rows, -(-columns // WIDTH)), 1e-5)
        return float8_in_tiles(codes.view(torch.float8_e4m3fn), scale, device)
    form = FORMATS[name]
    data = torch.randint(0, 127, (rows, form.row_bytes(columns)), generator=noise, dtype=torch.uint8, device="cpu")
    blocks = data.view(-1, form.block_bytes)
    for at in form.halves:
        blocks[:, at : at + 2] = half_bytes(torch.full((1, 1), 1e-5))
    return in_tiles(QuantizedMatrix(form, data, (rows, columns)), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures go, each as soon as it is there")
    parser.add_argument("--dry-run", action="store_true", help="small models on a CPU")
    parser.add_argument("--only", nargs="+", help="only these parts; the first word of several")
    options = parser.parse_args()
    if options.dry_run:
        base._runs_uncaptured = True
        torch.set_num_threads(1)
    more, found = More("cpu" if options.dry_run else "cuda"), {"machine": provenance(), "figures": dict[str, Any]()}
    parts: dict[str, Callable[[], Any]] = {
        **{f"rounds {number}": partial(more.rounds, number) for number in NUMBERS[: 3 if more.dry else None]},
        **{f"long {tokens}": partial(more.long, tokens) for tokens in ((48,) if more.dry else (8192, 32768, 131072))},
        "first token": more.first_token,
        "batch of 8": lambda: more.rates(more.target, 8, more.tokens, **GREEDY),
        "sampled": lambda: more.rates(more.target, 1, more.tokens, **SAMPLED),
        "draft head": more.head,
        "formats": more.formats,
        "quantised": more.quantised,
    }
    chosen = [name for name in parts if not options.only or {name, name.split()[0]} & set(options.only)]
    if unknown := set(options.only or ()).difference(chosen, (name.split()[0] for name in chosen)):
        parser.error(f"--only: no part is named {', '.join(sorted(unknown))}; the parts are {', '.join(parts)}")
    for name in chosen:
        try:
            found["figures"][name] = parts[name]()
        except Exception as error:
            found["figures"][name] = {"error": f"{type(error).__name__}: {error}"}
        save(options.json, found)
    if any(figure.get("same text") is False for name, figure in found["figures"].items() if "rounds" in name):
        raise SystemExit("a text is not that of plain decoding")


if __name__ == "__main__":
    main()
