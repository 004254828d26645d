"""Real models, row after row: pipespec with each option, with GGUF files, and other programs; the figures and table of such a run in docs/when-which.md.

    python -m tools.real_models build/real
    python -m bench.run --target build/real/q15-hf --drafts build/real/q05-hf --dtype bfloat16 --reference plain --tuning 0 --chat-template \
      --prompts code=humaneval.jsonl chat=mt_bench.jsonl --samples 2 --new-tokens 48 --repeats 2 --systems hf default "GGUF, default" --out run
    python -m bench.real run --json bench/results/real.json
    python -m bench.real bench/results/real.json --page docs/when-which.md

Importing this adds the rows to the systems of :mod:`bench.run`. A row of ``GGUF`` and one of llama.cpp reads NAME.gguf next to the folder NAME-hf of the target. Per row and
kind of prompt, ``--json`` has the tokens/s of whole calls (sum of tokens over the sum of each prompt's median time), the ratio to our plain decoding, the worst prompt's
ratio to it, milliseconds to the first token, tokens/s after it, and the share of texts that are those of :func:`own_plain`, by default our plain decoding's.
"""

import argparse
import copy
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import tables
from bench.config import BenchConfig
from bench.harness import markdown_table, replace_table, save
from bench.samples import ResultsFolder, Sample, StepCounts
from bench.systems import KINDS, REFERENCE, HFSystem, Kind, LineSystem, PipelineSystem, System, Workload, stop
from pipespec.registry import LOCKSTEP, PLAIN

LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16")

PACKED = "GGUF"
"""Rows of the models' GGUF files begin with it."""

START_SECONDS = 120


def shuffled(model: Any) -> Any:
    """A copy with its layers in another order: a draft that is as expensive as the model and hardly ever right."""
    twin = copy.deepcopy(model)
    layers = twin.model.layers
    order = torch.randperm(len(layers), generator=torch.Generator().manual_seed(1)).tolist()
    twin.model.layers = torch.nn.ModuleList(layers[i] for i in order)
    for i, layer in enumerate(twin.model.layers):
        layer.self_attn.layer_idx = i
    return twin


def own_plain(row: str) -> str | None:
    """The row that a row's texts are compared with: plain decoding by its program with its weights. None: the run's reference."""
    if row.startswith(("llama.cpp", "OpenVINO")) and "," in row:
        return row.partition(",")[0]
    plain = {PACKED: f"{PACKED}, plain", "HF": "hf"}.get(row.replace(",", " ").split()[0])
    return plain if plain != row else None


def packed(folder: str) -> Path:
    """The GGUF file next to the folder NAME-hf."""
    return Path(folder).with_name(f"{Path(folder).name.removesuffix('-hf')}.gguf")


class RealSystem(PipelineSystem):
    """A row of ours. Its drafts: ``draft`` (the largest), ``useless``, ``itself``, ``packed``, ``head``, and ``ngram``."""

    def __init__(self, name: str, config: BenchConfig, schedule: str | None = None, **given: Any) -> None:
        target = packed(config.target or "") if name.startswith(PACKED) else None
        super().__init__(name, name, schedule, given.pop("drafts", ()), target, **given)
        self.compared_with, self._config = own_plain(name), config

    def draft(self, name: str) -> Any:
        family = self.workload.family
        made = {
            "draft": lambda: list(family.drafts.values())[-1],
            "useless": lambda: shuffled(family.target),
            "itself": lambda: copy.deepcopy(family.target),
            "packed": lambda: packed(self._config.drafts[-1]),
            "head": lambda: self._config.head,
        }
        return made[name]() if name in made else name


def _lockstep(drafts: Sequence[str], n: int) -> dict[str, Any]:
    return {"drafts": drafts, "schedule": LOCKSTEP.name, "lookahead": n}


ROWS: dict[str, dict[str, Any]] = {
    "default": {"drafts": ["draft"]},
    "default, no draft": {},
    "default, useless draft": {"drafts": ["useless"]},
    "default, a copy of itself as draft": {"drafts": ["itself"]},
    **{f"lockstep, draft x{n}": _lockstep(["draft"], n) for n in (1, 2, 3, 4, 6)},
    **{f"lockstep, n-gram x{n}": _lockstep(["ngram"], n) for n in (2, 4, 8, 16)},
    "n-gram before the draft": _lockstep(["ngram", "draft"], 4),
    "exact": {"drafts": ["draft"], "exact": True},
    "rejection": {"drafts": ["draft"], "acceptance": "rejection"},
    f"{PACKED}, plain": {"schedule": PLAIN.name},
    f"{PACKED}, default, no draft": {},
    f"{PACKED}, default": {"drafts": ["packed"]},
    **{f"head x{n}": {"drafts": ["head"], "lookahead": n} for n in range(1, 7)},
    "head": {"drafts": ["head"]},
    "head, n-gram": {"drafts": ["ngram", "head"]},
    **{f"{PACKED}, head x{n}": {"drafts": ["head"], "lookahead": n} for n in (1, 2)},
    f"{PACKED}, head": {"drafts": ["head"]},
    "head in 8 bits x3": {"drafts": ["head"], "lookahead": 3, "weights": {"draft 0": "q8_0"}},
}
"""Rows of ours: drafts, and options of the pipeline."""


