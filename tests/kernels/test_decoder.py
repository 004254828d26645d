"""The native forward of a decoder against the same model in float64, and with equal bits in every shape of a call."""

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipespec_kernels.decoder import DecoderShape, LayerWeights, NativeDecoder, Taps

from .implementations import simd, simd_variants

VARIANTS = simd_variants()
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
FEW = DecoderShape(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocabulary=100, eps=1e-6, scale=16**-0.5
)
ODD = DecoderShape(
    hidden=40, intermediate=72, heads=6, kv_heads=2, head_dim=20, vocabulary=1001, eps=1e-5, scale=0.3, rotary_dim=12
)


def int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and its scales."""
    scale = matrix.abs().amax(1) / 127
    return (matrix / scale[:, None]).round().to(torch.int8), scale


def int8_layer(layer: LayerWeights) -> LayerWeights:
    names = ("q", "k", "v", "o", "gate", "up", "down")
    changed = {name: int8(getattr(layer, name)) for name in names}
    matrices = {name: matrix for name, (matrix, _) in changed.items()}
    return dataclasses.replace(layer, **matrices, **{f"{name}_scale": scale for name, (_, scale) in changed.items()})


class Model:
    """A decoder with random weights, and its forward in float64 by definition."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: int = 3,
        *,
        biases: bool = False,
        head_norms: str = "",
        norms: Sequence[str] = ("input_norm", "post_norm"),
        gated: bool = True,
        sinks: bool = False,
        ropes: Sequence[int | None] = (0, 0, 0),
        tied: bool = False,
        side: bool = False,
        bits: int = 32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int, around: float = 0.0) -> Tensor:
            x = torch.randn(size, generator=generator) * (size[-1] ** -0.5 if len(size) == 2 else 0.2) + around
            return x.bfloat16().to(dtype) if bits == 16 else x.to(dtype)

        s = self.shape = shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        sizes = {
            "q": (q, s.hidden),
            "k": (kv, s.hidden),
            "v": (kv, s.hidden),
            "o": (s.hidden, q),
            "gate": (s.intermediate, s.hidden),
            "up": (s.intermediate, s.hidden),
            "down": (s.hidden, s.intermediate),
        }
        if not gated:
            del sizes["gate"]
        weight = 1.0 - s.norm_offset
        has_bias = biases and s.norm == "layer"

        def head_norm(heads: int) -> Tensor:
            size = {"shared": (s.head_dim,), "own": (heads, s.head_dim), "joint": (heads * s.head_dim,)}[head_norms]
            return random(*size, around=weight)

        self.layers = [
            LayerWeights(
                **({"input_norm": None, "post_norm": None} | {name: random(s.hidden, around=weight) for name in norms}),
                **({f"{name}_bias": random(s.hidden) for name in norms} if has_bias else {}),
                **({"gate": None} | {name: random(*size) for name, size in sizes.items()}),
                **({f"{name}_bias": random(size[0]) for name, size in sizes.items()} if biases else {}),
                **({"q_norm": head_norm(s.heads), "k_norm": head_norm(s.kv_heads)} if head_norms else {}),
                **({"sinks": random(s.heads)} if sinks else {}),
                rope=ropes[i % len(ropes)],
            )
            for i in range(layers)
        ]
        if side:
            double = {name: random(sizes[name][0], 2 * s.hidden) for name in "qkv"}
            self.layers[0] = dataclasses.replace(self.layers[0], **double, side_norm=random(s.hidden, around=weight))
        self.head = random(s.vocabulary, s.hidden)
        # In 8 bits: the matrices as the decoder takes them. The others are what they stand for.
        self.int8 = bits == 8
        if self.int8:
            self.given = [int8_layer(layer) for layer in self.layers]
            self.given_head, self.head_scale = int8(self.head)
            self.layers = [
                dataclasses.replace(
                    layer, **{n: getattr(layer, n) * getattr(layer, f"{n}_scale")[:, None] for n in sizes}
                )
                for layer in self.given
            ]
            self.head = self.given_head * self.head_scale[:, None]
        self.embedding = self.head if tied else random(s.vocabulary, s.hidden) * 4
        self.norm = random(s.hidden, around=weight)
        self.head_bias = random(s.vocabulary) if biases else None
        self.norm_bias = random(s.hidden) if has_bias else None

    def native(self) -> NativeDecoder:
        return NativeDecoder(
            self.shape,
            self.given if self.int8 else self.layers,
            embedding=self.embedding,
            norm=self.norm,
            norm_bias=self.norm_bias,
            head=self.given_head if self.int8 else self.head,
            head_bias=self.head_bias,
            head_scale=self.head_scale if self.int8 else None,
        )

    def _normed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        if weight is None:
            return x
        if self.shape.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        root = (x.pow(2).mean(-1, keepdim=True) + self.shape.eps).sqrt()
        return x / root * (weight.double() + self.shape.norm_offset) + (0 if bias is None else bias.double())

    def _heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Heads ``[n, heads, D]``, normalised."""
        if weight is not None and weight.dim() == 1 and len(weight) > x.shape[-1]:
            return self._normed(x.flatten(1), weight).view(x.shape)
        return self._normed(x, weight)

    def _rotated(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = tables
        r = self.shape.rotated
        x, rest = x[..., :r], x[..., r:]
        if self.shape.rotates_pairs:
            cos, sin = (table[..., : r // 2].repeat_interleave(2, -1) for table in (cos, sin))
            other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            other = torch.cat((-x[..., r // 2 :], x[..., : r // 2]), -1)
        return torch.cat((x * cos + other * sin, rest), -1)

    @staticmethod
    def _capped(x: Tensor, limit: float) -> Tensor:
        return limit * torch.tanh(x / limit) if limit else x

    def row(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, factors: Tensor | None = None, *, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits and hidden states of one sequence from position 0 on, and each layer's keys and values ``[Hkv, n, D]``. ``given``: hidden states, the
        embeddings being side inputs."""
        s, n = self.shape, len(tokens)
        side, cache = self.embedding.double()[tokens], []
        factors = None if factors is None else factors.double()[:n, None]
        h = side * s.embedding_scale if given is None else given.double()
        tables = [
            (c.double()[:n], t.double()[:n])
            for c, t in zip(cos.view(-1, *cos.shape[-2:]), sin.view(-1, *sin.shape[-2:]), strict=True)
        ]
        mask = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
        activation: Callable[[Tensor], Tensor] = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "relu2": lambda x: F.relu(x).square(),
        }[s.activation]

        def linear(x: Tensor, layer: LayerWeights, name: str) -> Tensor:
            bias = getattr(layer, f"{name}_bias")
            return F.linear(x, getattr(layer, name).double(), None if bias is None else bias.double())

        for layer in self.layers:
            x = read = self._normed(h, layer.input_norm, layer.input_norm_bias)
            h = x if layer.adds_to_norm else h
            if layer.side_norm is not None:
                x = torch.cat((self._normed(side, layer.side_norm), x), -1)
            q, k, v = (linear(x, layer, name).view(n, -1, s.head_dim) for name in "qkv")
            if not s.norms_rotated:
                q, k = self._heads(q, layer.q_norm), self._heads(k, layer.k_norm)
            q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
            if layer.rope is not None:
                q, k = self._rotated(q, tables[layer.rope]), self._rotated(k, tables[layer.rope])
            if s.norms_rotated:
                q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            q = q if factors is None else q * factors
            cache.append((k, v))
            group = s.heads // s.kv_heads
            scores = self._capped(q @ k.repeat_interleave(group, 0).transpose(1, 2) * s.scale, s.softcap) + mask
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks.double()[:, None, None].expand(-1, n, 1)), -1)
            mixed = scores.softmax(-1)[..., :n] @ v.repeat_interleave(group, 0)
            added = self._normed(linear(mixed.transpose(0, 1).reshape(n, -1), layer, "o"), layer.o_norm)
            h = h + s.residual_scale * added
            x = read if s.is_parallel else self._normed(h, layer.post_norm, layer.post_norm_bias)
            up = linear(x, layer, "up")
            x = activation(up) if layer.gate is None else activation(linear(x, layer, "gate")) * up
            h = h + s.residual_scale * self._normed(linear(x, layer, "down"), layer.down_norm)
        bias = None if self.head_bias is None else self.head_bias.double()
        logits = F.linear(self._normed(h, self.norm, self.norm_bias), self.head.double(), bias)
        return self._capped(logits * s.logit_scale, s.logit_softcap), h, cache


