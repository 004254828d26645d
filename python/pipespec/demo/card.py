"""Writes the family's model card from the figures that the training phases recorded."""

from __future__ import annotations

from typing import Any

_HEAD = """\
# The demo's model family

Three language models of the LLaMA architecture and one tokenizer, small enough to live in the
repository, so that every example, test and benchmark of this project runs offline on real weights.
They are made for one purpose: a target that is slow because it is deep, and drafts that often agree
with it. They are **not** useful as models of Python. `module/` is a draft module for speculative pipeline
decoding of the target; it has a card of its own.

"""

_TAIL = """\
## Limits

Toy size: the continuations look like Python and often mean nothing. 512 positions, one domain (source
text of one Python version), one vocabulary of 2048 byte-level tokens. The agreement figures hold for
greedy decoding after prompts like those above; other text, or sampling, gives others. The target's greedy
text soon repeats itself, and repetition is easy to predict: the first 64 tokens are the stricter figure.

The drafts were distilled from this target. With another target they are worth nothing.

## Licence

The weights, the tokenizer and this card: Apache-2.0, like the project. They were trained on the Python
standard library, which the Python Software Foundation publishes under the PSF License Agreement, and on
what the target wrote after it; no other text was used. The sample above quotes a few lines of it, and the
target may recite others.
"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n\n"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def write(records: dict[str, Any], shapes: dict[str, tuple[int, int, int, int]], held_out: tuple[str, ...]) -> str:
    """The card as Markdown. ``records`` are the phases' figures, by phase; nothing else is a source of numbers."""
    data, target, drafts, text = records["corpus"], records["target"], records["drafts"], records["text"]
    figures = records["evaluate"]
    parts = [_HEAD, "## Shapes\n\n"]
    parts.append(
        _table(
            ["model", "hidden", "layers", "heads", "intermediate", "parameters"],
            [
                [name, *(str(size) for size in shape), f"{figures['parameters'][name]:,}"]
                for name, shape in shapes.items()
            ],
        )
    )
    parts.append(
        f"Tied embeddings, bf16 weights, {figures['bytes'] / 1e6:.1f} MB in all. Every folder loads by itself with\n"
        "`AutoModelForCausalLM` and `AutoTokenizer`; the tokenizer is the same in each. Load with\n"
        "`dtype=torch.float32` for the figures below. The tokenizer puts `<|begin|>` before a text, and\n"
        "`<|endoftext|>` ends a file.\n\n"
    )
    parts.append("## Data\n\n")
    parts.append(
        f"The standard library of CPython {data['python']}, without tests, generated tables and site packages:\n"
        f"{data['files']} files, {data['characters'] / 1e6:.2f} M characters, {data['tokens'] / 1e6:.2f} M tokens.\n"
        f"Held out, and seen by no model:\n{', '.join(f'`{m}`' for m in held_out)}\n"
        f"({data['held_out_files']} files, {data['held_out_tokens']:,} tokens).\n\n"
    )
    parts.append("## Training\n\n")
    rows = [
        [
            "target",
            "next token, corpus",
            f"{target['steps']:,}",
            f"{target['tokens'] / 1e6:.2f} M",
            _minutes(target["seconds"]),
        ]
    ]
    if "pretrain" in records:
        first = records["pretrain"]
        rows.append(
            [
                "both drafts",
                "next token, corpus",
                f"{first['steps']:,}",
                f"{first['tokens'] / 1e6:.2f} M",
                _minutes(first["seconds"]),
            ]
        )
    rows.append(
        [
            "both drafts",
            "distillation",
            f"{drafts['steps']:,}",
            f"{drafts['tokens'] / 1e6:.2f} M",
            _minutes(drafts["seconds"]),
        ]
    )
    parts.append(_table(["model", "phase", "steps", "tokens", "wall time"], rows))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in text["by_kind"].items())
    parts.append(
        f"Distillation text: {sum(text['by_kind'].values()):,} tokens in {text['sequences']:,} sequences that the target\n"
        f"itself wrote after prompts of the training modules\n({kinds};\n"
        f"{_minutes(text['seconds'])}), and every fourth step the corpus. Loss: KL divergence to the target's\n"
        "distribution plus cross entropy with its first choice. Optimizer: Muon for the layers' matrices, AdamW for\n"
        "the rest; the rate follows half a cosine over the wall-clock budget.\n\n"
    )
    if records.get("notes"):
        parts.append("\n".join(records["notes"]) + "\n\n")
    parts.append("## Measured on the held-out modules\n\n")
    parts.append(
        f"All figures are of the bf16 files as they are here, in fp32. Losses are nats per token over\n"
        f"{figures['held_out_loss_tokens']:,} tokens of the held-out modules.\n\n"
    )
    losses = figures["held_out_loss"]
    parts.append(_table(["model", "held-out loss"], [[name, f"{losses[name]:.3f}"] for name in shapes]))
    sizes = figures["prompt_tokens"]
    parts.append(
        f"Agreement: {figures['prompts']} held-out function heads ({sizes[0]} to {sizes[-1]} tokens, median\n"
        f"{sizes[len(sizes) // 2]}), up to 128 tokens written greedily after each by the verifying model; the share\n"
        "of those tokens that are the draft's first choice too. Accepted: mean number of draft tokens accepted in a\n"
        "round of greedy speculative decoding with the given window; a round yields one token more.\n\n"
    )
    rows = []
    for pair in ("medium->target", "small->target", "small->medium"):
        found = figures[pair]
        rows.append(
            [
                pair.replace("->", " → "),
                f"{found['tokens']:,}",
                f"{found['agreement']:.3f}",
                f"{found['first_half']:.3f} / {found['second_half']:.3f}",
                f"{found['accepted_at_4']:.2f}",
                f"{found['accepted_at_8']:.2f}",
            ]
        )
    parts.append(
        _table(
            ["draft → verifier", "tokens", "agreement", "first / last 64 tokens", "accepted of 4", "accepted of 8"],
            rows,
        )
    )
    sample = figures["samples"][0]
    parts.append(f"What the target writes after the first of those prompts (`{sample['name']}`, the prompt first):\n\n")
    parts.append(f"```python\n{sample['prompt']}\n# --- from here on the target ---{sample['text']}\n```\n\n")
    parts.append("## How to make it again\n\n")
    parts.append("The commands of this family, in the order in which they were started:\n\n```sh\n")
    commands = [records[phase]["command"] for phase in ("target", "pretrain") if phase in records]
    commands += [*text["commands"], drafts["command"], figures["command"]]
    parts.append("\n".join(dict.fromkeys(commands)) + "\n```\n\n")
    parts.append(
        "Without `--phases` one command does all of it in order. Budgets are wall clock, so another machine, or\n"
        "another load, gives other weights; on the same interpreter the data and its order are the same.\n\n"
    )
    parts.append(_TAIL)
    return "".join(parts)


