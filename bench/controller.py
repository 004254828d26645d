"""What a draft token costs, and what the controller makes of it on real texts without the noise of a machine.

    python -m bench.controller price MODEL ... --json bench/results/price.json
    python -m bench.controller record --target build/real/q15-hf --drafts build/real/q05-hf --chat-template \
      --prompts code=humaneval.jsonl chat=mt_bench.jsonl --out build/texts.json
    python -m bench.controller replay build/texts.json --json bench/results/controller.json
    python -m bench.controller record --target build/real/q05-hf --head head --chat-template --prompts ... --out build/head.json

``price``: medians of the time of a step by its number of columns, as parts of that of one column. MODEL is a folder, a GGUF file, or FOLDER=FORMAT, whose matrices are
quantised. ``record`` writes the target's greedy text after each prompt, at which of its tokens each draft makes the same choice, and the times of steps; of a draft head, which
reads the target's hidden states, the same for each place in a chain of draft tokens. The times are those of the GGUF file next to a target NAME-hf if there is a head. A round's outcome
depends on nothing else, so ``replay`` runs the controller on these texts: it is shown the times of its rounds with noise, and the result counts them without: does any
prompt lose, and how far is it from the best fixed setting? A draft that begins reads the end of the prompt first.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.config import BenchConfig, add_options, configured, with_prompts
from bench.harness import repeated, save, table
from bench.machine import provenance
from bench.real import packed, shuffled
from bench.run import load_models, prompts_of
from pipespec import Pipeline
from pipespec.engine.cache import RowCache
from pipespec.engine.cached_text import PROMPT_TAIL
from pipespec.engine.controller import MAX_DRAFT_TOKENS, Choice, Controller
from pipespec.engine.forward import described, forward
from pipespec.engine.head import DraftHead
from pipespec.engine.ngram import NgramDraft
from pipespec.models.loading import load_model
from pipespec.models.quantizing import quantized
from pipespec.process.progress import quiet_transformers, say
from pipespec_kernels import _native
from pipespec_train.heads import HeadStudent
from pipespec_train.students import StudentBatch
from pipespec_train.teacher import teacher_forward

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, PROMPT_TAIL)
NOISE = {"quiet": (0.03, 0.0), "busy": (0.05, 0.1)}
"""Deviation of a step's time, and how often one takes 1.2 to 2.5 times as long."""
FIXED = [Choice("ngram", k) for k in (2, 4, 8, 16)] + [Choice("model", k) for k in (1, 2, 3, 4, 6)]
PROMISE = 0.97
PLACES = 6
"""In a chain of a draft head's tokens: further ones pay nowhere."""
Match = tuple[list[int], int]
"""Draft tokens of the n-gram index after a position, and the kind of its match by length."""


# --- price and record ---


def step_times(model: Any, repeats: int = 5) -> dict[int, float]:
    """Median seconds of a forward by its number of columns, after 64 positions. The widths take turns."""
    cache, tokens = RowCache.for_model(model, 1, 256), torch.arange(100, 100 + max(WIDTHS))[None]
    forward(model, tokens[:, :64], cache, keep=0)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(repeats):
        for width in WIDTHS:
            cache.set_lengths([64])
            times[width] += repeated(
                lambda w=width: forward(model, tokens[:, :w], cache, keep=min(w, 17)), 1, warm_up=0
            )  # type: ignore[misc]
    return {width: statistics.median(found) for width, found in times.items()}