def _ours(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    wanted = ROWS[kind].get("drafts", ())
    if "head" in wanted and config.head is None:
        raise ValueError(f"the system {kind!r} needs a draft head: give --head")
    if {"draft", "packed"} & {*wanted} and not drafts:
        raise ValueError(f"the system {kind!r} needs a draft: give --drafts")
    yield RealSystem(kind, config, **copy.deepcopy(ROWS[kind]))


HF_ROWS = {"HF prompt lookup, 3": (3,), "HF prompt lookup, 10": (10,), "HF assisted": (20, 0.4)}
"""Rows of transformers with fixed settings, the last one its default."""


def _hf(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    system = HFSystem(kind, kind, drafts[-1:] if "assisted" in kind else (), [HF_ROWS[kind]])
    system.compared_with = own_plain(kind)
    yield system


def _llama(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    if config.llama is None or config.target is None:
        raise ValueError("llama.cpp needs its server and a target: give --llama and --target")
    ways: dict[str, tuple[str, ...]] = {"": (), ", n-gram": LLAMA_NGRAM}
    if config.drafts:
        ways[", draft"] = ("--spec-type", "draft-simple", "-md", str(packed(config.drafts[-1])), "--spec-draft-n-max", "4")  # fmt: skip
    for way, more in ways.items():
        yield LlamaServer(f"llama.cpp Q4_K_M{way}", Path(config.llama), packed(config.target), more)


def _openvino(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    if not config.openvino or config.target is None:
        raise ValueError(
            "OpenVINO needs an interpreter, a folder of exports and a target: give --openvino and --target"
        )
    python, folder = map(Path, config.openvino)
    for name, label in (("fp16", "bfloat16"), ("int8", "int8"), ("int4", "int4")):
        target, *own = (folder / f"{packed(path).stem}-{name}" for path in (config.target, *config.drafts[-1:]))
        if not target.exists():
            continue
        yield OpenVino(f"OpenVINO {label}", python, target)
        if name != "fp16":
            yield OpenVino(f"OpenVINO {label}, lookup", python, target, lookup=8)
            yield from (OpenVino(f"OpenVINO {label}, draft", python, target, draft=draft) for draft in own)


KINDS.update(
    {name: Kind("pipespec, a row of bench/real.py", _ours, bool(row.get("drafts"))) for name, row in ROWS.items()}
)
KINDS.update({name: Kind("transformers, with these settings", _hf) for name in HF_ROWS})
KINDS["llama.cpp"] = Kind("llama.cpp's server with the target's GGUF file", _llama)
KINDS["OpenVINO"] = Kind("OpenVINO GenAI with exports of the target", _openvino)


class LlamaServer(System):
    """One ``llama-server`` process. ``options`` are its own, after the model's file.

    It takes and gives token ids, so that all rows read the same prompt, and stops at the model's end of the text, as ours do.
    """

    def __init__(self, label: str, binary: Path, model: Path, options: Sequence[str] = ()) -> None:
        super().__init__(label, label, "rival")
        self.compared_with = own_plain(label)
        self.command = [str(binary), "-m", str(model), "-np", "1", "-c", "4096", "-fit", "off", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, workload: Workload) -> None:
        super().start(workload)
        self.serve(workload.threads)

    def serve(self, threads: int) -> None:
        """Start the process, and wait until it has read the model."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [*self.command, "--port", str(port), "-t", str(threads), "-tb", str(threads)]
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
        begin = time.perf_counter()
        found = self.complete(ids, new_tokens, self.workload.sampling.get("temperature", 0.0))
        seconds = time.perf_counter() - begin
        return of_tokens(found["tokens"], seconds - found["timings"]["predicted_ms"] / 1000, seconds)

    def complete(self, ids: torch.Tensor, new_tokens: int, temperature: float = 0.0, **more: Any) -> dict[str, Any]:
        """The server's answer to a prompt ``[1, S]``, with its own times. ``more``: further fields of the request."""
        body = {"prompt": ids[0].tolist(), "n_predict": new_tokens, "temperature": temperature, **more}
        body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

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
scheduler = genai.SchedulerConfig()
scheduler.enable_prefix_caching = False  # each call reads its whole prompt, as those of the other rows do
scheduler.max_num_batched_tokens = sys.maxsize  # in one piece, as a pipeline without this object does
options["scheduler_config"] = scheduler
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
        self.compared_with = own_plain(label)
        self.command = [str(python), "-c", _WORKER, json.dumps([str(folder), given])]

    def start(self, workload: Workload) -> None:
        if not workload.is_greedy:
            raise NotImplementedError("greedy only")
        super().start(workload)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        tokens, seconds, first = self.ask({"ids": ids.tolist(), "max_new_tokens": new_tokens})
        return of_tokens(tokens, first, seconds)


# ---- tables


def record_of(folder: ResultsFolder) -> dict[str, Any]:
    """The samples of a run as a file of ``bench/results``: a record per row and kind of prompt, and per row over all of them."""
    settings, samples = folder.settings(), list(folder.samples.values())
    all_prompts = {f"{d['name']} {name}": n for d in settings["datasets"] for name, n in d["prompt_tokens"].items()}
    whole = settings | {"datasets": [{"name": "all", "prompt_tokens": all_prompts}]}
    merged = [replace(s, dataset="all", sample=f"{s.dataset} {s.sample}") for s in samples]
    summaries = tables.summarise(settings, samples), tables.summarise(whole, merged)
    rows = [row for summary in summaries for row in tables.rows_of(summary)]
    found = []
    names = {r.key: r.label if r.key == REFERENCE else r.key for r in rows}
    for r in rows:
        if r.tokens_per_second is None:
            continue
        record: dict[str, Any] = {"row": names[r.key], "prompts": r.dataset}
        record |= {"tokens_per_second": r.tokens_per_second, "of_plain": r.vs_plain}
        record |= {"worst_prompt_of_plain": r.worst, "first_token_ms": 1000 * (r.seconds_to_first_token or 0.0)}
        record |= {"decoding_tokens_per_second": r.decode_tokens_per_second, "same_text": [r.identical or 0, r.runs]}
        if r.dataset == "all" and sum(r.histogram):
            record["tokens_per_step"] = sum((n + 1) * count for n, count in enumerate(r.histogram)) / sum(r.histogram)
            record["steps_by_tokens"] = {n + 1: count for n, count in enumerate(r.histogram) if count}
        found.append(record)
    forms = {names[r.key]: r.forward for r in rows if r.forward is not None}
    lengths = [tokens for d in settings["datasets"] for tokens in d["prompt_tokens"].values()]
    failed = {names[r.key]: r.reason for r in rows if r.reason is not None}
    about = settings["run"] | {"target": str(settings["family"].get("name")).removesuffix("-hf")}
    record = {"benchmark": "real", "machine": settings["machine"], "settings": about, "prompt_tokens": lengths}
    return record | {"forward": forms, "rows": found, "failed": failed}


TABLE_ROWS = {
    "HF generate()": "transformers `generate()`",
    "HF prompt lookup, 10": "transformers, prompt lookup",
    "OpenVINO int8, lookup": "OpenVINO GenAI, 8 bits, prompt lookup",
    "OpenVINO int4": "OpenVINO GenAI, 4 bits",
    "llama.cpp Q4_K_M, n-gram": "llama.cpp, Q4_K_M, n-gram drafts",
    PLAIN.name: "pipespec, target alone",
    "default": "pipespec, default, 0.5B draft",
    f"{PACKED}, plain": "pipespec, Q4_K_M, target alone",
    f"{PACKED}, default, no draft": "pipespec, Q4_K_M, default",
    f"{PACKED}, default": "pipespec, Q4_K_M, default, 0.5B draft",
}


def best_table(record: dict[str, Any]) -> str:
    """The table of a results file: per row and kind of prompt the speed as a ratio to our plain decoding of the same run.

    Rows of a run of other programs lie under a key of their own, whose own plain decoding is the measure.
    """
    runs = [record, *(part for part in record.values() if isinstance(part, dict) and "machine" in part)]
    kinds = [kind for kind in dict.fromkeys(row["prompts"] for row in record["rows"]) if kind != "all"]
    rows = []
    for name, label in TABLE_ROWS.items():
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


def main() -> None:
    """Print and save the figures of a run, or those of a file."""
    parser = argparse.ArgumentParser("bench.real", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of bench.run, or a file of figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of a run there")
    parser.add_argument("--page", type=Path, metavar="PAGE", help="rewrite the table of a page")
    args = parser.parse_args()
    record = (
        record_of(ResultsFolder(args.run)) if args.run.is_dir() else json.loads(args.run.read_text(encoding="utf-8"))
    )
    save(args.json, record)
    print(best_table(record))
    if args.page:
        replace_table(args.page, best_table(record))


if __name__ == "__main__":
    main()
