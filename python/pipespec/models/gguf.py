"""GGUF files: what they hold.

A file is checked as a whole, every tensor by name, before memory is taken. It is mapped, not read: blocks lie in the file's pages. The reader of the
package gguf takes seconds for a vocabulary, and transformers' own dequantises all weights. Any part of a split file stands for all of them.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipespec_kernels.formats import FORMATS, QuantizedMatrix

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata with a fixed size, in the words of ``struct``."""
_STRING, _ARRAY = 8, 9

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors without blocks, by their numbers."""

_FORMATS = {form.ggml_type: form for form in FORMATS.values() if form.ggml_type is not None}

CONVERTED = {
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Types whose matrices become other blocks, which hold the same weights (:mod:`pipespec.models.gguf_models`): their names, weights and bytes of a block."""

_OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0", 42: "Q2_0"}
_OLD_LAYOUTS = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Types that are not supported, for messages. The second ones are of older programs, which wrote the same weights for one processor."""

_MAX_ENTRIES = 1 << 22
"""Most entries of a list in the metadata. The largest vocabularies have 262,144 tokens and twice as many merges."""

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        name: of the tensor.
        shape: in torch's order: ``[rows, columns]``.
        type: a number of :data:`FLOATS`, or of a weight format.
        begin: of its first byte in its part.
        nbytes: its bytes.
        part: the index of the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    begin: int
    nbytes: int
    part: int = 0

    @property
    def type_name(self) -> str:
        """As llama.cpp calls it."""
        if self.type in FLOATS:
            return {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[FLOATS[self.type]]
        return CONVERTED[self.type][0] if self.type in CONVERTED else _FORMATS[self.type].name.upper()


@dataclass(frozen=True)
class GgufFile:
    """A file whose header has been checked against its size.

    Attributes:
        path: of the file, of a split one that of its first part.
        metadata: numbers, strings and lists of them by name.
        tensors: by name, in the order of the file.
        parts: the parts of the file, mapped; what is written to them stays in this process.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    parts: tuple[_Part, ...] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Map a file, and read its header.

        Args:
            path: of the file, or of any part of a split one.

        Raises:
            FileNotFoundError: there is none, or a part is missing.
            ValueError: no GGUF file, a part of a split one whose name does not say which, a big-endian or truncated one, or one with a tensor that does
                not fit: the message names it.
        """
        path = Path(path)
        name = _PART.search(path.name)
        if name is not None and int(name[1]) > 1 and path.is_file():
            path = path.with_name(f"{path.name[: name.start()]}-00001-of-{name[2]}{path.name[name.end() :]}")
        first = _Part.open(path)
        metadata, tensors = first.header()
        made = cls(path, metadata, tensors, (first,))
        count, number = made.integer("split.count", 1) or 1, made.integer("split.no", 0) or 0
        if count <= 1:
            return made
        if number or name is None or int(name[2]) != count:
            raise ValueError(
                f"{path} is part {number + 1} of {count} of a split GGUF file, and its name does not say so: call the parts ...-00001-of-{count:05}.gguf and "
                "so on, next to each other, or merge them (llama.cpp: llama-gguf-split --merge)"
            )
        parts, found = [first], dict(tensors)
        for i in range(1, count):
            part = _Part.open(
                path.with_name(f"{path.name[: name.start()]}-{i + 1:05}-of-{count:05}{path.name[name.end() :]}")
            )
            for tensor in part.header()[1].values():
                if tensor.name in found:
                    raise ValueError(f"{part.path}: there are two tensors {tensor.name}")
                found[tensor.name] = replace(tensor, part=i)
            parts.append(part)
        return cls(path, metadata, found, tuple(parts))

    @property
    def architecture(self) -> str:
        """Name of the architecture."""
        found = self.text("general.architecture")
        if found is None:
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
        """A copy of a tensor without blocks, in float32; of a type in :data:`CONVERTED`, its weights by the package gguf.

        Raises:
            ValueError: the package gguf is not there, or too old.
        """
        stored = self.stored(tensor)
        if tensor.type in FLOATS:
            return stored.view(FLOATS[tensor.type]).view(tensor.shape).float()
        try:
            from gguf import GGMLQuantizationType, quants

            rows = quants.dequantize(
                stored.view(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1).numpy(),
                GGMLQuantizationType(tensor.type),
            )
        except (ImportError, ValueError, NotImplementedError) as error:
            name = CONVERTED[tensor.type][0]
            raise ValueError(
                f"{self.path}: tensor {tensor.name} is of the type {name}, which the package gguf reads: install a current one (pip install -U gguf)"
            ) from error
        return torch.from_numpy(rows).float().view(tensor.shape)

    def stored(self, tensor: GgufTensor) -> torch.Tensor:
        """A copy of a tensor's bytes."""
        return self._bytes(tensor).clone()  # the file aligns to less than torch's kernels like

    def release_pages(self) -> None:
        """Give the pages that were read back to the system. What is read again comes from the file."""
        for part in self.parts:
            part.content.madvise(mmap.MADV_DONTNEED)

    def changed(self) -> Path | None:
        """The part that was written to, replaced in place or truncated since it was opened; None: there is none. A file that was renamed or deleted has not changed."""
        return next((part.path for part in self.parts if part.has_changed()), None)

    def __deepcopy__(self, memo: Any) -> GgufFile:
        return self  # a mapping has no copies

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        content = self.parts[tensor.part].content
        return torch.frombuffer(content, dtype=torch.uint8, offset=tensor.begin, count=tensor.nbytes)


