"""What does a draft made out of a model cost, and how often does it agree? ``python -m bench.bench_drafts [--quick] [--json FILE]``

The bundled family on held-out function heads, greedy. Each draft is taken as it is, with a trimmed head, in int8, and both; beside them stand drafts out of
the target's own layers. Reported per draft: the share of the target's tokens that it chooses, teacher-forced; the shortest time of a step of one column on one
thread; and the best rate of lockstep over the repeats, beside that of plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.harness import choose_sizes, save
from pipespec import Pipeline
from pipespec.bench.machine import provenance
from pipespec.demo import FAMILY, family_path, prompts
from pipespec.models.derived import in_int8, with_layers, with_vocabulary
from pipespec.planning.measure import Text, agreement, step_times, written_by
from pipespec.process.progress import quiet_transformers

LAYERS: tuple[int | tuple[int, ...], ...] = (3, 6, (0, 4, 7, 11), (0, 2, 4, 7, 9, 11))
TRIMMED = (500, 1000)
LOOKAHEAD = 3


def drafts(models: dict[str, PreTrainedModel]) -> Iterator[tuple[str, PreTrainedModel]]:
    """All drafts with their names."""
    for name in ("small", "medium"):
        yield name, models[name]
        yield f"{name}, int8", in_int8(models[name])
        for count in TRIMMED:
            # The lowest ids: the family's tokenizer gave them to its first merges. Token 1 ends a text.
            yield f"{name}, {count} tokens", with_vocabulary(models[name], range(count))
        yield f"{name}, {TRIMMED[-1]} tokens, int8", in_int8(with_vocabulary(models[name], range(TRIMMED[-1])))
    for layers in LAYERS:
        name = f"self:{layers if isinstance(layers, int) else ','.join(map(str, layers))}"
        draft = with_layers(models["target"], layers)
        yield name, draft
        yield f"{name}, int8", in_int8(draft)


def rate(target: PreTrainedModel, draft: PreTrainedModel | None, texts: Sequence[Text], repeats: int) -> float:
    """The best tokens per second over the repeats."""
    found = []
    own = [] if draft is None else [draft]
    with Pipeline(target, own, schedule="lockstep" if own else "plain", lookahead=LOOKAHEAD if own else None) as pipe:
        for _ in range(repeats):
            tokens, took = 0, 0.0
            for text, first in texts:
                ids = torch.from_numpy(text[None, :first].astype("int64"))
                new = len(text) - first
                pipe.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
                assert pipe.report is not None
                tokens, took = tokens + pipe.report.tokens, took + pipe.report.seconds
            found.append(tokens / took)
    return max(found)


def step_ms(model: PreTrainedModel) -> float:
    """The shortest of several medians of a step of one column."""
    return 1e3 * min(step_times(model, "model", (1,), threads=1, budget_s=0.2).at(1) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser("bench_drafts", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and tokens: under a minute")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out function heads (16; quick: 2)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="per prompt (96; quick: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    choose_sizes(options, prompts=(16, 2), new_tokens=(96, 16))
    torch.set_num_threads(1)
    with quiet_transformers():
        models = {n: AutoModelForCausalLM.from_pretrained(family_path(n), dtype=torch.float32).eval() for n in FAMILY}
        tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    target, repeats = models["target"], 1 if options.quick else 4
    texts = written_by(target, [tokenizer(text).input_ids for text in prompts(options.prompts)], options.new_tokens)
    plain, info = rate(target, None, texts, repeats), provenance()
    print(f"{info['cpu']}, one thread; target {step_ms(target):.3f} ms per step, plain decoding {plain:.0f} tokens/s")
    print(f"{'draft':<32}{'agreement':>10}{'step':>10}{'tokens/s':>10}{'vs plain':>10}")
    found = []
    for name, draft in drafts(models):
        share = float(agreement(draft, texts).mean())
        record = {"draft": name, "agreement": share, "step_ms": step_ms(draft)}
        record["tokens_per_second"] = speed = rate(target, draft, texts, repeats)
        found.append(record)
        print(f"{name:<32}{share:>10.3f}{record['step_ms']:>7.3f} ms{speed:>10.0f}{speed / plain:>9.2f}x", flush=True)
    save(options.json, {"machine": info, "plain_tokens_per_second": plain, "drafts": found})


if __name__ == "__main__":
    main()
