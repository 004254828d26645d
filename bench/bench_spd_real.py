"""What trained draft modules of SPD reach on prompts that they have not seen::

    python -m bench.bench_spd_real TARGET --module FOLDER ... --prompts FILE.jsonl ... --json bench/results/spd_real.json

TARGET is a folder with a chat template. Of each file of prompts (:mod:`bench.datasets`) evenly chosen first turns are answered greedily. All drafts along
these answers are counted, and the first answers are also decoded, which must give the same counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from bench import datasets
from bench.harness import save
from bench.machine import provenance
from bench.run import encode
from pipespec.models.loading import load_model
from pipespec.process.progress import say
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from pipespec_train.acceptance import Acceptance, drafts_right, replay
from pipespec_train.trainer import RECORD

ANSWER = 64
"""New tokens of an answer."""


def load_target(folder: Path) -> PreTrainedModel:
    """The model. Of the generation config only the tokens stay: a penalty, say, would change the text."""
    model = load_model(folder, dtype="float32")
    given = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )
    return model


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


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "bench_spd_real", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--module", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=12, metavar="N", help="prompts of each file (%(default)s)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="of them decoded, too (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    model, tokenizer = load_target(args.target), AutoTokenizer.from_pretrained(args.target)
    texts: dict[str, list[tuple[torch.Tensor, int]]] = {}
    for file in args.prompts:
        asked = datasets.read(file)[1]
        prompts = [encode(tokenizer, c, True) for c in asked[:: max(1, len(asked) // args.count)][: args.count]]
        texts[file.stem] = [(generated(model, ids), ids.shape[1]) for ids in prompts]
    rows, runs = [], {}
    for folder in args.module:
        runs[folder.name] = json.loads((folder / RECORD).read_text())
        config = DraftModuleConfig.load(folder)
        trained = DraftModule.load(folder, target=model, stages=config.stages)
        sizes = [end - begin for begin, end in config.stages]
        pipe = SpeculativePipeline(model, str(folder), stages=sizes, dtype="float32")
        for name, answers in texts.items():
            say(f"{folder.name}, {name}")
            tables = [drafts_right(model, trained, text)[0] for text, _ in answers]
            row: dict[str, Any] = {"stages": config.n, "prompts": name, "count": len(answers)}
            row |= counted(tables, [begin for _, begin in answers]) | {"decoded": []}
            for (text, begin), table in list(zip(answers, tables, strict=True))[: args.decode]:
                found = {"identical": torch.equal(generated(pipe, text[:, :begin]), text)}
                found |= {"drafts": pipe.report.checked, "accepted": pipe.report.accepted, "cycles": pipe.report.cycles}  # type: ignore[union-attr]
                row["decoded"].append(found | {"along_text": replay(table, begin)._asdict()})
            rows.append(row)
            say(json.dumps(row))
    about = {"new_tokens": ANSWER, "dtype": "float32", "greedy": True, "target": args.target.name}
    save(args.json, {"machine": provenance(), **about, "training": runs, "rows": rows})


if __name__ == "__main__":
    main()
