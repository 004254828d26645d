"""Compile the Triton kernels and check their machine code. ``python -m bench.compile_gate [--json FILE] [--page FILE] [--arch 90] [--quick] [--kernel NAME ...] [--tighten 0.5]``

Compiles every kernel ahead of time for sm_80, sm_90 and sm_100, and those with most shared memory for the architectures that have less of it, with
triton's own ptxas and no GPU, and reads the machine code with its cuobjdump. For each it prints

* registers per thread, bytes spilled to local memory, bytes of shared memory, instructions;
* the loop's instructions per logit: those between its label and its branch, divided by the logits that it loads (of
  several loops, the most expensive one; without a loop, all instructions);
* ``all``: the same with all instructions outside the loop added once, divided by the logits of a thread in a launch for
  B=16, Q=5, V=128256 on 132 multiprocessors. This is an upper bound: few threads walk along draft tokens.

Attention, the KV kernels and those of layers have no logits, and the second kernel of ``cutoff`` reads few of them, so their last three columns are
empty. Attention must load asynchronously, 16 bytes
at a time, and multiply 16-bit numbers on tensor cores. Kernels of layers must load 16 bytes at a time where the size of a row allows it; they have
budgets for registers and for all their instructions. In PTX a barrier must come right before and right after each ticket (an atomic operation with acquire and release), and none may be under a predicate.
Variants for a dependent launch (``PDL``, from sm_90 on) must wait for the launch ahead before any branch and any access to global memory, but loads of weights, which
no launch ahead writes. Products of few rows must have such loads, in PTX and in machine code; their tensor cores' products and the sums of their norms must divide a row's
summands among the threads alike for 8 and for 16 columns.

Of products and attention the JSON file also has what a multiprocessor holds at once: blocks of threads, and bytes of weights that are on their way; and how many instructions come before the first
load. ``--page docs/kernels.md`` writes them into the table there.

A kernel over its budget makes the exit status 1. Budgets exist for spills (none), shared memory (the architecture's limit per block) and
the loop. So does a fused multiply-add where noise must have the host's bits. Pointers and strides are compiled as aligned, as they are for
the vocabularies of models.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.compile_products import (
    BYTES,
    PRODUCT_KERNELS,
    CompileCase,
    bytes_of_step,
    bytes_per_weight,
    kept_in_bytes,
    product_cases,
    product_faults,
    products_table,
    room,
)
from bench.harness import replace_table, save
from bench.machine import provenance
from pipespec_kernels.triton.activation import BLOCK as ACTIVATION_BLOCK
from pipespec_kernels.triton.activation import silu_mul_kernel
from pipespec_kernels.triton.attention import (
    COMBINED,
    GROUPED,
    attention_kernel,
    combine_kernel,
    tiling,
)
from pipespec_kernels.triton.cutoff import (
    MAX_GROUPS,
    SCAN_WARPS,
    SEARCH_WARPS,
    TILE,
    cutoff_scan_kernel,
    cutoff_search_kernel,
    group_of,
)
from pipespec_kernels.triton.kv import append_kernel
from pipespec_kernels.triton.launch import MIN_WIDTH_BLOCK, Config, choose_config, cut
from pipespec_kernels.triton.logprobs import BLOCK as LOGPROBS_BLOCK
from pipespec_kernels.triton.logprobs import WARPS as LOGPROBS_WARPS
from pipespec_kernels.triton.logprobs import logprobs_kernel
from pipespec_kernels.triton.lookup import lookup_kernel
from pipespec_kernels.triton.norm import add_rms_norm_kernel
from pipespec_kernels.triton.norm import tile_of as norm_tile
from pipespec_kernels.triton.penalize import BLOCK as PENALTY_BLOCK
from pipespec_kernels.triton.penalize import penalize_kernel
from pipespec_kernels.triton.rejection_sample import rejection_choose_kernel, rejection_test_kernel
from pipespec_kernels.triton.rope import rope_append_kernel
from pipespec_kernels.triton.rope import tile_of as rope_tile
from pipespec_kernels.triton.verify import verify_kernel

ARCHS = (80, 90, 100)
SMALL_ARCHS = (86, 89, 120)
# Per block of threads: CUDA C++ Programming Guide, table of capabilities.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10} | dict.fromkeys(SMALL_ARCHS, 99 << 10)
# What is compiled for the architectures with less shared memory; the rest has at most 81 KiB.
LARGEST = (("verify, greedy", "fp32"), ("rejection_sample, test", "fp32"), ("attention, D=128, M=128, parts", "bf16"))
LARGEST += (("attention, D=256, M=32", "bf16"), ("qkv_append, D=128, M=16", "bf16"))
LARGEST += tuple((f"linear_small, gate_up, {name}, M=16", "bf16") for name in ("q4_k", "q6_k", "q8_0"))
# What a quick run compiles for the architectures other than sm_90, in bf16: one or two variants of each kind of kernel.
IN_QUICK = ("verify, greedy", "verify, coupled, cutoff", "rejection_sample, test", "rejection_sample, choose")
IN_QUICK += (
    "cutoff, scan",
    "cutoff, search",
    "penalize",
    "logprobs, cutoff",
    "prompt_lookup",
    "prompt_lookup, corpus",
    "attention, D=128, M=32",
    "attention, D=128, M=128, parts",
    "attention, D=128, M=16, invariant",
    "attention, combine, D=128",
    "kv_append",
    "add_rms_norm, H=4096",
    "silu_mul, silu",
    "rope_append, D=128",
    "linear_small, O",
    "linear_small, gate_up",
    "qkv_append, D=128",
    "linear_small, O, q4_k",
    "linear_small, O, q6_k",
    "linear_small, O, q8_0",
    "experts_small, q4_k",
    "experts_small, sums",
    "decode_rows, all",
    "decode_rows, of tokens",
)
LAYER_KERNELS = (add_rms_norm_kernel, silu_mul_kernel, rope_append_kernel)
SPILLED_BYTES = dict.fromkeys(ARCHS + SMALL_ARCHS, 24 if triton.__version__.startswith("3.5.") else 0)
"""Triton 3.5 spills so much in three forms of attention, 3.6 nothing."""
LAYER_REGISTERS = 128  # with 16 warps a block of threads: as many as a multiprocessor has for them
VOCAB, ROWS, MULTIPROCESSORS = 128256, 16 * 5, 132

# Types of the kernels' arguments. The case defines the type of the logits; other arguments are int32.
_BY_TYPE = {
    "*i64": "tokens best arrivals ticket rejected next_token length epoch seeds invalid_positions top_k",
    "*i32": "query_lens num_draft_tokens n_select selected accepted positions remaining lengths n_new to begin n_keep tickets corpus "
    "history prompt_lengths bias_ids bitmask table top_ids",
    "*fp32": "repetition presence frequency inv_temperature cutoff sums lse draft_inv_temperature draft_cutoff out maxima weights chosen top",
    "*fp64": "top_p min_p",
    "fp32": "scale_log2 cap_log2 eps",
}
POINTERS = {name: kind for kind, names in _BY_TYPE.items() for name in names.split()}
# Of the case's type.
VALUES = ("logits", "draft_logits", "queries", "keys", "values", "new_keys", "new_values", "output")
VALUES += ("x", "residual", "residual_out", "weight", "bias", "norm", "gate_up", "cos", "sin", "q_norm", "k_norm")
# Multiples of 16 in a launch for a model's vocabulary; so are all strides of keys and values but those of the last dimension.
ALIGNED = ("vocab", "span", "logits_stride_b", "logits_stride_q", "draft_stride_b", "draft_stride_q")
ALIGNED_STRIDES = tuple(f"{name}_stride" for name in ("queries", "keys", "values", "new_keys", "new_values", "output"))
ALIGNED_STRIDES += tuple(
    f"{name}_stride" for name in ("x", "residual", "residual_out", "weight", "gate_up", "cos", "sin")
)


def cases() -> Iterator[CompileCase]:
    small = choose_config(5, VOCAB, MULTIPROCESSORS, busy=False)
    wide = choose_config(ROWS, VOCAB, MULTIPROCESSORS, busy=False)
    busy = choose_config(ROWS, VOCAB, MULTIPROCESSORS, busy=True)
    assert len({small, wide, busy}) == 3
    greedy = {"HAS_STATE": True, "COUPLED": False, "HAS_CUTOFF": False, "FAST": True, "WALK": True}
    greedy |= {"WIDTH_BLOCK": MIN_WIDTH_BLOCK, "HAS_INVALID": False}
    coupled = greedy | {"COUPLED": True, "HAS_INVALID": True}
    cutoff = coupled | {"HAS_CUTOFF": True}
    for dtype in BYTES:
        yield CompileCase("verify, greedy", verify_kernel, dtype, wide, greedy, 12)
    for dtype in ("bf16", "fp32"):
        yield CompileCase("verify, coupled", verify_kernel, dtype, busy, coupled, 34)
    yield CompileCase("verify, greedy, small", verify_kernel, "bf16", small, greedy, 12)
    yield CompileCase("verify, coupled, small", verify_kernel, "bf16", small, coupled, 34)
    yield CompileCase("verify, coupled, cutoff", verify_kernel, "bf16", busy, cutoff, 46)
    yield CompileCase("verify, coupled, exact", verify_kernel, "bf16", busy, cutoff | {"FAST": False}, None)
    yield CompileCase("select, greedy", verify_kernel, "bf16", wide, greedy | {"WALK": False, "HAS_STATE": False}, 12)
    ratio = {"HAS_DRAFT": True, "HAS_CUTOFF": True, "HAS_DRAFT_CUTOFF": True}
    certain = dict.fromkeys(ratio, False)
    test = {"WIDTH_BLOCK": MIN_WIDTH_BLOCK, "SPLITS_BLOCK": 128}
    choose = {"HAS_STATE": True, "FAST": True}
    for dtype in ("bf16", "fp32"):
        yield CompileCase("rejection_sample, test", rejection_test_kernel, dtype, wide, ratio | test, 14)
    yield CompileCase("rejection_sample, test, certain", rejection_test_kernel, "bf16", wide, certain | test, 14)
    yield CompileCase("rejection_sample, choose", rejection_choose_kernel, "bf16", busy, ratio | choose, 30)
    yield CompileCase("rejection_sample, choose, certain", rejection_choose_kernel, "bf16", busy, certain | choose, 44)
    filters = {"HAS_COUNTS": True, "HAS_K": True, "HAS_P": True, "HAS_MIN": True}
    filters |= {"GROUP": group_of(VOCAB), "GROUPS_BLOCK": MAX_GROUPS}
    one_tile = Config(TILE, SCAN_WARPS, triton.cdiv(VOCAB, TILE))
    for dtype, shift in (("bf16", 16), ("fp32", 0)):
        yield CompileCase("cutoff, scan", cutoff_scan_kernel, dtype, one_tile, filters, 21)
        search = filters | {"SHIFT": shift, "BLOCK": TILE}
        yield CompileCase(
            "cutoff, search", cutoff_search_kernel, dtype, None, search, None, SEARCH_WARPS, instructions=3200
        )
    penalties = {"HAS_COUNTS": True, "HAS_BITMASK": False, "BLOCK": PENALTY_BLOCK, "WIDTH_BLOCK": MIN_WIDTH_BLOCK}
    for name, mask, budget in (("penalize", False, 1250), ("penalize, bitmask", True, 1900)):
        # The name begins the type of the logits: float32 only, whatever the case's type is.
        constants = penalties | {"HAS_BITMASK": mask}
        types = {"logits": "*fp32", "bias": "*fp32"}
        yield CompileCase(
            name, penalize_kernel, "bf16", None, constants, None, instructions=budget, fused=False, types=types
        )
    for name, filters, budget in (("logprobs", False, 1000), ("logprobs, cutoff", True, 1100)):
        constants = {"HAS_SCALE": filters, "HAS_CUTOFF": filters, "BLOCK": LOGPROBS_BLOCK}
        for dtype in ("bf16", "fp32"):
            yield CompileCase(name, logprobs_kernel, dtype, None, constants, None, LOGPROBS_WARPS, instructions=budget)
    for name, has_corpus, budget in (("prompt_lookup", False, 800), ("prompt_lookup, corpus", True, 1250)):
        constants = {"HAS_CORPUS": has_corpus, "MAX_MATCH": 8, "BLOCK": 1024, "WIDTH_BLOCK": 64}
        ids = {"tokens": "*i32", "best": "*i64", "ticket": "*i64"}
        yield CompileCase(name, lookup_kernel, "bf16", None, constants, None, instructions=budget, types=ids)
    yield from kv_cases()
    yield from layer_cases()
    yield from product_cases()


def kv_cases() -> Iterator[CompileCase]:
    """Attention: the tilings of invariant, narrow and wide steps, and one more of each other type; 4 query heads to each of 8 of keys, as in
    Llama-3-8B. ``whole``: one block takes all keys. ``parts``: a second launch combines, as without a work space. ``window, capped``: with a window and a soft cap."""
    heads = {"GROUP": 4, "HEADS": 8, "HAS_QUERY_LENS": True, "GROUPED": GROUPED}

    def attention(dtype: str, dim: int, invariant: bool, width: int, how: str = "") -> CompileCase:
        cut = tiling(width * 4, dim, BYTES[dtype], invariant, "capped" in how)
        constants = {"DIM": dim, "SPAN": cut.span, "SPANS": cut.combined(dim)} | heads
        constants |= {"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_D": triton.next_power_of_2(dim)}
        constants |= {"DIRECT": how == "whole", "COMBINES": invariant and how != "parts"}
        constants |= {"WINDOWED": "window" in how, "CAPPED": "capped" in how}
        name = ", ".join(filter(None, (f"attention, D={dim}, M={cut.block_m}", "invariant" if invariant else "", how)))
        return CompileCase(
            name, attention_kernel, dtype, None, constants, None, cut.warps, cut.stages, fused=not cut.span
        )

    for dim in (64, 80, 96, 128, 256):
        yield attention("bf16", dim, True, 5)
    yield attention("bf16", 128, True, 5, "parts")
    for case in (attention("bf16", 128, True, 5), attention("bf16", 128, False, 8)):
        yield kept_in_bytes(case)
    for dim in (128, 256):
        yield attention("bf16", dim, False, 8)
    yield attention("bf16", 128, False, 32, "parts")
    yield attention("fp16", 96, False, 5, "whole")
    yield attention("bf16", 128, True, 5, "window, capped")
    yield attention("fp32", 256, True, 5)
    blocks = {"DIM": 128, "BLOCK_D": 128}
    combined = heads | blocks | {"SPAN": 0, "BLOCK_N": 64, "SPANS": COMBINED}
    yield CompileCase("attention, combine, D=128", combine_kernel, "bf16", None, combined, None)
    append = CompileCase("kv_append", append_kernel, "bf16", None, blocks | {"HAS_NEW": True, "BLOCK_Q": 8}, None)
    yield from (append, kept_in_bytes(append))


def layer_cases() -> Iterator[CompileCase]:
    """Layers of Llama-3-8B; a head of every size, with the norms of Qwen3; a row that is longer than a tile."""

    def norm(
        dtype: str, hidden: int, budget: int, one_plus: bool = False, residual: bool = True, bias: bool = False
    ) -> CompileCase:
        block, warps = norm_tile(hidden)
        constants = {"HAS_RESIDUAL": residual, "HAS_BIAS": bias, "ONE_PLUS": one_plus, "HIDDEN": hidden, "BLOCK": block}
        return CompileCase(
            f"add_rms_norm, H={hidden}", add_rms_norm_kernel, dtype, None, constants, None, warps, 3, budget, False
        )

    for dtype in BYTES:
        yield norm(dtype, 4096, 390)
    yield norm("bf16", 5120, 460, one_plus=True)
    yield norm("bf16", 16384, 530)
    yield norm("bf16", 53248, 820, bias=True)
    yield norm("fp16", 1001, 490, residual=False)

    for kind, (name, budget) in enumerate({"silu": 365, "gelu_tanh": 405, "gelu": 340}.items()):
        constants = {"KIND": kind, "INTERMEDIATE": 14336, "BLOCK": ACTIVATION_BLOCK}
        yield CompileCase(f"silu_mul, {name}", silu_mul_kernel, "bf16", None, constants, None, 4, 3, budget, False)

    def rope(
        dtype: str, dim: int, rotary: int, budget: int, norm: bool = False, positions: bool = False
    ) -> CompileCase:
        constants = {"HAS_NEW": True, "HAS_POSITIONS": positions, "HAS_NORM": norm, "ONE_PLUS": False}
        constants |= {"HEADS_Q": 32, "HEADS": 8}
        constants |= {"DIM": dim, "ROTARY": rotary} | rope_tile(dim, rotary)
        name = f"rope_append, D={dim}{'' if rotary == dim else f', R={rotary}'}{', norms' if norm else ''}"
        return CompileCase(name, rope_append_kernel, dtype, None, constants, None, 4, 3, budget, False)

    for dim in (64, 80, 96, 128):
        yield rope("bf16", dim, dim, 330)
    yield kept_in_bytes(rope("bf16", 128, 128, 600))
    yield rope("bf16", 256, 256, 390)
    yield rope("bf16", 128, 128, 640, norm=True)
    yield rope("bf16", 256, 64, 1090, norm=True)
    yield rope("fp16", 96, 48, 440, positions=True)
    yield rope("fp32", 256, 256, 740, norm=True)
    with_float32 = rope("bf16", 128, 128, 370)
    yield replace(with_float32, name=f"{with_float32.name}, fp32 tables", types={"cos": "*fp32", "sin": "*fp32"})


def dependent_cases() -> Iterator[CompileCase]:
    """Those of a quick run, as dependent launches."""
    for case in cases():
        if case.name in IN_QUICK and case.dtype == "bf16":
            yield replace(case, name=f"{case.name}, PDL", constants=case.constants | {"PDL": True})


def compile_case(case: CompileCase, arch: int, tighten: float = 1.0) -> dict[str, Any]:
    constants = {"PDL": False} | case.constants | ({} if case.config is None else {"BLOCK": case.config.block})
    warps = case.warps if case.config is None else case.config.warps
    signature, attributes = {}, {}
    for i, name in enumerate(case.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            usual = f"*{case.dtype}" if name in VALUES else POINTERS.get(name, "i32")
            signature[name] = case.types.get(name, usual)
        if signature[name].startswith("*") or name in ALIGNED or name.startswith(ALIGNED_STRIDES):
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(case.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": case.stages, "enable_fp_fusion": case.fused},
    )
    sass, usage = disassemble(compiled.asm["cubin"])
    loop_per_logit = all_per_logit = None
    if case.config is not None:
        span = cut(case.config, VOCAB).span
        rows_read = 2 if constants.get("HAS_DRAFT") else 1
        per_thread = rows_read * span / (32 * warps)
        loop, logits = main_loop(sass, BYTES[case.dtype]) or (len(sass), per_thread)
        loop_per_logit = loop / logits
        all_per_logit = loop_per_logit + (len(sass) - loop) / per_thread
    report = {
        "name": case.name,
        "arch": arch,
        "dtype": case.dtype,
        "block": next(constants[key] for key in ("BLOCK", "BLOCK_N", "BLOCK_D", "TILES") if key in constants),
        "warps": warps,
        "registers": usage["REG"],
        "spilled": usage["LOCAL"] + usage["STACK"],
        "shared": compiled.metadata.shared,
        "instructions": len(sass),
        "loop_per_logit": loop_per_logit,
        "all_per_logit": all_per_logit,
        "bytes_per_weight": bytes_per_weight(constants, case.dtype) if case.kernel in PRODUCT_KERNELS else None,
        "tickets": compiled.asm["ptx"].count(".acq_rel."),
        "before_wait": before_wait(sass) if constants["PDL"] else None,
    }
    if (step := bytes_of_step(case)) is not None:
        report |= room(report, step, case.stages) | {"first_load": first_load(sass)}
    parameters = [name for name, kind in signature.items() if kind != "constexpr"]
    ptx = compiled.asm["ptx"]
    failures = ordering_faults(ptx) + dependency_faults(ptx, constants["PDL"], parameters)
    if report["spilled"] > SPILLED_BYTES[arch]:
        failures.append(f"{report['spilled']} bytes spilled")
    if case.kernel is attention_kernel:
        if not any(re.search(r"\bLDGSTS\S*\.128\b", text) for _, text in sass):
            failures.append("keys and values do not come 16 bytes at a time while others are multiplied")
        if case.dtype != "fp32" and not any(re.search(r"MMA\b", text) for _, text in sass):
            failures.append("no tensor cores")
    if case.kernel in LAYER_KERNELS:
        if report["registers"] > LAYER_REGISTERS:
            failures.append(f"{report['registers']} registers, budget {LAYER_REGISTERS}")
        if constants.get("HIDDEN", 0) % 8 == 0 and not any(re.search(r"\bLDG\S*\.128\b", text) for _, text in sass):
            failures.append("rows do not come 16 bytes at a time")
    if case.kernel in PRODUCT_KERNELS:
        failures += product_faults(report, sass, compiled.asm["ttgir"], constants)
    if case.instructions is not None and len(sass) > case.instructions * tighten:
        failures.append(f"{len(sass)} instructions, budget {case.instructions * tighten:g}")
    if report["shared"] > SHARED_BYTES[arch]:
        failures.append(f"{report['shared']} bytes of shared memory, there are {SHARED_BYTES[arch]}")
    if not constants.get("FAST", True) and any(re.search(r"\bFFMA", text) for _, text in sass):
        failures.append("a product and a sum were fused: not the host's bits")
    if case.per_logit is not None and loop_per_logit is not None and loop_per_logit > case.per_logit * tighten:
        failures.append(f"{loop_per_logit:.1f} instructions per logit, budget {case.per_logit * tighten:g}")
    return report | {"failures": failures}


def ordering_faults(ptx: str) -> list[str]:
    """What breaks the order of tickets. All threads of a block store before one of them takes the ticket, and none loads what other blocks have stored before it."""
    code = [line for line in map(str.strip, ptx.splitlines()) if line and not line.startswith((".", "//", "$L__tmp"))]
    found = ["a barrier is under a predicate"] if any(re.match(r"@!?%p\d+\s+bar", line) for line in code) else []
    # A jump may come from where there was no barrier, or lead to where there is none.
    other = re.compile(r"^(@!?%p\d+\s+)?(bar|bra|ret|(ld|st|red|atom|cp)\S*\.global|\$L)")
    for i, line in enumerate(code):
        if re.search(r"(atom|red)\S*\.(acq_rel|acquire|release)\.", line):
            sides = {"before": reversed(code[:i]), "after": iter(code[i + 1 :])}
            near = {side: next(filter(other.match, lines), "") for side, lines in sides.items()}
            found += [f"no barrier {side} a ticket" for side, line in near.items() if not line.startswith("bar.sync")]
    return found


def dependency_faults(ptx: str, dependent: bool, parameters: list[str]) -> list[str]:
    """What is wrong with the wait for the launch ahead: every thread must come to it, and before it touches what other launches may write or read. ``parameters``: of
    the kernel, in order; the one that is named ``weight`` is what no launch writes."""
    if not dependent:
        return ["a launch that is not dependent waits"] if "griddepcontrol" in ptx else []
    before, *after = re.split(r"(?m)^\s*griddepcontrol\.wait;", ptx, maxsplit=1)
    start = r"(?m)(?:^|[;{])\s*(@!?%?\w+\s+)?"
    rules = {
        "no wait for the launch ahead": not after,
        "an access before the wait": re.search(
            start + r"(st|atom|red|cp|prefetch|multimem|discard)\.(?!param|shared)", before
        ),
        "a load before the wait of what is not a weight": loaded_before(before, parameters) - {"weight"},
        "a branch before the wait": re.search(start + r"(bra|brx|call|ret|exit)\b", before),
        "the next launch is never let in": "griddepcontrol.launch_dependents;" not in "".join(after),
    }
    return [fault for fault, found in rules.items() if found]


def loaded_before(ptx: str, parameters: list[str]) -> set[str]:
    """The pointers that code without branches loads from, by the names of the kernel's parameters; ``"unknown"``: it is not clear from which one."""
    pointers: dict[str, set[str]] = {}  # by register, the 64-bit parameters that it comes from
    loads: set[str] = set()
    for statement in re.split(r"[;\n]\s*", re.sub(r"//.*", "", ptx)):
        parts = re.match(r"(?:@!?%\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)\s+(\{[^}]*\}|[^,]+)(?:,(.*))?$", statement.strip())
        if parts is None:
            continue
        operation, result, rest = parts[1], parts[2], parts[3] or ""
        if operation.startswith(("ld.param.b64", "ld.param.u64")):
            number = re.search(r"_param_(\d+)", rest)
            position = int(number[1]) if number else len(parameters)
            found = {parameters[position] if position < len(parameters) else "unknown"}
        else:
            place = re.search(r"\[([^\]]*)\]", rest)
            read = place[1] if place else rest
            found = set().union(*(pointers.get(register, set()) for register in re.findall(r"%\w+", read)))
            if operation.startswith("ld.") and not operation.startswith(("ld.param", "ld.shared")):
                loads |= found or {"unknown"}
        for register in re.findall(r"%\w+", result):
            pointers[register] = pointers.get(register, set()) | found
    return loads


