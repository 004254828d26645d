"""The forward of decoders on the CPU, one native call per step, from a description of their layers.

:class:`NativeDecoder` reads a model's matrices where they lie: bfloat16, float32 or int8. It copies those that are quantised, into panels that a forward
reads front to back, and where there is room float32 ones whose values are all bfloat16's, as such. Arithmetic is float32, whatever the dtypes of weights
and cache; products with quantised matrices are those of :mod:`pipespec_kernels.packed`.

Every number is computed by one sequence of operations. It depends neither on the other rows and columns of the call nor on the
number of threads, so one forward of ``q`` columns gives the same bits as ``q`` forwards of one column. Only other instructions
(``PIPESPEC_SIMD``) may round differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.decoder_layers import CODES, Address, Addresses, DecoderShape, LayerSizes, LayerWeights
from pipespec_kernels.formats import QuantizedMatrix
from pipespec_kernels.packed import num_threads
from pipespec_kernels.recurrent import States, StateSizes

__all__ = ["ANY", "DecoderShape", "LayerSizes", "LayerWeights", "NativeDecoder", "PerLayerInputs", "Taps"]

ANY = 1 << 62
"""Bytes that are more than any memory has."""

_TOKEN_BYTES = {torch.int32: 4, torch.int64: 8}


class Taps(NamedTuple):
    """Where a forward copies hidden states.

    Attributes:
        layers: k for what layer k reads: the embedding, or the output of layer k - 1; the number of layers for the last output.
        out: float32 or bfloat16 ``[rows, positions, len(layers) * H]``, contiguous in the last dimension.
        begin: Per row, the position of its first column in ``out``.
    """

    layers: Sequence[int]
    out: Tensor
    begin: Sequence[int]


class PerLayerInputs(NamedTuple):
    """What makes the inputs of each layer beside its hidden states, ``P`` of each.

    They are the sum of two parts: an embedding of the token, and the norms of a product with the embedding that the first layer reads.

    Attributes:
        embedding: ``[V or more, W]``, of which the first ``layers * P`` columns are those of the decoder's layers.
        matrix: ``[layers * P, H]``.
        norm: ``[P]``.
        scale: float32 ``[layers * P]``, of a matrix in int8.
    """

    embedding: Tensor | QuantizedMatrix
    matrix: Tensor | QuantizedMatrix
    norm: Tensor
    scale: Tensor | None = None

    def native(self, shape: DecoderShape, layers: int, at: Addresses) -> tuple[list[Address], int]:
        """What the native code takes. Raises ``ValueError`` for shapes that do not fit."""
        rows, width = self.embedding.shape
        if rows < shape.vocabulary or width < layers * shape.per_layer:
            raise ValueError(
                f"the embedding of per-layer inputs must have {shape.vocabulary} rows and {layers * shape.per_layer} columns at least, got {rows} and {width}"
            )
        found = [
            at("per_layer.embedding", self.embedding, (rows, width)),
            at("per_layer.matrix", self.matrix, (layers * shape.per_layer, shape.hidden), self.scale),
            at("per_layer.norm", self.norm, (shape.per_layer,)),
        ]
        return found, width


class NativeDecoder:
    """A decoder's layers, and where given its embedding, last norm and head, for forwards on the CPU.

    It keeps the memory of the tensors that it is given. Their values must not change during a call; those of norms, biases and copied matrices never.

    Args:
        shape: Sizes and constants.
        layers: The weights of each layer.
        windows: Per layer, the number of last positions that a column sees, its own included; None, or 0, or no sequence: all.
        embedding: ``[V, H]``; may be the head's tensor. It is read where it lies. Of a quantised matrix that is the head, too, only the
            packed copy stays.
        norm: The last norm ``[H]``, in front of ``head``. Only a decoder of a head alone may lack it: a product with one matrix.
        norm_bias: ``[H]``, of a layer norm.
        head: ``[V, H]``. Either may be quantised.
        head_bias: ``[V]``.
        head_scale: float32 ``[V]``, of a head in int8.
        per_layer: With ``shape.per_layer``, what makes these inputs.
        room: Bytes that copies of float32 matrices as bfloat16 may take. None is made if all would take more.
        threads: Upper bound while weights are copied; default ``torch.get_num_threads()``.

    Attributes:
        shape: As given.
        num_layers: Number of layers.
        nbytes: Bytes of the copies of matrices.
        weight_bits: As forwards read the matrices that are not quantised, the most of any: 8 in int8, 16 in bfloat16, else 32; 0: there is none.
        logits_dtype: bfloat16 if the head's dtype is, else float32.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or constant that does not fit.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        *,
        windows: Sequence[int | None] | None = None,
        embedding: Tensor | QuantizedMatrix | None = None,
        norm: Tensor | None = None,
        norm_bias: Tensor | None = None,
        head: Tensor | QuantizedMatrix | None = None,
        head_bias: Tensor | None = None,
        head_scale: Tensor | None = None,
        per_layer: PerLayerInputs | None = None,
        room: int = ANY,
        threads: int | None = None,
    ) -> None:
        shape.check()
        for i, layer in enumerate(layers):
            layer.check(f"layers[{i}]", shape)
        _check_sizes(layers, shape)
        if (per_layer is None) != (shape.per_layer == 0):
            raise ValueError("per_layer makes the per-layer inputs that the shape has, and no others")
        if head is None and norm is not None:
            raise ValueError("a norm needs a head")
        if head is not None and norm is None and (layers or embedding is not None):
            raise ValueError("a head after layers or an embedding needs a norm")
        if head is None and (head_bias is not None or head_scale is not None):
            raise ValueError("head_bias needs a head, and so does head_scale")
        biases = [norm_bias, *(bias for layer in layers for bias in (layer.input_norm_bias, layer.post_norm_bias))]
        if shape.norm == "rms" and any(bias is not None for bias in biases):
            raise ValueError("an RMS norm has no bias")
        seen = _windows(windows, len(layers))
        self.shape = shape
        self.num_layers = len(layers)
        self.logits_dtype = head.dtype if isinstance(head, Tensor) and head_scale is None else torch.float32
        self._embedding: Tensor | QuantizedMatrix | None = (
            embedding.detach().contiguous() if isinstance(embedding, Tensor) else embedding
        )
        self._addresses = at = Addresses()
        h, v = shape.hidden, shape.vocabulary
        described = [
            layer.native(f"layers[{i}]", shape, window, at)
            for i, (layer, window) in enumerate(zip(layers, seen, strict=True))
        ]
        more, width = ([(0,) * 5] * 3, 0) if per_layer is None else per_layer.native(shape, len(layers), at)
        self._native = _native.Decoder(
            *shape.native(),
            [weights for weights, _ in described],
            [rest for _, rest in described],
            [
                at("embedding", self._embedding, (v, h)),
                at("norm", norm, (h,)),
                at("head", head, (v, h), head_scale),
                at("head_bias", head_bias, (v,)),
                at("norm_bias", norm_bias, (h,)),
                *more,
            ],
            width,
            room,
            num_threads(threads),
        )
        self._recurrent, self._state_sizes = sum(layer.recurrent is not None for layer in layers), _state_sizes(layers)
        self._kinds = _kinds(layers, shape)
        self._has_embedding, self._has_head = embedding is not None, head is not None
        self._reads_side = [layer.side_norm is not None for layer in layers]
        self._rotations = max((layer.rope + 1 for layer in layers if layer.rope is not None), default=0)
        if _same_blocks(embedding, head):
            self._embedding = None  # it is read from the packed head
        self.nbytes: int = self._native.bytes
        self.weight_bits: int = self._native.weight_bits

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens.

        Args:
            tokens: int32 or int64 ``[rows, q]`` on the CPU, any strides.

        Returns:
            float32 ``[rows, q, H]``.

        Raises:
            TypeError: A dtype that is not supported.
            ValueError: A shape, device or token id that does not fit.
        """
        described = self._tokens(tokens)
        out = torch.empty((*tokens.shape, self.shape.hidden), dtype=torch.float32, device="cpu")
        self._native.embed(described, *tokens.shape, out.data_ptr())
        return out

    def run_layers(
        self,
        hidden: Tensor,
        keys: Tensor | Sequence[Tensor],
        values: Tensor | Sequence[Tensor],
        lengths: Sequence[int],
        cos: Tensor,
        sin: Tensor,
        query_factors: Tensor | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
        side: Tensor | None = None,
        tokens: Tensor | None = None,
        taps: Taps | None = None,
        states: States | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Run the layers ``begin .. end - 1``, and append keys and values.

        Args:
            hidden: float32 ``[rows, q, H]``; is not changed.
            keys: float32 or bfloat16 ``[layers, rows, kv_heads, capacity, head_dim]``, the layers being all of this decoder's that have keys of their own.
                Any strides, the last dimension contiguous. Row ``r`` is written at ``lengths[r] .. lengths[r] + q - 1``. Where layers differ in
                ``kv_heads`` or ``head_dim``, one tensor for each size, in the order of their first layers.
            values: Like ``keys``. With a latent, ``keys [.., latent]`` are the latents, and ``values [.., rotary_dim]`` the rotated parts, which lie right
                behind them in one tensor.
            lengths: Positions that each row holds. Column ``j`` of row ``r`` stands at position ``lengths[r] + j`` and sees the
                positions up to its own, or of these the last ones that the layer's window holds.
            cos: float32 ``[rotations, positions, rotary_dim]``, contiguous, or ``[positions, rotary_dim]`` for one rotation. Row ``p`` belongs to position
                ``p``. Its halves are equal: element ``i`` of each half belongs to pair ``i``.
            sin: Like ``cos``.
            query_factors: float32 ``[positions]``, contiguous; queries are multiplied by those of their positions. None: by 1.
            begin: First layer.
            end: After the last layer; None: all.
            side: Like ``hidden``, for layers that have side inputs.
            tokens: With per-layer inputs, the tokens whose embeddings ``hidden`` are, as for :meth:`embed`; ``begin`` is 0 then.
            taps: Hidden states that are copied.
            states: Of recurrent layers, which have no keys and values.
            threads: Upper bound, the calling thread included; default ``torch.get_num_threads()``.

        Returns:
            float32 ``[rows, q, H]``.

        Raises:
            TypeError: A dtype that is not supported.
            ValueError: A shape, stride, device or length that does not fit. Nothing has been written then.
        """
        end = self.num_layers if end is None else end
        if not 0 <= begin <= end <= self.num_layers:
            raise ValueError(f"need 0 <= begin <= end <= {self.num_layers}, got begin {begin} and end {end}")
        _check_hidden(self.shape, hidden)
        if hidden.dim() != 3:
            raise ValueError(f"hidden must be [rows, q, {self.shape.hidden}], got shape {tuple(hidden.shape)}")
        if any(self._reads_side[begin:end]) != (side is not None) or (side is not None and side.shape != hidden.shape):
            raise ValueError("layers with side inputs, and no others, need side of the shape of hidden")
        if (tokens is None) != (self.shape.per_layer == 0) or (tokens is not None and begin):
            raise ValueError("layers with per-layer inputs, and no others, need tokens, from layer 0 on")
        if tokens is not None and tokens.shape != hidden.shape[:2]:
            raise ValueError(f"tokens must be {tuple(hidden.shape[:2])} as hidden, got {tuple(tokens.shape)}")
        described = None if tokens is None else _tokens(tokens)
        cache, columns = _cache(
            self, hidden.shape[0], hidden.shape[1], keys, values, lengths, (cos, sin, query_factors)
        )
        tapped, count = _taps(self, hidden.shape[0], hidden.shape[1], taps), num_threads(threads)
        out = hidden.detach().clone(memory_format=torch.contiguous_format)
        if side is not None:
            _check_hidden(self.shape, side)
            side = side.detach().contiguous()
        held = _states(self, hidden.shape[0], hidden.shape[1], states)
        given = 0 if side is None else side.data_ptr()
        self._native.run_layers(out.data_ptr(), given, described, cache, columns, begin, end, tapped, count, held)
        return out

    def logits(self, hidden: Tensor, *, threads: int | None = None) -> Tensor:
        """The last norm, if there is one, and the head.

        Args:
            hidden: float32 ``[..., H]``.
            threads: As for :meth:`run_layers`.

        Returns:
            ``[..., V]``, bfloat16 if the head's dtype is, else float32.

        Raises:
            TypeError: A dtype that is not supported.
            ValueError: A shape or device that does not fit, or a decoder without a head.
        """
        self._need_head()
        _check_hidden(self.shape, hidden)
        count = num_threads(threads)
        source = hidden.detach().contiguous()
        out = torch.empty((*hidden.shape[:-1], self.shape.vocabulary), dtype=self.logits_dtype, device="cpu")
        rows = source.numel() // self.shape.hidden
        self._native.logits(source.data_ptr(), rows, out.data_ptr(), CODES[self.logits_dtype], count)
        return out

    def step(
        self,
        tokens: Tensor,
        keys: Tensor | Sequence[Tensor],
        values: Tensor | Sequence[Tensor],
        lengths: Sequence[int],
        cos: Tensor,
        sin: Tensor,
        query_factors: Tensor | None = None,
        *,
        keep: int,
        taps: Taps | None = None,
        states: States | None = None,
        threads: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Embed tokens, run all layers, and compute the logits of the last columns.

        Args:
            tokens: As for :meth:`embed`.
            keys: This and the next five: as for :meth:`run_layers`.
            values: Likewise.
            lengths: Likewise.
            cos: Likewise.
            sin: Likewise.
            query_factors: Likewise.
            keep: The number of last columns whose logits are computed, ``0 .. q``.
            taps: As for :meth:`run_layers`.
            states: As for :meth:`run_layers`.
            threads: As for :meth:`run_layers`.
            out: Contiguous tensor ``[rows, keep, V]`` of the dtype of the logits to write to.

        Returns:
            ``[rows, keep, V]``, as :meth:`logits`.

        Raises:
            TypeError: A dtype that is not supported.
            ValueError: A shape, stride, device, length or token id that does not fit. Nothing has been written then.
        """
        self._need_head()
        described = self._tokens(tokens)
        rows, width = tokens.shape
        if not 0 <= keep <= width:
            raise ValueError(f"keep must be 0 .. {width}, the number of columns, got {keep}")
        cache, columns = _cache(self, rows, width, keys, values, lengths, (cos, sin, query_factors))
        tapped, count = _taps(self, rows, width, taps), num_threads(threads)
        held = _states(self, rows, width, states)
        shape, dtype = (rows, keep, self.shape.vocabulary), self.logits_dtype
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        elif out.dtype is not dtype:
            raise TypeError(f"out must be {dtype}, got {out.dtype}")
        elif out.shape != shape or not out.is_contiguous() or not out.is_cpu:
            raise ValueError(f"out must be contiguous {shape} on the CPU, got {tuple(out.shape)} on {out.device}")
        self._native.step(described, cache, columns, keep, out.data_ptr(), CODES[dtype], tapped, count, held)
        return out

    def _need_head(self) -> None:
        if not self._has_head:
            raise ValueError("this decoder was made without a head")

    def _tokens(self, tokens: Tensor) -> tuple[int, int, int, int]:
        if not self._has_embedding:
            raise ValueError("this decoder was made without embedding")
        return _tokens(tokens)


def _tokens(tokens: Tensor) -> tuple[int, int, int, int]:
    """Tokens as the native code takes them."""
    size = _TOKEN_BYTES.get(tokens.dtype)
    if size is None:
        raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}")
    if tokens.dim() != 2 or not tokens.is_cpu:
        raise ValueError(f"tokens must be [rows, q] on the CPU, got {tuple(tokens.shape)} on {tokens.device}")
    row_stride, column_stride = tokens.stride()
    return tokens.data_ptr(), size, row_stride, column_stride


def _windows(windows: Sequence[int | None] | None, count: int) -> list[int]:
    """The window of each layer; 0: there is none."""
    seen = [index(window or 0) for window in windows or [0] * count]
    if len(seen) != count or any(window < 0 for window in seen):
        raise ValueError(f"windows must be positive, one per layer of {count}, got {windows}")
    return seen


def _check_sizes(layers: Sequence[LayerWeights], shape: DecoderShape) -> None:
    """Raise ``ValueError`` for sizes of layers that do not fit, and for keys of a layer that has no such ones."""
    found = [layer.sizes or shape.layer_sizes for layer in layers]
    for i, (layer, own) in enumerate(zip(layers, found, strict=True)):
        own.check(f"layers[{i}]", shape.heads)
        if own.rotary_dim > shape.rotated:
            raise ValueError(f"layers[{i}] rotates {own.rotary_dim} elements, more than rotary_dim = {shape.rotated}")
        if (of := layer.keys_of) is None:
            continue
        is_there = 0 <= of < i and layers[of].keys_of is None and layers[of].recurrent is None
        if not is_there or found[of][1:3] != own[1:3] or shape.latent:
            raise ValueError(
                f"layers[{i}] reads the keys of layer {of}, which must come before it and store keys of its size"
            )


def _kinds(layers: Sequence[LayerWeights], shape: DecoderShape) -> dict[tuple[int, int], int]:
    """By heads and size of keys, the number of layers that store such ones. A decoder without any takes empty tensors."""
    stored = [
        (layer.sizes or shape.layer_sizes)[1:3] for layer in layers if layer.recurrent is None and layer.keys_of is None
    ]
    return Counter(stored) or {(shape.kv_heads, shape.head_dim): 0}


def _cache(
    of: NativeDecoder,
    rows: int,
    width: int,
    keys: Tensor | Sequence[Tensor],
    values: Tensor | Sequence[Tensor],
    lengths: Sequence[int],
    tables: tuple[Tensor, Tensor, Tensor | None],
) -> tuple[Any, Any]:
    """Keys and values, and the columns fed, as the native code takes them."""
    stored, others = ([given] if isinstance(given, Tensor) else list(given) for given in (keys, values))
    if not len(stored) == len(others) == len(of._kinds):
        raise ValueError(
            f"this decoder has keys and values of {len(of._kinds)} sizes, got tensors of {len(stored)} and {len(others)}"
        )
    cos, sin, factors = tables
    _check_rotations(of, cos, sin)
    _check_factors(factors, cos.shape[-2])
    described = [
        _store(of.shape, (count, rows, *kind), own, other)
        for (kind, count), own, other in zip(of._kinds.items(), stored, others, strict=True)
    ]
    held = [index(n) for n in lengths]
    if len(held) != rows:
        raise ValueError(f"lengths must have {rows} entries, one per row, got {len(held)}")
    capacity = min(own.shape[3] for own in stored)
    room = min(capacity, cos.shape[-2])
    if held and not 0 <= min(held) <= max(held) <= room - width:
        raise ValueError(
            f"lengths are {held} and each row is fed {width} tokens, but the capacity is {capacity} and cos and sin "
            f"have {cos.shape[-2]} positions"
        )
    return (
        described,
        (
            held,
            width,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-2],
            0 if factors is None else factors.data_ptr(),
        ),
    )


def _store(sizes: DecoderShape, wanted: tuple[int, ...], keys: Tensor, values: Tensor) -> tuple[Any, ...]:
    """Keys and values of one size, ``wanted``: layers, rows, heads and the size of a key."""
    layers, rows, heads, key = wanted
    code = CODES.get(keys.dtype)
    if code is None or values.dtype is not keys.dtype:
        raise TypeError(f"keys and values must both be float32 or both bfloat16, got {keys.dtype} and {values.dtype}")
    shape, size = keys.shape, sizes.latent or key
    if len(shape) != 5 or (layers, rows, heads, shape[3], size) != shape:
        raise ValueError(f"keys must be [{layers}, {rows}, {heads}, capacity, {size}], got shape {tuple(shape)}")
    if values.shape != (*shape[:4], sizes.rotated if sizes.latent else size):
        raise ValueError(f"values are {tuple(values.shape)}, keys are {tuple(shape)}")
    behind = keys.data_ptr() + size * keys.element_size()
    if sizes.latent and keys.numel() and (values.data_ptr() != behind or values.stride() != keys.stride()):
        raise ValueError("the rotated parts of keys must lie right behind their latents, as values")
    key_strides, value_strides = keys.stride(), values.stride()
    if (key_strides[4] != 1 or value_strides[4] != 1) and shape[4] > 1:
        raise ValueError(
            f"the last dimension of keys and values must be contiguous, got strides {key_strides} and {value_strides}"
        )
    if not (keys.is_cpu and values.is_cpu):
        raise ValueError(f"keys and values must be on the CPU, not on {keys.device} and {values.device}")
    return keys.data_ptr(), values.data_ptr(), code, key_strides[:4] + value_strides[:4]


def _check_rotations(of: NativeDecoder, cos: Tensor, sin: Tensor) -> None:
    size = of.shape.rotated
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype is not torch.float32:
            raise TypeError(f"{name} must be float32, got {table.dtype}")
        if table.dim() not in (2, 3) or table.shape[-1] != size or not table.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [rotations, positions, {size}], or of one rotation [positions, {size}], got shape {tuple(table.shape)}"
            )
        if table.shape != cos.shape or (table.shape[0] if table.dim() == 3 else 1) < of._rotations:
            raise ValueError(
                f"cos and sin must have one shape with {of._rotations} rotations, got {tuple(cos.shape)} and {tuple(sin.shape)}"
            )
        if not table.is_cpu:
            raise ValueError(f"{name} must be on the CPU, not on {table.device}")


def _check_factors(factors: Tensor | None, positions: int) -> None:
    if factors is None:
        return
    if factors.dtype is not torch.float32:
        raise TypeError(f"query_factors must be float32, got {factors.dtype}")
    if factors.shape != (positions,) or not factors.is_contiguous() or not factors.is_cpu:
        raise ValueError(
            f"query_factors must be contiguous [{positions}] on the CPU, as many as cos has positions, got {tuple(factors.shape)} on {factors.device}"
        )


def _state_sizes(layers: Sequence[LayerWeights]) -> StateSizes | None:
    """Of all recurrent layers of a decoder; None: there are none."""
    sizes = {layer.recurrent.state_sizes for layer in layers if layer.recurrent is not None}
    if len(sizes) > 1:
        raise ValueError(f"all recurrent layers must have states of the same sizes, got {sorted(sizes)}")
    return sizes.pop() if sizes else None


def _states(of: NativeDecoder, rows: int, width: int, states: States | None) -> tuple[Any, ...] | None:
    """The states of recurrent layers, as the native code takes them."""
    if (states is None) != (of._recurrent == 0):
        raise ValueError("a decoder with recurrent layers, and no other, needs their states")
    if states is None or of._state_sizes is None:
        return None
    return states.native(rows, width, of._recurrent, of._state_sizes)


def _check_hidden(shape: DecoderShape, hidden: Tensor) -> None:
    if hidden.dtype is not torch.float32:
        raise TypeError(f"hidden must be float32, got {hidden.dtype}")
    if hidden.dim() < 1 or hidden.shape[-1] != shape.hidden:
        raise ValueError(f"hidden must be [..., {shape.hidden}], got shape {tuple(hidden.shape)}")
    if not hidden.is_cpu:
        raise ValueError(f"hidden must be on the CPU, not on {hidden.device}")


def _taps(of: NativeDecoder, rows: int, width: int, taps: Taps | None) -> tuple[Any, ...]:
    """The copies of hidden states, as the native code takes them."""
    if taps is None:
        return [], 0, 0, [], 0
    layers, out, begin = list(map(index, taps.layers)), taps.out, list(map(index, taps.begin))
    if not all(0 <= layer <= of.num_layers for layer in layers):
        raise ValueError(f"taps are 0 .. {of.num_layers}, the number of layers, got {layers}")
    if out.dtype not in CODES or not out.is_cpu:
        raise TypeError(f"what is tapped must be float32 or bfloat16 on the CPU, got {out.dtype} on {out.device}")
    size = len(layers) * of.shape.hidden
    if out.dim() != 3 or (out.shape[0], out.shape[2], len(begin)) != (rows, size, rows) or out.stride(2) != 1:
        raise ValueError(
            f"what is tapped must be [{rows}, positions, {size}], the last dimension contiguous, and {rows} positions, got {tuple(out.shape)} and {begin}"
        )
    if begin and not 0 <= min(begin) <= max(begin) <= out.shape[1] - width:
        raise ValueError(f"{width} columns from the positions {begin} on do not fit {out.shape[1]} positions")
    row, stride, _ = out.stride()
    return layers, out.data_ptr(), CODES[out.dtype], [r * row + at * stride for r, at in enumerate(begin)], stride


def _same_blocks(a: Tensor | QuantizedMatrix | None, b: Tensor | QuantizedMatrix | None) -> bool:
    quantized = isinstance(a, QuantizedMatrix) and isinstance(b, QuantizedMatrix)
    return quantized and a.data.data_ptr() == b.data.data_ptr()  # type: ignore[union-attr]
