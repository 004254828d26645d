"""Verification kernels in Triton, one file per family: for tensors on a GPU.

``verify`` (greedy and coupled) and ``select`` (the choice of every column), ``rejection_sample`` (Leviathan's and Chen's test), ``cutoff``
(top-k, top-p and min-p as one logit per row), ``penalize`` (penalties, biases, bitmasks), ``logprobs``; over keys and values with lengths on the device ``kv_append`` and its like, and
``verify_attention``; of a layer ``add_rms_norm``, ``silu_mul`` and ``rope_append``, and products of few rows with them: ``linear_small`` and ``qkv_append``, also of quantised
weights, whose rows ``decode_rows`` writes out. No call waits for the device, allocates memory that a graph
could not replay, or depends on earlier calls, so all can be captured in a CUDA graph.

With ``TRITON_INTERPRET=1`` in the environment before the first import of triton, the same kernels run in triton's
interpreter on CPU tensors, one program after the other in numpy: for tests, thousands of times slower.
"""

from pipespec_kernels.noise import Streams
from pipespec_kernels.triton.activation import silu_mul
from pipespec_kernels.triton.attention import verify_attention
from pipespec_kernels.triton.cutoff import cutoff
from pipespec_kernels.triton.experts import experts_small, mix_experts
from pipespec_kernels.triton.kv import kv_append
from pipespec_kernels.triton.launch import Config, RowState, Workspace
from pipespec_kernels.triton.linear import linear_small, qkv_append
from pipespec_kernels.triton.logprobs import logprobs
from pipespec_kernels.triton.lookup import prompt_lookup
from pipespec_kernels.triton.norm import add_rms_norm
from pipespec_kernels.triton.penalize import penalize
from pipespec_kernels.triton.rejection_sample import rejection_sample
from pipespec_kernels.triton.rope import rope_append
from pipespec_kernels.triton.tiles import decode_rows
from pipespec_kernels.triton.verify import select, verify

__all__ = [
    "Config",
    "RowState",
    "Streams",
    "Workspace",
    "add_rms_norm",
    "cutoff",
    "decode_rows",
    "experts_small",
    "kv_append",
    "linear_small",
    "logprobs",
    "mix_experts",
    "penalize",
    "prompt_lookup",
    "qkv_append",
    "rejection_sample",
    "rope_append",
    "select",
    "silu_mul",
    "verify",
    "verify_attention",
]