def before_wait(sass: list[tuple[int, str]]) -> int:
    """Loads of 16 bytes before the machine code waits for the launch ahead."""
    code = [text for _, text in sass]
    wait = next((i for i, text in enumerate(code) if re.search(r"\bACQBULK\b", text)), 0)
    return sum(bool(re.search(r"\bLDG\S*\.128\b", text)) for text in code[:wait])


def first_load(sass: list[tuple[int, str]]) -> int | None:
    """Instructions before the first load of 16 bytes, that of the first weights; None: there is none."""
    return next((i for i, (_, text) in enumerate(sass) if re.search(r"\bLDG(STS)?\S*\.128\b", text)), None)


def disassemble(cubin: bytes) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Return addresses and instructions without padding, and the resources of the kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(option: str) -> str:
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

        text, resources = run("-sass"), run("--dump-resource-usage")
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    sass = [(int(address, 16), instruction) for address, instruction in lines]
    sass = [(address, instruction) for address, instruction in sass if not instruction.startswith("NOP")]
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources)}
    return sass, usage


def main_loop(sass: list[tuple[int, str]], itemsize: int) -> tuple[int, int] | None:
    """Return the instructions of the most expensive innermost loop that loads, and the logits of one iteration. None: there is no such loop."""
    found = []
    for end, instruction in sass:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < end:
            begin = int(target[1], 16)
            body = [text for at, text in sass if begin <= at <= end]
            loaded = sum(loaded_bytes(text) for text in body)
            if loaded:
                found.append((len(body), loaded // itemsize, begin, end))
    innermost = [
        loop for loop in found if not any(o is not loop and loop[2] <= o[2] and o[3] <= loop[3] for o in found)
    ]
    return max(innermost, key=lambda loop: loop[0] / loop[1])[:2] if innermost else None


def loaded_bytes(instruction: str) -> int:
    load = re.match(r"(?:@!?U?P\d+\s+)?LDG(?:STS)?\.(\S+)", instruction)  # to registers, or past them to shared memory
    bits = load and re.search(r"\b(256|128|64|U16|U8)\b", load[1])
    return int(bits[1].lstrip("U")) // 8 if bits else 4 if load else 0


LINE = (
    "{name:42}{dtype:6}{arch:>4}{block:>7}{warps:>6}{registers:>6}{spilled:>7}{shared:>8}{instructions:>8}"
    "{loop:>8}{budget:>8}{all:>7}"
)
"""A row of the table."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the Triton kernels ahead of time and holds them to budgets.")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS + SMALL_ARCHS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="all variants for sm_90, some for the others")
    parser.add_argument("--kernel", nargs="+", default=[""], help="only those whose names begin so")
    parser.add_argument("--json", type=Path, help="write the reports here")
    parser.add_argument("--page", type=Path, help="replace the table of this Markdown file")
    parser.add_argument("--tighten", type=float, default=1.0, help="multiply the budgets by this")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: nothing would be compiled", file=sys.stderr)
        return 2

    print(f"triton {triton.__version__}; instructions per logit: of the loop (budget), and all at B=16 Q=5 V={VOCAB}")
    heads = {"name": "", "dtype": "", "registers": "regs", "spilled": "spill", "instructions": "instrs"}
    print(LINE.format_map({name: heads.get(name, name) for name in re.findall(r"\{(\w+)", LINE)}))
    reports = []
    for case in [*cases(), *dependent_cases()]:
        if not case.name.startswith(tuple(options.kernel)):
            continue
        for arch in (a for a in options.arch or ARCHS + SMALL_ARCHS if a >= 90 or "PDL" not in case.constants):
            if arch in SMALL_ARCHS:
                if (case.name, case.dtype) not in LARGEST or (options.quick and arch != 89):
                    continue
            elif options.quick and arch != 90 and (case.name not in IN_QUICK or case.dtype != "bf16"):
                continue
            r = compile_case(case, arch, options.tighten)
            reports.append(r)
            loop, every = ("-" if r[key] is None else f"{r[key]:.1f}" for key in ("loop_per_logit", "all_per_logit"))
            budget = "-" if case.per_logit is None else f"{case.per_logit * options.tighten:g}"
            failed = f"  FAILED: {', '.join(r['failures'])}" if r["failures"] else ""
            print(LINE.format(**r | {"loop": loop, "budget": budget, "all": every}) + failed, flush=True)
    if options.page:
        replace_table(options.page, products_table(reports), "gate")
    save(
        options.json,
        {"machine": provenance(), "triton": triton.__version__, "spilled": SPILLED_BYTES, "reports": reports},
    )
    return 1 if any(r["failures"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