def in_ms(times: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {name: {width: 1000 * s for width, s in found.items()} for name, found in times.items()}


def price(options: argparse.Namespace) -> None:
    """Print and save the times of steps of models."""
    times, forms = {}, {}
    for name in options.models:
        path, _, weights = name.partition("=")
        model = quantized(load_model(path), weights) if weights else load_model(path)
        times[short := name.rpartition("/")[2]] = step_times(model, 15)
        forms[short] = described(model, RowCache.for_model(model, 1, 64))
    columns = {str(width): lambda r, width=width: f"{r[1][width] / r[1][1]:.2f}" for width in WIDTHS}
    print(table({"columns": lambda r: r[0], **columns}, times.items()))
    save(options.json, {"benchmark": "price", "machine": provenance(), "forward": forms, "step_ms": in_ms(times)})


def choices(model: Any, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """The model's greedy choice at each token of a text."""
    tokens = torch.tensor([[*prompt, *text]])[:, :-1]
    cache = RowCache.for_model(model, 1, tokens.shape[1])
    forward(model, tokens[:, : len(prompt) - 1], cache, keep=0)
    return forward(model, tokens[:, len(prompt) - 1 :], cache, keep=len(text))[0].argmax(-1).tolist()


@torch.no_grad()
def chains(head: DraftHead, target: Any, prompt: Sequence[int], text: Sequence[int]) -> list[list[bool]]:
    """For each place in a chain of the head's draft tokens: which tokens of a text it has right there, if all tokens of the chain before are the text's."""
    ids, size = torch.tensor([[*prompt, *text]]), len(text)
    student = HeadStudent(head, target, PLACES)
    found = teacher_forward(target, ids, student.anchors)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    batch = StudentBatch(ids, found.anchors.float(), everywhere, torch.zeros(ids.shape[1], 1), found.last)
    tables = []
    for place, (logits, _) in enumerate(student.simulate(batch)):
        # Logits at position p are those of token p + 1. The first ones of a chain are at position 1.
        own = head.ids[logits.argmax(-1)][:-1] == ids[0, 2 + place :]
        tables.append([False] * max(0, size - len(own)) + own.tolist()[-size:])
    return tables


class _Watched(Controller):
    """Drafts 0 to 4 tokens in turn, and keeps the seconds of steps by their columns."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.seen: dict[str, dict[int, list[float]]] = {"target": {}, "head": {}}

    def choose(self, matches: Any, lag: int, remaining: int) -> Choice:
        self._lag, self._rounds = lag, self._rounds + 1
        tokens = self._rounds % 5 if remaining > 5 else 0
        return Choice("model", tokens) if tokens else Choice()

    def note_target(self, columns: int, seconds: float) -> None:
        self.seen["target"].setdefault(columns, []).append(seconds)

    def note_draft(self, columns: int, seconds: float) -> None:
        self.seen["head"].setdefault(columns, []).append(seconds)

    def note_reading(self, seconds: float) -> None:
        self.note_draft(self._lag, seconds)


def head_times(target: Path, head: str, prompt: Sequence[int]) -> dict[str, dict[int, float]]:
    """Median seconds of steps of a target and a head in 8 bits, by their columns, over three calls."""
    with Pipeline(target, [head], weights={"draft 0": "q8_0"}) as pipe:
        driver: Any = pipe._driver
        watch = driver.controller = _Watched()
        for call in range(4):
            pipe.generate(torch.tensor([prompt]), max_new_tokens=128, do_sample=False)
            if not call:  # cold
                watch.seen = {"target": {}, "head": {}}
    return {
        name: {n: statistics.median(found) for n, found in sorted(seen.items())} for name, seen in watch.seen.items()
    }


def record(options: argparse.Namespace) -> None:
    """Write texts, agreement and times."""
    config = with_prompts(
        configured(options, BenchConfig(samples=24, new_tokens=96, dtype="bfloat16")), options.prompts
    )
    family, _ = load_models(config)
    target, texts = family.target, []
    with Pipeline(target, schedule="plain") as pipe:
        for data in (prompts_of(config, request, family) for request in config.dataset):
            for name, ids in data.prompts.items():
                out = pipe.generate(ids, max_new_tokens=config.new_tokens, do_sample=False)
                texts.append({"kind": data.name, "prompt": ids[0].tolist(), "text": out[0, ids.shape[1] :].tolist()})
                say(f"{data.name} {name}")
    times = {"target": step_times(target)}
    for draft in list(family.drafts.values())[:1]:
        for name, model in {"draft": draft, "useless": shuffled(draft)}.items():
            times[name] = step_times(model)
            for entry in texts:
                own = choices(model, entry["prompt"][-PROMPT_TAIL - 1 :], entry["text"])
                entry[name] = [[a == b for a, b in zip(own, entry["text"], strict=True)]] * MAX_DRAFT_TOKENS
    if config.head is not None:
        head = DraftHead.load(config.head, target, torch.float32)
        for entry in texts:
            entry["head"] = chains(head, target, entry["prompt"], entry["text"])
        times |= head_times(packed(str(config.target)), config.head, texts[0]["prompt"])
    about = {"machine": provenance(), "target": family.name, "draft": next(iter(family.drafts), "head")}
    corpus = NgramDraft().for_target(config.target, target).ids
    about["corpus"] = None if corpus is None else np.asarray(corpus).tolist()
    save(options.out, about | {"times": times, "texts": texts})


# --- replay ---


def matches(prompt: Sequence[int], text: Sequence[int], corpus: Sequence[int] | None) -> list[Match]:
    """What the n-gram index drafts after each committed token of a text but the last, and the length of its match."""
    settings, known = NgramDraft(), np.array([*prompt, *text], dtype=np.int32)
    index, found = _native.NgramIndex(settings.min_match, settings.max_match), []
    phrases = corpus and _native.NgramCorpus(np.array(corpus, dtype=np.int32), settings.max_match)
    for length in range(len(prompt) + 1, len(known)):
        index.truncate(min(len(index), length - 1))
        index.write(len(index), known[len(index) : length])
        drafted: list[int] = []
        first = 0
        while len(drafted) < MAX_DRAFT_TOKENS and (match := index.match(phrases))[0] >= 0:
            first = first or match[1]
            index.write(length + len(drafted), np.array([match[0]], dtype=np.int32))
            drafted.append(match[0])
        found.append((drafted, first))
    return found


class World:
    """One text, and the times of a machine.

    Args:
        entry: Of ``record``.
        drafts: For each place in a round, and each token of the text, whether the draft's choice is the same; None: there is no draft.
        times: Seconds by columns of ``target`` and ``draft``.
        noise: Of :data:`NOISE`.
        reads_target: Whether it is a draft head, which reads what the target has committed in the round before.
    """

    def __init__(
        self,
        entry: dict[str, Any],
        drafts: list[list[bool]] | None,
        times: dict[str, dict[int, float]],
        noise: str,
        *,
        reads_target: bool = False,
    ):
        self.text, self.found = entry["text"], entry["matches"]
        self.tail = min(PROMPT_TAIL, len(entry["prompt"]) - 1)
        self.drafts, self.times, self.reads_target = drafts, times, reads_target
        self.sigma, self.spikes = NOISE[noise]
        self.random = random.Random(len(self.text))

    def clean(self, model: str, columns: int) -> float:
        """Seconds of a step, between the measured widths on a line."""
        known = self.times[model]
        return float(np.interp(columns, list(known), list(known.values())))

    def noisy(self, seconds: float) -> float:
        spike = self.random.uniform(1.2, 2.5) if self.random.random() < self.spikes else 1.0
        return seconds * spike * max(self.random.gauss(1.0, self.sigma), 0.5)

    def run(self, choose: Callable[..., Choice], controller: Controller | None = None) -> float:
        """Seconds of the rounds after the first token, without noise."""
        done, lag, reads, seconds = 1, self.tail, self.drafts is not None, 0.0
        if controller is not None:
            controller.begin()
        while done < len(self.text):
            drafted, match = self.found[done - 1]
            choice = choose([(len(drafted), match)], -1 if self.drafts is None else lag, len(self.text) - done)
            count, accepted, right = min(choice.tokens, len(self.text) - done - 1), 0, iter(())
            if choice.source == "model":
                assert self.drafts is not None
                count = min(count, len(self.drafts))
                seconds += self.draft(count, lag, done, reads, controller)
                reads, right = False, (self.drafts[i][done + i] for i in range(count))
            elif choice.source == "ngram":
                count = min(count, len(drafted))
                right = (a == b for a, b in zip(drafted[:count], self.text[done : done + count], strict=True))
            accepted = leading(right)
            took = self.clean("target", 1 + count)
            seconds += took
            if controller is not None:
                controller.note_target(1 + count, self.noisy(took))
                if count:
                    controller.note_round(choice, [(len(drafted), match)], [(count, accepted)])
            done += accepted + 1
            own = accepted + 1 if self.reads_target else 0
            lag = own if choice.source == "model" else lag + accepted + 1
        return seconds

    def draft(self, count: int, lag: int, done: int, reads: bool, controller: Controller | None) -> float:
        """Seconds in which the draft model catches up and proposes ``count`` tokens."""
        total = 0.0
        for i in range(count):
            columns = 1 if i else max(lag, 1) if self.reads_target else 1 + lag
            took = self.clean("draft", columns)
            total += took
            if controller is None:
                continue
            if reads and i == 0:
                controller.note_reading(self.noisy(took))
            else:
                controller.note_draft(columns, self.noisy(took))
            compared = min(lag, done)
            if i == 0 and compared >= 8 and not self.reads_target:
                assert self.drafts is not None
                controller.rates["model"].note_agreement(sum(self.drafts[0][done - compared : done]), compared)
        return total


def leading(right: Iterator[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for is_right in right:
        if not is_right:
            break
        count += 1
    return count


def scenario(
    texts: list[dict[str, Any]], name: str, times: dict[str, dict[int, float]], noise: str, kept: bool
) -> list[dict[str, Any]]:
    """One record per kind of text: the controller's ratios to plain decoding, and to the best fixed choice for that kind."""
    found = {"target": times["target"], "draft": times["target" if name in ("itself", "no draft") else "draft"]}
    cost = None if name == "no draft" else found["draft"][1] / found["target"][1]
    controller, records = Controller(cost), []
    for kind in dict.fromkeys(entry["kind"] for entry in texts):
        plain, ours, fixed = [], [], {choice: 0.0 for choice in FIXED if choice.source == "ngram" or cost is not None}
        for entry in (entry for entry in texts if entry["kind"] == kind):
            always = [[True] * len(entry["text"])] * MAX_DRAFT_TOKENS
            drafts = {"no draft": None, "itself": always}.get(name, entry.get(name))
            world = World(entry, drafts, found, noise)
            controller = controller if kept else Controller(cost)
            ours.append(world.run(controller.choose, controller))
            plain.append(world.run(lambda *_: Choice()))
            for choice in fixed:
                fixed[choice] += world.run(lambda *_, choice=choice: choice)
        best = min(fixed, key=lambda choice: fixed[choice])
        ratios = [p / o for p, o in zip(plain, ours, strict=True)]
        records.append(
            {
                "draft": name,
                "noise": noise,
                "pipeline": "kept" if kept else "new for each prompt",
                "prompts": kind,
                "count": len(ratios),
                "of_plain": sum(plain) / sum(ours),
                "median_of_plain": statistics.median(ratios),
                "worst_of_plain": min(ratios),
                "below_promise": sum(ratio < PROMISE for ratio in ratios),
                "best_fixed": f"{best.source} {best.tokens}" if fixed[best] < sum(plain) else "plain",
                "of_best_fixed": min(fixed[best], sum(plain)) / sum(ours),
            }
        )
    return records


COLUMNS = {
    **{name: f"{{{name}}}" for name in ("draft", "noise", "pipeline", "prompts")},
    "of plain": "{of_plain:.2f}x",
    "median": "{median_of_plain:.2f}x",
    "worst": "{worst_of_plain:.3f}x",
    "below 0.97": "{below_promise} of {count}",
    "best fixed": "{best_fixed}",
    "of it": "{of_best_fixed:.2f}",
}


def with_head(
    texts: list[dict[str, Any]], times: dict[str, dict[int, float]], noise: str, kept: bool
) -> list[dict[str, Any]]:
    """One record per kind of text: a head that the controller may use, beside the index alone and two tokens of the head in each round."""
    found = {"target": times["target"], "draft": times["head"]}
    cost, records = found["draft"][1] / found["target"][1], []

    def pair() -> tuple[Controller, Controller]:
        return Controller(cost, compares=False), Controller(None)

    for kind in dict.fromkeys(entry["kind"] for entry in texts):
        ours, index = pair()
        rows = []
        for entry in (entry for entry in texts if entry["kind"] == kind):
            ours, index = (ours, index) if kept else pair()
            both = World(entry, entry["head"], found, noise, reads_target=True)
            alone = World(entry, None, found, noise)
            plain, two = alone.run(lambda *_: Choice()), both.run(lambda *_: Choice("model", 2))
            rows.append((plain, two, alone.run(index.choose, index), both.run(ours.choose, ours)))
        plain, two, alone_s, ours_s = (sum(column) for column in zip(*rows, strict=True))
        of_better = [min(b, c) / d for _, b, c, d in rows]
        records.append(
            {
                "noise": noise,
                "pipeline": "kept" if kept else "new for each prompt",
                "prompts": kind,
                "count": len(rows),
                "head_x2": plain / two,
                "index": plain / alone_s,
                "both": plain / ours_s,
                "worst_of_plain": min(row[0] / row[3] for row in rows),
                "of_better": statistics.mean(of_better),
                "worst_of_better": min(of_better),
                "below_98": sum(ratio < 0.98 for ratio in of_better),
            }
        )
    return records


HEAD_COLUMNS = {
    **{name: f"{{{name}}}" for name in ("noise", "pipeline", "prompts")},
    "head x2": "{head_x2:.2f}x",
    "index and corpus": "{index:.2f}x",
    "all": "{both:.2f}x",
    "worst": "{worst_of_plain:.3f}x",
    "of the better one": "{of_better:.3f}",
    "worst of it": "{worst_of_better:.3f}",
    "below 0.98": "{below_98} of {count}",
}


def replay(options: argparse.Namespace) -> None:
    """Run all scenarios, print and save."""
    given = json.loads(options.texts.read_text(encoding="utf-8"))
    times = {model: {int(width): s for width, s in found.items()} for model, found in given["times"].items()}
    for entry in given["texts"]:
        entry["matches"] = matches(entry["prompt"], entry["text"], given.get("corpus"))
    rows = []
    for name in (*(name for name in ("draft", "useless") if name in times), "itself", "no draft"):
        for noise in NOISE:
            for kept in (False, True):
                rows += scenario(given["texts"], name, times, noise, kept)
    print(table(COLUMNS, rows))
    about = {key: given[key] for key in ("machine", "target", "draft")}
    heads = []
    if "head" in times:
        heads = [
            row for noise in NOISE for kept in (False, True) for row in with_head(given["texts"], times, noise, kept)
        ]
        print(table(HEAD_COLUMNS, heads))
    more = {"with_head": heads} if heads else {}
    save(options.json, {"benchmark": "controller", **about, "step_ms": in_ms(times), "rows": rows, **more})


def main() -> None:
    """Measure prices, record or replay."""
    out = argparse.ArgumentParser(
        "bench.controller", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = out.add_subparsers(required=True)
    costs = commands.add_parser("price")
    costs.add_argument("models", nargs="+")
    costs.add_argument("--json", type=Path)
    costs.set_defaults(run=price)
    writes = commands.add_parser("record")
    add_options(writes)  # of which those of the models and the prompts count
    writes.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
    writes.add_argument("--out", type=Path, required=True)
    writes.set_defaults(run=record)
    reads = commands.add_parser("replay")
    reads.add_argument("texts", type=Path)
    reads.add_argument("--json", type=Path)
    reads.set_defaults(run=replay)
    options = out.parse_args()
    with quiet_transformers():
        options.run(options)


if __name__ == "__main__":
    main()
