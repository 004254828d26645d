"""Verification kernels in Triton, one file per family: for tensors on a GPU.

``verify`` (greedy and coupled) and ``select`` (the choice of every column), ``verify_ratio`` (Leviathan's and Chen's test), ``cutoff`` (top-k, top-p and min-p as one
logit per row). Nothing here waits for the device, allocates what a graph could not replay, or depends on what a caller
did before: all can be captured in a CUDA graph.

With ``TRITON_INTERPRET=1`` in the environment before the first import of triton, the same kernels run in triton's
interpreter on CPU tensors, one program after the other in numpy: for tests, thousands of times slower.
"""

from pipespec_kernels.noise import Streams
from pipespec_kernels.triton.cutoff import cutoff
from pipespec_kernels.triton.launch import Config, RowState, Workspace
from pipespec_kernels.triton.verify import select, verify
from pipespec_kernels.triton.verify_ratio import verify_ratio

__all__ = ["Config", "RowState", "Streams", "Workspace", "cutoff", "select", "verify", "verify_ratio"]
