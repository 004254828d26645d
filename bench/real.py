"""Speed on real models, row beside row: transformers' ways, and ours with each option.

    python -m tools.real_models build/real
    python -m bench.bench_real --models build/real --target q15 --draft q05 --prompts code=humaneval.jsonl chat=mt_bench.jsonl edit=docs/how-to/troubleshooting.md
    python -m bench.bench_real --readme README.md bench/results/real.json

Prompts are the first turns of datasets as they are published (:mod:`bench.datasets`); any other file is a text to edit, in one prompt. All rows generate each prompt in turn, in whole calls, so that a machine that becomes
slower does so for all. Per row: tokens/s of whole calls (sum of tokens over the sum of each prompt's median time), the ratio to our plain decoding, the worst
prompt's ratio to it, milliseconds to the first token, tokens/s behind it, and the share of texts that are those of :func:`own_plain`. Sampled rows have one seed per prompt.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bench.datasets  # noqa: F401  adds the published formats
from bench.harness import markdown_table, replace_table, save
from bench.real_rivals import LlamaServer, OpenVino
from pipespec import Pipeline
from pipespec.bench.contenders import CommitClock, private_copies
from pipespec.bench.datasets import read
from pipespec.bench.machine import provenance
from pipespec.cli.options import option
from pipespec.process.progress import quiet_transformers, say
from pipespec.process.record_files import is_dataset
from pipespec.registry import LOCKSTEP, PLAIN, WORKERS

LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16")
EDIT_TOKENS = 1400
"""Of a text to edit."""

Row = Callable[[torch.Tensor, dict[str, Any]], tuple[list[int], float, float]]
"""Token ids of a prompt and arguments of ``generate()`` to the new tokens, the seconds of the call, and those to the first token."""


def shuffled(model: Any) -> Any:
    """A copy with its layers in another order: a draft that is as expensive as the model and hardly ever right."""
    twin = copy.deepcopy(model)
    layers = twin.model.layers
    order = torch.randperm(len(layers), generator=torch.Generator().manual_seed(1)).tolist()
    twin.model.layers = torch.nn.ModuleList(layers[i] for i in order)
    for i, layer in enumerate(twin.model.layers):
        layer.self_attn.layer_idx = i
    return twin


def options_of(draft: Any, third: Any) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """By row: drafts and options of the pipeline."""
    fixed = {f"lockstep, draft x{n}": ([draft], {"schedule": LOCKSTEP.name, "lookahead": n}) for n in (1, 2, 3, 4, 6)}
    ngram = {f"lockstep, n-gram x{n}": (["ngram"], {"schedule": LOCKSTEP.name, "lookahead": n}) for n in (2, 4, 8, 16)}
    return {
        PLAIN.name: ([], {"schedule": PLAIN.name}),
        "default": ([draft], {}),
        "default, no draft": ([], {}),
        "default, useless draft": ([shuffled], {}),
        "default, a copy of itself as draft": ([copy.deepcopy], {}),
        **fixed,
        **ngram,
        "n-gram before the draft": (["ngram", draft], {"schedule": LOCKSTEP.name, "lookahead": 4}),
        "workers": ([draft], {"schedule": WORKERS.name}),
        "exact": ([draft], {"exact": True}),
        "rejection": ([draft], {"acceptance": "rejection"}),
        "int8 draft": ([draft], {"schedule": LOCKSTEP.name, "lookahead": 3, "weights": {"drafts": "int8"}}),
        "other tokenizer x2": ([third], {"schedule": LOCKSTEP.name, "lookahead": 2}),
        "three models": ([third, draft], {"schedule": LOCKSTEP.name, "lookahead": 2}),
    }


PACKED = "GGUF"
"""Rows of the models' GGUF files begin with it."""


def own_plain(row: str) -> str:
    """The row that a row's texts are compared with: plain decoding by its program with its weights; plain rows of other programs with ours."""
    if row.startswith(("llama.cpp", "OpenVINO")) and "," in row:
        return row.partition(",")[0]
    hf = PLAIN.name if row == "HF generate()" else "HF generate()"
    return f"{PACKED}, plain" if row.startswith(PACKED) else hf if row.startswith("HF") else PLAIN.name


def packed_rows(target: Path, draft: Path) -> dict[str, tuple[Path, list[Any], dict[str, Any]]]:
    """Rows of GGUF files: target, drafts and options."""
    return {
        f"{PACKED}, plain": (target, [], {"schedule": PLAIN.name}),
        f"{PACKED}, default, no draft": (target, [], {}),
        f"{PACKED}, default": (target, [draft], {}),
    }


