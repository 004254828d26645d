"""Draft modules of SPD for a real target: its own text, the training, and what the modules reach on prompts that they have not seen::

    python -m bench.bench_spd_real text TARGET WORK --minutes 15 --part 0 2 & python -m bench.bench_spd_real text TARGET WORK --minutes 15 --part 1 2
    python -m bench.bench_spd_real train TARGET WORK --stages 4 --minutes 27
    python -m bench.bench_spd_real evaluate TARGET WORK --module WORK/module-4 --prompts FILE.jsonl ... --json bench/results/spd_real.json

``text`` keeps the states that the modules read while it writes, so that training does not run the target. The files of ``--prompts`` have one
object per line with ``turns``, of which the first is asked.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import json
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from bench.harness import save
from pipespec.bench.machine import provenance
from pipespec.models.loading import load_model
from pipespec.models.properties import end_tokens
from pipespec.process.progress import say
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from pipespec_spd.partition import cut
from pipespec_train import recipe
from pipespec_train.acceptance import Acceptance, drafts_right, replay
from pipespec_train.data import Batches, TrainingExample, collate, frequent_tokens
from pipespec_train.settings import TrainingSettings
from pipespec_train.trainer import RECORD, Taught, TrainingBatch, train

PROMPTS = Path(__file__).with_name("recipes") / "smollm2-135m-prompts.toml"
NEW_TOKENS, BATCH, HELD_OUT, SEED, ANSWER = 96, 48, 8, 42, 64


def own_prompts() -> list[str]:
    """The prompts of the training text, in a fixed random order."""
    found = []
    for group in tomllib.loads(PROMPTS.read_text(encoding="utf-8"))["group"]:
        found += [form.format(topic) for form in group["templates"] for topic in group["topics"]]
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if said and 60 <= len(said) <= 300 and not node.name.startswith("__"):
                node.body, node.decorator_list = node.body[:1], []
                found.append(f"Complete this Python function.\n\n{ast.unparse(node)}")
    order = np.random.default_rng(7).permutation(len(found))
    return [found[i] for i in order]


def load_target(folder: Path) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer. Of the generation config only the tokens stay: a penalty, say, would change what the drafts learn."""
    model = load_model(folder, dtype="float32")
    given = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )
    return model, AutoTokenizer.from_pretrained(folder)


def write_text(
    model: PreTrainedModel, tok: Any, texts: list[str], length: int, greedy: bool, kept: list[int]
) -> Iterator[Any]:
    """Answers to ``texts``, as ids, length of the prompt, and float16 states ``[ids - 1, len(kept) + 1, H]``, the last after the final norm."""
    asked = [
        tok.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False)
        for t in texts
    ]
    tok.padding_side = "left"
    inputs = tok(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        **inputs, **sampling, max_new_tokens=length, output_hidden_states=True, return_dict_in_generate=True
    )
    states = torch.stack([torch.cat([step[k] for step in out.hidden_states], 1) for k in (*kept, -1)], 2).half()
    begin, end = inputs["input_ids"].shape[1], torch.tensor(list(end_tokens(model)), dtype=torch.int64)
    for row, pad in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        ends = torch.isin(out.sequences[row, begin:], end).nonzero()
        stop = begin + int(ends[0, 0]) + 1 if len(ends) else out.sequences.shape[1]
        yield out.sequences[row, pad:stop].numpy(), begin - pad, states[row, pad : stop - 1].numpy()