def angles(shape: DecoderShape, positions: int = 64, bases: Sequence[float] = (100.0,)) -> tuple[Tensor, Tensor]:
    """Of one rotation, or of one per base."""
    r = shape.rotated
    inverse = torch.tensor(bases).double()[:, None] ** (-torch.arange(0, r, 2).double() / max(r, 1))
    x = (torch.arange(positions).double()[:, None] * inverse[:, None]).repeat(1, 1, 2)
    return (x.cos().float(), x.sin().float()) if len(bases) > 1 else (x[0].cos().float(), x[0].sin().float())


def storage(
    model: Model, rows: int, capacity: int = 64, dtype: torch.dtype = torch.float32, layout: str = "plain"
) -> tuple[Tensor, Tensor]:
    """Keys and values full of NaN, so that a read of an unwritten element shows."""
    s, layers = model.shape, len(model.layers)
    if layout == "plain":
        both = torch.full((2, layers, rows, s.kv_heads, capacity, s.head_dim), math.nan, dtype=dtype)
        return both[0], both[1]
    # Positions before heads, something between the layers, and different strides of keys and values.
    keys = torch.full((rows, capacity, layers, s.kv_heads + 1, s.head_dim + 3), math.nan, dtype=dtype)
    values = torch.full((layers, capacity, rows, s.kv_heads, s.head_dim), math.nan, dtype=dtype)
    return keys.permute(2, 0, 3, 1, 4)[:, :, 1:, :, 2:-1], values.permute(0, 2, 3, 1, 4)