def head_rows(head: Path) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Rows of a draft head: drafts and options."""
    fixed = {f"head x{n}": ([head], {"lookahead": n}) for n in range(1, 7)}
    packed = {"lookahead": 3, "weights": {"draft 0": "q8_0"}}
    return fixed | {"head": ([head], {}), "head, n-gram": (["ngram", head], {}), "head in 8 bits x3": ([head], packed)}


def pipeline_row(
    target: Any, drafts: list[Any], options: dict[str, Any], verified: Counter[int]
) -> tuple[Row, Pipeline]:
    """A row of ours, and its pipeline. ``verified`` counts the target's steps by the tokens that each one commits."""
    drafts = [draft(target) if draft in (shuffled, copy.deepcopy) else draft for draft in drafts]
    drafts = private_copies(drafts) if options.get("schedule") == WORKERS.name else drafts
    pipe = Pipeline(target, drafts, **options)

    def run(ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[list[int], float, float]:
        result = timed(pipe.generate, ids, arguments)
        if pipe.report is not None:
            verified.update(dict(enumerate(pipe.report.stages[-1].histogram, 1)))
        return result

    return run, pipe


def hf_row(target: Any, **options: Any) -> Row:
    """A row of transformers."""

    def run(ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[list[int], float, float]:
        arguments = dict(arguments)
        torch.manual_seed(arguments.pop("seed", 0))
        return timed(target.generate, ids, arguments | options)

    return run


def timed(generate: Callable[..., Any], ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[list[int], float, float]:
    """Run a call with a clock as its streamer."""
    clock = CommitClock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **arguments)
    seconds = time.perf_counter() - clock.began
    return out[0, ids.shape[1] :].tolist(), seconds, clock.commits[0][0]


def read_prompts(given: Sequence[str], tokenizer: Any, count: int, most: int) -> list[tuple[str, torch.Tensor]]:
    """The first ``count`` prompts of each file, as chats of one turn if there is a template: name of the file and token ids ``[1, S]``."""
    found = []
    for entry in given:
        name, _, path = entry.partition("=")
        if is_dataset(file := Path(path)):
            asked = [conversation.turns[0] for conversation in read(file)[1][:count]]
        else:
            page = tokenizer.decode(tokenizer(file.read_text(encoding="utf-8"))["input_ids"][:EDIT_TOKENS])
            asked = [f"Correct the spelling of this text and write it again, unchanged otherwise.\n\n{page}"]
        for question in asked:
            if tokenizer.chat_template:
                chat = [{"role": "user", "content": question}]
                question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(question, add_special_tokens=not tokenizer.chat_template, return_tensors="pt").input_ids
            found.append((name, ids[:, -most:]))
    return found


def rivals(options: argparse.Namespace) -> Iterator[tuple[str, LlamaServer | OpenVino]]:
    """Rows of other programs: the files and folders next to the models that are there."""
    gguf = {name: options.models / f"{name}.gguf" for name in (options.target, options.draft)}
    if options.llama is not None:
        threads = torch.get_num_threads()
        draft = ("--spec-type", "draft-simple", "-md", str(gguf[options.draft]), "--spec-draft-n-max", "4")
        ways: dict[str, tuple[str, ...]] = {"": (), ", n-gram": LLAMA_NGRAM, ", draft": draft}
        for way, more in ways.items():
            yield f"llama.cpp Q4_K_M{way}", LlamaServer(options.llama, gguf[options.target], threads, more)
    if options.openvino is not None:
        python, folder = options.openvino
        for kind in ("fp16", "int8", "int4"):
            target, draft_folder = (folder / f"{name}-{kind}" for name in (options.target, options.draft))
            if not target.exists():
                continue
            label = "bfloat16" if kind == "fp16" else kind
            yield f"OpenVINO {label}", OpenVino(python, target)
            if kind != "fp16":
                yield f"OpenVINO {label}, lookup", OpenVino(python, target, lookup=8)
                yield f"OpenVINO {label}, draft", OpenVino(python, target, draft=draft_folder)


def summary(texts: dict[str, list[list[tuple[list[int], float, float]]]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One record per row and kind of prompt. ``texts[row][prompt]``: the results of the repeats."""
    records = []
    for kind in [*dict.fromkeys(kinds), "all"]:
        places = [i for i, k in enumerate(kinds) if kind in (k, "all")]
        plain = {i: statistics.median(seconds for _, seconds, _ in texts[PLAIN.name][i]) for i in places}
        plain_rate = {i: len(texts[PLAIN.name][i][0][0]) / plain[i] for i in places}
        for row, results in texts.items():
            if any(not results[i] for i in places):
                continue
            seconds = {i: statistics.median(s for _, s, _ in results[i]) for i in places}
            first = {i: statistics.median(f for _, _, f in results[i]) for i in places}
            tokens = {i: len(results[i][0][0]) for i in places}
            ratios = [tokens[i] / seconds[i] / plain_rate[i] for i in places]
            own = texts.get(own_plain(row), [[] for _ in kinds])
            known = [i for i in places if own[i]]
            same = sum(results[i][0][0] == own[i][0][0] for i in known)
            rate = sum(tokens.values()) / sum(seconds.values())
            records.append(
                {
                    "row": row,
                    "prompts": kind,
                    "tokens_per_second": rate,
                    "of_plain": rate / (sum(len(texts[PLAIN.name][i][0][0]) for i in places) / sum(plain.values())),
                    "worst_prompt_of_plain": min(ratios),
                    "first_token_ms": 1000 * statistics.median(first.values()),
                    "decoding_tokens_per_second": (sum(tokens.values()) - len(places))
                    / (sum(seconds.values()) - sum(first.values())),
                    "same_text": [same, len(known)],
                }
            )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The records as Markdown."""
    rows = []
    for r in records:
        numbers = [f"{r['tokens_per_second']:.2f}", f"{r['of_plain']:.2f}x", f"{r['worst_prompt_of_plain']:.2f}x"]
        numbers += [
            f"{r['first_token_ms']:.0f}",
            f"{r['decoding_tokens_per_second']:.2f}",
            "/".join(map(str, r["same_text"])),
        ]
        rows.append([r["row"], r["prompts"], *numbers])
    header = (
        "row",
        "prompts",
        "tokens/s",
        "of plain",
        "worst prompt",
        "first token, ms",
        "decoding, tokens/s",
        "same text as plain",
    )
    return markdown_table(header, rows)


README_ROWS = {
    "HF generate()": "transformers `generate()`",
    "HF prompt lookup, 10": "transformers, prompt lookup",
    "HF assisted": "transformers, assisted by the draft",
    "OpenVINO bfloat16": "OpenVINO GenAI",
    "OpenVINO int8, lookup": "OpenVINO GenAI, 8 bits, prompt lookup",
    "OpenVINO int4": "OpenVINO GenAI, 4 bits",
    "llama.cpp Q4_K_M, n-gram": "llama.cpp, Q4_K_M, n-gram drafts",
    PLAIN.name: "pipespec, target alone",
    "default": "pipespec, default",
    f"{PACKED}, plain": "pipespec, Q4_K_M, target alone",
    f"{PACKED}, default": "pipespec, Q4_K_M, default",
}


def readme_table(record: dict[str, Any]) -> str:
    """The README's table of a results file: per row and kind of prompt the speed as a ratio to our plain decoding of the same run.

    Rows of a run of other programs lie under a key of their own, whose own plain decoding is the measure.
    """
    runs = [record, *(part for part in record.values() if isinstance(part, dict) and "machine" in part)]
    kinds = [kind for kind in dict.fromkeys(row["prompts"] for row in record["rows"]) if kind != "all"]
    rows = []
    for name, label in README_ROWS.items():
        found = next(
            (
                of
                for run in runs
                if (of := {r["prompts"]: r for r in run["rows"] if r["row"] == name}).keys() >= {*kinds}
            ),
            None,
        )
        if found is not None:
            same = [sum(found[kind]["same_text"][i] for kind in kinds) for i in (0, 1)]
            numbers = [
                cell
                for kind in kinds
                for cell in (f"{found[kind]['tokens_per_second']:.1f}", f"{found[kind]['of_plain']:.2f}x")
            ]
            rows.append([label, *numbers, f"{found['all']['first_token_ms']:.0f}", "/".join(map(str, same))])
    heads = [head for kind in kinds for head in (f"{kind}: tokens/s", "of target alone")]
    return markdown_table(["", *heads, "first token, ms", "same text"], rows)


# fmt: off
def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option(out, "readme", ("PAGE", "JSON"), Path, "rewrite the table of a page from a measurement", nargs=2)
    option(out, "models", None, Path, "folder of tools.real_models (%(default)s)", default=Path("build/real"))
    option(out, "target", None, str, "default: %(default)s", default="q15")
    option(out, "draft", None, str, "default: %(default)s", default="q05")
    option(out, "dtype", None, str, "default: %(default)s", default="bfloat16")
    option(out, "hf", None, str, "transformers' rows, in this dtype", choices=("none", "bfloat16", "float32"), default="none")
    option(out, "prompts", "NAME=FILE", str, "the prompts to measure", nargs="+", default=[])
    option(out, "count", None, int, "prompts of each file (%(default)s)", default=4)
    option(out, "prompt-tokens", None, int, "at most, the last ones (%(default)s)", default=1024)
    option(out, "new-tokens", None, int, "most per prompt (%(default)s)", default=64)
    option(out, "repeats", None, int, "default: %(default)s", default=3)
    option(out, "temperature", None, float, "sample (greedy without)")
    option(out, "head", None, Path, "a draft head of the target: its rows")
    option(out, "third", None, str, "a smaller draft with another tokenizer (%(default)s)", default="smol")
    option(out, "llama", None, Path, "llama.cpp's llama-server: its rows")
    option(out, "openvino", ("PYTHON", "FOLDER"), Path, "OpenVINO GenAI's rows: an interpreter with openvino_genai, and a folder of exports NAME-fp16, -int8, -int4",
           nargs=2)
    option(out, "rows", None, str, "all without; plain is always there", nargs="+")
    option(out, "json", None, Path, "write the measurement")
    return out
# fmt: on


def main() -> None:
    """Measure, print and save."""
    options = parser().parse_args()
    if options.readme:
        page, measured = options.readme
        replace_table(page, readme_table(json.loads(measured.read_text(encoding="utf-8"))))
        return
    if not options.prompts:
        raise SystemExit("bench_real: --prompts NAME=FILE is missing: the prompts to measure")
    with quiet_transformers():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run all rows in turn."""
    tokenizer = AutoTokenizer.from_pretrained(options.models / f"{options.target}-hf")

    def load(name: str, dtype: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(options.models / f"{name}-hf", dtype=getattr(torch, dtype)).eval()

    target, draft = load(options.target, options.dtype), load(options.draft, options.dtype)
    arguments: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": False}
    if options.temperature:
        arguments |= {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    prompts = read_prompts(options.prompts, tokenizer, options.count, options.prompt_tokens)
    kinds = [kind for kind, _ in prompts]
    rows: dict[str, Row] = {}
    running: dict[str, Pipeline | LlamaServer | OpenVino] = {}
    verified: dict[str, Counter[int]] = {}
    failed: dict[str, str] = {}
    third = load(options.third, options.dtype)
    named = options_of(draft, third) | (head_rows(options.head) if options.head is not None else {})
    ours = {name: (target, drafts, more) for name, (drafts, more) in named.items()}
    ours |= packed_rows(*(options.models / f"{name}.gguf" for name in (options.target, options.draft)))
    for name, (model, drafts, more) in ours.items():
        if name != PLAIN.name and options.rows and name not in options.rows:
            continue
        try:
            verified[name] = Counter()
            rows[name], running[name] = pipeline_row(model, drafts, more, verified[name])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    if options.hf != "none":
        theirs = target if options.hf == options.dtype else load(options.target, options.hf)
        assistant = draft if options.hf == options.dtype else load(options.draft, options.hf)
        rows["HF generate()"] = hf_row(theirs)
        for n in (3, 10):
            rows[f"HF prompt lookup, {n}"] = hf_row(theirs, prompt_lookup_num_tokens=n)
        rows["HF assisted"] = hf_row(theirs, assistant_model=assistant)
    for name, rival in rivals(options):
        rows[name] = running[name] = rival
    texts: dict[str, list[list[tuple[list[int], float, float]]]] = {row: [[] for _ in prompts] for row in rows}
    for repeat in range(options.repeats):
        for i, (kind, ids) in enumerate(prompts):
            for row, run in rows.items():
                if row in failed:
                    continue
                seeded = arguments | ({"seed": 1000 + i} if arguments["do_sample"] else {})
                try:
                    if repeat == 0 and i == 0:  # packs weights, starts processes
                        run(prompts[0][1], seeded | {"max_new_tokens": 2})
                    texts[row][i].append(run(ids, seeded))
                except Exception as error:
                    failed[row] = f"{type(error).__name__}: {error}"
            say(f"repeat {repeat + 1}, prompt {i + 1} of {len(prompts)} ({kind})")
        record = {
            "benchmark": "real",
            "machine": provenance(),
            "settings": {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
            | {
                "prompts": [
                    f"{name}={Path(file).name}" for name, _, file in (p.partition("=") for p in options.prompts)
                ]
            }
            | {"repeats": repeat + 1, "llama": options.llama is not None, "openvino": options.openvino is not None},
            "prompt_tokens": [ids.shape[1] for _, ids in prompts],
            "forward": {
                name: p.report.stages[-1].forward for name, p in running.items() if isinstance(p, Pipeline) and p.report
            },
            "rows": summary(texts, kinds),
            "failed": failed,
        }
        for row in record["rows"]:
            if row["prompts"] == "all" and (steps := verified.get(row["row"])):
                row["tokens_per_step"] = sum(n * count for n, count in steps.items()) / steps.total()
                row["steps_by_tokens"] = dict(sorted(steps.items()))
        save(options.json, record)  # a run that is stopped has its complete repeats
    print(table(record["rows"]))
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    for pipe in running.values():
        pipe.close()
    print(readme_table(record))


if __name__ == "__main__":
    main()
