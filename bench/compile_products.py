"""The compile gate's cases of products of few rows and of quantised weights, and what is wrong with their machine code; see :mod:`bench.compile_gate`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bench.harness import markdown_table
from pipespec_kernels.products import MAX_ROWS
from pipespec_kernels.tiles import BAND, LAYOUTS, WIDTH
from pipespec_kernels.triton.experts import BLOCK_MIXED, experts_kernel, mix_kernel
from pipespec_kernels.triton.launch import Config
from pipespec_kernels.triton.linear import PARTS, linear_kernel, qkv_append_kernel, tiles_for
from pipespec_kernels.triton.tiles import TILES, decode_kernel

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PRODUCT_KERNELS = (linear_kernel, qkv_append_kernel, experts_kernel)
PRODUCT_REGISTERS = {8: 128, 16: 200}  # by columns, on sm_90: four blocks of four warps on a multiprocessor, and two
ELSEWHERE = 168
"""Registers on other architectures at least, or a tenth more: three blocks. Products of float32, and partial rotations, take more there."""
TILES_REGISTERS = {8: 184, 16: 255}  # with quantised weights: nearly three, and two


@dataclass(frozen=True)
class CompileCase:
    """One compilation. ``per_logit``: budget of the loop (None: no budget). ``config`` None: the kernel has no rows of logits.
    ``instructions``: budget of the whole kernel (None: no budget). ``fused``: products and sums are, as in the launch. ``types``: of
    arguments that are not as usual."""

    name: str
    kernel: Any
    dtype: str
    config: Config | None
    constants: dict[str, Any]
    per_logit: float | None
    warps: int = 4
    stages: int = 3
    instructions: int | None = None
    fused: bool = True
    types: dict[str, str] = field(default_factory=dict)


def kept_in_bytes(case: CompileCase) -> CompileCase:
    """A kernel with keys and values in floats of 8 bits."""
    return replace(case, name=f"{case.name}, 8 bits", types=case.types | {"keys": "*u8", "values": "*u8"})


def product_cases() -> Iterator[CompileCase]:
    """The products of Llama-3-8B, and those of smaller models with biases and with rows that a step does not divide."""

    def product(
        name: str, kernel: Any, dtype: str, n: int, k: int, most: int, columns: int = 8, **own: Any
    ) -> CompileCase:
        layout = own.get("LAYOUT")
        tile = tiles_for(n, BYTES[dtype], layout is not None)[0]
        types = {} if layout is None else {"weight": "*u8"}
        constants = {
            "LAYOUT": None, "K": k, "NORM": False, "HAS_BIAS": False, "ONE_PLUS": False, "PARTS": PARTS, "ROWS": tile.rows, "COLUMNS": columns,
        }  # fmt: skip
        constants |= {"HAS_COUNTS": True, "ROWS_OF_X": MAX_ROWS}
        constants |= {"EVEN": k % (PARTS * tile.block) == 0, "BLOCK": tile.block, "BLOCK_NORM": tile.norm} | own
        name = f"{name}, M={columns}" if columns > 8 else name
        return CompileCase(name, kernel, dtype, None, constants, None, PARTS, tile.stages, most, False, types)

    def linear(name: str, dtype: str, n: int, k: int, most: int, columns: int = 8, **own: Any) -> CompileCase:
        own = {"KIND": -1, "HAS_RESIDUAL": False, "N": n} | own
        return product(f"linear_small, {name}", linear_kernel, dtype, n, k, most, columns, **own)

    def qkv(dtype: str, dim: int, rotary: int, k: int, most: int, columns: int = 8, **own: Any) -> CompileCase:
        own = {"HEADS_Q": 32, "HEADS": 8, "DIM": dim, "ROTARY": rotary, "NORM": True} | own
        name = f"qkv_append, D={dim}{'' if rotary == dim else f', R={rotary}'}"
        return product(name, qkv_append_kernel, dtype, 48 * dim, k, most, columns, **own)

    for columns, more in ((8, 1.0), (16, 1.6)):
        yield linear("O", "bf16", 4096, 4096, int(900 * more), columns, HAS_RESIDUAL=True)
        yield linear("gate_up", "bf16", 28672, 4096, int(1900 * more), columns, KIND=0, NORM=True)
        yield qkv("bf16", 128, 128, 4096, int(2200 * more), columns)
    yield linear("down", "bf16", 4096, 14336, 900, HAS_RESIDUAL=True)
    yield linear("head", "bf16", 128256, 4096, 1900, NORM=True)
    yield linear("gate_up, gelu", "fp16", 9728, 896, 2400, KIND=1, NORM=True, ONE_PLUS=True)
    yield linear("O", "fp32", 2048, 2048, 1500, HAS_RESIDUAL=True)
    yield linear("gate_up", "fp32", 16384, 2048, 2000, KIND=0, NORM=True)
    yield qkv("bf16", 64, 64, 896, 2700, HAS_BIAS=True)
    yield qkv("fp16", 96, 48, 3072, 2600, HAS_BIAS=True)
    yield kept_in_bytes(qkv("bf16", 128, 128, 4096, 2900))
    with_float32 = qkv("bf16", 128, 128, 4096, 2300)
    yield replace(with_float32, name=f"{with_float32.name}, fp32 tables", types={"cos": "*fp32", "sin": "*fp32"})
    for name, layout in LAYOUTS.items():
        yield linear(f"O, {name}", "bf16", 4096, 4096, 2600 if layout.words else 1900, HAS_RESIDUAL=True, LAYOUT=layout)
    for name in ("q4_k", "q6_k"):
        for columns, more in ((8, 1.0), (16, 1.6)):
            own = {"NORM": True, "LAYOUT": LAYOUTS[name]}
            yield linear(f"gate_up, {name}", "bf16", 28672, 4096, int(4600 * more), columns, KIND=0, **own)
            case = qkv("bf16", 128, 128, 4096, int(3600 * more), columns, LAYOUT=LAYOUTS[name])
            yield replace(case, name=f"{case.name}, {name}")
    yield linear("down, q8_0", "fp16", 2048, 5632, 2200, LAYOUT=LAYOUTS["q8_0"])
    yield linear("gate_up, q8_0", "bf16", 28672, 4096, 7600, 16, KIND=0, NORM=True, LAYOUT=LAYOUTS["q8_0"])
    yield linear("gate_up, e4m3", "bf16", 28672, 4096, 7600, 16, KIND=0, NORM=True, LAYOUT=LAYOUTS["e4m3"])
    case = qkv("bf16", 128, 128, 4096, 3600, LAYOUT=LAYOUTS["e4m3"])
    yield replace(case, name=f"{case.name}, e4m3")
    most = {"NORM": True, "KIND": 0, "columns": MAX_ROWS}
    yield from other_tiles(linear("O", "bf16", 4096, 4096, 900, MAX_ROWS, HAS_RESIDUAL=True), 4096)
    yield from other_tiles(linear("gate_up", "bf16", 28672, 4096, 1900, **most), 28672)
    yield from other_tiles(linear("gate_up, q4_k", "bf16", 28672, 4096, 4600, LAYOUT=LAYOUTS["q4_k"], **most), 28672)
    yield from expert_cases()
    rows = {"LAYOUT": LAYOUTS["q4_k"], "HAS_INDEX": False, "N": 4096, "K": 4096, "TILES": TILES}
    for name, index in (("all", False), ("of tokens", True)):
        yield CompileCase(
            f"decode_rows, {name}", decode_kernel, "bf16", None, rows | {"HAS_INDEX": index}, None, TILES, 3, 900, False,
            {"weight": "*u8", "index": "*i64"},
        )  # fmt: skip


def expert_cases() -> Iterator[CompileCase]:
    """Those of Qwen3-30B-A3B: gates and ups of 128 experts, of which a row has 8."""
    n, k = 1536, 2048
    for name, columns, most in (("q4_k", 8, 2100), ("q4_k", MAX_ROWS, 3000), ("q8_0", 8, 2200), ("bf16", 8, 1500)):
        layout = LAYOUTS.get(name)
        tile = tiles_for(n, 2, layout is not None)[0]
        constants = {"N": n, "K": k, "EACH": 8, "SLOTS": 8, "LAYOUT": layout, "HAS_BIAS": False, "PARTS": PARTS}
        constants |= {"EVEN": True, "ROWS": tile.rows, "BLOCK": tile.block, "COLUMNS": columns}
        types = {"chosen": "*i64"} | ({} if layout is None else {"weight": "*u8"})
        full = f"experts_small, {name}{f', M={columns}' if columns > 8 else ''}"
        yield CompileCase(full, experts_kernel, "bf16", None, constants, None, PARTS, tile.stages, most, False, types)
    types = {"found": "*bf16", "shares": "*bf16", "chosen": "*i64"}
    constants = {"N": k, "EACH": 8, "EXPERTS": 128, "BLOCK": BLOCK_MIXED}
    yield CompileCase("experts_small, sums", mix_kernel, "bf16", None, constants, None, 4, 3, 700, False, types)


def other_tiles(case: CompileCase, weights: int) -> Iterator[CompileCase]:
    """A product of a number of rows of weights with the other tiles that a measurement on a GPU may choose."""
    for tile in tiles_for(weights, BYTES[case.dtype], case.constants["LAYOUT"] is not None)[1:]:
        name = f"{case.name}, {tile.rows} rows, {tile.stages} stages"
        constants = case.constants | {"ROWS": tile.rows}
        yield replace(case, name=name, constants=constants, stages=tile.stages, instructions=None)


def bytes_per_weight(constants: dict[str, Any], dtype: str) -> float:
    """What a product reads for each of its weights."""
    layout = constants["LAYOUT"]
    return BYTES[dtype] if layout is None else layout.nbytes / (BAND * WIDTH)


REGISTERS, THREADS, RESERVED = 65536, 2048, 1 << 10
"""Registers and threads of a multiprocessor, and the shared memory that the system takes of each block."""
SHARED_IN_ALL = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Of a multiprocessor: CUDA C++ Programming Guide, table of capabilities."""


