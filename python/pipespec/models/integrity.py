"""What can be said of a model's weights by reading them: their digests, and the tensors that are not finite."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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

    Types whose scales lie elsewhere (``IQ2_XXS`` and the like, ``NVFP4``) are not read. Arguments and errors are those of :func:`digests`.
    """
    return [name for name, tensor in _floats(path) if not _is_finite(tensor)]


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
        elif tensor.type in _FORMATS:
            form, stored = _FORMATS[tensor.type], whole.stored(tensor).view(-1, _FORMATS[tensor.type].block_bytes)
            scales = [stored[:, at : at + 2] for at in form.halves]
            if scales:
                yield name, torch.cat(scales, 1).view(torch.float16)
        whole.release_pages()


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    values: Any = tensor if tensor.element_size() > 1 else tensor.float()  # floats of 8 bits know no isfinite
    return all(bool(piece.isfinite().all()) for piece in values.reshape(-1).split(_PIECE))
