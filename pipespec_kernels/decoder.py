"""The forward of LLaMA-like decoders on the CPU, one native call per step.

:class:`NativeDecoder` reads a model's matrices where they lie: bfloat16, float32 or int8. It copies those that are quantised, into panels that a forward
reads front to back, and where there is room float32 ones whose values are all bfloat16's, as such. Arithmetic is float32, whatever the dtypes of weights
and cache; products with quantised matrices are those of :mod:`pipespec_kernels.packed`.

Every number is computed by one sequence of operations. It depends neither on the other rows and columns of the call nor on the
number of threads, so one forward of ``q`` columns gives the same bits as ``q`` forwards of one column. Only other instructions
(``PIPESPEC_SIMD``) may round differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.formats import QuantizedMatrix
from pipespec_kernels.packed import format_code, num_threads

__all__ = ["ANY", "DecoderShape", "LayerWeights", "NativeDecoder", "Taps"]

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_CODES: Mapping[torch.dtype, int] = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16}
ANY = 1 << 62
"""Bytes that are more than any memory has."""

_TOKEN_BYTES = {torch.int32: 4, torch.int64: 8}


@dataclass(frozen=True)
class DecoderShape:
    """The sizes and constants of a decoder.

    Attributes:
        hidden: Size of the hidden states, ``H``.
        intermediate: Size between the matrices of the MLP.
        heads: Heads of queries.
        kv_heads: Heads of keys and values; divides ``heads``.
        head_dim: Size of a head.
        vocabulary: Token ids, ``V``.
        eps: Added to the mean square in RMS norms.
        scale: Factor of the attention scores.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        norm_offset: Added to the weights of RMS norms: 1.0 for Gemma.
        rotary_dim: The first elements of a head that are rotated, an even number; None: all.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    scale: float
    activation: str = "silu"
    norm_offset: float = 0.0
    rotary_dim: int | None = None

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: float32 or bfloat16 on the CPU, matrices ``[out, in]`` as in ``torch.nn.Linear``.

    Matrices may be quantised, each in a format of its own. ``q_norm`` and ``k_norm`` ``[head_dim]`` are RMS norms of each head before its rotation. A
    matrix with a scale, float32 ``[out]``, is int8; its weights are ``scale[:, None] * matrix``.

    With a ``side_norm [H]`` the layer has side inputs, as that of an EAGLE-3 head: ``q``, ``k`` and ``v`` are ``[out, 2 * H]`` and read the normalised
    side inputs, and after them the normalised hidden states; with ``adds_to_norm`` the residual begins with the latter instead of the hidden states.
    """

    input_norm: Tensor
    q: Tensor | QuantizedMatrix
    k: Tensor | QuantizedMatrix
    v: Tensor | QuantizedMatrix
    o: Tensor | QuantizedMatrix
    post_norm: Tensor
    gate: Tensor | QuantizedMatrix
    up: Tensor | QuantizedMatrix
    down: Tensor | QuantizedMatrix
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    side_norm: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    o_scale: Tensor | None = None
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    adds_to_norm: bool = False


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
        head: ``[V, H]``. Either may be quantised.
        head_bias: ``[V]``.
        head_scale: float32 ``[V]``, of a head in int8.
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
        head: Tensor | QuantizedMatrix | None = None,
        head_bias: Tensor | None = None,
        head_scale: Tensor | None = None,
        room: int = ANY,
        threads: int | None = None,
    ) -> None:
        _check_shape(shape)
        if head is None and norm is not None:
            raise ValueError("a norm needs a head")
        if head is not None and norm is None and (layers or embedding is not None):
            raise ValueError("a head after layers or an embedding needs a norm")
        if head is None and (head_bias is not None or head_scale is not None):
            raise ValueError("head_bias needs a head, and so does head_scale")
        seen = [index(window or 0) for window in windows or [0] * len(layers)]
        if len(seen) != len(layers) or any(window < 0 for window in seen):
            raise ValueError(f"windows must be positive, one per layer of {len(layers)}, got {windows}")
        self.shape = shape
        self.num_layers = len(layers)
        self.logits_dtype = head.dtype if isinstance(head, Tensor) and head_scale is None else torch.float32
        self._embedding: Tensor | QuantizedMatrix | None = (
            embedding.detach().contiguous() if isinstance(embedding, Tensor) else embedding
        )
        self._held = held = list[Tensor]()  # they are read where they lie

        def at(
            name: str, weight: Tensor | QuantizedMatrix | None, expected: tuple[int, ...], scale: Tensor | None = None
        ) -> tuple[int, int, int]:
            if weight is None:
                return 0, 0, 0
            if isinstance(weight, QuantizedMatrix):
                _check_quantized(name, weight, expected, scale)
                return weight.data.data_ptr(), _native.FIRST_FORMAT + format_code(weight), 0
            _check_weight(name, weight, expected, scale)
            held.append(weight.detach().contiguous())
            address = held[-1].data_ptr()
            if scale is None:
                return address, _CODES[weight.dtype], 0
            held.append(scale.detach().contiguous())
            return address, 0, held[-1].data_ptr()

        h, v = shape.hidden, shape.vocabulary
        self._native = _native.Decoder(
            (h, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim, v, shape.rotated),
            shape.eps,
            shape.scale,
            _ACTIVATIONS[shape.activation],
            shape.norm_offset,
            [
                [
                    at(f"layers[{i}].{name}", getattr(layer, name), size, getattr(layer, f"{name}_scale", None))
                    for name, size in _layer_shapes(shape, layer).items()
                ]
                for i, layer in enumerate(layers)
            ],
            [(window, layer.adds_to_norm) for window, layer in zip(seen, layers, strict=True)],
            [
                at("embedding", self._embedding, (v, h)),
                at("norm", norm, (h,)),
                at("head", head, (v, h), head_scale),
                at("head_bias", head_bias, (v,)),
            ],
            room,
            num_threads(threads),
        )
        self._has_embedding, self._has_head = embedding is not None, head is not None
        self._reads_side = [layer.side_norm is not None for layer in layers]
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
        keys: Tensor,
        values: Tensor,
        lengths: Sequence[int],
        cos: Tensor,
        sin: Tensor,
        *,
        begin: int = 0,
        end: int | None = None,
        side: Tensor | None = None,
        taps: Taps | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Run the layers ``begin .. end - 1``, and append keys and values.

        Args:
            hidden: float32 ``[rows, q, H]``; is not changed.
            keys: float32 or bfloat16 ``[layers, rows, kv_heads, capacity, head_dim]``, the layers being all of this decoder's.
                Any strides, the last dimension contiguous. Row ``r`` is written at ``lengths[r] .. lengths[r] + q - 1``.
            values: Like ``keys``.
            lengths: Positions that each row holds. Column ``j`` of row ``r`` stands at position ``lengths[r] + j`` and sees the
                positions up to its own, or of these the last ones that the layer's window holds.
            cos: float32 ``[positions, rotary_dim]``, contiguous. Row ``p`` belongs to position ``p``, in the order of transformers' ``rotate_half``.
            sin: Like ``cos``.
            begin: First layer.
            end: After the last layer; None: all.
            side: Like ``hidden``, for layers that have side inputs.
            taps: Hidden states that are copied.
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
        cache, columns = _cache(self, hidden.shape[0], hidden.shape[1], keys, values, lengths, cos, sin)
        tapped, count = _taps(self, hidden.shape[0], hidden.shape[1], taps), num_threads(threads)
        out = hidden.detach().clone(memory_format=torch.contiguous_format)
        if side is not None:
            _check_hidden(self.shape, side)
            side = side.detach().contiguous()
        given = 0 if side is None else side.data_ptr()
        self._native.run_layers(out.data_ptr(), given, cache, columns, begin, end, tapped, count)
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
        self._native.logits(source.data_ptr(), rows, out.data_ptr(), _CODES[self.logits_dtype], count)
        return out

    def step(
        self,
        tokens: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Sequence[int],
        cos: Tensor,
        sin: Tensor,
        *,
        keep: int,
        taps: Taps | None = None,
        threads: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Embed tokens, run all layers, and compute the logits of the last columns.

        Args:
            tokens: As for :meth:`embed`.
            keys: This and the next four: as for :meth:`run_layers`.
            values: Likewise.
            lengths: Likewise.
            cos: Likewise.
            sin: Likewise.
            keep: The number of last columns whose logits are computed, ``0 .. q``.
            taps: As for :meth:`run_layers`.
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
        cache, columns = _cache(self, rows, width, keys, values, lengths, cos, sin)
        tapped, count = _taps(self, rows, width, taps), num_threads(threads)
        shape, dtype = (rows, keep, self.shape.vocabulary), self.logits_dtype
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        elif out.dtype is not dtype:
            raise TypeError(f"out must be {dtype}, got {out.dtype}")
        elif out.shape != shape or not out.is_contiguous() or not out.is_cpu:
            raise ValueError(f"out must be contiguous {shape} on the CPU, got {tuple(out.shape)} on {out.device}")
        self._native.step(described, cache, columns, keep, out.data_ptr(), _CODES[dtype], tapped, count)
        return out

    def _need_head(self) -> None:
        if not self._has_head:
            raise ValueError("this decoder was made without a head")

    def _tokens(self, tokens: Tensor) -> tuple[int, int, int, int]:
        if not self._has_embedding:
            raise ValueError("this decoder was made without embedding")
        size = _TOKEN_BYTES.get(tokens.dtype)
        if size is None:
            raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}")
        if tokens.dim() != 2 or not tokens.is_cpu:
            raise ValueError(f"tokens must be [rows, q] on the CPU, got {tuple(tokens.shape)} on {tokens.device}")
        row_stride, column_stride = tokens.stride()
        return tokens.data_ptr(), size, row_stride, column_stride


def _cache(
    of: NativeDecoder,
    rows: int,
    width: int,
    keys: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    cos: Tensor,
    sin: Tensor,
) -> tuple[Any, Any]:
    """Keys and values, and the columns fed, as the native code takes them."""
    sizes, layers = of.shape, of.num_layers
    code = _CODES.get(keys.dtype)
    if code is None or values.dtype is not keys.dtype:
        raise TypeError(f"keys and values must both be float32 or both bfloat16, got {keys.dtype} and {values.dtype}")
    shape = keys.shape
    if len(shape) != 5 or (layers, rows, sizes.kv_heads, shape[3], sizes.head_dim) != shape:
        raise ValueError(
            f"keys must be [{layers}, {rows}, {sizes.kv_heads}, capacity, {sizes.head_dim}], got shape {tuple(shape)}"
        )
    if values.shape != shape:
        raise ValueError(f"values are {tuple(values.shape)}, keys are {tuple(shape)}")
    key_strides, value_strides = keys.stride(), values.stride()
    if (key_strides[4] != 1 or value_strides[4] != 1) and shape[4] > 1:
        raise ValueError(
            f"the last dimension of keys and values must be contiguous, got strides {key_strides} and {value_strides}"
        )
    if not (keys.is_cpu and values.is_cpu):
        raise ValueError(f"keys and values must be on the CPU, not on {keys.device} and {values.device}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype is not torch.float32:
            raise TypeError(f"{name} must be float32, got {table.dtype}")
        if table.dim() != 2 or table.shape[1] != sizes.rotated or not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous [positions, {sizes.rotated}], got shape {tuple(table.shape)}")
        if not table.is_cpu:
            raise ValueError(f"{name} must be on the CPU, not on {table.device}")
    held = [index(n) for n in lengths]
    if len(held) != rows:
        raise ValueError(f"lengths must have {rows} entries, one per row, got {len(held)}")
    room = min(shape[3], cos.shape[0], sin.shape[0])
    if held and not 0 <= min(held) <= max(held) <= room - width:
        raise ValueError(
            f"lengths are {held} and each row is fed {width} tokens, but the capacity is {shape[3]} and cos and sin "
            f"have {cos.shape[0]} and {sin.shape[0]} positions"
        )
    return (
        (keys.data_ptr(), values.data_ptr(), code, key_strides[:4] + value_strides[:4]),
        (held, width, cos.data_ptr(), sin.data_ptr()),
    )


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
    if out.dtype not in _CODES or not out.is_cpu:
        raise TypeError(f"what is tapped must be float32 or bfloat16 on the CPU, got {out.dtype} on {out.device}")
    size = len(layers) * of.shape.hidden
    if out.dim() != 3 or (out.shape[0], out.shape[2], len(begin)) != (rows, size, rows) or out.stride(2) != 1:
        raise ValueError(
            f"what is tapped must be [{rows}, positions, {size}], the last dimension contiguous, and {rows} positions, got {tuple(out.shape)} and {begin}"
        )
    if begin and not 0 <= min(begin) <= max(begin) <= out.shape[1] - width:
        raise ValueError(f"{width} columns from the positions {begin} on do not fit {out.shape[1]} positions")
    row, stride, _ = out.stride()
    return layers, out.data_ptr(), _CODES[out.dtype], [r * row + at * stride for r, at in enumerate(begin)], stride


def _same_blocks(a: Tensor | QuantizedMatrix | None, b: Tensor | QuantizedMatrix | None) -> bool:
    quantized = isinstance(a, QuantizedMatrix) and isinstance(b, QuantizedMatrix)
    return quantized and a.data.data_ptr() == b.data.data_ptr()  # type: ignore[union-attr]


def _check_shape(shape: DecoderShape) -> None:
    for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
        if not 0 < getattr(shape, name) < 2**31:
            raise ValueError(f"{name} must be 1 .. 2**31 - 1, got {getattr(shape, name)}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"kv_heads must divide heads, got {shape.kv_heads} and {shape.heads}")
    if shape.rotated % 2 or not 0 <= shape.rotated <= shape.head_dim:
        raise ValueError(f"rotary_dim must be even and 0 .. head_dim = {shape.head_dim}, got {shape.rotated}")
    if shape.activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {shape.activation!r}")


def _layer_shapes(shape: DecoderShape, layer: LayerWeights) -> dict[str, tuple[int, ...]]:
    h, i = shape.hidden, shape.intermediate
    inputs = h if layer.side_norm is None else 2 * h
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices: dict[str, tuple[int, ...]] = {
        "q": (q, inputs),
        "k": (kv, inputs),
        "v": (kv, inputs),
        "o": (h, q),
        "gate": (i, h),
        "up": (i, h),
        "down": (h, i),
    }
    norms: dict[str, tuple[int, ...]] = dict.fromkeys(("input_norm", "post_norm", "side_norm"), (h,))
    norms |= dict.fromkeys(("q_norm", "k_norm"), (shape.head_dim,))
    biases = {f"{name}_bias": size[:1] for name, size in matrices.items()}
    found = matrices | biases | norms
    return {f.name: found[f.name] for f in fields(LayerWeights) if f.name in found}


def _check_quantized(name: str, matrix: QuantizedMatrix, expected: tuple[int, ...], scale: Tensor | None) -> None:
    if len(expected) != 2 or scale is not None:
        raise TypeError(f"{name} cannot be quantised" if scale is None else f"{name} is quantised and has a scale")
    if tuple(matrix.shape) != expected:
        raise ValueError(f"{name} must be {expected}, got {tuple(matrix.shape)}")


def _check_weight(name: str, tensor: Tensor, expected: tuple[int, ...], scale: Tensor | None = None) -> None:
    if scale is not None:
        if tensor.dtype is not torch.int8 or scale.dtype is not torch.float32:
            raise TypeError(
                f"{name} with a scale must be int8 and the scale float32, got {tensor.dtype} and {scale.dtype}"
            )
        if scale.shape != expected[:1] or not scale.is_cpu:
            raise ValueError(f"the scale of {name} must be {expected[:1]} on the CPU, got {tuple(scale.shape)}")
    elif tensor.dtype not in _CODES:
        raise TypeError(f"{name} must be float32 or bfloat16, got {tensor.dtype}")
    if tensor.shape != expected:
        raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, not on {tensor.device}")
