"""Reading a prompt and decoding after it, by the prompt's length: pipespec, transformers with the same weights in bfloat16, llama.cpp and OpenVINO GenAI.

    python -m bench.lengths q15.gguf --peer q15-hf --llama llama-server --openvino PYTHON EXPORT --out lengths.json

For each length and repeat, the systems run one after the other. None keeps a prefix or has a draft. The time of the prompt ends with the first token, the
time of decoding begins there. A prompt consists of the words of a file (default: docs/calls.md), repeated until it has the length.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.machine import describe, provenance
from bench.real import LlamaServer, OpenVino
from bench.systems import CommitClock, Family, System, Workload

Generate = Callable[..., Any]
Measure = Callable[[torch.Tensor, int], tuple[float, float]]
LENGTHS = (64, 512, 2048, 4096)
COLUMNS = {
    "system": "{system}",
    "prompt, tokens": "{length:,}",
    "prompt, tokens/s": "{read:.0f}",
    "decoding, tokens/s": "{decoded:.1f}",
    "of the shortest": "{share:.2f}",
}


def measure(generate: Generate, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Tokens per second of one call: of its prompt ``[1, S]``, and of the ``tokens`` that it generates after the first one."""
    clock = CommitClock()
    call = {"attention_mask": torch.ones_like(prompt), "eos_token_id": None, "do_sample": False, "streamer": clock}
    with torch.inference_mode():
        generate(input_ids=prompt, max_new_tokens=tokens + 1, **call)
    return prompt.shape[1] / clock.commits[0][0], tokens / (clock.commits[-1][0] - clock.commits[0][0])


def measure_rival(system: System, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """As :func:`measure`, of another program, by its own times. It may end its text earlier."""
    sample = system.run(prompt, tokens + 1, 0)
    first, last = sample.commits[0][0], sample.commits[-1][0]
    return prompt.shape[1] / first, (len(sample.tokens) - 1) / (last - first)


def compare(
    systems: dict[str, Measure], words: torch.Tensor, lengths: Sequence[int], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """A row per system and length, with the speeds of all rounds. ``words``: int64 ids ``[n]``. Each system runs once before, and is not measured then."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for speeds in systems.values():
        speeds(words[None, : min(lengths)], tokens)
    for _ in range(rounds):
        for length in lengths:
            prompt = words.repeat(-(-length // len(words)))[None, :length]
            for name, speeds in systems.items():
                row = rows.setdefault((name, length), {"system": name, "length": length, "prompt": [], "decoding": []})
                read, decoded = speeds(prompt, tokens)
                row["prompt"].append(read)
                row["decoding"].append(decoded)
                print(f"{name:14} {length:6} tokens: prompt {read:8.1f}/s, decoding {decoded:6.1f}/s", flush=True)
    return list(rows.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: medians, and the decoding as a share of that after the shortest prompt."""
    found: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        read, decoded = statistics.median(row["prompt"]), statistics.median(row["decoding"])
        share = decoded / first.setdefault(row["system"], decoded)
        found.append(row | {"read": read, "decoded": decoded, "share": share})
    return harness.table(COLUMNS, found)


def rivals_of(options: argparse.Namespace) -> dict[str, System]:
    """Other programs that read the target's file or an export of it, with the threads of torch."""
    found: dict[str, System] = {}
    if options.llama is not None:
        context = str(max(options.lengths) + options.tokens + 64)
        found["llama.cpp"] = LlamaServer("llama.cpp", options.llama, options.target, ("-c", context))
    if options.openvino:
        python, export = options.openvino
        found["OpenVINO"] = OpenVino("OpenVINO", python, export)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a GGUF file, or a folder with config.json, which runs in bfloat16")
    parser.add_argument("--peer", type=Path, help="a folder that transformers runs in bfloat16")
    parser.add_argument("--llama", type=Path, help="llama.cpp's llama-server, which reads the target's file")
    parser.add_argument("--openvino", type=Path, nargs=2, help="an interpreter with openvino_genai, and an export")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=16, help="to decode after each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs" / "calls.md")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from pipespec import Pipeline
    from pipespec.models.tokenizers import load_tokenizer

    # A prompt that is kept would not be read again.
    dtype = "auto" if options.target.is_file() else torch.bfloat16
    pipe = Pipeline(options.target, schedule="plain", dtype=dtype, prefix_cache=0)
    systems: dict[str, Measure] = {"pipespec": partial(measure, pipe.generate)}
    if options.peer is not None:
        model = AutoModelForCausalLM.from_pretrained(options.peer, dtype=torch.bfloat16).eval()
        systems["transformers"] = partial(measure, model.generate)
    text = options.text.read_text(encoding="utf-8")
    words = load_tokenizer(options.target)(text, return_tensors="pt", verbose=False).input_ids[0]
    rivals = rivals_of(options)
    workload = Workload(
        Family(options.target.name, pipe.target, {}), options.tokens + 1, max(options.lengths), torch.get_num_threads()
    )
    gc.collect()
    try:
        for name, system in rivals.items():
            system.start(workload)
            systems[name] = partial(measure_rival, system)
        rows = compare(systems, words, options.lengths, options.tokens, options.rounds)
    finally:
        for system in rivals.values():
            system.close()
    origin = provenance(torch.get_num_threads())
    print(f"\n{describe(origin)}\n\n{table(rows)}")
    harness.save(options.out, {**origin, "target": options.target.name, "rows": rows})


if __name__ == "__main__":
    main()
