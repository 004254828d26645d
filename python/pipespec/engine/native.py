"""The native form of a model's forward: one call into C++ per step, on the weights where the model has them.

A model of :data:`pipespec.models.families.NATIVE_CLASSES` on the CPU, or parts of one, take this form after their outputs were compared with those of
the model's own modules. The native sums are independent of the number of rows and columns, so a text does not depend on batch, drafts, schedule or
cuts into parts, in bfloat16 either.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.form import (
    LayerLoop,
    PartsForm,
    check_outputs,
    check_parts,
    probe,
    probe_cache,
    probe_inputs,
    probed,
)
from pipespec.models import description, families
from pipespec.models.families import NotReadable
from pipespec.models.parts import ModelParts
from pipespec.models.properties import changing_buffers, dynamic_frequencies, reset_rotary, rotary_changes_at
from pipespec.models.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    has_blocks,
    packed_copies_dropped,
    pages_released,
)
from pipespec.process.threads import Lock
from pipespec_kernels._native import MemoryWatch, use_huge_pages
from pipespec_kernels.decoder import ANY, NativeDecoder, Taps
from pipespec_kernels.env import host_memory

SHARE = 0.01
"""Largest share of the forwards' time of the last call for the values that the beginning of a call compares."""

LONGEST = 0.02
"""Seconds that they may take, so that they do not delay the first token."""

TABLE = 1 << 20
"""Bytes from which on a table's rows are compared only once they were read. The others stay in their file."""

packing_seconds: ContextVar[float] = ContextVar("packing_seconds", default=0.0)
"""Time in which the calls of this context have read and packed weights."""

MOVING = 0.1
"""Share of the forwards' time in which weights move into huge pages, until all lie there. As much is lost in small pages."""

MOVED = 32 << 20
"""Bytes that move at a time."""

HEAD_ROWS = 4096
"""Rows of the head that are compared with the model's own module."""


class Checksums:
    """Digests of all values of some tensors, for changes that leave no version: through ``.data``, numpy or DLPack, and those of inference tensors.

    The beginning of a call compares all small tensors (norms, biases, frequencies of RoPE), a few values of the others, and more of them in turn: samples,
    of which every row of a matrix has one, then blocks with all their values, for :data:`SHARE` of the time of the last call. Its end compares
    what is left, so that a text of old weights is noticed before the next one. Models of up to 512 KiB are read as a whole at the beginning.

    Args:
        tensors: on the CPU. Others are left out.
        tables: those among them that have a row ``[*, n]`` per token, of which :meth:`read` names the rows that are to be compared. They are contiguous.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor] = ()) -> None:
        # They keep the memory.
        self._tensors = [tensor.detach() for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
        self._watch, self._credit = MemoryWatch(), 0.0
        self._tables = [(table.detach(), np.zeros(len(table), dtype=bool)) for table in tables]
        """Each with the rows that were read."""
        by_rows = {table.data_ptr() for table in tables}
        for tensor in self._tensors:
            if tensor.data_ptr() in by_rows:
                continue
            size = tensor.element_size()
            span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            # One sample per row of a contiguous matrix, along a diagonal that wraps around.
            step = tensor.shape[-1] + 1 if tensor.ndim > 1 else 16
            self._watch.add(tensor.data_ptr(), span * size, step * size)
        self._watch.remember(torch.get_num_threads())

    def read(self, tokens: torch.Tensor) -> None:
        """Note that a forward reads the tables' rows of ``tokens``, integers of any shape. Those outside of a table are left out."""
        for table, is_read in self._tables:
            ids = tokens.numpy().ravel()
            ids = ids[(ids >= 0) & (ids < len(table))]
            new = np.unique(ids[~is_read[ids]])
            is_read[new] = True
            size = table.shape[1] * table.element_size()
            for row in new.tolist():
                self._watch.remember_block(table.data_ptr() + row * size, size)

    def spend(self, seconds: float) -> None:
        """Note the time of a forward."""
        self._credit += SHARE * seconds

    def agree(self) -> bool:
        """Whether the tensors have the values that they had, as far as the beginning of a call reads them."""
        seconds, self._credit = min(self._credit, LONGEST), 0.0
        return bool(self._watch.agree(seconds))

    def rest_agrees(self) -> bool:
        """Whether they do, by all values that were not compared since :meth:`agree`."""
        while self._watch.has_rest:
            if not self._watch.rest_agrees(torch.get_num_threads()):
                return False
        return True


