"""The description of a decoder's layers: sizes, constants and weights, with what must hold of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.experts import Experts
from pipespec_kernels.formats import QuantizedMatrix
from pipespec_kernels.latent import Latent
from pipespec_kernels.packed import format_code
from pipespec_kernels.recurrent import Recurrent
from pipespec_kernels.rows import OrderedRows

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3, "quick_gelu": 4}
_NORMS = {"rms": 0, "layer": 1}
_SHARED, _OWN, _JOINT = range(3)
"""What a norm of queries or keys is for, see :class:`LayerWeights`."""
CODES: Mapping[torch.dtype, int] = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16}
_NUMBERS = (
    "eps", "scale", "norm_offset", "softcap", "residual_scale", "embedding_scale", "logit_scale", "logit_softcap", "per_layer_scale",
    "per_layer_in_scale", "per_layer_sum_scale",
)  # fmt: skip
"""Of a :class:`DecoderShape`, in the order of the native code."""
_LAYER_NORMS = (
    "input_norm", "post_norm", "side_norm", "o_norm", "down_norm", "input_norm_bias", "post_norm_bias", "per_layer_norm"
)  # fmt: skip
_ATTENTION, _FEED_FORWARD = ("q", "k", "v", "o"), ("up", "down")


class LayerSizes(NamedTuple):
    """The sizes of one layer, as those of :class:`DecoderShape`."""

    intermediate: int
    kv_heads: int
    head_dim: int
    rotary_dim: int

    def check(self, name: str, heads: int) -> None:
        """Raise ``ValueError`` for sizes that do not fit each other, or ``heads`` of queries."""
        if not all(0 < size < 2**31 for size in self[:3]):
            raise ValueError(f"{name} must have sizes of 1 .. 2**31 - 1, got {self}")
        if heads % self.kv_heads:
            raise ValueError(f"{name}: kv_heads must divide heads, got {self.kv_heads} and {heads}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"{name}: rotary_dim must be even and 0 .. head_dim = {self.head_dim}, got {self.rotary_dim}"
            )


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
        eps: Added to the mean square, or to the variance, in norms.
        scale: Factor of the attention scores.
        activation: ``silu``, ``gelu_tanh``, ``gelu``, ``relu2``, the square of what is positive, or ``quick_gelu``, ``x`` times the sigmoid of ``1.702 x``.
        norm_offset: Added to the weights of norms: 1.0 for Gemma.
        rotary_dim: The first elements of a head that are rotated, an even number; None: all.
        norm: ``rms``, or ``layer`` for layer norms, which subtract the mean.
        rotates_pairs: Elements ``2 i`` and ``2 i + 1`` of a head are rotated; else ``i`` and ``i + rotary_dim / 2``.
        norms_rotated: ``q_norm`` and ``k_norm`` come after the rotation.
        is_parallel: Attention and feed-forward of a layer read the same hidden states.
        softcap: Scores are ``softcap * tanh(score / softcap)`` after their factor; 0: they are not capped.
        residual_scale: Factor of what attention and feed-forward add to the hidden states.
        embedding_scale: Factor of the embeddings.
        logit_scale: Factor of the logits.
        logit_softcap: As ``softcap``, of the logits after their factor.
        latent: With latent attention, the first elements of a key, which are its value, too; the rotated ones follow. 0: keys and values differ.
        per_layer: Inputs of each layer beside the hidden states, ``P``; 0: there are none.
        per_layer_scale: Factor of the embeddings of these inputs.
        per_layer_in_scale: Factor of what they have from the embeddings of the model, in front of its norm.
        per_layer_sum_scale: Factor of the sum of both.
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
    norm: str = "rms"
    rotates_pairs: bool = False
    norms_rotated: bool = False
    is_parallel: bool = False
    softcap: float = 0.0
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    latent: int = 0
    per_layer: int = 0
    per_layer_scale: float = 1.0
    per_layer_in_scale: float = 1.0
    per_layer_sum_scale: float = 1.0

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def layer_sizes(self) -> LayerSizes:
        """The sizes of a layer that has none of its own."""
        return LayerSizes(self.intermediate, self.kv_heads, self.head_dim, self.rotated)

    def check(self) -> None:
        """Raise ``ValueError`` for a size or constant that does not fit."""
        for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
            if not 0 < getattr(self, name) < 2**31:
                raise ValueError(f"{name} must be 1 .. 2**31 - 1, got {getattr(self, name)}")
        self.layer_sizes.check("its layers", self.heads)
        if not 0 <= self.per_layer < 2**31:
            raise ValueError(f"per_layer must be 0 .. 2**31 - 1, got {self.per_layer}")
        if self.latent and (self.kv_heads != 1 or self.latent + self.rotated != self.head_dim):
            raise ValueError(
                f"a latent and rotary_dim make up one head of keys, got {self.latent}, {self.rotated} and {self.head_dim} in {self.kv_heads} heads"
            )
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {self.activation!r}")
        if self.norm not in _NORMS:
            raise ValueError(f"norm must be one of {', '.join(_NORMS)}, got {self.norm!r}")
        if min(self.softcap, self.logit_softcap) < 0:
            raise ValueError(
                f"softcap and logit_softcap must be positive, or 0 for none, got {self.softcap} and {self.logit_softcap}"
            )

    def native(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """Sizes, kinds and constants as the native code takes them."""
        sizes = (
            self.hidden,
            self.intermediate,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.vocabulary,
            self.rotated,
            self.latent,
            self.per_layer,
        )
        kinds = (
            _ACTIVATIONS[self.activation],
            _NORMS[self.norm],
            self.rotates_pairs,
            self.norms_rotated,
            self.is_parallel,
        )
        return sizes, kinds, tuple(getattr(self, name) for name in _NUMBERS)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: float32 or bfloat16 on the CPU, matrices ``[out, in]`` as in ``torch.nn.Linear``.

    Matrices may be quantised, each in a format of its own. A matrix with a scale, float32 ``[out]``, is int8; its weights are ``scale[:, None] * matrix``.
    Without a ``gate``, the activation is that of ``up``.
    With ``experts`` there is none of ``gate``, ``up`` and ``down``, and with what is ``recurrent`` none of ``q``, ``k``, ``v`` and ``o``. A ``latent``
    attention takes the place of ``q``, ``k`` and ``v``, in all layers or in none. What a head gives is
    multiplied by the sigmoids of ``q_gate``'s product, which has the shape of ``q``.

    The norms of a layer, ``[H]``, each of which may lack: ``input_norm`` in front of the attention, ``o_norm`` of what the attention adds, ``post_norm`` in front
    of the feed-forward, ``down_norm`` of what that adds. In a parallel layer without ``post_norm``, the feed-forward reads what the attention reads. Before their
    rotation, queries and keys have norms of their heads: ``q_norm [head_dim]`` the same for each head, ``[heads, head_dim]`` each its own, or
    ``[heads * head_dim]`` one over all heads; ``k_norm`` likewise.

    ``rope`` is the number of the layer's rotation among those that a forward gets; None: queries and keys are not rotated. ``sinks [heads]`` are scores that
    take part in the softmax of each head, and have no value.

    ``sizes`` are those of the layer where it differs from the shape, and ``keys_of`` is the number of an earlier layer of the same sizes of heads, whose keys and
    values it reads: then there is none of ``k`` and ``v``. Values have a norm ``v_norm [head_dim]`` before they are kept. Per-layer inputs, ``P`` of each column, are multiplied by
    the activation of the product of the hidden states with ``per_layer_gate [P, H]``; the product of that with ``per_layer_out [H, P]``, with the norm ``per_layer_norm [H]`` behind it, is
    added after the feed-forward. ``output_scale [1]`` is a factor of the layer's output.

    With a ``side_norm [H]`` the layer has side inputs, as that of an EAGLE-3 head: ``q``, ``k`` and ``v`` are ``[out, 2 * H]`` and read the normalised
    side inputs, and after them the normalised hidden states; with ``adds_to_norm`` the residual begins with the latter instead of the hidden states.
    """

    input_norm: Tensor | None
    q: Tensor | QuantizedMatrix | OrderedRows | None
    k: Tensor | QuantizedMatrix | None
    v: Tensor | QuantizedMatrix | None
    o: Tensor | QuantizedMatrix | None
    post_norm: Tensor | None
    gate: Tensor | QuantizedMatrix | None
    up: Tensor | QuantizedMatrix | None
    down: Tensor | QuantizedMatrix | None
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
    o_norm: Tensor | None = None
    down_norm: Tensor | None = None
    input_norm_bias: Tensor | None = None
    post_norm_bias: Tensor | None = None
    sinks: Tensor | None = None
    q_gate: Tensor | QuantizedMatrix | OrderedRows | None = None
    q_gate_bias: Tensor | None = None
    v_norm: Tensor | None = None
    per_layer_gate: Tensor | QuantizedMatrix | None = None
    per_layer_out: Tensor | QuantizedMatrix | None = None
    per_layer_norm: Tensor | None = None
    output_scale: Tensor | None = None
    per_layer_gate_scale: Tensor | None = None
    per_layer_out_scale: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    o_scale: Tensor | None = None
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    adds_to_norm: bool = False
    rope: int | None = 0
    keys_of: int | None = None
    sizes: LayerSizes | None = None
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    latent: Latent | None = None

    def check(self, name: str, shape: DecoderShape) -> None:
        """Raise ``ValueError`` for a layer that lacks an attention or a feed-forward, or has two of one."""
        if (self.latent is not None) != (shape.latent > 0):
            raise ValueError(f"{name} has latents, and the shape has none, or the reverse")
        for part, other, names in self._instead(name):
            lacking = [each for each in names if getattr(self, each) is None]
            if lacking and other is None:
                raise ValueError(f"{name} has neither {lacking[0]} nor {part}")
            if other is not None and len(lacking) < len(names):
                raise ValueError(f"{name} has {part}, and takes none of {', '.join(names)}")
        if {each is not None for each in (self.per_layer_gate, self.per_layer_out)} != {shape.per_layer > 0}:
            raise ValueError(
                f"{name} has per_layer_gate and per_layer_out if the shape has per-layer inputs, and only then"
            )
        if self.experts is not None and (self.gate is not None or shape.is_parallel):
            raise ValueError(f"{name} has experts, and takes no gate, and cannot be parallel")
        others = (self.side_norm, self.q_gate, self.sinks)
        for kind, own in (("is recurrent", self.recurrent), ("has latents", self.latent)):
            if own is not None and any(weight is not None for weight in others):
                raise ValueError(f"{name} {kind}, and takes none of side_norm, q_gate and sinks")

    def _instead(self, name: str) -> list[tuple[str, Any, tuple[str, ...]]]:
        """What may take the place of matrices, and those. Raises ``ValueError`` for a layer that lacks another one."""
        feed_forward = ("experts", self.experts, _FEED_FORWARD)
        for part, other, names in (("latent", self.latent, ("q", "k", "v")), ("keys_of", self.keys_of, ("k", "v"))):
            if other is None:
                continue
            if lacking := [each for each in _ATTENTION if each not in names and getattr(self, each) is None]:
                raise ValueError(f"{name} has no {lacking[0]}")
            return [(part, other, names), feed_forward]
        return [("recurrent", self.recurrent, _ATTENTION), feed_forward]

    def head_norms(self, shape: DecoderShape) -> int:
        """What the norms of queries and keys are for."""
        sizes = self.sizes or shape.layer_sizes
        norm, heads = (self.k_norm, sizes.kv_heads) if self.q_norm is None else (self.q_norm, shape.heads)
        if norm is None or tuple(norm.shape) == (sizes.head_dim,):
            return _SHARED
        return _OWN if tuple(norm.shape) == (heads, sizes.head_dim) else _JOINT

    def shapes(self, shape: DecoderShape) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights by their names, in the order of the fields; without experts and recurrent parts."""
        (i, kv_heads, d, _), h = self.sizes or shape.layer_sizes, shape.hidden
        inputs = h if self.side_norm is None else 2 * h
        q, kv = shape.heads * d, kv_heads * d
        matrices: dict[str, tuple[int, ...]] = {
            "q": (q, inputs),
            "q_gate": (q, inputs),
            "k": (kv, inputs),
            "v": (kv, inputs),
            "o": (h, q if self.latent is None else self.latent.outputs()),
            "gate": (i, h),
            "up": (i, h),
            "down": (h, i),
            "per_layer_gate": (shape.per_layer, h),
            "per_layer_out": (h, shape.per_layer),
        }
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(_LAYER_NORMS, (h,))
        kind = self.head_norms(shape)
        for name, heads in (("q_norm", shape.heads), ("k_norm", kv_heads)):
            norms[name] = {_SHARED: (d,), _OWN: (heads, d), _JOINT: (heads * d,)}[kind]
        norms |= {"sinks": (shape.heads,), "v_norm": (d,), "output_scale": (1,)}
        biases = {f"{name}_bias": size[:1] for name, size in matrices.items()}
        found = matrices | biases | norms
        return {f.name: found[f.name] for f in fields(LayerWeights) if f.name in found}

    def native(
        self, name: str, shape: DecoderShape, window: int, at: Addresses
    ) -> tuple[list[Address], tuple[Any, ...]]:
        """The addresses of the weights, and what else the native code takes. ``window``: last positions that a column sees; 0: all."""
        h = shape.hidden
        weights = [
            at(f"{name}.{each}", getattr(self, each), size, getattr(self, f"{each}_scale", None))
            for each, size in self.shapes(shape).items()
        ]
        of_latent = h, shape.heads, shape.latent, shape.rotated
        return weights, (
            window,
            self.adds_to_norm,
            -1 if self.rope is None else self.rope,
            self.head_norms(shape),
            -1 if self.keys_of is None else self.keys_of,
            self.sizes or shape.layer_sizes,
            None if self.experts is None else self.experts.native(f"{name}.experts", h, at),
            None if self.recurrent is None else self.recurrent.native(f"{name}.recurrent", h, at),
            None if self.latent is None else self.latent.native(f"{name}.latent", of_latent, at),
        )


Address = tuple[int, int, int, int, int]
"""Of a weight: its address, its type, the addresses of its scales and of the order of its rows, and how many rows there are to choose from."""


class Addresses:
    """Addresses of weights as the native code takes them, and the tensors that lie there: they are read as long as this lives."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __call__(
        self,
        name: str,
        weight: Tensor | QuantizedMatrix | OrderedRows | None,
        expected: tuple[int, ...],
        scale: Tensor | None = None,
    ) -> Address:
        """The address of a weight that must have the shape ``expected``; zeros for None."""
        if weight is None:
            return 0, 0, 0, 0, 0
        if isinstance(weight, QuantizedMatrix):
            _check_quantized(name, weight, expected, scale)
            return weight.data.data_ptr(), _native.FIRST_FORMAT + format_code(weight), 0, 0, 0
        if isinstance(weight, OrderedRows):
            matrix, stored = weight.matrix, len(weight.matrix)
            if weight.shape != expected or scale is not None:
                raise ValueError(f"{name} must be {expected} without a scale, got rows {weight.shape}")
            _check_weight(name, matrix, (stored, *expected[1:]))
            return self._hold(matrix), CODES[matrix.dtype], 0, self._hold(weight.order), stored
        _check_weight(name, weight, expected, scale)
        if scale is None:
            return self._hold(weight), CODES[weight.dtype], 0, 0, 0
        return self._hold(weight), 0, self._hold(scale), 0, 0

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor.detach().contiguous())
        return self._held[-1].data_ptr()


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
    elif tensor.dtype not in CODES:
        raise TypeError(f"{name} must be float32 or bfloat16, got {tensor.dtype}")
    if tensor.shape != expected:
        raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, not on {tensor.device}")