def feed(
    decoder: NativeDecoder,
    tokens: Tensor,
    cache: tuple[Tensor, Tensor],
    tables: tuple[Tensor, ...],
    widths: Sequence[int],
    threads: int = 1,
) -> Tensor:
    """Logits of all columns of ``tokens``, fed in pieces of these widths."""
    rows, at, pieces = len(tokens), 0, []
    for width in widths:
        piece = tokens[:, at : at + width]
        pieces.append(decoder.step(piece, *cache, [at] * rows, *tables, keep=width, threads=threads))
        at += width
    assert at == tokens.shape[1]
    return torch.cat(pieces, 1)


def random_tokens(shape: DecoderShape, rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randint(0, shape.vocabulary, (rows, columns), generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected).abs().max().item()
    assert error <= tolerance * (expected.max() - expected.min()).item()


MODELS = {
    "grouped": {"shape": FEW},
    "tied": {"shape": FEW, "tied": True},
    "biases": {"shape": FEW, "biases": True},
    "head norms": {"shape": dataclasses.replace(FEW, head_dim=24), "head_norms": "shared"},
    "odd": {"shape": ODD},
    "odd, everything": {"shape": ODD, "biases": True, "head_norms": "shared", "tied": True},
    "norms around, caps, factors": {
        "shape": dataclasses.replace(FEW, softcap=2.0, residual_scale=0.3, embedding_scale=1.7, logit_scale=0.6, logit_softcap=1.5, norm_offset=1.0),
        "norms": ("input_norm", "o_norm", "post_norm", "down_norm"),
        "tied": True,
    },
    "norms of rotated heads, factors of queries": {"shape": dataclasses.replace(FEW, norms_rotated=True), "head_norms": "shared"},
    "norms behind, over all heads": {"shape": ODD, "norms": ("o_norm", "down_norm"), "head_norms": "joint"},
    "layer norms, parallel, pairs": {
        "shape": dataclasses.replace(ODD, norm="layer", is_parallel=True, rotates_pairs=True),
        "norms": ("input_norm",),
        "head_norms": "own",
        "biases": True,
    },
    "sinks, two rotations and none": {
        "shape": dataclasses.replace(FEW, norm="layer", activation="relu2"),
        "gated": False,
        "sinks": True,
        "biases": True,
        "ropes": (1, None, 0),
    },
    "gelu_tanh": {"shape": dataclasses.replace(FEW, activation="gelu_tanh", norm_offset=1.0)},
    "gelu": {"shape": dataclasses.replace(FEW, activation="gelu")},
    "one head": {"shape": dataclasses.replace(FEW, heads=1, kv_heads=1, head_dim=80)},
    "one kv head": {"shape": dataclasses.replace(FEW, heads=5, kv_heads=1, head_dim=8)},
    "16 bits": {"shape": ODD, "bits": 16, "biases": True},
    "bfloat16 weights": {"shape": FEW, "bits": 16, "dtype": torch.bfloat16},
    "8 bits": {"shape": ODD, "bits": 8, "biases": True},
    "8 bits, few": {"shape": FEW, "bits": 8},
}  # fmt: skip


DESCRIBED = [name for name in MODELS if "norms " in name or "sinks" in name]
"""Models with parts that LLaMA has not."""

BASES = (100.0, 7.0)


def tables_of(name: str, model: Model) -> tuple[Tensor, ...]:
    tables = angles(model.shape, bases=BASES if "two" in name else BASES[:1])
    return (*tables, 1 + torch.arange(64) / 9) if "factors of queries" in name else tables


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition(name: str, variant: str) -> None:
    model = Model(**MODELS[name])
    with simd(variant):
        decoder = model.native()
        assert decoder.weight_bits == (16 if "16" in name else 8 if "8 bits" in name else 32)
        tables = tables_of(name, model)
        tokens = random_tokens(model.shape, 2, 50)
        cache = storage(model, 2)
        logits = feed(decoder, tokens, cache, tables, [1, 33, 2, 1, 5, 8])
    for r in range(2):
        expected, _, layers = model.row(tokens[r], *tables)
        if model.head.dtype is torch.bfloat16:
            assert logits.dtype is torch.bfloat16
            assert_close(logits[r], expected, 2**-9)
        else:
            assert_close(logits[r], expected)
        for i, (k, v) in enumerate(layers):
            assert_close(cache[0][i, r, :, :50], k)
            assert_close(cache[1][i, r, :, :50], v)
    # Nothing was written after the rows' lengths.
    assert cache[0][:, :, :, 50:].isnan().all()
    assert cache[1][:, :, :, 50:].isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["grouped", "odd, everything", "16 bits", "8 bits", "one head", *DESCRIBED])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_call(name: str, variant: str, cache_dtype: torch.dtype) -> None:
    # Column by column, in blocks, all at once; alone and in a batch; with one thread and with several.
    model = Model(**MODELS[name])
    with simd(variant):
        decoder = model.native()
        tables = tables_of(name, model)
        tokens, caches = random_tokens(model.shape, 5, 40), []

        def run(rows: Tensor, widths: Sequence[int], threads: int, layout: str = "plain") -> Tensor:
            caches.append(storage(model, len(rows), dtype=cache_dtype, layout=layout))
            return feed(decoder, rows, caches[-1], tables, widths, threads)

        alone = torch.cat([run(tokens[r : r + 1], [1] * 40, 1) for r in range(5)])
        keys = torch.cat([c[0] for c in caches], 1)
        assert alone.isfinite().all()
        for widths, threads, layout in [
            ([40], 1, "plain"),
            ([40], 3, "strided"),
            ([1] * 40, 2, "plain"),
            ([2, 3, 4, 5, 6, 7, 8, 5], 1, "strided"),
            ([3, 33, 4], 2, "plain"),
        ]:
            assert torch.equal(run(tokens, widths, threads, layout), alone), (widths, threads)
            assert torch.equal(caches[-1][0][:, :, :, :40], keys[:, :, :, :40])


