"""Speed of popular models on files of their shapes, beside llama.cpp: ``python -m bench.shapes [--models NAME ...] [--llama BINARY] [--json FILE]``

Each file has the tensors and types of the published one (Q4_K_M; gpt-oss MXFP4) with random blocks, and fewer layers where the whole model exceeds ``--gigabytes``: the table says so.
It is written, measured and deleted, one after the other. A row has tokens/s of plain decoding of one text and of a prompt, medians of ``--repeats``, and the share of a plain read of the
same threads that the bytes take which a token must read: all matrices, and of experts those that are chosen.

``--llama`` is llama.cpp's server, which reads the same file with the same threads and tells its own times.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import markdown_table, read_bytes_per_second, save, seconds
from bench.machine import describe, provenance
from bench.products import matrix_of
from bench.real import LlamaServer
from pipespec import Pipeline
from pipespec_kernels.formats import FORMATS

TENSORS = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type by name."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Attributes:
        name: in the table.
        architecture: in the file.
        layers: of the published model.
        hidden: size of the hidden states.
        inner: of the feed-forward, or of one expert.
        heads: of the attention, and of its keys; the size of one.
        vocabulary: tokens.
        keys: further numbers of the metadata, after the name of the architecture.
        experts: how many, and how many of them a token has; None: there are none.
        kind: type of most matrices.
        is_tied: the head is the embedding.
        period: of the layers with attention where the others have a gated delta net; 1: all have.
        around: the layers have norms after each part.
        head_norms: queries and keys have norms.
        is_biased: the attention has biases and sinks, and the experts biases.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: tuple[int, int, int]
    vocabulary: int
    keys: dict[str, Any] = field(default_factory=dict)
    experts: tuple[int, int] | None = None
    kind: str = "q4_k"
    is_tied: bool = True
    period: int = 1
    around: bool = False
    head_norms: bool = True
    is_biased: bool = False


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "gemma3-4b", "gemma3", 34, 2560, 10240, (8, 4, 256), 262208, around=True,
            keys={"attention.sliding_window": 1024, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        ),
        Shape("qwen3-4b", "qwen3", 36, 2560, 9728, (32, 8, 128), 151936, keys={"rope.freq_base": 1e6}),
        Shape(
            "qwen3.5-4b", "qwen35", 32, 2560, 9216, (16, 4, 256), 248320, period=4,
            keys={
                "rope.freq_base": 1e7, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": 4, "ssm.state_size": 128,
                "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096, "full_attention_interval": 4,
            },
        ),
        Shape(
            "gpt-oss-20b", "gpt-oss", 24, 2880, 2880, (64, 8, 64), 201088, experts=(32, 4), kind="mxfp4", is_tied=False, head_norms=False, is_biased=True,
            keys={
                "attention.sliding_window": 128, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
                "rope.scaling.original_context_length": 4096,
            },
        ),
        Shape("qwen3-30b-a3b", "qwen3moe", 48, 2048, 768, (32, 4, 128), 151936, experts=(128, 8), is_tied=False, keys={"rope.freq_base": 1e6}),
    )
}  # fmt: skip


def layer_tensors(shape: Shape, layer: int) -> TENSORS:
    """The tensors of a layer, by their names after ``blk.N.``."""
    hidden, inner, (heads, kv, dim) = shape.hidden, shape.inner, shape.heads
    kind, wide = (shape.kind, "q6_k") if shape.kind == "q4_k" else ("q8_0", "q8_0")
    # Half of the layers have these in more bits, as Q4_K_M has them.
    wide = wide if layer % 2 else kind
    found: TENSORS = {"attn_norm.weight": ((hidden,), "f32")}
    if (layer + 1) % shape.period:
        found |= _delta_tensors(shape, kind)
    else:
        gates = 2 if shape.period > 1 else 1
        found |= {
            "attn_q.weight": ((gates * heads * dim, hidden), kind),
            "attn_k.weight": ((kv * dim, hidden), kind),
            "attn_v.weight": ((kv * dim, hidden), wide),
            "attn_output.weight": ((hidden, heads * dim), kind),
        }
        found |= {f"attn_{n}_norm.weight": ((dim,), "f32") for n in "qk" if shape.head_norms}
    if shape.is_biased:
        rows = {"q": heads * dim, "k": kv * dim, "v": kv * dim, "output": hidden}
        found |= {f"attn_{name}.bias": ((size,), "f32") for name, size in rows.items()}
        found["attn_sinks.weight"] = ((heads,), "f32")
    is_after = shape.around or shape.is_biased or shape.period > 1
    found |= {"post_attention_norm.weight": ((hidden,), "f32")} if is_after else {}
    found |= {"ffn_norm.weight": ((hidden,), "f32")} if shape.around or not is_after else {}
    found |= {"post_ffw_norm.weight": ((hidden,), "f32")} if shape.around else {}
    matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if shape.experts is None:
        return found | {f"ffn_{n}.weight": (size, wide if n == "down" else kind) for n, size in matrices.items()}
    count = shape.experts[0]
    found["ffn_gate_inp.weight"] = ((count, hidden), "f32")
    for name, size in matrices.items():
        of_experts = wide if name == "down" and shape.kind == "q4_k" else shape.kind
        found[f"ffn_{name}_exps.weight"] = ((count, *size), of_experts)
        found |= {f"ffn_{name}_exps.bias": ((count, size[0]), "f32")} if shape.is_biased else {}
    found |= {"ffn_gate_inp.bias": ((count,), "f32")} if shape.is_biased else {}
    return found


def _delta_tensors(shape: Shape, kind: str) -> TENSORS:
    """Those of a gated delta net."""
    hidden, keys = shape.hidden, shape.keys
    of_keys, of_values, heads = (keys["ssm.group_count"] * keys["ssm.state_size"], keys["ssm.inner_size"], keys["ssm.time_step_rank"])  # fmt: skip
    mixed = 2 * of_keys + of_values
    return {
        "attn_qkv.weight": ((mixed, hidden), kind),
        "attn_gate.weight": ((of_values, hidden), kind),
        "ssm_alpha.weight": ((heads, hidden), kind),
        "ssm_beta.weight": ((heads, hidden), kind),
        "ssm_conv1d.weight": ((mixed, keys["ssm.conv_kernel"]), "f32"),
        "ssm_norm.weight": ((of_values // heads,), "f32"),
        "ssm_a": ((heads,), "f32"),
        "ssm_dt.bias": ((heads,), "f32"),
        "ssm_out.weight": ((hidden, of_values), kind),
    }


def end_tensors(shape: Shape) -> TENSORS:
    """Those outside of the layers."""
    kind = "q6_k" if shape.kind == "q4_k" else "q8_0"
    matrix = (shape.vocabulary, shape.hidden), kind
    found: TENSORS = {"token_embd.weight": matrix, "output_norm.weight": ((shape.hidden,), "f32")}
    return found if shape.is_tied else found | {"output.weight": matrix}


def nbytes(tensors: TENSORS) -> int:
    """Bytes of the matrices in blocks."""
    found = 0
    for shape, kind in tensors.values():
        form = FORMATS.get(kind)
        found += 0 if form is None else int(np.prod(shape)) // form.block * form.block_bytes
    return found


def fitting(shape: Shape, limit: float) -> Shape:
    """The shape with so many layers, in whole periods, that its blocks fit ``limit`` bytes."""
    step = max(shape.period, 2)
    size = sum(nbytes(layer_tensors(shape, i)) for i in range(step))
    layers = int((limit - nbytes(end_tensors(shape))) // size) * step
    return replace(shape, layers=max(step, min(shape.layers, layers)))


def read_by_a_token(shape: Shape) -> int:
    """Bytes that decoding a token must read. Of an embedding that is no head it is one row."""
    found = nbytes({"head": end_tensors(shape)["token_embd.weight"]})
    for i in range(shape.layers):
        tensors = layer_tensors(shape, i)
        chosen = {name: each for name, each in tensors.items() if "_exps.weight" in name}
        part = 1.0 if shape.experts is None else shape.experts[1] / shape.experts[0]
        found += nbytes({k: v for k, v in tensors.items() if k not in chosen}) + int(part * nbytes(chosen))
    return found


def write(shape: Shape, path: Path) -> None:
    """Write a file of a shape: random blocks, random tokens' texts."""
    import gguf

    writer, name = gguf.GGUFWriter(path, shape.architecture), shape.architecture
    heads, kv, dim = shape.heads
    numbers: dict[str, Any] = {
        "context_length": 32768, "embedding_length": shape.hidden, "block_count": shape.layers, "feed_forward_length": shape.inner,
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": dim, "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6, **shape.keys,
    }  # fmt: skip
    if shape.experts is not None:
        numbers |= {"expert_count": shape.experts[0], "expert_used_count": shape.experts[1]}
        numbers["expert_feed_forward_length"] = shape.inner
    add: dict[type, Any] = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
    for key, value in numbers.items():
        add.get(type(value), writer.add_uint32)(f"{name}.{key}", value)
    _write_tokens(writer, shape.vocabulary)
    tensors = end_tensors(shape)
    for i in range(shape.layers):
        tensors |= {f"blk.{i}.{part}": each for part, each in layer_tensors(shape, i).items()}
    random = np.random.default_rng(0)
    for at, (size, kind) in tensors.items():
        if kind == "f32":
            values = -np.ones(size) if at.endswith("ssm_a") else random.normal(0.01 if "bias" in at else 1, 0.1, size)
            writer.add_tensor(at, values.astype(np.float32))
            continue
        form = FORMATS[kind]
        assert form.ggml_type is not None
        rows = int(np.prod(size[:-1]))
        # A part of the rows, again and again: random numbers take longer than the rest.
        some = matrix_of(form, part := min(rows, 1024), size[-1]).data.numpy()
        data = np.resize(some, (rows, some.shape[1])) if part < rows else some
        writer.add_tensor(at, data.reshape(*size[:-1], -1), raw_dtype=gguf.GGMLQuantizationType(form.ggml_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokens(writer: Any, count: int) -> None:
    letters = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*letters, "ab", *(f"t{i}" for i in range(len(letters) + 1, count))][:count])
    writer.add_token_types([1] * count)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


