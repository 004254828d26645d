"""Fills the model cards ``card.md`` and ``module_card.md`` with the figures that the training phases recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _table(head: str, rows: Iterable[str]) -> str:
    """A Markdown table of lines whose cells are separated by ``|``."""
    return "\n".join(f"| {line} |" for line in (head, *rows)).replace("\n", f"\n{'|---' * (head.count('|') + 1)}|\n", 1)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _names(modules: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in modules)


def write(records: dict[str, Any], shapes: dict[str, tuple[int, int, int, int]], held_out: tuple[str, ...]) -> str:
    """The family's card as Markdown. ``records`` are the phases' figures, by phase; nothing else is a source of numbers."""
    corpus, text, figures = records["corpus"], records["text"], records["evaluate"]
    sizes, parameters, losses = figures["prompt_tokens"], figures["parameters"], figures["held_out_loss"]
    phases = [
        ("target | next token, corpus", records["target"]),
        ("both drafts | next token, corpus", records.get("pretrain")),
        ("both drafts | distillation", records["drafts"]),
    ]
    agreement = [
        f"{pair.replace('->', ' → ')} | {found['tokens']:,} | {found['agreement']:.3f} | {found['first_half']:.3f} / "
        f"{found['second_half']:.3f} | {found['accepted_at_4']:.2f} | {found['accepted_at_8']:.2f}"
        for pair in ("medium->target", "small->target", "small->medium")
        for found in [figures[pair]]
    ]
    commands = [records[phase]["command"] for phase in ("target", "pretrain") if phase in records]
    commands += [*text["commands"], records["drafts"]["command"], figures["command"]]
    return _template("card.md").format(
        corpus=corpus,
        text=text,
        figures=figures,
        sample=figures["samples"][0],
        shapes=_table(
            "model | hidden | layers | heads | intermediate | parameters",
            (f"{name} | {' | '.join(map(str, shape))} | {parameters[name]:,}" for name, shape in shapes.items()),
        ),
        megabytes=figures["bytes"] / 1e6,
        characters=corpus["characters"] / 1e6,
        tokens=corpus["tokens"] / 1e6,
        held_out=_names(held_out),
        training=_table(
            "model | phase | steps | tokens | wall time",
            (f"{n} | {r['steps']:,} | {r['tokens'] / 1e6:.2f} M | {_minutes(r['seconds'])}" for n, r in phases if r),
        ),
        written=sum(text["by_kind"].values()),
        kinds=", ".join(f"{count:,} {kind}" for kind, count in text["by_kind"].items()),
        minutes=_minutes(text["seconds"]),
        notes="\n".join([*records["notes"], "", ""]) if records.get("notes") else "",
        losses=_table("model | held-out loss", (f"{name} | {losses[name]:.3f}" for name in shapes)),
        sizes=(sizes[0], sizes[len(sizes) // 2], sizes[-1]),
        agreement=_table(
            "draft → verifier | tokens | agreement | first / last 64 tokens | accepted of 4 | accepted of 8", agreement
        ),
        commands="\n".join(dict.fromkeys(commands)),
    )


def write_module(record: dict[str, Any], config: Any, held_out: tuple[str, ...]) -> str:
    """The draft module's card as Markdown. ``record``: the figures of the phase ``module``; ``config``: the module's."""
    own, found, curve = record["own_text"], record["measured"], record["history"]
    shown = [curve[i] for i in sorted({round(i * (len(curve) - 1) / 7) for i in range(8)})]
    return _template("module_card.md").format(
        config=config,
        record=record,
        own=own,
        found=found,
        stages=" / ".join(f"{begin}-{end - 1}" for begin, end in config.stages),
        anchors=", ".join(map(str, config.anchors)),
        types=", ".join(map(str, config.types)),
        tokens=record["tokens"] / 1e6,
        minutes=_minutes(record["seconds"]),
        written=sum(own["by_kind"].values()),
        fills=config.n - 1,
        notes="".join(note + "\n\n" for note in record.get("notes", [])),
        curve=_table(
            "step | minutes | loss | held-out KL | agreement on held-out text | acceptance on its own text",
            (
                f"{f['step']:,} | {f['seconds'] / 60:.1f} | {f['loss']:.3f} | {f['held_out_loss']:.3f} | "
                f"{f['agreement']:.3f} | {f['acceptance']:.3f}"
                for f in shown
            ),
        ),
        held_out=_names(held_out),
        agreement=", ".join(f"{curve[-1][f'agreement_{fill}']:.3f}" for fill in range(1, config.n)),
        measured=_table(
            "stages | drafts verified | accepted | acceptance | first / last 64 tokens | tokens per cycle | equivalent accepted length",
            [
                f"{config.n} | {found['verified']:,} | {found['accepted']:,} | {found['acceptance']:.3f} | "
                f"{found['first_half']:.3f} / {found['second_half']:.3f} | {found['accepted_length'] / config.n:.3f} | "
                f"{found['accepted_length']:.2f}"
            ],
        ),
        commands="\n".join([*own["commands"], record["command"]]),
    )