def room(report: dict[str, Any], step: float, stages: int) -> dict[str, int]:
    """How many blocks of threads of a kernel a multiprocessor holds at once, and how many bytes of theirs are then on their way while others are multiplied. ``step``: bytes of one
    step of a block."""
    threads = 32 * report["warps"]
    each = -(-report["registers"] // 8) * 8 * threads
    shared = SHARED_IN_ALL.get(report["arch"], 100 << 10) // (report["shared"] + RESERVED)
    blocks = min(REGISTERS // each, shared, THREADS // threads)
    return {"blocks": blocks, "in_flight": int(blocks * (stages - 1) * step)}


def bytes_of_step(case: CompileCase) -> float | None:
    """What a block of threads loads ahead in one step of a product or of attention; None: the kernel is another one."""
    constants = case.constants
    if case.kernel in PRODUCT_KERNELS:
        layout, weights = constants["LAYOUT"], PARTS * constants["ROWS"] * constants["BLOCK"]
        # Of quantised weights the codes alone are loaded ahead.
        return weights * (BYTES[case.dtype] if layout is None else (layout.low + layout.high) / 8)
    if "BLOCK_N" in constants and "BLOCK_M" in constants:
        return 2 * constants["BLOCK_N"] * constants["BLOCK_D"] * (1 if "keys" in case.types else BYTES[case.dtype])
    return None


def products_table(reports: list[dict[str, Any]]) -> str:
    """A Markdown table: a product, or a form of attention, per line, with what it has on each architecture."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    waits: dict[str, list[str]] = {}
    for r in reports:
        if "in_flight" not in r or r["arch"] not in SHARED_IN_ALL:
            continue
        if r["before_wait"] is None:
            by_name.setdefault(f"{r['name']}, {r['dtype']}", []).append(r)
        else:
            name = f"{r['name'].removesuffix(', PDL')}, {r['dtype']}"
            waits.setdefault(name, []).append(str(r["before_wait"]))
    keys = "registers", "spilled", "shared", "blocks", "in_flight", "instructions", "first_load"
    lines = []
    for name, found in by_name.items():
        cells = [" / ".join(str(r[key]) for r in found) for key in keys]
        # As often all have the same.
        cells = [cell.split(" / ")[0] if len(set(cell.split(" / "))) == 1 else cell for cell in cells]
        weight = found[0]["bytes_per_weight"]
        lines.append([name, *cells, "-" if weight is None else f"{weight:.2f}", " / ".join(waits.get(name, ["-"]))])
    heads = ("registers", "spilled", "shared memory", "blocks", "bytes on their way", "instructions", "before the first load")  # fmt: skip
    return markdown_table(["kernel", *heads, "bytes per weight", "loads before the wait"], lines)


OF_OPERANDS = "lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warp = [[1, 0, 0], [2, 0, 0]]"
"""The first operand of ``mma`` in Triton's intermediate code: which numbers a thread has, with 8 columns in a row."""


def product_faults(
    report: dict[str, Any], sass: list[tuple[int, str]], ttgir: str, constants: dict[str, Any]
) -> list[str]:
    """What is wrong with a product of few rows."""
    half, found = report["dtype"] != "fp32", []
    in_tiles = constants["LAYOUT"] is not None
    most = (TILES_REGISTERS if in_tiles else PRODUCT_REGISTERS)[constants["COLUMNS"]]
    most = most if report["arch"] == 90 else max(most * 11 // 10, ELSEWHERE)
    if report["registers"] > most:
        found.append(f"{report['registers']} registers, budget {most}")
    needed = 2 if in_tiles else 4
    is_late = "EACH" in constants  # which experts are needed is known after the wait
    if constants["PDL"] and not is_late and report["before_wait"] < needed:
        found.append(f"{report['before_wait']} loads of weights before the wait, {needed} needed")
    moved = re.findall(r"(?:local_load|convert_layout)\b.*: tensor<\S+, (#\w+).*> -> .*dot_op<\{opIdx = 0", ttgir)
    # A layout that gives each thread its own operands, in another order of its registers.
    of_threads = re.findall(rf"(?m)^(#linear\d*) = #ttg.linear<\{{register = .*, {re.escape(OF_OPERANDS)}", ttgir)
    if in_tiles and half and not set(moved).issubset(of_threads):
        found.append("decoded weights go from thread to thread")
    steps = constants["K"] // (PARTS * constants["BLOCK"])
    if steps > 2 and not any(re.search(r"\bLDGSTS\S*\.128\b", text) for _, text in sass):
        found.append("weights do not come 16 bytes at a time while others are multiplied")
    # Products of m16n8k16 for any number of columns, one warp for each part of a step.
    tiles = re.findall(r"nvidia_mma<\{.*?warpsPerCTA = \[([\d, ]+)\], instrShape = \[([\d, ]+)\]", ttgir)
    if half and tiles != [(f"{PARTS}, 1, 1", "1, 16, 8")]:
        found.append(f"products on tensor cores are divided otherwise: {tiles}")
    # A norm's sum: all threads along the row.
    layouts = dict(re.findall(r"(?m)^(#blocked\d*) = #ttg.blocked<\{(.*?), order", ttgir))
    for layout in re.findall(r"-> tensor<\d+xf32, #ttg.slice<\{dim = 1, parent = (#blocked\d*)\}>>", ttgir):
        if not layouts[layout].endswith(f"threadsPerWarp = [1, 32], warpsPerCTA = [1, {PARTS}]"):
            found.append(f"the sum of a norm is divided by rows: {layouts[layout]}")
    return found
