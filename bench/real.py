"""Speed on real models, row beside row: transformers' ways, other programs, and ours with each option.

    python -m tools.real_models build/real
    python -m bench.real --models build/real --target q15 --draft q05 --prompts code=humaneval.jsonl chat=mt_bench.jsonl edit=docs/how-to/troubleshooting.md --out run
    python -m bench.real --models build/real --target q15 --hf bfloat16 --rows "GGUF, plain" --prompts 32 150 512 2048 --new-tokens 1 --out first
    python -m bench.real --readme README.md bench/results/real.json

Prompts are the first turns of datasets as they are published (:mod:`bench.datasets`); any other file is a text to edit, in one prompt; a number is so many random tokens. :mod:`bench.runner` generates each
prompt in all rows in turn, in whole calls, so that a machine that becomes slower does so for all. Per row and kind of prompt, ``--json`` has the tokens/s of whole calls
(sum of tokens over the sum of each prompt's median time), the ratio to our plain decoding, the worst prompt's ratio to it, milliseconds to the first token, tokens/s
after it, and the share of texts that are those of :func:`own_plain`. Sampled rows have one seed per prompt.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import tables
from bench.datasets import read
from bench.harness import markdown_table, replace_table, save
from bench.machine import provenance
from bench.runner import Dataset, Runner
from bench.samples import ResultsFolder, Sample, StepCounts
from bench.systems import Family, HFSystem, LineSystem, PipelineSystem, System, Workload, stop
from pipespec.cli.options import option
from pipespec.process.progress import quiet_transformers
from pipespec.registry import LOCKSTEP, PLAIN, WORKERS
from pipespec_train.record_files import is_dataset

LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16")
EDIT_TOKENS = 1400
"""Of a text to edit."""

PACKED = "GGUF"
"""Rows of the models' GGUF files begin with it."""

START_SECONDS = 120


def load_hf(models: Path, name: str, dtype: str = "bfloat16") -> Any:
    """A model of the folder that ``tools.real_models`` has written."""
    return AutoModelForCausalLM.from_pretrained(models / f"{name}-hf", dtype=getattr(torch, dtype)).eval()


def shuffled(model: Any) -> Any:
    """A copy with its layers in another order: a draft that is as expensive as the model and hardly ever right."""
    twin = copy.deepcopy(model)
    layers = twin.model.layers
    order = torch.randperm(len(layers), generator=torch.Generator().manual_seed(1)).tolist()
    twin.model.layers = torch.nn.ModuleList(layers[i] for i in order)
    for i, layer in enumerate(twin.model.layers):
        layer.self_attn.layer_idx = i
    return twin


def own_plain(row: str) -> str:
    """The row that a row's texts are compared with: plain decoding by its program with its weights; plain rows of other programs with ours."""
    if row.startswith(("llama.cpp", "OpenVINO")) and "," in row:
        return row.partition(",")[0]
    hf = PLAIN.name if row == "HF generate()" else "HF generate()"
    return f"{PACKED}, plain" if row.startswith(PACKED) else hf if row.startswith("HF") else PLAIN.name


def our_rows(options: argparse.Namespace) -> Iterator[System]:
    """Rows of ours."""

    def lockstep(drafts: Sequence[str], n: int) -> dict[str, Any]:
        return {"drafts": drafts, "schedule": LOCKSTEP.name, "lookahead": n}

    fixed: dict[str, dict[str, Any]] = {f"lockstep, draft x{n}": lockstep(["draft"], n) for n in (1, 2, 3, 4, 6)}
    ngram = {f"lockstep, n-gram x{n}": lockstep(["ngram"], n) for n in (2, 4, 8, 16)}
    packed: dict[str, Any] = {"target": options.models / f"{options.target}.gguf"}
    found: dict[str, dict[str, Any]] = {
        PLAIN.name: {"schedule": PLAIN.name},
        "default": {"drafts": ["draft"]},
        "default, no draft": {},
        "default, useless draft": {"drafts": ["useless"]},
        "default, a copy of itself as draft": {"drafts": ["itself"]},
        **fixed,
        **ngram,
        "n-gram before the draft": lockstep(["ngram", "draft"], 4),
        "workers": {"drafts": ["draft"], "schedule": WORKERS.name},
        "exact": {"drafts": ["draft"], "exact": True},
        "rejection": {"drafts": ["draft"], "acceptance": "rejection"},
        f"{PACKED}, plain": {"schedule": PLAIN.name, **packed},
        f"{PACKED}, default, no draft": packed,
        f"{PACKED}, default": {"drafts": ["packed"], **packed},
    }
    if options.head is not None:
        found |= {f"head x{n}": {"drafts": ["head"], "lookahead": n} for n in range(1, 7)}
        found |= {"head": {"drafts": ["head"]}, "head, n-gram": {"drafts": ["ngram", "head"]}}
        found["head in 8 bits x3"] = {"drafts": ["head"], "lookahead": 3, "weights": {"draft 0": "q8_0"}}
    for name, given in found.items():
        if name == PLAIN.name or not options.rows or name in options.rows:
            yield PipelineSystem(name, name, **{"schedule": None, **given})


