"""What can be said of a model's weights by reading them: their digests, and the tensors that are not finite."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pipespec.models.gguf import FLOATS, GgufFile
from pipespec.models.loading import is_gguf, weight_files
from pipespec_kernels.formats import FORMATS

_FORMATS = {form.ggml_type: form for form in FORMATS.values()}
_PIECE = 1 << 26
"""Elements that are looked at together."""


def digests(path: str | Path) -> dict[str, str]:
    """The SHA-256 of each file of weights, by its name.

    Args:
        path: a folder with safetensors, or a GGUF file.

    Raises:
        OSError: a file cannot be read.
    """
    files = [part.path for part in GgufFile.open(path).parts] if is_gguf(path) else weight_files(path)
    found = {}
    for file in files:
        with file.open("rb") as opened:
            found[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def not_finite(path: str | Path) -> list[str]:
    """The names of the tensors that hold NaN or an infinity, in the files' order. Of blocks the float16 scales are read: the codes are finite.

    Types whose scales lie elsewhere (:func:`not_read`: ``MXFP4``, ``NVFP4``, the small ``IQ`` types) are not read. Arguments and errors are those of :func:`digests`.
    """
    return [name for name, tensor in _floats(path) if not _is_finite(tensor)]


def not_read(path: str | Path) -> dict[str, int]:
    """The tensors that :func:`not_finite` does not read, their number by type."""
    if not is_gguf(path):
        return {}
    tensors = GgufFile.open(path).tensors.values()
    return dict(
        Counter(tensor.type_name for tensor in tensors if not (tensor.type in FLOATS or _scales_at(tensor.type)))
    )


def _scales_at(kind: int) -> Sequence[int]:
    """Where a block of a type has its float16 scales."""
    return _FORMATS[kind].halves if kind in _FORMATS else ()


def _floats(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    if not is_gguf(path):
        for file in weight_files(path):
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118  # not a mapping
        return
    whole = GgufFile.open(path)
    for name, tensor in whole.tensors.items():
        if tensor.type in FLOATS:
            yield name, whole.floats(tensor)
        elif places := _scales_at(tensor.type):
            stored = whole.stored(tensor).view(-1, _FORMATS[tensor.type].block_bytes)
            yield name, torch.cat([stored[:, at : at + 2] for at in places], 1).view(torch.float16)
        whole.release_pages()


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    values: Any = tensor if tensor.element_size() > 1 else tensor.float()  # floats of 8 bits know no isfinite
    return all(bool(piece.isfinite().all()) for piece in values.reshape(-1).split(_PIECE))