@dataclass(frozen=True)
class Speed:
    """Tokens/s of a prompt and of decoding, of each repeat."""

    prompt: list[float]
    decoding: list[float]


def ours(path: Path, prompts: list[torch.Tensor], new_tokens: int) -> Speed:
    """Of a pipeline that decodes plainly. The first prompt does not count: blocks are packed in its call."""
    found = Speed([], [])
    with Pipeline(path, schedule="plain", prefix_cache=0) as pipe:
        pipe.target.generation_config.eos_token_id = None
        for i, ids in enumerate(prompts):
            first = seconds(lambda ids=ids: pipe.generate(ids, max_new_tokens=1, do_sample=False))
            whole = seconds(lambda ids=ids: pipe.generate(ids, max_new_tokens=1 + new_tokens, do_sample=False))
            if i:
                found.prompt.append(ids.shape[1] / first)
                found.decoding.append(new_tokens / (whole - first))
        assert pipe.report is not None
        form = pipe.report.stages[-1].forward
    if form != "native":
        raise RuntimeError(f"{path}: {form}")
    return found


def llama(binary: Path, path: Path, prompts: list[torch.Tensor], new_tokens: int, threads: int) -> Speed:
    """Of llama.cpp's server, by its own times. The first prompt does not count."""
    server = LlamaServer("llama.cpp", binary, path)
    try:
        server.serve(threads)
        answers = [server.complete(ids, new_tokens, ignore_eos=True)["timings"] for ids in prompts]
    finally:
        server.close()
    return Speed(
        [one["prompt_per_second"] for one in answers[1:]], [one["predicted_per_second"] for one in answers[1:]]
    )


