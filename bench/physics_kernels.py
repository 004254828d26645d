"""The small kernel of ``bench.physics``."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton, where ``PDL`` does not compile
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def add_one(x, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Add 1 to float32 ``[programs * BLOCK]``. ``PDL``: launched with programmatic dependent launch."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
