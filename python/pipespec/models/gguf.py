"""GGUF files: what they hold.

A file is checked as a whole, every tensor by name, before memory is taken. It is mapped, not read: blocks lie in the file's pages. The reader of the
package gguf takes seconds for a vocabulary, and transformers' own dequantises all weights.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from pipespec_kernels.formats import FORMATS, QuantizedMatrix

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata with a fixed size, in the words of ``struct``."""
_STRING, _ARRAY = 8, 9

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors without blocks, by their numbers."""

_FORMATS = {form.ggml_type: form for form in FORMATS.values()}

_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that are not supported, for messages."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        name: of the tensor.
        shape: in torch's order: ``[rows, columns]``.
        type: a number of :data:`FLOATS`, or of a weight format.
        begin: of its first byte in the file.
        nbytes: its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file whose header has been checked against its size.

    Attributes:
        path: of the file.
        metadata: numbers, strings and lists of them by name.
        tensors: by name, in the order of the file.
        content: the file, mapped; what is written to it stays in this process.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    content: mmap.mmap = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Map a file, and read its header.

        Raises:
            FileNotFoundError: there is none.
            ValueError: no GGUF file, a part of a split one, a big-endian or truncated one, or one with a tensor that does not fit: the message names it.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        size = path.stat().st_size
        with path.open("rb") as opened:
            start = opened.read(8)
            if start[:4] != _MAGIC or len(start) < 8:
                raise ValueError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
            version = int.from_bytes(start[4:], "little")
            if version & 0xFFFF == 0:
                raise ValueError(
                    f"{path} is a big-endian GGUF file: convert it again for this machine (llama.cpp: gguf_convert_endian.py)"
                )
            if version not in _VERSIONS:
                raise ValueError(f"{path} is of GGUF version {version}; versions 2 and 3 are supported")
            content = mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        reader = _Reader(content)
        try:
            count, entries = reader.unpack("QQ")
            metadata = {reader.string(): reader.value() for _ in range(entries)}
            if (parts := metadata.get("split.count", 1)) > 1:
                raise ValueError(
                    f"{path} is part {metadata['split.no'] + 1} of {parts} of a split GGUF file: merge them first (llama.cpp: llama-gguf-split "
                    "--merge)"
                )
            listed = [(reader.string(), reader.dimensions(), *reader.unpack("IQ")) for _ in range(count)]
        except (struct.error, LookupError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{path} is truncated or damaged: its header cannot be read beyond byte {reader.at} of {size}"
            ) from error
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path} is damaged: its general.alignment is {alignment!r}")
        data = -(-reader.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dimensions, kind, offset in listed:
            if name in tensors:
                raise ValueError(f"{path}: there are two tensors {name}")
            tensors[name] = _checked(path, size, name, tuple(reversed(dimensions)), kind, data + offset)
        return cls(path, metadata, tensors, content)

    @property
    def architecture(self) -> str:
        """Name of the architecture."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise ValueError(f"{self.path} does not name an architecture (general.architecture)")
        return found

    # ---- the metadata, of which any value may be of any type

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        return self._value(key, default, str, "text")

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        return self._value(key, default, bool, "a truth value")

    def integer(self, key: str, default: int | None = None) -> int | None:
        """An integer."""
        return self._value(key, default, int, "an integer")

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number."""
        found = self._value(key, default, (int, float), "a number")
        if found is not None and not math.isfinite(found):
            raise ValueError(f"{self.path} is damaged: its {key} is {found}")
        return found

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if there is none."""
        return self._values(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        """A list of integers; empty if there is none."""
        return self._values(key, int, "integers")

    def numbers(self, key: str) -> list[float]:
        """A list of numbers; empty if there is none."""
        return self._values(key, (int, float), "numbers")

    def _value(self, key: str, default: Any, kind: Any, name: str) -> Any:
        found = self.metadata.get(key, default)
        if found is None or (isinstance(found, kind) and (kind is bool or not isinstance(found, bool))):
            return found
        shown = f"a list of {len(found)}" if isinstance(found, list) else repr(found)[:60]
        raise ValueError(f"{self.path} is damaged: its {key} is {shown}, not {name}")

    def _values(self, key: str, kind: Any, name: str) -> Any:
        found = self.metadata.get(key, [])
        # The entries of a list have one type.
        if isinstance(found, list) and (not found or (isinstance(found[0], kind) and not isinstance(found[0], bool))):
            return found
        raise ValueError(f"{self.path} is damaged: its {key} is not a list of {name}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def matrix(self, tensor: GgufTensor) -> QuantizedMatrix:
        """A matrix in blocks, where it lies in the file."""
        form, (rows, columns) = _FORMATS[tensor.type], tensor.shape
        return QuantizedMatrix(form, self._bytes(tensor).view(rows, form.row_bytes(columns)), (rows, columns))

    def floats(self, tensor: GgufTensor) -> torch.Tensor:
        """A copy of a tensor without blocks, in float32."""
        stored = self._bytes(tensor).clone()  # the file aligns to less than torch's kernels like
        return stored.view(FLOATS[tensor.type]).view(tensor.shape).float()

    def release_pages(self) -> None:
        """Give the pages that were read back to the system. What is read again comes from the file."""
        self.content.madvise(mmap.MADV_DONTNEED)

    def __deepcopy__(self, memo: Any) -> GgufFile:
        return self  # a mapping has no copies

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        return torch.frombuffer(self.content, dtype=torch.uint8, offset=tensor.begin, count=tensor.nbytes)


class _Reader:
    """Reads values one after the other. Raises ``IndexError`` at the end of the file, and ``KeyError`` for an unknown type."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 8

    def unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def string(self) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        begin = self.at + 8
        end = begin + int.from_bytes(self.content[self.at : begin], "little")
        if end > len(self.content):
            raise IndexError
        self.at = end
        return self.content[begin:end].decode(errors="replace")

    def dimensions(self) -> tuple[int, ...]:
        (count,) = self.unpack("I")
        return self.unpack(f"{count}Q" if count <= 8 else "")  # more would be damage

    def value(self) -> Any:
        (kind,) = self.unpack("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.unpack(_NUMBERS[kind])[0]
        kind, count = self.unpack("IQ")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.unpack(f"{count}{_NUMBERS[kind]}"))


def _checked(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
    """A tensor whose type, shape and place fit the file."""
    if kind in FLOATS:
        block, block_bytes = 1, FLOATS[kind].itemsize
    elif kind in _FORMATS:
        block, block_bytes = _FORMATS[kind].block, _FORMATS[kind].block_bytes
    else:
        known = f"of the type {_OTHERS[kind]}" if kind in _OTHERS else f"of an unknown type ({kind})"
        raise ValueError(
            f"{path}: tensor {name} is {known}, which is not supported; the types are F32, F16, BF16, {', '.join(FORMATS).upper()}"
        )
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(f"{path}: tensor {name} {list(shape)} does not consist of blocks of {block}")
    nbytes = prod(shape) // block * block_bytes
    if begin + nbytes > size:
        raise ValueError(f"{path} is truncated: tensor {name} ends in byte {begin + nbytes}, the file in byte {size}")
    return GgufTensor(name, shape, kind, begin, nbytes)