def hf_rows(target: Any) -> Iterator[System]:
    """Rows of transformers, with fixed settings."""
    yield HFSystem("HF generate()", "HF generate()", target=target)
    for n in (3, 10):
        yield HFSystem(f"HF prompt lookup, {n}", f"HF prompt lookup, {n}", candidates=[(n,)], target=target)
    # transformers' default
    yield HFSystem("HF assisted", "HF assisted", ["assistant"], candidates=[(20, 0.4)], target=target)


def read_prompts(given: Sequence[str], tokenizer: Any, count: int, most: int) -> list[tuple[str, torch.Tensor]]:
    """The first ``count`` prompts of each file, as chats of one turn if there is a template: name of the file and token ids ``[1, S]``.

    A number in place of a file is one prompt of as many random tokens.
    """
    found = []
    for entry in given:
        if entry.isdecimal():
            draw = torch.Generator().manual_seed(0)
            found.append((entry, torch.randint(tokenizer.vocab_size // 2, (1, int(entry)), generator=draw)))
            continue
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


def rivals(options: argparse.Namespace) -> Iterator[System]:
    """Rows of other programs: the files and folders next to the models that are there."""
    gguf = {name: options.models / f"{name}.gguf" for name in (options.target, options.draft)}
    if options.llama is not None:
        draft = ("--spec-type", "draft-simple", "-md", str(gguf[options.draft]), "--spec-draft-n-max", "4")
        ways: dict[str, tuple[str, ...]] = {"": (), ", n-gram": LLAMA_NGRAM, ", draft": draft}
        for way, more in ways.items():
            yield LlamaServer(f"llama.cpp Q4_K_M{way}", options.llama, gguf[options.target], more)
    if options.openvino is not None:
        python, folder = options.openvino
        for kind in ("fp16", "int8", "int4"):
            target, draft_folder = (folder / f"{name}-{kind}" for name in (options.target, options.draft))
            if not target.exists():
                continue
            label = "bfloat16" if kind == "fp16" else kind
            yield OpenVino(f"OpenVINO {label}", python, target)
            if kind != "fp16":
                yield OpenVino(f"OpenVINO {label}, lookup", python, target, lookup=8)
                yield OpenVino(f"OpenVINO {label}, draft", python, target, draft=draft_folder)


class LlamaServer(System):
    """One ``llama-server`` process. ``options`` are its own, after the model's file.

    It takes and gives token ids, so that all rows read the same prompt, and stops at the model's end of the text, as ours do.
    """

    def __init__(self, label: str, binary: Path, model: Path, options: Sequence[str] = ()) -> None:
        super().__init__(label, label, "rival")
        self.command = [str(binary), "-m", str(model), "-np", "1", "-c", "4096", "-fit", "off", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, workload: Workload) -> None:
        super().start(workload)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [*self.command, "--port", str(port), "-t", str(workload.threads), "-tb", str(workload.threads)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"does not start: {' '.join(command)}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        """Seconds to the first token are those of the call less the server's own time of decoding."""
        temperature = self.workload.sampling.get("temperature", 0.0)
        body = {"prompt": ids[0].tolist(), "n_predict": new_tokens, "temperature": temperature}
        body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = json.load(answer)
        seconds = time.perf_counter() - begin
        return of_tokens(found["tokens"], seconds - found["timings"]["predicted_ms"] / 1000, seconds)

    def close(self) -> None:
        if self._process is not None:
            stop(self._process)


def of_tokens(tokens: list[int], first: float, seconds: float) -> Sample:
    """The sample of a program that tells nothing of its steps: its tokens, and the seconds to the first one and to the last."""
    return Sample(tokens=tokens, commits=[(first, 1), (seconds, len(tokens))], stages=[StepCounts("target", 0)])


# Runs in the interpreter that has openvino_genai: a job per line, an answer per line.
_WORKER = """
import json, sys, time
import numpy, openvino, openvino_genai as genai
folder, options = json.loads(sys.argv[1])
draft = options.pop("draft", None)
if draft: options["draft_model"] = genai.draft_model(draft, "CPU")
per_call = options.pop("per_call", {})
pipe = genai.LLMPipeline(folder, "CPU", **options)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    config = pipe.get_generation_config()
    config.max_new_tokens = job["max_new_tokens"]
    config.do_sample = False
    for name, value in per_call.items(): setattr(config, name, value)
    ids = openvino.Tensor(numpy.array(job["ids"], dtype=numpy.int64))
    begin = time.perf_counter()
    out = pipe.generate(ids, config)
    seconds = time.perf_counter() - begin
    print(json.dumps([list(map(int, out.tokens[0])), seconds, out.perf_metrics.get_ttft().mean / 1000]), flush=True)
"""


class OpenVino(LineSystem):
    """One process with an OpenVINO GenAI pipeline, greedy only.

    ``python`` is an interpreter with ``openvino_genai``; ``folder`` and ``draft`` are exported models; ``lookup`` is the number of tokens per
    step that its prompt lookup proposes.
    """

    def __init__(self, label: str, python: Path, folder: Path, draft: Path | None = None, lookup: int = 0) -> None:
        given: dict[str, Any] = {}
        if draft is not None:
            given |= {"draft": str(draft), "per_call": {"num_assistant_tokens": 3}}
        if lookup:
            given |= {"prompt_lookup": True, "per_call": {"num_assistant_tokens": lookup, "max_ngram_size": 3}}
        super().__init__(label, label, "rival")
        self.command = [str(python), "-c", _WORKER, json.dumps([str(folder), given])]

    def start(self, workload: Workload) -> None:
        if not workload.is_greedy:
            raise NotImplementedError("greedy only")
        super().start(workload)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        tokens, seconds, first = self.ask({"ids": ids.tolist(), "max_new_tokens": new_tokens})
        return of_tokens(tokens, first, seconds)


# ---- tables


def record_of(folder: ResultsFolder, about: dict[str, Any]) -> dict[str, Any]:
    """The samples of a run as a file of ``bench/results``: a record per row and kind of prompt, and per row over all of them."""
    settings, samples = folder.settings(), list(folder.samples.values())
    all_prompts = {f"{d['name']} {name}": n for d in settings["datasets"] for name, n in d["prompt_tokens"].items()}
    whole = settings | {"datasets": [{"name": "all", "prompt_tokens": all_prompts}]}
    merged = [replace(s, dataset="all", sample=f"{s.dataset} {s.sample}") for s in samples]
    summaries = tables.summarise(settings, samples), tables.summarise(whole, merged)
    rows = [row for summary in summaries for row in tables.rows_of(summary)]
    found = []
    for r in rows:
        if r.tokens_per_second is None:
            continue
        record = {
            "row": r.label,
            "prompts": r.dataset,
            "tokens_per_second": r.tokens_per_second,
            "of_plain": r.vs_plain,
        }
        record |= {"worst_prompt_of_plain": r.worst, "first_token_ms": 1000 * (r.seconds_to_first_token or 0.0)}
        record |= {"decoding_tokens_per_second": r.decode_tokens_per_second, "same_text": [r.identical or 0, r.runs]}
        if r.dataset == "all" and sum(r.histogram):
            record["tokens_per_step"] = sum((n + 1) * count for n, count in enumerate(r.histogram)) / sum(r.histogram)
            record["steps_by_tokens"] = {n + 1: count for n, count in enumerate(r.histogram) if count}
        found.append(record)
    forms = {r.label: r.forward for r in rows if r.forward is not None}
    lengths = [tokens for d in settings["datasets"] for tokens in d["prompt_tokens"].values()]
    failed = {r.label: r.reason for r in rows if r.reason is not None}
    record = {"benchmark": "real", "machine": settings["machine"], "settings": about, "prompt_tokens": lengths}
    return record | {"forward": forms, "rows": found, "failed": failed}


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
    option(out, "prompts", "NAME=FILE", str, "the prompts to measure; a number: random tokens, for the time to the first token", nargs="+", default=[])
    option(out, "count", None, int, "prompts of each file (%(default)s)", default=4)
    option(out, "prompt-tokens", None, int, "at most, the last ones (%(default)s)", default=1024)
    option(out, "new-tokens", None, int, "most per prompt (%(default)s)", default=64)
    option(out, "repeats", None, int, "default: %(default)s", default=3)
    option(out, "temperature", None, float, "sample (greedy without)")
    option(out, "head", None, Path, "a draft head of the target: its rows")
    option(out, "llama", None, Path, "llama.cpp's llama-server: its rows")
    option(out, "openvino", ("PYTHON", "FOLDER"), Path, "OpenVINO GenAI's rows: an interpreter with openvino_genai, and a folder of exports NAME-fp16, -int8, -int4",
           nargs=2)
    option(out, "rows", None, str, "all without; plain is always there", nargs="+")
    option(out, "alone", "ROW", str, "this row and no other: the peak of memory is its own")
    option(out, "out", "DIR", Path, "folder of results; one that exists is continued")
    option(out, "json", None, Path, "write the table's figures")
    return out
# fmt: on


def main() -> None:
    """Measure, print and save."""
    options = parser().parse_args()
    if options.readme:
        page, measured = options.readme
        replace_table(page, readme_table(json.loads(measured.read_text(encoding="utf-8"))))
        return
    if not options.prompts or options.out is None:
        raise SystemExit(
            "bench.real: give --prompts NAME=FILE, the prompts to measure, and --out DIR, the folder of results"
        )
    with quiet_transformers():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run all rows in turn."""

    load = cache(partial(load_hf, options.models))
    tokenizer = AutoTokenizer.from_pretrained(options.models / f"{options.target}-hf")
    target, hf = load(options.target, options.dtype), options.dtype if options.hf == "none" else options.hf
    drafts: dict[str, Any] = {
        "draft": partial(load, options.draft, options.dtype),
        "useless": partial(shuffled, target),
        "itself": partial(copy.deepcopy, target),
        "packed": options.models / f"{options.draft}.gguf",
        "head": options.head,
        "assistant": partial(load, options.draft, hf),
    }
    systems = [
        *our_rows(options),
        *(hf_rows(load(options.target, hf)) if options.hf != "none" else ()),
        *rivals(options),
    ]
    systems = [system for system in systems if options.alone in (None, system.key)]
    for system in systems:
        system.compared_with = own_plain(system.key)
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for kind, ids in read_prompts(options.prompts, tokenizer, options.count, options.prompt_tokens):
        kinds.setdefault(kind, {})[str(len(kinds.get(kind, ())))] = ids
    datasets = [Dataset(kind, "first turns", found, [next(iter(found.values()))]) for kind, found in kinds.items()]
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    threads, longest = torch.get_num_threads(), max(ids.shape[1] for found in kinds.values() for ids in found.values())
    run = {"dtype": options.dtype, "device": "cpu", "sampling": sampling, "seed": 1000, "threads": threads}
    run |= {"new_tokens": options.new_tokens, "repeats": options.repeats}
    family = Family(options.target, target, drafts, tokenizer)
    about = {"family": {"name": options.target, "target": options.target, "drafts": {"draft": options.draft}}}
    about |= {"machine": provenance(), "run": run, "reference": PLAIN.name, "ratio_to": PLAIN.name}
    workload = Workload(family, options.new_tokens, longest, threads, sampling)
    folder = ResultsFolder(options.out)
    summary = Runner(folder, workload, systems, datasets, about, tuning=0).run()
    settings = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    settings["prompts"] = [f"{name}={Path(file).name}" for name, _, file in (p.partition("=") for p in options.prompts)]
    settings |= {"llama": options.llama is not None, "openvino": options.openvino is not None}
    record = record_of(folder, settings) | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
    save(options.json, record)
    print(tables.text(summary))
    print(readme_table(record))


if __name__ == "__main__":
    main()