def measured(shape: Shape, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The record of a shape. The rate of a read is the best of one before and one behind each system: neighbours of a virtual machine change it within minutes."""
    whole, shape = shape.layers, fitting(shape, options.gigabytes * 1e9)
    shape = replace(shape, layers=min(shape.layers, options.layers or shape.layers))
    path = folder / f"{shape.name}.gguf"
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, shape.vocabulary, (1, options.prompt), generator=generator) for _ in range(1 + options.repeats)
    ]
    began = time.monotonic()
    write(shape, path)
    record: dict[str, Any] = {"name": shape.name, "layers": shape.layers, "of": whole, "bytes": path.stat().st_size}
    record["read"] = read_by_a_token(shape)
    rates = [read_bytes_per_second(options.threads)]
    speeds = {"ours": ours(path, prompts, options.new_tokens)}
    rates.append(read_bytes_per_second(options.threads))
    if options.llama:
        speeds["llama.cpp"] = llama(options.llama, path, prompts, options.new_tokens, options.threads)
        rates.append(read_bytes_per_second(options.threads))
    path.unlink()
    record["read_bytes_per_second"] = rate = max(rates)
    for name, speed in speeds.items():
        decoding = statistics.median(speed.decoding)
        record[name] = {
            "prompt": round(statistics.median(speed.prompt), 2),
            "decoding": round(decoding, 2),
            "share": round(decoding * record["read"] / rate, 3),
        }
    return record | {"seconds": round(time.monotonic() - began)}


def table_of(records: list[dict[str, Any]]) -> str:
    """The table, a row per model; ratios to llama.cpp in brackets."""
    rows = []
    for record in records:
        mine, other = record["ours"], record.get("llama.cpp")
        layers = f"{record['layers']}" + (f" of {record['of']}" if record["layers"] < record["of"] else "")
        row = [record["name"], layers, f"{record['bytes'] / 1e9:.2f}", f"{record['read'] / 1e9:.2f}"]
        for key in ("decoding", "prompt"):
            row.append(f"{mine[key]:.1f}" + (f" ({mine[key] / other[key]:.2f})" if other else ""))
            row += [f"{other[key]:.1f}"] if other else ["-"]
        rows.append([*row, f"{mine['share']:.2f}", f"{other['share']:.2f}" if other else "-"])
    header = ["model", "layers", "GB", "GB per token", "decoding", "llama.cpp", "prompt", "llama.cpp", "share of a read", "llama.cpp"]  # fmt: skip
    return markdown_table(header, rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--llama", type=Path, help="llama.cpp's llama-server")
    parser.add_argument(
        "--gigabytes", type=float, default=2.8, help="most of a file; models in memory take as much again"
    )
    parser.add_argument("--layers", type=int, help="at most so many, for a trial")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = provenance(options.threads)
    print(describe(machine), flush=True)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            records.append(measured(SHAPES[name], options, Path(folder)))
            print(json.dumps(records[-1]), flush=True)
    print(table_of(records))
    save(options.json, {"machine": machine, "models": records})


if __name__ == "__main__":
    main()