def test_16_and_32_bits_give_the_same_bits() -> None:
    model = Model(ODD, bits=16, biases=True)
    size = sum(getattr(layer, name).nbytes for layer in model.layers for name in MATRICES) // 2
    wide, narrow = (NativeDecoder(ODD, model.layers, room=room) for room in (size - 1, size))
    assert (wide.weight_bits, wide.nbytes, narrow.weight_bits, narrow.nbytes) == (32, 0, 16, size)
    shape, tables = (3, 2, ODD.kv_heads, 32, ODD.head_dim), angles(ODD)
    for name in VARIANTS:
        with simd(name):
            for columns in (1, 9):
                hidden = torch.randn(2, columns, ODD.hidden)
                caches = [(torch.full(shape, math.nan), torch.full(shape, math.nan)) for _ in range(2)]
                results = [
                    decoder.run_layers(hidden, *cache, [0, 0], *tables)
                    for decoder, cache in zip((wide, narrow), caches, strict=True)
                ]
                assert torch.equal(*results), name


def test_changed_weights_are_read_at_once() -> None:
    """Those of matrices: nothing is copied of them."""
    model = Model(FEW, dtype=torch.bfloat16)
    decoder, changed = model.native(), Model(FEW, dtype=torch.bfloat16, seed=1)
    assert decoder.nbytes == 0
    for name in MATRICES:
        for layer, other in zip(model.layers, changed.layers, strict=True):
            getattr(layer, name).copy_(getattr(other, name))
    model.head.copy_(changed.head)
    hidden, tables = torch.randn(1, 5, FEW.hidden), angles(FEW)
    results = []
    for run in (decoder, model.native()):
        cache = torch.zeros(3, 1, FEW.kv_heads, 8, FEW.head_dim), torch.zeros(3, 1, FEW.kv_heads, 8, FEW.head_dim)
        results.append(run.logits(run.run_layers(hidden, *cache, [0], *tables)))
    assert torch.equal(*results)


