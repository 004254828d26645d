"""How many variants of a kernel the batches and widths of a product compile. Each takes about a second of the first call."""

import itertools
import os
from collections import defaultdict
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from pipespec_kernels.noise import Noise
from pipespec_kernels.triton import Workspace, cutoff, launch, rejection_sample, verify

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"), reason="the interpreter compiles nothing"
)
VOCABULARY, MULTIPROCESSORS = 128256, 132


def variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What the machine code depends on: constants, dtypes, numbers that are 1 or multiples of 16, and the alignment of pointers."""
    key: list[Any] = [options["num_warps"]]
    for param, value in zip(
        kernel.params, [*args, *(options.get(p.name) for p in kernel.params[len(args) :])], strict=True
    ):
        if param.is_constexpr:
            key.append(value)
        elif isinstance(value, torch.Tensor):
            # Allocations are aligned.
            offset = value.storage_offset() * value.element_size()
            key.append((value.dtype, param.do_not_specialize_on_alignment or offset % 16 == 0))
        else:
            key.append(param.do_not_specialize or (value == 1, value % 16 == 0))
    return tuple(key)


def test_batches_and_widths_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[Any]] = defaultdict(set)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen[kernel.__name__].add(variant(kernel, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(launch, "check_device", lambda device, what: None)
    with torch.device("meta"):
        for batch, width in itertools.product(range(1, 65), range(1, 18)):
            logits = torch.empty(batch, width, VOCABULARY, dtype=torch.bfloat16)
            tokens = torch.empty(batch, width, dtype=torch.int32)
            _, kv, num_draft_tokens, query_lens = torch.empty(4, batch, dtype=torch.int32).unbind()
            scale, bars = torch.empty(batch), torch.empty(batch, width)
            noise = Noise(torch.empty(batch, dtype=torch.int64), kv, scale, bars, offset=1)
            counts = query_lens, num_draft_tokens
            workspace = Workspace(batch, width, "meta")
            verify(logits, tokens, *counts, noise=noise, workspace=workspace, exact=True)
            cutoff(logits, inv_temperature=scale, top_p=scale, query_lens=query_lens, num_draft_tokens=num_draft_tokens)
            rejection_sample(logits, tokens, *counts, logits, noise, workspace=workspace)
    found = {name: len(variants) for name, variants in seen.items()}
    assert found == {
        "verify_kernel": 2,
        "cutoff_scan_kernel": 1,
        "cutoff_search_kernel": 1,
        "rejection_test_kernel": 2,
        "rejection_choose_kernel": 2,
    }


@pytest.mark.parametrize(
    ("wish", "device", "capability", "hip", "dependent"),
    [
        ("1", "cuda", (9, 0), None, True),
        ("", "cuda", (9, 0), None, False),
        ("0", "cuda", (9, 0), None, False),
        ("1", "cuda", (8, 9), None, False),
        ("1", "cuda", (9, 4), "6.4", False),
        ("1", "cpu", None, None, False),
    ],
)
def test_where_launches_are_dependent(wish, device, capability, hip, dependent, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_PDL", wish)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = launch.dependent.__wrapped__(torch.device(device))
    assert found == ({"PDL": True, "launch_pdl": True} if dependent else {"PDL": False})