@dataclass(frozen=True)
class _Part:
    """A file of a GGUF model, mapped. The descriptor stays open: it tells whether the content changes, wherever the name leads."""

    path: Path
    content: mmap.mmap
    opened: BinaryIO
    state: tuple[int, int]

    @classmethod
    def open(cls, path: Path) -> _Part:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        opened = path.open("rb")
        start = opened.read(8)
        if start[:4] != MAGIC or len(start) < 8:
            raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
        version = int.from_bytes(start[4:], "little")
        if version & 0xFFFF == 0:
            raise ValueError(
                f"{path} is a big-endian GGUF file: convert it again for this machine (llama.cpp: gguf_convert_endian.py)"
            )
        if version not in _VERSIONS:
            raise ValueError(f"{path} is of GGUF version {version}; versions 2 and 3 are supported")
        content = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return cls(path, content, opened, _state(opened))

    def has_changed(self) -> bool:
        return _state(self.opened) != self.state

    def header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """The metadata, and the tensors by name."""
        path, size, reader = self.path, len(self.content), _Reader(self.content)
        try:
            count, entries = reader.unpack("QQ")
            metadata = {reader.string(): reader.value() for _ in range(entries)}
            listed = [(reader.string(), reader.dimensions(), *reader.unpack("IQ")) for _ in range(count)]
        except (struct.error, LookupError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{path} is truncated or damaged: its header cannot be read beyond byte {reader.at} of {size}"
            ) from error
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"{path} is damaged: its general.alignment is {alignment!r}")
        begin = -(-reader.at // alignment) * alignment
        expected, tensors = 0, dict[str, GgufTensor]()
        for name, dimensions, kind, offset in listed:
            if name in tensors:
                raise ValueError(f"{path}: there are two tensors {name}")
            if offset != expected:
                raise ValueError(
                    f"{path} is damaged: tensor {name} begins at {offset} of the weights, and the one before it ends at {expected}"
                )
            tensors[name] = _checked(path, size, name, tuple(reversed(dimensions)), kind, begin + offset)
            expected += -(-tensors[name].nbytes // alignment) * alignment
        if tensors and abs(size - begin - expected) >= alignment:
            raise ValueError(
                f"{path} is damaged: its weights end in byte {begin + expected}, and the file in byte {size}"
            )
        return metadata, tensors


def _state(opened: BinaryIO) -> tuple[int, int]:
    found = os.fstat(opened.fileno())
    return found.st_size, found.st_mtime_ns


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
        if count > _MAX_ENTRIES:
            raise OverflowError
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.unpack(f"{count}{_NUMBERS[kind]}"))


def _checked(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
    """A tensor whose type, shape and place fit the file."""
    if kind in FLOATS:
        block, block_bytes = 1, FLOATS[kind].itemsize
    elif kind in _FORMATS:
        block, block_bytes = _FORMATS[kind].block, _FORMATS[kind].block_bytes
    elif kind in CONVERTED:
        _, block, block_bytes = CONVERTED[kind]
    else:
        known = {**_OTHERS, **_OLD_LAYOUTS}.get(kind)
        what = f"of an unknown type ({kind})" if known is None else f"of the type {known}"
        instead = (
            ": it is Q4_0 in an order for one processor; take the file in Q4_0 (or IQ4_NL) instead"
            if known and kind in _OLD_LAYOUTS
            else ""
        )
        names = ", ".join(
            [*(form.name.upper() for form in _FORMATS.values()), *(name for name, _, _ in CONVERTED.values())]
        )
        raise ValueError(
            f"{path}: tensor {name} is {what}, which is not supported{instead or f'; the types are F32, F16, BF16, {names}'}"
        )
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(f"{path}: tensor {name} {list(shape)} does not consist of blocks of {block}")
    nbytes = prod(shape) // block * block_bytes
    if begin + nbytes > size:
        raise ValueError(f"{path} is truncated: tensor {name} ends in byte {begin + nbytes}, the file in byte {size}")
    return GgufTensor(name, shape, kind, begin, nbytes)