def test_the_memory_of_weights_is_kept() -> None:
    model = Model(FEW, dtype=torch.bfloat16)
    decoder, hidden = model.native(), torch.randn(3, FEW.hidden)
    wanted = decoder.logits(hidden)
    model.head = model.head + 1
    gc.collect()
    assert torch.equal(decoder.logits(hidden), wanted)


def test_one_weight_makes_it_32_bits() -> None:
    model = Model(FEW, bits=16)
    assert model.native().weight_bits == 16
    for name in MATRICES:
        changed = getattr(model.layers[1], name).clone()
        changed[-1, -1] = 1 + 2**-20
        layers = [model.layers[0], dataclasses.replace(model.layers[1], **{name: changed}), model.layers[2]]
        assert NativeDecoder(FEW, layers).weight_bits == 32, name
    model.head[5, 5] = 1 + 2**-20
    assert model.native().weight_bits == 32


LARGE = dataclasses.replace(ODD, hidden=200, vocabulary=2001)
"""A head of several units of work while it is checked and packed, and rows of several tiles."""


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("bits", "dtype"), [(32, torch.float32), (16, torch.float32), (16, torch.bfloat16)])
def test_packing_by_several_threads(bits: int, dtype: torch.dtype, threads: int) -> None:
    head, hidden = torch.randn(LARGE.vocabulary, LARGE.hidden), torch.randn(3, LARGE.hidden)
    if bits == 16:
        head = head.bfloat16().float()
    decoder = NativeDecoder(LARGE, [], norm=torch.ones(LARGE.hidden), head=head.to(dtype), threads=threads)
    assert decoder.weight_bits == bits
    normed = torch.nn.functional.rms_norm(hidden.double(), (LARGE.hidden,), eps=LARGE.eps)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    wanted = normed * (1 + LARGE.norm_offset) @ head.double().T
    torch.testing.assert_close(decoder.logits(hidden).double(), wanted, rtol=rounding, atol=1e-4)


def test_the_last_weight_makes_it_32_bits() -> None:
    head = torch.ones(LARGE.vocabulary, LARGE.hidden)
    head[-1, -1] = 1 + 2**-20
    assert NativeDecoder(LARGE, [], norm=torch.ones(LARGE.hidden), head=head, threads=2).weight_bits == 32