def text(args: argparse.Namespace) -> None:
    torch.manual_seed(args.part[0])
    model, tok = load_target(args.target)
    mine = own_prompts()[args.first :][args.part[0] :: args.part[1]]
    begun, tokens = time.monotonic(), 0
    args.work.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        group = mine[number * 2 * BATCH : (number + 1) * 2 * BATCH]  # the longer and the shorter half: less padding
        if not group or time.monotonic() - begun > 60 * args.minutes:
            break
        group.sort(key=len)
        for half, some in enumerate((group[: len(group) // 2], group[len(group) // 2 :])):
            greedy = number % 3 < 2
            rows = list(write_text(model, tok, some, NEW_TOKENS, greedy, args.kept))
            file = args.work / f"text-{args.first}-{args.part[0]}-{number}-{half}.npz"
            packed = {f"ids{i}": r[0].astype(np.int32) for i, r in enumerate(rows)} | {
                f"states{i}": r[2] for i, r in enumerate(rows)
            }
            assert all(np.isfinite(r[2]).all() for r in rows)
            np.savez(
                file, begin=np.array([r[1] for r in rows]), kept=np.array(args.kept), prompts=np.array(some), **packed
            )
            tokens += sum(len(r[0]) - r[1] for r in rows)
            say(f"{file.name}: {tokens:,} tokens in {time.monotonic() - begun:.0f} s")


# ---- training


def read_text(work: Path, kept: list[int]) -> tuple[list[TrainingExample], list[Any]]:
    """The examples of ``text``, whose answers are to learn, and the states of each."""
    examples, states = [], []
    for file in sorted(work.glob("text-*.npz")):
        with np.load(file) as part:
            if part["kept"].tolist() != kept:
                raise ValueError(f"{file} keeps the states {part['kept'].tolist()}, not {kept}")
            for i, begin in enumerate(part["begin"].tolist()):
                ids = part[f"ids{i}"][:-1]  # the last token has no state
                examples.append(TrainingExample(ids, np.arange(len(ids)) >= begin - 1))
                states.append(torch.from_numpy(part[f"states{i}"]))
    return examples, states


def draft_vocabulary(examples: list[TrainingExample], size: int, always: Iterable[int]) -> list[int]:
    """The tokens of the text, filled up with those of the smallest ids: a BPE vocabulary is ordered by how often its merges were found."""
    seen = frequent_tokens(examples, size, always)
    return sorted([*seen, *[i for i in range(2 * size) if i not in set(seen)][: size - len(seen)]])


def train_module(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    options = {name.replace("-", "_"): value for name, value in recipe.load(args.recipe).items()}
    model = load_model(args.target, dtype="float32")
    examples, states = read_text(args.work, args.kept)
    vocabulary = draft_vocabulary(examples, options["vocabulary"], end_tokens(model))
    ranges = cut(model.config.num_hidden_layers, args.stages, list).ranges
    config = DraftModuleConfig.for_target(model, ranges, layers=options["layers"], vocabulary=vocabulary)
    module = DraftModule.of_target(model, config)
    columns = [args.kept.index(k) for k in config.anchors[1:]]
    held = np.random.default_rng(1).permutation(len(examples))[:HELD_OUT].tolist()
    used = [i for i in range(len(examples)) if i not in held]
    order = Batches([examples[i] for i in used], options["batch"], SEED)

    def batch(rows: list[int]) -> TrainingBatch:
        plain = collate([examples[i] for i in rows])
        known = torch.zeros(*plain.ids.shape, len(args.kept) + 1, model.config.hidden_size)
        for row, i in enumerate(rows):
            known[row, : len(states[i])] = states[i]
        with torch.no_grad():
            anchors = torch.cat([model.get_input_embeddings()(plain.ids)[:, :, None], known[:, :, columns]], 2)
        return plain._replace(taught=Taught(anchors, known[:, :, -1]))

    fields = {field.name for field in dataclasses.fields(TrainingSettings)}
    settings = TrainingSettings(**{k: v for k, v in options.items() if k in fields} | {"minutes": args.minutes})
    learnt = sum(int(e.wanted.sum()) for e in examples)
    say(
        f"{len(examples)} examples, {sum(len(e.ids) for e in examples):,} tokens, {learnt:,} to learn; anchors {config.anchors}"
    )
    train(
        model, module, lambda number: batch([used[i] for i in order.rows(number)]), settings, args.work / f"module-{args.stages}",
        held_out=[batch(held[at : at + options["batch"]]) for at in range(0, len(held), options["batch"])], data=order.digest(),
    )  # fmt: skip


# ---- what the modules reach


def counted(right: np.ndarray, begins: list[int]) -> dict[str, Any]:
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


def read_answers(
    model: PreTrainedModel, tok: Any, file: Path, args: argparse.Namespace
) -> list[tuple[torch.Tensor, int]]:
    """Prompt and greedy answer, ``[1, S]``, and the length of the prompt, for evenly chosen prompts of a file; written once."""
    kept = args.work / f"answers-{file.stem}.json"
    if not kept.exists():
        lines = file.read_text(encoding="utf-8").splitlines()
        asked = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // args.count]][: args.count]
        said = write_text(model, tok, asked, ANSWER, True, [])
        kept.write_text(json.dumps([(ids.tolist(), begin) for ids, begin, _ in said]))
    return [(torch.tensor([ids]), begin) for ids, begin in json.loads(kept.read_text())]


def evaluate(args: argparse.Namespace) -> None:
    model, tok = load_target(args.target)
    answers = {file.stem: read_answers(model, tok, file, args) for file in args.prompts}
    rows, runs = [], {}
    for folder in args.module:
        runs[folder.name] = json.loads((folder / RECORD).read_text())
        config = DraftModuleConfig.load(folder)
        trained = DraftModule.load(folder, target=model, stages=config.stages)
        pipe = SpeculativePipeline(
            model, str(folder), stages=[end - begin for begin, end in config.stages], dtype="float32"
        )
        for name, texts in answers.items():
            row: dict[str, Any] = {"stages": config.n, "prompts": name, "count": len(texts)}
            say(f"{folder.name}, {name}")
            tables = [drafts_right(model, trained, text)[0] for text, _ in texts]
            row |= counted(tables, [begin for _, begin in texts])
            row["decoded"] = []  # the same counts from decoding itself
            for (text, begin), table in list(zip(texts, tables, strict=True))[: args.decode]:
                asked, options = text[:, :begin], {"max_new_tokens": ANSWER, "do_sample": False}
                same = torch.equal(pipe.generate(asked, attention_mask=torch.ones_like(asked), **options), text)
                report = pipe.report
                assert report is not None
                counts = replay(table, begin)
                row["decoded"].append({
                    "identical": same, "drafts": report.checked, "accepted": report.accepted, "cycles": report.cycles, "along_text": counts._asdict(),
                })  # fmt: skip
            rows.append(row)
            say(json.dumps(row))
    text = [
        part[name]
        for file in sorted(args.work.glob("text-*.npz"))
        for part in [np.load(file)]
        for name in part
        if name.startswith("ids")
    ]
    begins = np.concatenate([np.load(file)["begin"] for file in sorted(args.work.glob("text-*.npz"))])
    sizes = {"answers": len(text), "tokens": sum(map(len, text)), "written": sum(map(len, text)) - int(begins.sum())}
    settings = {
        "text": sizes,
        "new_tokens": ANSWER,
        "dtype": "float32",
        "greedy": True,
        "target": "SmolLM2-135M-Instruct",
    }
    save(args.json, {"machine": provenance(), **settings, "training": runs, "rows": rows})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench_spd_real", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("phase", choices=("text", "train", "evaluate"))
    parser.add_argument("target")
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=27.0, metavar="M", help="of writing, or of training")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th prompt from the I-th on"
    )
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="of the module to train")
    parser.add_argument("--recipe", default=str(PROMPTS.with_name("smollm2-135m.toml")))
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="prompts per file that are decoded, too")
    parser.add_argument("--count", type=int, default=12, metavar="N", help="prompts of each file")
    parser.add_argument("--module", type=Path, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="prompts that an earlier call has used")
    parser.add_argument(
        "--kept", type=int, nargs="+", default=[8, 15, 16, 23, 29], metavar="K", help="states that are kept"
    )
    args = parser.parse_args(arguments)
    {"text": text, "train": train_module, "evaluate": evaluate}[args.phase](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
