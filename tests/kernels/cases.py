"""The operations in one table: how calls of each are made, what a call gives, and how close.

``test_matrix.py`` runs the table for every implementation, dtype and layout.
"""

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.generation import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from pipespec_kernels import reference
from pipespec_kernels.noise import Noise, Streams
from pipespec_kernels.penalties import Penalties

from .implementations import INTERPRETED
from .selection import DTYPES, KINDS, argmax_by_hand, make_logits, ragged_counts

T = TypeVar("T")
Arguments = dict[str, Any]
EPS = 1e-5
FLOATS = [*DTYPES, torch.float64]
# Elements from one number to the next, as a share of the number: float32 sums are in another order, 16-bit numbers may be rounded to a neighbour.
STEP = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
VOCABULARIES = (1, 2, 3, 7, 31, 33, 64, 100, 300, 512, 1000, 1024, 4097)

# ---- layouts

LAYOUTS = ("contiguous", "transposed", "gaps", "offset", "expanded", "overlapping")
"""The last two have other values, and only what is not written has them."""


def placed(x: Tensor, layout: str, *, free: bool = False, written: bool = False, seed: int = 0) -> Tensor:
    """The values of ``x`` in another layout: all dimensions but the last, or with ``free`` all of them, in other places of memory.

    Between the elements are NaNs (or ids that lead far out), which must neither be read nor written.
    """
    if x.numel() == 0 or (written and layout in LAYOUTS[4:]):
        return x
    if x.dim() == 1:
        wide = torch.stack([x, garbage(x)], 1)
        return {"gaps": wide[:, 0], "expanded": x[:1].expand(x.shape)}.get(layout, x) if free else x
    if layout == "transposed":  # of four dimensions: the columns before the heads
        first = x.dim() - 2 - (not free)
        return x.transpose(first, first + 1).contiguous().transpose(first, first + 1) if first >= 0 else x
    if layout == "gaps":  # of four dimensions: the rows within the columns, as some engines have them
        order = [2, 0, 1, 3] if x.dim() == 4 else list(range(x.dim()))
        wide = garbage(x.permute(order).new_empty([x.shape[i] + 3 for i in order]))
        inside = wide[tuple(slice(1, 1 + x.shape[i]) for i in order)]
        return inside.permute([order.index(i) for i in range(x.dim())]).copy_(x)
    if layout == "offset":  # begins at an address that no vector is aligned to
        flat = garbage(x.new_empty(x.numel() + 1))[1:]
        return flat.view(x.shape).copy_(x)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "overlapping":
        sizes = random.Random(seed)
        strides = [sizes.randint(0, 80) for _ in x.shape[1:]] + [sizes.randint(0, 80) if free else 1]
        reach = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        return x.flatten().repeat(-(-reach // x.numel()))[:reach].as_strided(x.shape, strides)
    return x


def garbage(x: Tensor) -> Tensor:
    return torch.full_like(x, math.nan if x.is_floating_point() else -(10**9))


def each(arguments: T, change: Callable[[str, Tensor], Any], name: str = "") -> T:
    """The arguments with ``change(name, tensor)`` in the place of each tensor, those of noise and penalties included."""
    if isinstance(arguments, dict):
        return {key: each(value, change, key) for key, value in arguments.items()}  # type: ignore[return-value]
    if is_dataclass(arguments) and not isinstance(arguments, type):
        parts = {f.name: each(getattr(arguments, f.name), change, f.name) for f in fields(arguments)}
        return replace(arguments, **parts)
    return change(name, arguments) if isinstance(arguments, Tensor) else arguments


def same_strides(x: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device, of all of the memory around it, too."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


# ---- numbers


class Draw:
    """The random numbers of one call.

    Attributes:
        vocabulary: the size of the vocabulary.
        kernels: the call is for Triton's kernels.
        repeats: some elements of what is not written share their memory.
    """

    def __init__(self, seed: int, dtype: torch.dtype, layout: str = "contiguous", *, values: int | None = None, kernels: bool = INTERPRETED, **sizes: int) -> None:  # fmt: skip
        """``seed`` decides sizes and options, and without ``values`` the numbers; ``sizes``: of rows, columns and vocabulary, where they are given."""
        self._sizes, self._placed = random.Random(seed), seed
        self.generator = torch.Generator().manual_seed(seed if values is None else values)
        self.dtype, self._layout, self.repeats = dtype, layout, layout in LAYOUTS[4:]
        self.kernels = kernels
        self.vocabulary = self.pick(*VOCABULARIES)
        self.rows, self.columns = self.size(0, 3 if kernels else 5), self.size(0, 3 if kernels else 6)
        self.__dict__.update(sizes)

    def pick(self, *options: T) -> T:
        return self._sizes.choice(options)

    def size(self, low: int, high: int) -> int:
        return self._sizes.randint(low, high)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int64).to(dtype)

    def placed(self, x: Tensor, *, free: bool = False, written: bool = False) -> Tensor:
        self._placed += 1
        return placed(x, self._layout, free=free, written=written, seed=self._placed)

    def logits(self, *kinds: str) -> Tensor:
        shape = self.rows, self.columns, self.vocabulary
        return self.placed(make_logits(self.pick(*kinds), shape, self.dtype, self.generator))

    def cutoff(self, logits: Tensor) -> Tensor:
        """The cutoff at a random logit of each row; sometimes at none, or above all."""
        ids = self.integers(0, self.vocabulary, *logits.shape[:2], 1)
        found, chance = logits.gather(2, ids)[..., 0].float(), self.uniform(0, 1, *logits.shape[:2])
        found = found.masked_fill(chance < 0.1, -math.inf).masked_fill(chance > 0.95, math.inf)
        return self.placed(found, free=True)

    def noise(self, logits: Tensor, filtered: bool) -> Noise:
        rows = len(logits)
        positions = self.integers(0, 2**62, rows) >> self.integers(0, 60, rows)
        seeds, scale = self.integers(-(2**63), 2**63 - 1, rows), self.uniform(0.1, 2.1, rows)
        per_row = (self.placed(x, free=True) for x in (seeds, positions, scale))
        return Noise(*per_row, self.cutoff(logits) if filtered else None, stream=self.pick(0, 1, 2, 3))

    def counts(self) -> Arguments:
        both = ragged_counts(self.rows, self.columns, self.generator)
        return {
            name: self.placed(x, free=True) for name, x in zip(("query_lens", "num_draft_tokens"), both, strict=True)
        }

    def agreeing(self, choices: Tensor) -> Tensor:
        """Tokens that mostly are the choices of the columns before; some of the others are no ids."""
        agrees = self.uniform(0, 1, *choices.shape) < 0.8
        others = self.integers(0, self.vocabulary + 2, *choices.shape)
        tokens = torch.where(agrees, choices.long().roll(1, 1), others)
        return self.placed(tokens.to(self.pick(torch.int32, torch.int64)), free=True)

    def storage(self, heads: int, capacity: int, dim: int, new: int) -> Arguments:
        """Storage with room for up to ``new`` columns after each row."""
        counts = self.integers(0, new + 1, self.rows)
        lengths = (self.uniform(0, 1, self.rows) * (capacity - counts + 1)).long()
        caches = (self.placed(self.normal(self.rows, heads, capacity, dim), written=True) for _ in range(2))
        integers = [x.to(self.pick(torch.int32, torch.int64)) for x in (lengths, counts)]
        return dict(zip(("k_cache", "v_cache", "lengths", "n_new"), (*caches, *integers), strict=True))


# ---- calls


def of_argmax(draw: Draw) -> Arguments:
    return {"logits": draw.logits(*KINDS)}


def of_sample(draw: Draw) -> Arguments:
    logits = draw.logits(*KINDS)
    return {"logits": logits, "noise": draw.noise(logits, draw.pick(True, False))}


def of_verify(draw: Draw) -> Arguments:
    logits = draw.logits(*KINDS)
    noise = draw.noise(logits, draw.pick(True, False)) if draw.pick(True, True, False) else None
    choices = logits.argmax(-1) if noise is None else sample_by_hand(logits, noise)
    return {"logits": logits, "tokens": draw.agreeing(choices), "noise": noise, **draw.counts()}


def of_rejection_sample(draw: Draw) -> Arguments:
    logits = draw.logits("normal") if draw.kernels else draw.logits("normal", "few values", "minus inf", "nans")
    draft = (logits.float() + torch.randn(logits.shape, generator=draw.generator)).to(draw.pick(*DTYPES))
    filtered, certain = draw.pick(True, False), draw.pick(True, False, False)
    noise = draw.noise(logits, False)
    drawn_with = replace(noise, stream=5)
    options: Arguments = {"streams": Streams(5, 6, 7)}
    if filtered:
        noise.cutoff = draw.placed(logits.float().amax(-1) - 3, free=True)
        drawn_with.inv_temperature = options["draft_inv_temperature"] = noise.inv_temperature * 0.75
        drawn_with.cutoff = options["draft_cutoff"] = draw.placed(draft.float().amax(-1) - 3, free=True)
    tokens = draw.agreeing(sample_by_hand(draft, drawn_with))
    draft_logits = None if certain else draw.placed(draft)
    return {
        "logits": logits,
        "tokens": tokens,
        "draft_logits": draft_logits,
        "noise": noise,
        **draw.counts(),
        **options,
    }


def of_cutoff(draw: Draw) -> Arguments:
    logits = draw.logits(*KINDS, "ranked", "sorted", "flat", "two values", "infinite")
    values = {
        "inv_temperature": draw.uniform(0.5, 1.5, draw.rows),
        "top_k": torch.tensor([draw.pick(0, 0, 1, 2, 3, 17, 150, 10**6) for _ in range(draw.rows)], dtype=torch.int64),
        "top_p": torch.tensor([draw.pick(0.0, 0.1, 0.75, 0.999, 1.0, 1.0) for _ in range(draw.rows)]).double(),
        "min_p": torch.tensor([draw.pick(0.0, 0.0, 0.03, 1.0) for _ in range(draw.rows)]).double(),
    }
    if draw.pick(True, False):  # one number for all rows
        values = {name: x[0].item() if len(x) else 1 for name, x in values.items()} | {
            "inv_temperature": draw.pick(0.5, 1.0)
        }
    return {"logits": logits, **values, **(draw.counts() if draw.pick(True, False) else {})}


def of_penalize(draw: Draw) -> Arguments:
    """Repeated tokens, ids outside of the vocabulary, biases of -inf."""
    draw.vocabulary = max(draw.vocabulary, 6)
    rows, columns, vocabulary, longest = draw.rows, draw.columns, draw.vocabulary, draw.pick(40, 40, 1500)
    ids = torch.stack(
        [torch.randperm(vocabulary, generator=draw.generator)[:6] for _ in range(rows)] or [torch.empty(6)]
    )[:rows]
    bias = draw.normal(rows, 6)
    ids[:, 5:], bias[:, :1] = -1, -math.inf
    scores = [draw.uniform(0.5, 2, rows), *draw.normal(2, rows)]
    prompts = draw.integers(0, longest // 2, rows, dtype=torch.int32)
    masks = draw.integers(-(2**31), 2**31 - 1, rows, columns, -(-vocabulary // 32), dtype=torch.int32)
    logits = make_logits(
        draw.pick("normal", "few values", "any bits"), (rows, columns, vocabulary), draw.dtype, draw.generator
    )
    tokens = draw.integers(-1, vocabulary + 3, rows, columns).to(draw.pick(torch.int32, torch.int64))
    return {
        "logits": draw.placed(logits, written=True),
        "tokens": draw.placed(tokens, free=True),
        "history": draw.integers(-1, vocabulary // 2, rows, longest + columns, dtype=torch.int32),
        "lengths": draw.integers(0, longest, rows, dtype=torch.int32),
        "penalties": Penalties(*scores, prompts, ids.int(), bias),
        "bitmask": masks if draw.pick(True, True, False) else None,
        **(draw.counts() if draw.pick(True, True, False) else {}),
    }


def of_prompt_lookup(draw: Draw) -> Arguments:
    """Texts of few ids, which repeat; rows that have nothing to feed, or do not select."""
    rows, width, ids = draw.rows, draw.columns + 2, draw.pick(2, 3, 5, 40)

    def text(*shape: int) -> Tensor:
        return draw.integers(0, ids, *shape, dtype=torch.int32)

    query_lens = draw.integers(0, width + 1, rows, dtype=torch.int32)
    draft_tokens = (draw.uniform(0, 1, rows) * query_lens.clamp(max=draw.pick(1, width))).int()
    room = draw.pick(0, 3, 70, 400)
    min_match = draw.pick(1, 2, 4)
    return {
        "tokens": text(rows, width),
        "query_lens": query_lens,
        "num_draft_tokens": draft_tokens,
        "n_select": query_lens * draw.integers(0, 4, rows).clamp(max=1).int(),
        "history": text(rows, width + room),
        "lengths": draw.integers(0, room + 1, rows, dtype=torch.int32),
        "count": draw.pick(1, 2, 5, 40),
        "min_match": min_match,
        "max_match": min_match + draw.pick(0, 1, 6),
        "corpus": text(draw.pick(1, 2, 30, 500)) if draw.pick(True, False) else None,
    }


def of_logprobs(draw: Draw) -> Arguments:
    """Columns without a selected token, tokens below the cutoff, and ids outside of the vocabulary."""
    logits = draw.logits("normal", "few values", "minus inf", "zeros", "nans")
    selected = draw.integers(-1, draw.vocabulary + 1, draw.rows, draw.columns, dtype=torch.int32)
    scale = draw.placed(draw.uniform(0.5, 1.5, draw.rows), free=True) if draw.pick(True, False) else None
    bars = draw.placed(draw.uniform(-1, 0.7, draw.rows, draw.columns), free=True) if draw.pick(True, False) else None
    top_n = min(draw.pick(0, 4, 9), draw.vocabulary)
    return {"logits": logits, "selected": draw.placed(selected, free=True), "inv_temperature": scale, "cutoff": bars, "top_n": top_n, **draw.counts()}  # fmt: skip


def of_kv_append(draw: Draw) -> Arguments:
    width, heads, dim = draw.size(0, 9), draw.size(1, 3), draw.pick(1, 3, 16, 20)
    new = [draw.placed(draw.normal(draw.rows, heads, width, dim)) for _ in range(2)]
    there = draw.storage(heads, width + draw.size(0, 12), dim, width)
    return dict(zip(("keys", "values"), new, strict=True)) | there


def of_verify_attention(draw: Draw) -> Arguments:
    """What no column sees has NaNs."""
    width, heads, group = draw.pick(0, 1, 2, 7, 8, 9, 17), draw.size(1, 2), draw.size(1, 8)
    dim, window = draw.pick(1, 7, 8, 16, 20, 33, 64, 80, 128), draw.pick(None, None, 1, 5, 16, 33, 1000)
    there = draw.storage(heads, width + draw.size(1, 140), dim, width)
    lengths, counts = there["lengths"], there.pop("n_new")
    q = draw.placed(draw.normal(draw.rows, heads * group, width, dim))
    for row, (n, fed) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for cache in (there["k_cache"], there["v_cache"]):
            cache[row, :, n + fed :] = math.nan
            if not draw.kernels:  # they load whole blocks of keys
                cache[row, :, : 0 if window is None else max(0, n + 1 - window)] = math.nan
        if not draw.repeats:
            q[row, :, fed:] = math.nan
    options = {"scale": draw.pick(None, 0.3), "softcap": draw.pick(None, None, 2.0), "window": window}
    return {"q": q, **there, "query_lens": counts, **options, "invariant": draw.pick(True, False)}


def of_add_rms_norm(draw: Draw) -> Arguments:
    """Rows of small integers have exact sums of squares, so all results have the same bits."""
    shape = draw.rows, draw.pick(1, 2, 7, 33, 96, 100, 300, 1000)
    integers = draw.pick(True, False)
    x, residual = (draw.integers(-8, 9, *shape).to(draw.dtype) if integers else draw.normal(*shape) for _ in range(2))
    vectors = [draw.normal(shape[1]) for _ in range(2)]
    return {
        "x": draw.placed(x),
        "residual": draw.placed(residual) if draw.pick(True, False) else None,
        "weight": vectors[0],
        "eps": EPS,
        "one_plus_weight": draw.pick(True, False),
        "bias": draw.pick(vectors[1], None),
    }


def of_silu_mul(draw: Draw) -> Arguments:
    gate_up = draw.normal(draw.rows, 2 * draw.pick(1, 2, 7, 33, 100, 1500)) * 4
    gate_up[:1, 0] = draw.pick(0.0, -100.0, 100.0)
    return {"gate_up": draw.placed(gate_up), "activation": draw.pick("silu", "gelu_tanh", "gelu")}


def of_rope_append(draw: Draw) -> Arguments:
    """Queries, keys and values of one product."""
    width, capacity = draw.size(0, 4), draw.size(4, 10)
    heads_q, heads = draw.pick((1, 1), (6, 2), (3, 3))
    dim, rotary = draw.pick(
        (64, 64), (80, 80), (80, 32), (96, 96), (128, 128), (256, 64), (256, 256), (264, 264), (2, 2), (9, 4)
    )
    product = draw.placed(draw.normal(draw.rows, heads_q + 2 * heads, width, dim))
    there = draw.storage(heads, capacity, dim, width)
    angles = draw.uniform(0, 6, capacity + 3, rotary // 2)
    tables = draw.dtype if draw.dtype is torch.float64 else draw.pick(draw.dtype, torch.float32)
    case = dict(zip(("q", "keys", "values"), product.split([heads_q, heads, heads], 1), strict=True)) | there
    # The two halves differ, so that an error in their order shows.
    case |= {name: torch.cat((x, x * 0.5), 1).to(tables) for name, x in (("cos", angles.cos()), ("sin", angles.sin()))}
    if draw.pick(True, False):
        case |= {
            "q_norm": draw.normal(dim),
            "k_norm": draw.normal(dim),
            "eps": EPS,
            "one_plus_weight": draw.pick(True, False),
        }
    if draw.pick(True, False):
        at = draw.integers(0, capacity + 3, draw.rows, width)
        at[there["n_new"][:, None] <= torch.arange(width)] = -(10**9)  # of padding: not read
        case["positions"] = draw.placed(at, free=True, written=True)
    return case


def of_product(draw: Draw, outputs: int) -> tuple[Arguments, Arguments]:
    """What a product has before its own arguments, and behind them. Its results are about 1."""
    size = draw.pick(1, 7, 33, 100, 600) if draw.kernels else draw.pick(1, 7, 33, 100, 600, 1500)
    weight = (draw.normal(outputs, size).float() * size**-0.5).to(draw.dtype)
    bias, norm = draw.normal(outputs), draw.normal(size)
    before = {"weight": draw.placed(weight), "bias": draw.pick(bias, None)}
    before["x"] = draw.placed(draw.normal(draw.rows, size))
    has_norm = draw.pick(True, False)
    return before, {"norm": norm if has_norm else None, "eps": EPS, "one_plus_weight": draw.pick(True, False)}


def of_linear_small(draw: Draw) -> Arguments:
    """Rows of weights that no tile divides; up to 16 of ``x``."""
    draw.rows = draw.rows if draw.rows < 3 else draw.pick(3, 8, 9, 16)
    outputs, how = draw.pick(1, 3, 16, 17, 40), draw.pick("plain", "activation", "residual")
    before, options = of_product(draw, 2 * outputs if how == "activation" else outputs)
    options["activation"] = draw.pick("silu", "gelu_tanh", "gelu") if how == "activation" else None
    options["residual"] = draw.placed(draw.normal(draw.rows, outputs)) if how == "residual" else None
    return before | options


def of_experts_small(draw: Draw) -> Arguments:
    """Rows with one or several experts of a few, one row of ``x`` for all of them or one for each."""
    experts, each, outputs = draw.pick(1, 3, 6), draw.size(1, 3), draw.pick(1, 8, 17)
    each = min(each, experts)
    draw.rows = draw.rows if draw.rows < 3 else draw.pick(3, 8, 9, 16)
    case, _ = of_product(draw, experts * outputs)
    orders = draw.uniform(0, 1, draw.rows, experts).argsort(1)
    case["chosen"] = orders[:, :each].to(draw.pick(torch.int32, torch.int64)).contiguous()
    if draw.pick(True, False):
        case["x"] = draw.normal(draw.rows, each, case["x"].shape[1])
    shares = draw.uniform(0, 1, draw.rows, each)
    return case | {"experts": experts, "shares": draw.pick(None, shares.to(draw.dtype))}


def experts_by_hand(x: Any, weight: Any, chosen: Any, bias: Any, experts: int, shares: Any) -> torch.Tensor:
    """Each product apart."""
    rows = len(weight) // experts
    found = x.new_empty((*chosen.shape, rows))
    for m, j in itertools.product(*map(range, chosen.shape)):
        of = slice(int(chosen[m, j]) * rows, (int(chosen[m, j]) + 1) * rows)
        given = x[m : m + 1] if x.dim() == 2 else x[m, j : j + 1]
        found[m, j] = reference.linear_small(given, weight[of], None if bias is None else bias[of])[0]
    if shares is None:
        return found
    wide = torch.promote_types(x.dtype, torch.float32)
    return (found.to(wide) * shares.to(wide)[..., None]).sum(1).to(x.dtype)


def of_qkv_append(draw: Draw) -> Arguments:
    """Heads of which a tile takes a part, and whose dimensions are not all rotated."""
    width, capacity = draw.size(0, 4), draw.size(4, 10)
    heads_q, heads = draw.pick((1, 1), (3, 1), (2, 2))
    dim, rotary = draw.pick((64, 64), (40, 32), (24, 10), (2, 2), (9, 4), (48, 48))
    rows = draw.rows
    draw.rows = rows * width
    case, options = of_product(draw, (heads_q + 2 * heads) * dim)
    draw.rows, case["x"] = rows, case["x"].view(rows, width, case["x"].shape[1])
    there = draw.storage(heads, capacity, dim, width)
    counts = there.pop("n_new")
    if draw.pick(True, False):
        there["query_lens"] = counts.clamp(min=min(width, 1))  # a step without work gives any values
    new = there.get("query_lens", torch.full_like(counts, width))
    there["lengths"] = there["lengths"].clamp(max=capacity - new)
    angles = draw.uniform(0, 6, capacity + 3, rotary // 2)
    tables = draw.dtype if draw.dtype is torch.float64 else draw.pick(draw.dtype, torch.float32)
    case |= {name: torch.cat((x, x * 0.5), 1).to(tables) for name, x in (("cos", angles.cos()), ("sin", angles.sin()))}
    return case | there | options


# ---- results


def words(noise: Noise, row: int, column: int, vocabulary: int) -> Tensor:
    """The random bits of each id."""
    position = int(noise.positions[row]) + column + noise.offset
    return reference.philox_draw(int(noise.seeds[row]), position, noise.stream, torch.arange(vocabulary))


def argmax_slowly(logits: Tensor) -> Tensor:
    if logits.numel() > 10_000:
        return torch.argmax(logits, -1).int()
    rows = logits.reshape(-1, logits.shape[2]).tolist() if logits.numel() else []
    return torch.tensor([argmax_by_hand(row) for row in rows], dtype=torch.int32).view(logits.shape[:2])


def sample_by_hand(logits: Tensor, noise: Noise) -> Tensor:
    x = logits if logits.dtype is torch.float64 else logits.float()
    chosen = torch.empty(logits.shape[:2], dtype=torch.int32)
    for row in range(logits.shape[0]):
        for column in range(logits.shape[1]):
            gumbel = reference.gumbel(words(noise, row, column, logits.shape[2])).to(x.dtype)
            y = x[row, column] * noise.inv_temperature[row].to(x.dtype) + gumbel
            if noise.cutoff is not None:
                y = y.masked_fill(x[row, column] < noise.cutoff[row, column].to(x.dtype), -math.inf)
            chosen[row, column] = y.argmax()
    return chosen


def verify_by_hand(logits: Tensor, tokens: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, noise: Noise | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    choices = argmax_slowly(logits) if noise is None else sample_by_hand(logits, noise)
    selected, accepted = torch.full(tokens.shape, -1, dtype=torch.int32), torch.zeros(len(tokens), dtype=torch.int32)
    for row, (fed, drafts) in enumerate(zip(query_lens.tolist(), num_draft_tokens.tolist(), strict=True)):
        for j in range(drafts + 1 if fed else 0):
            column = fed - 1 - drafts + j
            selected[row, j] = choices[row, column]
            if j == drafts or selected[row, j] != tokens[row, column + 1]:
                break
            accepted[row] += 1
    return selected, accepted


def cutoff_by_reference(logits: Tensor, query_lens: Any = None, num_draft_tokens: Any = None, **filters: Any) -> Tensor:
    rows = [torch.as_tensor(x).expand(len(logits)) for x in filters.values()]
    return reference.cutoff(
        logits, rows[0].float(), rows[1], rows[2].double(), rows[3].double(), query_lens, num_draft_tokens
    )


def penalize_by_processors(logits: Tensor, tokens: Tensor, history: Tensor, lengths: Tensor, penalties: Penalties, bitmask: Any, query_lens: Any = None, num_draft_tokens: Any = None) -> None:  # fmt: skip
    """By transformers' processors and the formulas of vLLM's documentation, column by column."""
    p, (rows, columns, vocabulary) = penalties, logits.shape
    for row in range(rows):
        fed = columns if query_lens is None else int(query_lens[row])
        first = 0 if query_lens is None else fed - 1 - int(num_draft_tokens[row])
        for column in range(first if fed else 0, fed):
            scores = logits[row, column][None]
            seen = torch.cat([history[row, : lengths[row]].long(), tokens[row, : column + 1].long()])
            pairs = zip(p.bias_ids[row].tolist(), p.bias[row].tolist(), strict=True)
            scores = SequenceBiasLogitsProcessor({(i,): b for i, b in pairs if 0 <= i < vocabulary})(None, scores)
            inside = seen[(seen >= 0) & (seen < vocabulary)]
            if len(inside):
                scores = RepetitionPenaltyLogitsProcessor(float(p.repetition[row]))(inside[None], scores)
            generated = seen[int(p.prompt_lengths[row]) :]
            counts = torch.bincount(generated[(generated >= 0) & (generated < vocabulary)], minlength=vocabulary)
            scores = scores - p.frequency[row] * counts - p.presence[row] * (counts > 0)
            if bitmask is not None:
                at = torch.arange(vocabulary)
                scores[0, bitmask[row, column][at // 32] >> (at % 32) & 1 == 0] = -math.inf
            logits[row, column] = scores[0]
        n = int(lengths[row])
        room = min(columns, history.shape[1] - n)
        history[row, n : n + room] = tokens[row, :room].int()


def lookup_by_hand(
    tokens, query_lens, num_draft_tokens, n_select, history, lengths, count, min_match, max_match, corpus
):
    """Suffix after suffix and place after place, token after token."""
    selected = torch.full_like(tokens, -1)
    for row in range(len(tokens)):
        fed, drafted, begin = int(query_lens[row]), int(num_draft_tokens[row]), int(lengths[row])
        drafts = tokens[row, fed - drafted : fed].tolist()
        text = [*history[row, :begin].tolist(), *tokens[row, : fed - drafted].tolist()]
        history[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        if fed == 0 or n_select[row] == 0:
            continue
        number = min(count, tokens.shape[1] - (fed - drafted) + 1, history.shape[1] - len(text))
        proposed = next(filter(None, (
            following(text, n, where, number) for n in range(max_match, min_match - 1, -1) for where in ("text", corpus) if where is not None
        )), drafts)  # fmt: skip
        for j, token in enumerate(proposed):
            selected[row, j] = history[row, len(text) + j] = token
            if j + 1 < len(proposed):
                tokens[row, fed - drafted + j] = token
        query_lens[row] = fed - drafted + len(proposed) - 1 if proposed else 0
        num_draft_tokens[row] = max(0, len(proposed) - 1)
    return selected


def following(text: list[int], n: int, where: Any, number: int) -> list[int]:
    """The tokens behind the latest occurrence of the last ``n`` ones in the text itself or a corpus."""
    stored = list(text) if isinstance(where, str) else where.tolist()
    for end in range(len(stored) - 1, 0, -1):
        if n <= end and stored[end - n : end] == text[-n:]:
            found: list[int] = []
            while len(found) < number and end < len(stored):
                found.append(stored[end])
                stored += [stored[end]] if isinstance(where, str) else []
                end += 1
            return found
    return []


def logprobs_by_softmax(logits: Tensor, selected: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, inv_temperature: Any = None, cutoff: Any = None, top_n: int = 0) -> tuple[Tensor, ...]:  # fmt: skip
    """Column after column by ``torch.log_softmax`` in float64 and a stable sort."""
    chosen, top = torch.full(selected.shape, -math.inf), torch.full((*selected.shape, top_n), -math.inf)
    ids = torch.full(top.shape, -1, dtype=torch.int32)
    for row, (fed, drafts) in enumerate(zip(query_lens.tolist(), num_draft_tokens.tolist(), strict=True)):
        for j in range(drafts + 1 if fed else 0):
            token, column = int(selected[row, j]), fed - 1 - drafts + j
            if not 0 <= token < logits.shape[2]:
                continue
            x = logits[row, column].double()
            if cutoff is not None:
                x = x.masked_fill(x < cutoff[row, column].double(), -math.inf)
            y = x if inv_temperature is None else torch.where(x == -math.inf, x, x * inv_temperature[row].double())
            p = torch.log_softmax(y, -1)
            chosen[row, j] = p[token]
            best = torch.sort(x, descending=True, stable=True).indices[:top_n]
            top[row, j] = p[best]
            ids[row, j] = torch.where(p[best] > -math.inf, best, -1)
    return chosen, ids, top


def append_by_hand(
    keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, n_new: Tensor
) -> None:
    for new, cache in ((keys, k_cache), (values, v_cache)):
        for row, (n, count) in enumerate(zip(lengths.tolist(), n_new.tolist(), strict=True)):
            for j in range(count):
                cache[row, :, n + j] = new[row, :, j]


def attention_by_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, invariant: bool = False, **options: Any
) -> Tensor:
    return reference.verify_attention(q.nan_to_num(), k_cache.nan_to_num(), v_cache.nan_to_num(), **options)


# ---- closeness: of results, by dtype, and by the arguments


def same(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    """The same bits; but 0 equals -0, and NaN NaN."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.25) + 0, expected.nan_to_num(0.25) + 0)


def close(got: Tensor, expected: Tensor, near_zero: float = 0.0) -> None:
    """Equal, or neighbours, up to what a sum of numbers of about 1 loses."""
    assert got.dtype == expected.dtype
    step = STEP[expected.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=step, atol=max(step / 64, near_zero))


def close_norm(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    if torch.equal(arguments["x"], arguments["x"].round()):
        same(got, expected, arguments)
    else:  # where weight and bias cancel, the rounding error remains
        close(got, expected, 0 if arguments["bias"] is None else 4 * STEP[got.dtype])


def close_activation(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    # In float32, 1 + tanh and 1 + erf lose values below a millionth.
    close(got, expected, {torch.float64: 0.0, torch.float32: 1e-5}.get(got.dtype, 2**-12))


def close_rotation(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    if "q_norm" in arguments:  # the rotation mixes the norm's rounding differences
        close(got, expected, 8 * STEP[got.dtype])
    else:
        same(got, expected, arguments)


def close_product(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    """Sums of numbers of about 1 in another order; in 16 bits a number of the norm, of the product or of the result may be rounded to a neighbour."""
    close(got, expected, 8 * STEP[got.dtype])


def close_columns(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    """Of columns that are no padding, where these are queries."""
    counts = arguments.get("query_lens")
    if counts is not None and got.shape[2] == arguments["x"].shape[1] and got.shape != arguments["k_cache"].shape:
        fed = torch.arange(got.shape[2]) < counts[:, None]
        got, expected = (x.transpose(1, 2)[fed] for x in (got, expected))
    close_product(got, expected, arguments)


def close_attention(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    # For outputs of about 1. The weights are rounded to 16 bits before their product with the values, and so is the result.
    assert got.dtype is arguments["q"].dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    for row, fed in enumerate(arguments["query_lens"].tolist()):
        assert not got[row, :, fed:].any()


def close_logprobs(got: Tensor, expected: Tensor, arguments: Arguments) -> None:
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=3e-6, equal_nan=True)


# ---- the table


class Op(NamedTuple):
    """An operation.

    Attributes:
        make: the arguments of a random call.
        wanted: the results of such a call, by code that shares nothing with the implementations but the reference's noise, or by the reference,
            which ``test_oracles.py`` compares with transformers and torch. Writes to what the operation writes to.
        close: compares a result, or what was written.
        dtypes: of the logits, or of everything.
        written: arguments that are written to.
        out: the arguments that take the results.
        shared: arguments that have no rows.
        near: sums in float32 may differ from the reference's in float64, so examples are fixed: a new one could lie between the two.
    """

    make: Callable[[Draw], Arguments]
    wanted: Callable[..., Any]
    close: Callable[[Tensor, Tensor, Arguments], None] = same
    dtypes: list[torch.dtype] = FLOATS
    written: tuple[str, ...] = ()
    out: tuple[str, ...] = ("out",)
    shared: tuple[str, ...] = ()
    near: bool = False


TABLES = ("cos", "sin", "q_norm", "k_norm")
WEIGHTS = ("weight", "bias", "norm")
CACHES = ("k_cache", "v_cache")
STEP_ARRAYS = ("tokens", "query_lens", "num_draft_tokens", "history")
OPS = {
    "argmax": Op(of_argmax, argmax_slowly),
    "sample": Op(of_sample, sample_by_hand),
    "verify": Op(of_verify, verify_by_hand),
    "rejection_sample": Op(of_rejection_sample, reference.rejection_sample, near=True),
    "cutoff": Op(of_cutoff, cutoff_by_reference, near=True),
    "penalize": Op(of_penalize, penalize_by_processors, dtypes=[torch.float32], written=("logits", "history"), out=()),
    "prompt_lookup": Op(of_prompt_lookup, lookup_by_hand, dtypes=[torch.float32], written=STEP_ARRAYS, shared=("corpus",)),
    "logprobs": Op(of_logprobs, logprobs_by_softmax, close_logprobs, out=(), near=True),
    "kv_append": Op(of_kv_append, append_by_hand, written=CACHES, out=()),
    "verify_attention": Op(of_verify_attention, attention_by_reference, close_attention, near=True),
    "add_rms_norm": Op(of_add_rms_norm, reference.add_rms_norm, close_norm, out=("out", "residual_out"), shared=("weight", "bias"), near=True),
    "silu_mul": Op(of_silu_mul, reference.silu_mul, close_activation, near=True),
    "rope_append": Op(of_rope_append, reference.rope_append, close_rotation, written=CACHES, shared=TABLES, near=True),
    "linear_small": Op(of_linear_small, reference.linear_small, close_product, shared=WEIGHTS, near=True),
    "experts_small": Op(of_experts_small, experts_by_hand, close_product, out=(), shared=WEIGHTS, near=True),
    "qkv_append": Op(of_qkv_append, reference.qkv_append, close_columns, written=CACHES, shared=(*TABLES, *WEIGHTS), near=True),
}  # fmt: skip


class Case:
    """A call of an operation and what it gives."""

    def __init__(self, name: str, draw: Draw) -> None:
        self.name, self.op = name, OPS[name]
        self.arguments = self.op.make(draw)
        whole = each(copy.copy(self.arguments), lambda _, x: x.clone(memory_format=torch.contiguous_format))
        results = self.op.wanted(**whole)
        self.results = results if isinstance(results, tuple) else () if results is None else (results,)
        self.after = {name: whole[name] for name in self.op.written}