def test_matrices_of_different_dtypes() -> None:
    for bits in (16, 32):
        model = Model(FEW, bits=bits)
        results = []
        for cast in (torch.Tensor.float, torch.Tensor.bfloat16):
            layers = [
                dataclasses.replace(layer, k=cast(layer.k.bfloat16()), up=cast(layer.up.bfloat16()))
                for layer in model.layers
            ]
            decoder = NativeDecoder(FEW, layers)
            assert decoder.weight_bits == bits
            shape = (3, 1, FEW.kv_heads, 8, FEW.head_dim)
            cache, tables = (torch.zeros(shape), torch.zeros(shape)), angles(FEW)
            hidden = torch.randn(1, 5, FEW.hidden, generator=torch.Generator().manual_seed(1))
            results.append(decoder.run_layers(hidden, *cache, [0], *tables))
        assert torch.equal(*results)


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_keeps_the_last_columns(keep: int, threads: int) -> None:
    model = Model(ODD, biases=True)
    decoder, tables, tokens = model.native(), angles(ODD), random_tokens(ODD, 3, 23)
    cache, reference = storage(model, 3), storage(model, 3)
    everything = feed(decoder, tokens, reference, tables, [18, 5])
    decoder.step(tokens[:, :18], *cache, [0] * 3, *tables, keep=0, threads=threads)
    out = torch.full((3, keep, ODD.vocabulary), math.nan)
    got = decoder.step(tokens[:, 18:], *cache, [18] * 3, *tables, keep=keep, threads=threads, out=out)
    assert got is out
    assert torch.equal(got, everything[:, 23 - keep :])
    for ours, theirs in zip(cache, reference, strict=True):
        assert torch.equal(ours[:, :, :, :23], theirs[:, :, :, :23])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taps_are_the_hidden_states_of_the_layers(variant: str, dtype: torch.dtype) -> None:
    model = Model(ODD, layers=4)
    lengths, layers = [3, 0], [4, 0, 2, 2]
    with simd(variant):
        decoder, tables, tokens = model.native(), angles(ODD), random_tokens(ODD, 2, 12)
        first = storage(model, 2)
        decoder.step(tokens[:, :3], *first, [0, 0], *tables, keep=0)
        cache, parts = ([x.clone() for x in first] for _ in range(2))
        plain = decoder.step(tokens[:, 3:], *first, lengths, *tables, keep=2)
        streams = [decoder.embed(tokens[:, 3:])]
        for i in range(4):
            streams.append(decoder.run_layers(streams[-1], *parts, lengths, *tables, begin=i, end=i + 1))
        expected = torch.cat([streams[i] for i in layers], -1).to(dtype)
        for threads, width in ((1, 9), (2, 4)):
            out = torch.full((2, 16, 4 * ODD.hidden + 5), math.nan, dtype=dtype)
            for at in range(3, 12, width):
                begin = [n + at - 3 for n in lengths]
                taps = Taps(layers, out[:, :, 5:], [n + 2 for n in begin])
                logits = decoder.step(
                    tokens[:, at : at + width], *cache, begin, *tables, keep=min(2, 12 - at), taps=taps, threads=threads
                )
            assert torch.equal(logits, plain[:, -logits.shape[1] :])  # the last piece of 4 has one column
            for row, at in enumerate(n + 2 for n in lengths):
                assert torch.equal(out[row, at : at + 9, 5:], expected[row])
                assert out[row, :at].isnan().all()
                assert out[row, at + 9 :].isnan().all()
            assert out[:, :, :5].isnan().all()
        out = torch.empty(2, 9, 2 * ODD.hidden)
        decoder.run_layers(streams[1], *cache, lengths, *tables, begin=1, end=3, taps=Taps([1, 3], out, [0, 0]))
        assert torch.equal(out, torch.cat((streams[1], streams[3]), -1))