_MODULE_HEAD = """\
# The draft module of the demo's target

Predicts the next token of `../target`, cut into {n} stages (layers {stages}), from what the stages have computed before a
cycle: speculative pipeline decoding (SPD, arXiv 2605.30852). Written by `DraftModule.save`, read by `DraftModule.load` of
`pipespec.spd.draft_module`, which refuses any other target or split.

"""


def write_module(record: dict[str, Any], config: Any, held_out: tuple[str, ...]) -> str:
    """The draft module's card as Markdown. ``record``: the figures of the phase ``module``; ``config``: the module's."""
    settings, last, found = record["settings"], record["history"][-1], record["measured"]
    parts = [
        _MODULE_HEAD.format(n=config.n, stages=" / ".join(f"{begin}-{end - 1}" for begin, end in config.stages)),
        "## Shape\n\n",
        f"Anchors (residual streams read): {', '.join(map(str, config.anchors))}; type of the depths 0 .. {config.n}: "
        f"{', '.join(map(str, config.types))}.\nBlocks: {config.layers}, of the target's shape. Draft vocabulary: "
        f"{config.logits} of {config.target['vocab_size']} tokens. {record['parameters']:,} trained parameters, stored in bf16.\n\n",
        "## Training\n\n",
        f"{record['steps']:,} steps, {record['tokens'] / 1e6:.2f} M tokens, {_minutes(record['seconds'])}: three steps of four on\n"
        f"{record['own_text']['sequences']:,} sequences in which the target continues prompts of the training modules "
        f"({sum(record['own_text']['by_kind'].values()):,} tokens\nof its own; phase `text`), the fourth on the corpus. Half of the steps with all stages filled, the others with 1 .. "
        f"{config.n - 1} tokens in flight.\nKL divergence to the target's distribution plus {settings['argmax_weight']:g} times the cross "
        f"entropy with its first choice;\nMuon for the matrices, AdamW for head and gains, rate {settings['rate']:g}.\n",
        "The blocks began as the target's last layers, the head as its head. `training.svg` shows the curves.\n\n",
    ]
    parts += [note + "\n\n" for note in record.get("notes", [])]
    curve = record["history"]
    shown = [curve[i] for i in sorted({round(i * (len(curve) - 1) / 7) for i in range(8)})]
    parts.append(
        _table(
            ["step", "minutes", "loss", "held-out KL", "agreement on held-out text", "acceptance on its own text"],
            [
                [
                    f"{f['step']:,}",
                    f"{f['seconds'] / 60:.1f}",
                    f"{f['loss']:.3f}",
                    f"{f['held_out_loss']:.3f}",
                    f"{f['agreement']:.3f}",
                    f"{f['acceptance']:.3f}",
                ]
                for f in shown
            ],
        )
    )
    fills = ", ".join(f"{last[f'agreement_{fill}']:.3f}" for fill in range(1, config.n))
    parts.append(
        "Held-out text: source of the held-out modules ("
        + ", ".join(f"`{name}`" for name in held_out)
        + f").\nAt the end, with 1 .. {config.n - 1} tokens in flight: {fills}.\n\n"
    )
    parts.append("## Measured on the held-out modules\n\n")
    parts.append(
        f"The bf16 files as they are here, in fp32; {found['prompts']} held-out function heads, up to 128 tokens written greedily by the "
        "target\nafter each, as for the family's card. Every draft that decoding would verify is counted, fill phases after a\nwrong draft "
        "included.\n\n"
    )
    parts.append(
        _table(
            [
                "stages",
                "drafts verified",
                "accepted",
                "acceptance",
                "first / last 64 tokens",
                "tokens per cycle",
                "equivalent accepted length",
            ],
            [
                [
                    str(config.n),
                    f"{found['verified']:,}",
                    f"{found['accepted']:,}",
                    f"{found['acceptance']:.3f}",
                    f"{found['first_half']:.3f} / {found['second_half']:.3f}",
                    f"{found['accepted_length'] / config.n:.3f}",
                    f"{found['accepted_length']:.2f}",
                ]
            ],
        )
    )
    commands = "\n".join([*record["own_text"]["commands"], record["command"]])
    parts.append(f"## How to make it again\n\n```sh\n{commands}\n```\n\n")
    parts.append(
        "The work folder must hold `target/` and `tokenizer/` (here: copies of the bundled ones), as the phases before leave them. Licence\n"
        "and limits: as the family's (`../README.md`).\n"
    )
    return "".join(parts)