class NativeForm(PartsForm):
    """A model, or parts of one, as the native decoder runs it. Hidden states are float32.

    It reads matrices of numbers where the model has them, and copies those in blocks. Of float32 matrices whose values are all bfloat16's it makes copies
    of half the size where they fit: a forward of few columns takes half the time then, with the same bits.

    Args:
        model: one that :func:`pipespec.models.families.identity` accepts.
        reserved: bytes that will be allocated in addition to the copies, for caches and other parts.
        watches: whether changes of weights are to be noticed.

    Raises:
        NotReadable: the decoder cannot take the model, or copies of its blocks would take more than half of the free memory.
    """

    repeats_bits = True

    def __init__(self, model: PreTrainedModel | ModelParts, reserved: int, *, watches: bool = True) -> None:
        parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
        super().__init__(parts, torch.float32)
        packed, (total, free) = description.packed_bytes(parts), host_memory()
        # The other half is for caches that grow, and for the rest of the machine.
        room = free // 2 - packed - reserved if total else ANY
        if packed and room < 0:
            raise NotReadable(
                f"there is no room for a packed copy ({packed + reserved >> 20} MiB with its cache, {free >> 20} are free)"
            )
        read = description.read(model)
        try:
            with pages_released(parts):
                self.decoder = NativeDecoder(
                    read.shape,
                    read.layers,
                    windows=read.windows,
                    embedding=read.embedding,
                    norm=read.norm,
                    norm_bias=read.norm_bias,
                    head=read.head,
                    head_bias=read.head_bias,
                    head_scale=read.head_scale,
                    per_layer=read.per_layer,
                    room=max(room, 0),
                )
        except (ValueError, TypeError) as error:
            raise NotReadable(f"the decoder does not take it: {error}") from error
        self.token, self._rotary, self._rotations = object(), read.rotary, read.rotations
        self._rotary_dims = read.rotary_dims
        # One call runs all parts.
        self._steps = parts.embed is not None and parts.head is not None
        tensors: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for _, module in parts.named_modules() if watches else ():
            buffers = {name: module._buffers[name] for name in module._buffers.keys() - changing_buffers(module)}
            held = (*module._parameters.values(), *buffers.values())
            tensors[isinstance(module, (QuantizedEmbedding, QuantizedLinear))] += [
                tensor for tensor in held if tensor is not None
            ]
        tables = _tables_of(parts) if watches else []
        self._checksums = Checksums(tensors[False], [table for table in tables if table.is_floating_point()])
        self._of_blocks = Checksums(tensors[True], [table for table in tables if not table.is_floating_point()])
        self._small_pages: list[tuple[int, int]] = []
        """Address and size of the weights that are to move into huge pages."""
        self._room_to_move, self._time_to_move = 0, 0.0
        self._moving = Lock()
        self._has_versions = not any(map(torch.Tensor.is_inference, tensors[False]))
        # Calls at the same time compare in one round. What one of them finds counts for all that run in this form.
        self._comparing, self._is_stale = Lock(), False
        self._query_factors = read.query_factors
        # Dynamic RoPE; a longer text of a target is left to transformers.
        self._changes_at = None if read.rotary is None else rotary_changes_at(read.rotary)
        self._frequencies = [frequencies.clone() for frequencies in dynamic_frequencies(read.rotary)]
        self._table: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        """Cosines and sines, float32 ``[rotations, positions, rotary_dim]``, and the factors of queries ``[positions]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of weights."""
        return self.decoder.nbytes

    def is_current(self) -> bool:
        # The identity has the weights' versions. The checksums notice changes that do not raise a version. Any change of an inference tensor is one.
        with self._comparing:
            if not self._is_stale:
                is_current = self._checksums.agree()
                # Comparing brings blocks into memory that lie in a file, and nothing else reads them.
                with pages_released(self.parts):
                    is_current = is_current and self._of_blocks.agree()
                self._is_stale = not (is_current and (self._has_versions or self._checksums.rest_agrees()))
            return not self._is_stale

    def was_current(self) -> bool:
        with self._comparing:
            if not self._is_stale:
                # Matrices in blocks may lie in a file, which a whole read would bring into memory again.
                self._is_stale = not self._checksums.rest_agrees()
            return not self._is_stale

    def note_tokens(self, tokens: torch.Tensor) -> None:
        """Note that a forward, of this form or of the model's own modules, reads the embeddings of ``tokens``."""
        self._checksums.read(tokens)
        self._of_blocks.read(tokens)

    def move_weights(self, reserved: int) -> None:
        """Let the weights that this form reads where the model has them move into huge pages, with all that refers to them, during its forwards.

        A checkpoint of 16 bits lies in the small pages of its file. None of them are moved where the system has no huge pages, or the weights would take more
        than half of the free memory: a forward of few columns takes up to a fifth longer then. Weights may not be written to during a forward.

        Args:
            reserved: bytes that will be allocated for other things.
        """
        total, free = host_memory()
        weights = [
            weight
            # Of tables few rows are read, unless one is the head, too.
            for weight in self.parts._replace(embed=None, per_layer=None).parameters()
            # The form may have copies of float32 matrices.
            if weight.device.type == "cpu" and (weight.dtype != torch.float32 or not self.nbytes)
        ]
        memory = {weight.data_ptr(): weight.nbytes for weight in weights if weight.is_contiguous()}
        room = max(free // 2 - reserved, 0) if total else ANY
        self._room_to_move = room if sum(memory.values()) <= room else 0
        self._small_pages = [
            (max(at, begin), min(at + MOVED, begin + size) - max(at, begin))
            for begin, size in _joined(memory)
            # Cut between huge pages.
            for at in range(begin // MOVED * MOVED, begin + size, MOVED)
        ]

    def _move_some(self, seconds: float) -> None:
        """Move weights for a share of the time that a forward took."""
        self._time_to_move += MOVING * seconds
        if not self._small_pages:
            return
        with self._moving.attempt() as is_held:
            while is_held and self._small_pages and self._time_to_move > 0:
                total, free = host_memory()
                if total and free < 4 * MOVED:
                    break  # another model, or another process, has taken the memory
                began, part = time.perf_counter(), self._small_pages.pop()
                self._room_to_move -= use_huge_pages([part], self._room_to_move, torch.get_num_threads())
                self._time_to_move -= time.perf_counter() - began

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        began = time.perf_counter()
        features = cache.features
        if self._steps and (features is None or (isinstance(features, Features) and features.dtype in families.DTYPES)):
            storage, q = cache.open_storage(tokens.shape[1]), tokens.shape[1]
            taps = None if features is None else features.taps(storage[2], q, self.decoder.shape.hidden)
            self.note_tokens(tokens)
            rope, states = self._rope(cache.capacity, max(storage[2], default=0) + q), cache.open_states()
            outputs = self.decoder.step(tokens, *storage, *rope, keep=keep, taps=taps, states=states)
            if isinstance(features, Features):
                # As in transformers' hidden_states.
                features.change(self.decoder.num_layers, self.parts.norm, storage[2], q)
            cache.close()
        else:
            outputs = super().__call__(tokens, cache, keep)
        seconds = time.perf_counter() - began
        for checksums in (self._checksums, self._of_blocks):
            checksums.spend(seconds)
        self._move_some(seconds)
        return outputs

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        self.note_tokens(tokens)
        return self.decoder.embed(tokens)

    def run_layers(
        self,
        hidden: torch.Tensor,
        cache: RowCache,
        features: Collection[int] = (),
        side: torch.Tensor | None = None,
        *,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As :meth:`PartsForm.run_layers`. ``side [rows, q, H]``: for layers with side inputs."""
        first, (rows, q, size) = self.parts.first, hidden.shape
        storage = cache.open_storage(q)
        rope = self._rope(cache.capacity, max(storage[2], default=0) + q)
        found = [index for index in features if 0 < index - first <= self.decoder.num_layers]
        out = torch.empty((rows, q, len(found), size), dtype=torch.float32, device="cpu")
        taps = Taps([index - first for index in found], out.flatten(2), [0] * rows)
        states, tapped = cache.open_states(), taps if found else None
        hidden = self.decoder.run_layers(hidden, *storage, *rope, side=side, tokens=tokens, taps=tapped, states=states)
        cache.close()
        return hidden, {index: part.contiguous() for index, part in zip(found, out.unbind(2), strict=True)}

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        columns = hidden.shape[1]
        return self.decoder.logits(hidden if keep == columns else hidden[:, columns - keep :])

    def _rope(self, capacity: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The table of a forward up to position ``length - 1``, in a cache of ``capacity``, from the model's own rotary embedding."""
        if self._changes_at is not None and length > self._changes_at:
            return self._angles_of(length)  # those of this forward
        wanted, table = capacity, self._table
        if self._changes_at is not None:
            wanted = min(capacity, self._changes_at)
            reset_rotary(self._rotary)
            # Its own frequencies are not among the checksums, as forwards change them.
            now = dynamic_frequencies(self._rotary)
            if not all(map(torch.equal, now, self._frequencies)):
                table, self._frequencies = None, [frequencies.clone() for frequencies in now]
        if table is None or table[0].shape[1] < wanted:
            self._table = table = self._angles_of(wanted)
        return table

    def _angles_of(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        like, positions = (torch.empty(0, dtype=torch.float32, device="cpu"), torch.arange(count, device="cpu")[None])
        calls = [{} if kind is None else {"layer_type": kind} for kind in self._rotations]
        found = [_angles(self._rotary(like, position_ids=positions, **more)) for more in calls]
        width = self.decoder.shape.rotated
        cos, sin = (
            torch.stack(
                [
                    F.pad(_in_halves(each[i][0], size), (0, width - size))
                    for each, size in zip(found, self._rotary_dims, strict=True)
                ]
            ).contiguous()
            for i in range(2)
        )
        factors = None if self._query_factors is None else self._query_factors(positions[0]).float().contiguous()
        return cos, sin, factors


def _in_halves(angles: torch.Tensor, size: int) -> torch.Tensor:
    """Cosines or sines of a model ``[positions, n]`` in the decoder's order, ``[positions, size]``. Some models repeat each element, some have one of each pair."""
    half = size // 2
    if angles.shape[1] == size and torch.equal(angles[:, :half], angles[:, half:]):
        return angles
    angles = angles if angles.shape[1] == half else angles[:, ::2]
    return torch.cat([angles, angles], 1)


ROUGHLY = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""By dtype, the largest root mean square difference of what layers add from what the model's own add, relative to that, that needs no closer look. A factor that
the form lacks is far more."""


def _angles(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of what a rotary embedding gives: both, or complex numbers of which they are the parts."""
    return found if isinstance(found, tuple) else (found.real, found.imag)


def native_form(model: PreTrainedModel | ModelParts, reserved: int = 0) -> NativeForm:
    """Make the form of a model or of parts of one, and compare the outputs with those of the model's own modules.

    Layers of one kind run the same code. So the first layers, up to the last kind, are compared as a model of their own, whose head is the first rows of the
    head, see :func:`check_outputs`, and as many layers in the middle and at the end roughly: a first call does not wait for a whole model in a wider dtype.
    Sections that differ by more are compared as the first layers are.

    Args:
        model: a known one, see :func:`pipespec.engine.known.identify`.
        reserved: as for :class:`NativeForm`.

    Raises:
        NotReadable: the decoder cannot take the model, or the outputs do not agree.
    """
    from pipespec.process.progress import announced

    with torch.inference_mode(), announced("reading the weights"), ExitStack() as ends:
        begin = time.perf_counter()
        ends.callback(lambda: packing_seconds.set(packing_seconds.get() + time.perf_counter() - begin))
        form = NativeForm(model, reserved)
        parts = form.parts
        form.move_weights(reserved)
        if has_blocks(parts):
            with packed_copies_dropped(), pages_released(parts):
                check_parts(form, probe_inputs(parts))
            return form
        samples = _samples_of(parts)
        if len(samples) == 1:
            _check(model, form, probe_inputs(parts))
            return form
        for i, sample in enumerate(samples):
            part, given = NativeForm(sample, reserved, watches=False), probe_inputs(sample)
            if i == 0 or not _agrees_roughly(sample, part, given):
                _check(sample, part, given)
        return form


def _samples_of(parts: ModelParts) -> list[ModelParts]:
    """Parts that run all code of the given ones: layers of all kinds at the beginning, with embedding and head, in the middle and at the end. Where these are
    most layers, the given parts."""
    kinds, count = _layers_of_all_kinds(parts), len(parts.layers)
    # Layers that read what others keep, or inputs of their own, do not run alone.
    depend = parts.per_layer is not None or bool(getattr(parts.config, "num_kv_shared_layers", 0))
    if depend or 2 * kinds >= count:
        return [parts]
    begin = parts._replace(layers=parts.layers[:kinds])
    if type(parts.embed) is nn.Embedding and type(parts.head) is nn.Linear:
        # With a last panel that is as wide as the whole head's.
        rows = HEAD_ROWS + parts.head.out_features % 16
        embed, head = nn.Embedding.from_pretrained(parts.embed.weight[:rows]), copy.copy(parts.head)
        head._parameters = {
            name: None if value is None else nn.Parameter(value[:rows], requires_grad=False)
            for name, value in parts.head._parameters.items()
        }
        begin = begin._replace(embed=embed, head=head)
    firsts = sorted({max(kinds, (count - kinds) // 2), count - kinds})
    sections = (
        parts._replace(layers=parts.layers[i : i + kinds], first=parts.first + i, embed=None, norm=None, head=None)
        for i in firsts
    )
    return [begin, *sections]


def _tables_of(parts: ModelParts) -> list[torch.Tensor]:
    """Rows of embeddings, of tokens and of the layers' own inputs, where forwards read some of them alone: weights, or blocks in bytes."""
    inputs = None if parts.per_layer is None else parts.per_layer.embed
    found = [tensor for module in (parts.embed, inputs) if module is not None for tensor in _held(module)]
    uses = Counter(tensor.data_ptr() for _, module in parts.named_modules() for tensor in _held(module))
    # The decoder copies what is not contiguous, and a copy is compared as a whole.
    return [
        tensor
        for tensor in found
        if tensor.device.type == "cpu"
        and tensor.nbytes >= TABLE
        and tensor.is_contiguous()
        and uses[tensor.data_ptr()] == 1
    ]


def _held(module: nn.Module) -> list[torch.Tensor]:
    """The tensors of a module itself."""
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None]


def _joined(memory: dict[int, int]) -> list[tuple[int, int]]:
    """Ranges of memory, size by address, in their order; those that touch are one."""
    found: list[tuple[int, int]] = []
    for begin, size in sorted(memory.items()):
        if found and begin <= sum(found[-1]):
            first = found[-1][0]
            found[-1] = first, max(sum(found[-1]), begin + size) - first
        else:
            found.append((begin, size))
    return found


def _own_outputs(model: PreTrainedModel | ModelParts, given: torch.Tensor) -> torch.Tensor:
    """Outputs of all columns by the model's own modules."""
    if isinstance(model, ModelParts):
        return LayerLoop(model)(given, probe_cache(model, len(given)), given.shape[1])
    logits: torch.Tensor = model(input_ids=given, use_cache=False).logits
    return logits


def _check(model: PreTrainedModel | ModelParts, form: NativeForm, given: torch.Tensor) -> None:
    own = probed(_own_outputs(model, given))
    check_outputs(form.parts, given, own, probe(form, probe_cache(form.parts), given))


def _agrees_roughly(section: ModelParts, form: NativeForm, given: torch.Tensor) -> bool:
    """Compare layers of a section. ``given``: hidden states."""
    added = _own_outputs(section, given).float() - given
    difference = form(given, probe_cache(section), given.shape[1]).float() - given - added
    # Not a number compares false.
    return bool(difference.norm() <= ROUGHLY[section.dtype] * added.norm())


def _layers_of_all_kinds(parts: ModelParts) -> int:
    """How many of the first layers there are up to the first one of the last kind. A kind has the same classes, settings, sizes and window."""
    kinds: dict[tuple[Any, ...], int] = {}
    types = getattr(parts.config, "layer_types", None)
    for i, layer in enumerate(parts.layers):
        kind: list[Any] = [types and types[parts.first + i]]
        for module in layer.modules():
            settings = {
                name: value
                for name, value in vars(module).items()
                if name != "layer_idx" and isinstance(value, (bool, int, float, str, tuple, type(None)))
            }
            tensors = [(name, t.shape, t.dtype) for name, t in module._parameters.items() if t is not None]
            kind += [type(module), repr(sorted(settings.items())), *tensors]
        kinds.setdefault(tuple(kind), i)
    return 1 + max(kinds.values(), default=-1)