SIDED = {
    "32 bits": {"shape": ODD, "biases": True},
    "head norms": {"shape": FEW, "head_norms": "shared"},
    "16 bits": {"shape": FEW, "bits": 16},
    "8 bits": {"shape": ODD, "bits": 8},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("adds_to_norm", [False, True])
@pytest.mark.parametrize("name", SIDED)
def test_a_layer_with_side_inputs(name: str, adds_to_norm: bool, variant: str) -> None:
    model = Model(layers=2, side=True, **SIDED[name])
    for layers in (model.layers, *([model.given] if model.int8 else [])):
        layers[0] = dataclasses.replace(layers[0], adds_to_norm=adds_to_norm)
    shape, tokens = model.shape, random_tokens(model.shape, 2, 30)
    tables, hidden, results = angles(shape), torch.randn(2, 30, shape.hidden), []
    with simd(variant):
        decoder = model.native()
        side, before = decoder.embed(tokens), hidden.clone()
        for widths, threads in (([30], 1), ([1] * 30, 2), ([17, 8, 5], 3)):
            cache, at, pieces = storage(model, 2), 0, []
            for n in widths:
                piece = slice(at, at + n)
                pieces.append(
                    decoder.run_layers(
                        hidden[:, piece], *cache, [at] * 2, *tables, side=side[:, piece], threads=threads
                    )
                )
                at += n
            results.append(torch.cat(pieces, 1))
        logits = decoder.logits(results[0])
    assert torch.equal(before, hidden)
    assert all(torch.equal(result, results[0]) for result in results)
    for r in range(2):
        expected, last, _ = model.row(tokens[r], *tables, given=hidden[r])
        assert_close(results[0][r], last)
        assert_close(logits[r], expected)


def test_a_cache_of_bfloat16_is_rounded_to_nearest_even() -> None:
    model = Model(FEW, layers=1)
    decoder, tables, tokens = model.native(), angles(FEW), random_tokens(FEW, 1, 30)
    exact, rounded = storage(model, 1), storage(model, 1, dtype=torch.bfloat16)
    expected = feed(decoder, tokens, exact, tables, [30])
    got = feed(decoder, tokens, rounded, tables, [30])
    for ours, theirs in zip(rounded, exact, strict=True):
        assert torch.equal(ours[:, :, :, :30], theirs[:, :, :, :30].bfloat16())
    assert_close(got, expected.double(), 0.01)
    assert not torch.equal(got, expected)


def test_large_scores() -> None:
    # One key takes all of the weight: exponentials of differences far below the range of float32.
    model = Model(dataclasses.replace(FEW, scale=300.0))
    decoder, tables, tokens = model.native(), angles(FEW), random_tokens(FEW, 1, 30)
    logits = feed(decoder, tokens, storage(model, 1), tables, [30])
    assert_close(logits[0], model.row(tokens[0], *tables)[0], 1e-3)


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (3, 0)])
def test_nothing_to_do(rows: int, width: int) -> None:
    model = Model(FEW)
    decoder, tables = model.native(), angles(FEW)
    cache = storage(model, rows)
    tokens = torch.zeros((rows, width), dtype=torch.int64)
    assert decoder.step(tokens, *cache, [0] * rows, *tables, keep=width).shape == (rows, width, FEW.vocabulary)
    hidden = decoder.embed(tokens)
    assert hidden.shape == (rows, width, FEW.hidden)
    assert decoder.run_layers(hidden, *cache, [0] * rows, *tables).shape == hidden.shape
    assert decoder.logits(hidden).shape == (rows, width, FEW.vocabulary)


# ---- what is refused


def step(**change: Any) -> Tensor:
    """A step of two rows with four tokens each that fits, but for the changes."""
    model = Model(FEW)
    (cos, sin), (keys, values) = angles(FEW, 32), storage(model, 2, capacity=20)
    good = {"tokens": random_tokens(FEW, 2, 4), "keys": keys, "values": values, "lengths": [3, 16], "cos": cos, "sin": sin, "keep": 4}  # fmt: skip
    try:
        return model.native().step(**good | change)
    except (TypeError, ValueError):
        assert keys.isnan().all()
        raise


def sided(**change: Any) -> Tensor:
    """Layers of which the first has side inputs."""
    model, hidden = Model(FEW, layers=2, side=True), torch.randn(2, 3, FEW.hidden)
    cache = storage(model, 2)
    try:
        return model.native().run_layers(hidden, *cache, [0, 0], *angles(FEW), **{"side": hidden} | change)
    except (TypeError, ValueError):
        assert cache[0].isnan().all()
        raise


def bare(hidden: Tensor, **change: Any) -> Tensor:
    """One layer without an embedding or a head."""
    decoder = NativeDecoder(FEW, WEIGHTS.layers[:1])
    return decoder.run_layers(hidden, torch.zeros(0), torch.zeros(0), [0], *angles(FEW), **change)


def shaped(**change: Any) -> NativeDecoder:
    return NativeDecoder(dataclasses.replace(FEW, **change), WEIGHTS.layers)


def weighted(layer: LayerWeights, ends: dict[str, Any] | None = None, **change: Any) -> NativeDecoder:
    return NativeDecoder(FEW, [dataclasses.replace(layer, **change)], **ends or {})


