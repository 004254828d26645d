"""Which implementation runs an operation: by device, or one for all by ``PIPESPEC_OPS=reference`` or ``triton`` in the environment."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor

forced = os.environ.get("PIPESPEC_OPS", "")
if forced not in ("", "reference", "triton"):
    raise ValueError(f"PIPESPEC_OPS is {forced!r}: leave it unset, or use 'reference' or 'triton'")


def kernels(tensor: Tensor) -> Any:
    """The Triton kernels if they run calls with this tensor, else None. They do not support float64.

    Raises:
        ValueError: a tensor on the meta device.
    """
    if tensor.dtype is torch.float64 or not (tensor.is_cuda if forced == "" else forced == "triton"):
        if tensor.is_meta:
            raise ValueError("a tensor on the meta device has no values to compute with")
        return None
    try:
        return importlib.import_module("pipespec_kernels.triton")
    except ImportError as error:
        if forced == "triton":
            raise
        warnings.warn(
            f"Triton does not import ({error}): tensors on a GPU go to the slow reference. pip install triton",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