WEIGHTS, CODES, OUT = Model(FEW), Model(FEW, bits=8), torch.empty(2, 3, FEW.hidden)
LAYER, CODED = WEIGHTS.layers[0], CODES.given[0]
NO_TAPS = "what is tapped must be"
REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "capacity is 20", lambda: step(lengths=[3, 17])),
    (ValueError, "2 entries", lambda: step(lengths=[3])),
    (TypeError, "integer", lambda: step(lengths=[0.5, 1])),
    (ValueError, "cos must be", lambda: step(cos=torch.zeros(32, 8))),
    (ValueError, "cos must be on the CPU", lambda: step(cos=torch.zeros(32, 16, device="meta"))),
    (ValueError, "keep must be 0 .. 4", lambda: step(keep=5)),
    (ValueError, "threads must be at least 1", lambda: step(threads=0)),
    (ValueError, r"tokens\[1, 2\] is 100", lambda: step(tokens=torch.tensor([[0, 1, 2, 3], [0, 1, 100, 3]]))),
    (ValueError, "values are", lambda: step(values=torch.zeros(3, 2, 2, 21, 16))),
    (TypeError, "both be float32", lambda: step(values=torch.zeros(3, 2, 2, 20, 16, dtype=torch.bfloat16))),
    (ValueError, "out must be", lambda: step(out=torch.zeros(2, 4, 101))),
    (ValueError, "divide heads", lambda: shaped(kv_heads=3)),
    (ValueError, "even", lambda: shaped(rotary_dim=5)),
    (ValueError, "rotary_dim", lambda: shaped(rotary_dim=18)),
    (ValueError, "activation", lambda: shaped(activation="relu")),
    (ValueError, "hidden", lambda: shaped(hidden=0)),
    (ValueError, r"layers\[0\].q must be", lambda: shaped(head_dim=18)),
    (TypeError, "up must be float32 or bfloat16", lambda: weighted(LAYER, up=LAYER.up.half())),
    (ValueError, "down_bias must be", lambda: weighted(LAYER, down_bias=torch.zeros(1))),
    (ValueError, "on the CPU", lambda: weighted(LAYER, k=LAYER.k.to("meta"))),
    (ValueError, "needs a norm", lambda: weighted(LAYER, {"head": WEIGHTS.head})),
    (ValueError, "a norm needs a head", lambda: weighted(LAYER, {"norm": WEIGHTS.norm})),
    (ValueError, "needs a head", lambda: weighted(LAYER, {"head_bias": torch.zeros(100)})),
    (ValueError, "without embedding", lambda: weighted(LAYER).embed(torch.zeros((1, 1), dtype=torch.int64))),
    (ValueError, "without a head", lambda: weighted(LAYER).logits(torch.zeros(1, 64))),
    (ValueError, "begin 0 and end 2", lambda: bare(torch.zeros(1, 1, 64), end=2)),
    (ValueError, "hidden must be", lambda: bare(torch.zeros(1, 64))),
    (TypeError, "hidden must be float32", lambda: bare(torch.zeros(1, 1, 64).double())),
    (TypeError, "q with a scale must be int8", lambda: weighted(CODED, q=CODES.layers[0].q)),
    (ValueError, "scale of layers", lambda: weighted(CODED, q_scale=torch.ones(3))),
    (ValueError, "layers with side inputs, and no others, need side", lambda: sided(side=None)),
    (ValueError, "layers with side inputs, and no others, need side", lambda: sided(side=OUT[:, :2])),
    (ValueError, "layers with side inputs, and no others, need side", lambda: sided(begin=1)),
    (TypeError, "hidden must be float32", lambda: sided(side=OUT.double())),
    (ValueError, "taps are 0 .. 2, the number of layers", lambda: sided(taps=Taps([3], OUT, [0, 0]))),
    (ValueError, "taps are 0 .. 2, the number of layers", lambda: sided(taps=Taps([-1], OUT, [0, 0]))),
    (ValueError, NO_TAPS, lambda: sided(taps=Taps([1, 2], OUT, [0, 0]))),
    (ValueError, NO_TAPS, lambda: sided(taps=Taps([1], OUT, [0]))),
    (ValueError, NO_TAPS, lambda: sided(taps=Taps([1], OUT.mT.contiguous().mT, [0, 0]))),
    (ValueError, "3 columns from the positions", lambda: sided(taps=Taps([1], OUT, [0, 1]))),
    (ValueError, "3 columns from the positions", lambda: sided(taps=Taps([1], OUT, [-1, 0]))),
    (TypeError, "what is tapped must be float32 or bfloat16", lambda: sided(taps=Taps([1], OUT.half(), [0, 0]))),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED)
def test_what_does_not_fit_is_named(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_fits_is_not_refused() -> None:
    assert step().shape == (2, 4, FEW.vocabulary)
    assert sided().shape == OUT.shape
    assert weighted(CODED).weight_bits == 8
