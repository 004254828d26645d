"""Models of LLaMA's shapes that agree with each other at a chosen rate, for speed measurements. Their text has no meaning.

Nothing is trained or loaded. All models of a chain share one random cycle through the vocabulary, and the embedding and head of each model
encode it: the residual stream begins as the token's embedding ``e(v)``, and the head's row of a token is the sum of the embeddings of
the two tokens that it may follow. After token ``v`` at place ``p`` of the cycle these are the tokens at ``p + 1`` (*next*) and, by
``m(v)`` less likely, at ``p + 1 + V / 2`` (its *mate*). The choice between them depends on what the layers, random and of full size, add to
the stream in one direction ``u``, mostly by attention over the whole text:

    logit(next) - logit(mate)  ~  S * (m(v) + 2 * c * k * <h, u>),     c = +1 or -1, the half of the cycle that ``next`` lies in

So ``k``, the weight of ``u`` in the head, sets how often a model takes the mate. The target takes it rarely (``wander``: its text depends
on the whole context, and near-ties are rare); a draft takes it as often as the requested agreement allows. Every text moves through the places of the cycle modulo ``V / 2`` one by one, so none repeats itself within ``V / 2`` tokens.
``m(v)`` is common to all models, so their errors are correlated.

Every matrix is dense and random, and every parameter is used. Embedding and head are two matrices in every shape; the original 1B and
3B share one. A step reads the head and one row of the embedding: the bytes per step equal the original's, the memory does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """Sizes of a LLaMA, under its configuration's names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 128256
    max_position_embeddings: int = 8192


SHAPES = {
    "160M": Shape(640, 2560, 12, 10, 10),
    "1B": Shape(2048, 8192, 16, 32, 8),
    "3B": Shape(3072, 8192, 28, 24, 8),
    "8B": Shape(4096, 14336, 32, 32, 8),
    "70B": Shape(8192, 28672, 80, 64, 8),
    "tinyllama-1.1B": Shape(2048, 5632, 22, 32, 4, vocab_size=32000),
    "llama2-7B": Shape(4096, 11008, 32, 32, 32, vocab_size=32000),
    "llama2-13B": Shape(5120, 13824, 40, 40, 40, vocab_size=32000),
    "llama2-70B": Shape(8192, 28672, 80, 64, 8, vocab_size=32000),
    # LLaMA-like, with about as many weights and as many layers as Qwen3.5-4B and 9B, which have other layers.
    "4B": Shape(2560, 9216, 32, 16, 4, vocab_size=248320),
    "9B": Shape(4096, 12288, 32, 16, 4, vocab_size=248320),
    # For tests: small, with different sizes.
    "tiny-small": Shape(96, 192, 2, 4, 2, vocab_size=512),
    "tiny-medium": Shape(128, 256, 3, 4, 2, vocab_size=512),
    "tiny-target": Shape(160, 320, 4, 8, 2, vocab_size=512),
}
"""Llama-3.2-1B, Llama-3.2-3B, Llama-3-8B and 70B; a draft of 160 million weights per step with their vocabulary; Llama 2."""

SCALE = 18.0
"""``S``: approximate logit of the likelier token; other logits are around 0."""

MARGINS = (0.1, 0.9)
"""``m(v)`` is drawn between these."""

_SHARPNESS = 1.5
"""Scale of queries and keys: the standard deviation of attention scores is its square."""

_ATTENTION, _MLP = 0.6, 0.3
"""What all layers together add to the stream, in units of the embedding."""

_SILU = 0.6
"""Root mean square of silu(a) * b for standard normal a, b."""

MIN_AGREEMENT = 0.55
"""Minimum agreement; a draft that chooses at random reaches 0.5."""


@dataclass(frozen=True)
class Cycle:
    """The cycle that all models of a chain share, on the CPU. ``order [V]``: tokens by place; ``place [V]``: its inverse; ``margin [V]``: m by token."""

    order: torch.Tensor
    place: torch.Tensor
    margin: torch.Tensor

    @staticmethod
    def draw(vocabulary: int, seed: int) -> Cycle:
        """Draw a cycle; raises ``ValueError`` for an odd vocabulary, which has no halves."""
        if vocabulary % 2:
            raise ValueError(f"planted models need an even vocabulary, not {vocabulary}")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(vocabulary, generator=generator)
        low, high = MARGINS
        margin = low + (high - low) * torch.rand(vocabulary, generator=generator)
        return Cycle(order, order.argsort(), margin)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """The likelier follower of each token."""
        return self.order[(self.place[tokens] + 1) % len(self.order)]

    def mate(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens half a cycle away."""
        size = len(self.order)
        return self.order[(self.place[tokens] + size // 2) % size]

    def sign(self, tokens: torch.Tensor) -> torch.Tensor:
        """c: +1 in the first half of the cycle, -1 in the second."""
        return 1.0 - 2.0 * (self.place[tokens] >= len(self.order) // 2)


@dataclass
class _Seeded:
    """A model and its direction ``u [H]`` (unit length); ``k`` is 0 until it is set."""

    model: LlamaForCausalLM
    direction: torch.Tensor
    cycle: Cycle

    def differences(self, ids: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logit(next) - logit(mate) at columns ``begin ..`` of ``ids [n, T]`` with k = 0, and its change per unit of k; both float64."""
        model, cycle = self.model, self.cycle
        differences, effects = [], []
        head = model.lm_head.weight
        for row in ids:
            hidden = model.model(row[None].to(head.device)).last_hidden_state[0, begin:]
            follower = cycle.next(row[begin:].cpu())
            pair = (head[follower] - head[cycle.mate(follower)]).double()
            differences.append((hidden.double() * pair).sum(-1).cpu())
            along = hidden.double() @ self.direction.double()
            effects.append(2 * SCALE * cycle.sign(follower).double() * along.cpu())
        return torch.stack(differences), torch.stack(effects)

    def set(self, k: float) -> None:
        """Set k; may be called once."""
        head = self.model.lm_head.weight
        sign = self.cycle.sign(torch.arange(len(head))).to(head)
        head.addr_(sign, self.direction.to(head.dtype), alpha=SCALE * k)


_DIVISORS = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8), (32, 16), (64, 16))
"""Of widths and of layers: the sizes that :func:`fitted` tries."""


def fitted(
    names: Sequence[str], memory_bytes: float, step_bytes: float, bytes_per_weight: int, min_layers: int = 2
) -> tuple[dict[str, Shape], tuple[int, int]]:
    """The shapes ``names`` (the target last) by name, and the numbers by which widths and layers of all were divided until they fit.

    All weights together take at most ``memory_bytes``, and a step of the target reads at most ``step_bytes``. The target keeps at least
    ``min_layers``. The ratio of the models' weights stays about the same. Raises ``ValueError`` for unknown shapes, and if no size fits.
    """
    if unknown := [name for name in names if name not in SHAPES]:
        raise ValueError(f"no shape {', '.join(map(repr, unknown))}; there are {', '.join(SHAPES)}")
    for width, depth in _DIVISORS:
        shapes = {name: _divided(SHAPES[name], width, depth) for name in names}
        target = list(shapes.values())[-1]
        deep = max(target.num_hidden_layers, min_layers)
        shapes[names[-1]] = replace(target, num_hidden_layers=min(deep, SHAPES[names[-1]].num_hidden_layers))
        weights = [weights_of(shape) for shape in shapes.values()]
        total = bytes_per_weight * sum(layers + 2 * embedding for layers, embedding in weights)
        if total <= memory_bytes and bytes_per_weight * sum(weights[-1]) <= step_bytes:
            return shapes, (width, depth)
    raise ValueError(
        f"the shapes {', '.join(names)} do not fit {memory_bytes / 1e9:.1f} GB, even divided by {_DIVISORS[-1]}"
    )


def _divided(shape: Shape, width: int, depth: int) -> Shape:
    head = shape.hidden_size // shape.num_attention_heads
    heads = max(1, shape.num_attention_heads // width)
    groups = shape.num_attention_heads // shape.num_key_value_heads
    vocabulary = shape.vocab_size if width == 1 else max(512, shape.vocab_size // width // 64 * 64)
    return replace(
        shape,
        hidden_size=heads * head,
        intermediate_size=max(64, shape.intermediate_size // width // 32 * 32),
        num_hidden_layers=max(2, shape.num_hidden_layers // depth),
        num_attention_heads=heads,
        num_key_value_heads=heads // groups if heads % groups == 0 and heads >= groups else 1,
        vocab_size=vocabulary,
    )


def weights_of(shape: Shape) -> tuple[int, int]:
    """Weights of all layers, and of one embedding."""
    head = shape.hidden_size // shape.num_attention_heads
    attention = shape.hidden_size * head * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads)
    layers = shape.num_hidden_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    return layers, shape.vocab_size * shape.hidden_size


def bytes_per_step(model: Any) -> int:
    """Bytes of weights that a forward of ``model`` reads: all but the embedding, of which it reads a row, unless the head is the same."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if embedding is head else total - embedding.numel() * embedding.element_size()


def _config(shape: Shape) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(**asdict(shape), **tokens, rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=False)


@torch.no_grad()
def _seeded(shape: Shape, cycle: Cycle, seed: int, device: torch.device, dtype: torch.dtype) -> _Seeded:
    """The model with random layers and k = 0, created on ``device`` without transformers' own initialisation."""
    config = _config(shape)
    config.dtype = dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval()
    # Its tables were on meta, too.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    hidden, layers = shape.hidden_size, shape.num_hidden_layers

    def normal(weight: torch.Tensor, scale: float) -> None:
        weight.normal_(0.0, scale, generator=generator)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for projection, gain in ((attention.q_proj, _SHARPNESS), (attention.k_proj, _SHARPNESS), (attention.v_proj, 1)):
            normal(projection.weight, gain / math.sqrt(hidden))
        normal(attention.o_proj.weight, _ATTENTION / math.sqrt(layers * attention.o_proj.in_features))
        normal(mlp.gate_proj.weight, 1 / math.sqrt(hidden))
        normal(mlp.up_proj.weight, 1 / math.sqrt(hidden))
        normal(mlp.down_proj.weight, _MLP / (_SILU * math.sqrt(layers * shape.intermediate_size)))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.normal_(1.0, 0.1, generator=generator)
    model.model.norm.weight.normal_(1.0, 0.1, generator=generator)

    direction = torch.empty(hidden, dtype=torch.float32, device=device).normal_(generator=generator)
    direction /= direction.norm()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    normal(embedding, 1.0)
    # A component of the embedding along u would not depend on the context.
    embedding.addr_((embedding @ direction.to(dtype)), direction.to(dtype), alpha=-1.0)
    # A row of the head: the embeddings of the token that it is next to, and of the one whose next is its mate.
    order, place = cycle.order.to(device), cycle.place.to(device)
    before = order[(place - 1) % len(order)]
    mates_before = order[(place + len(order) // 2 - 1) % len(order)]
    weight = (1 - cycle.margin.to(device))[mates_before].to(dtype)
    # A piece at a time: bounds what is held besides.
    for rows in torch.arange(len(order), device=device).split(1 << 14):
        both = embedding[before[rows]] + weight[rows, None] * embedding[mates_before[rows]]
        head[rows] = both * (SCALE / hidden)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.requires_grad_(False)
    return _Seeded(model, direction, cycle)


@dataclass(frozen=True)
class PlantedFigures:
    """Measurements of a chain by :func:`measure`.

    ``agreement[i][j]``: share of positions of the target's text at which models i and j choose the same token; ``wander``: share of its
    tokens that are mates; ``flips``: share of positions at which the target, fed the text as a whole, chooses another token than step by
    step, which is rounding; ``margin``: its median lead over the second-best logit.
    """

    positions: int
    agreement: tuple[tuple[float, ...], ...]
    wander: float
    flips: float
    margin: float


@dataclass(frozen=True)
class PlantedChain:
    """Planted models, the target last. ``requested``: the drafts' agreement with the target; ``measured``: on prompts of its own (None: not)."""

    names: tuple[str, ...]
    models: tuple[LlamaForCausalLM, ...]
    cycle: Cycle
    requested: tuple[float, ...]
    weights: tuple[float, ...]
    measured: PlantedFigures | None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "names": self.names,
            "requested": self.requested,
            "k": self.weights,
            "measured": None if self.measured is None else asdict(self.measured),
            "parameters": {n: m.num_parameters() for n, m in zip(self.names, self.models, strict=True)},
            "bytes_per_step": {n: bytes_per_step(m) for n, m in zip(self.names, self.models, strict=True)},
        }


def random_prompts(vocabulary: int, count: int, tokens: int, seed: int) -> torch.Tensor:
    """LongTensor ``[count, tokens]``."""
    return torch.randint(0, vocabulary, (count, tokens), generator=torch.Generator().manual_seed(seed))


def nested(agreement: float | Sequence[float], drafts: int) -> tuple[float, ...]:
    """Agreement of each draft with the target, smallest first: one number is that of the smallest draft, and each next draft halves the disagreement.

    Raises ``ValueError`` for a wrong number of them, for one outside of ``MIN_AGREEMENT .. 1``, and where a larger draft would agree less.
    """
    if isinstance(agreement, (int, float)):
        agreement = [1 - (1 - agreement) / 2**i for i in range(drafts)]
    rates = tuple(agreement)
    if len(rates) != drafts:
        raise ValueError(f"agreement: one number, or one per draft ({drafts}), not {len(rates)}")
    if any(not MIN_AGREEMENT <= rate <= 1 for rate in rates):
        raise ValueError(
            f"agreement must lie between {MIN_AGREEMENT} and 1, not {rates}: planted models choose between two tokens"
        )
    if list(rates) != sorted(rates):
        raise ValueError(f"agreement must not fall from a smaller draft to a larger one: {rates}")
    return rates


@torch.no_grad()
def write(model: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The model's greedy text, LongTensor ``[n, P + new_tokens]``, on the CPU."""
    ids = prompts.to(model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out.cpu()


@torch.no_grad()
def measure(models: Sequence[LlamaForCausalLM], cycle: Cycle, prompts: torch.Tensor, new_tokens: int) -> PlantedFigures:
    """The choices of ``models`` along the text that the last one generates after ``prompts [n, P]``."""
    texts = write(models[-1], prompts, new_tokens)
    written = texts[:, prompts.shape[1] :]
    choices = []
    for model in models:
        logits = (model(t[None, :-1].to(model.device), logits_to_keep=new_tokens).logits[0] for t in texts)
        best = [row.float().topk(2) for row in logits]
        choices.append(torch.stack([b.indices[:, 0] for b in best]).cpu())
    leading = torch.stack([b.values for b in best])  # the target's
    followed = texts[:, prompts.shape[1] - 1 : -1]
    return PlantedFigures(
        positions=written.numel(),
        agreement=tuple(tuple(float((a == b).double().mean()) for b in choices) for a in choices),
        wander=float((written != cycle.next(followed)).double().mean()),
        flips=float((choices[-1] != written).double().mean()),
        margin=float((leading[..., 0] - leading[..., 1]).median()),
    )


def _bisect(rate: Callable[[float], float], wanted: float) -> float:
    """The k at which ``rate``, which falls from 1 to about 0.5, equals ``wanted``."""
    low, high = 0.0, 1e-3
    while rate(high) > wanted and high < 1e3:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > wanted else (low, middle)
    return (low + high) / 2


@torch.no_grad()
def plant(
    names: Sequence[str],
    agreement: float | Sequence[float] = 0.8,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    wander: float = 0.01,
    prompt_tokens: int = 32,
    new_tokens: int = 128,
    texts: int = 8,
    progress: Callable[[str], None] = lambda what: None,
    known: Mapping[str, Shape] = SHAPES,
) -> PlantedChain:
    """A chain of the shapes ``names`` (keys of ``known``, the target last), calibrated and measured.

    ``agreement``: see :func:`nested`; it holds for texts of about this length, ``texts`` of which calibrate and as many others measure.
    ``texts=0``: no calibration, so that all models take the *next* token and agree always; for the speed of models alone, at once.
    Deterministic by ``seed`` on one kind of device. Raises ``ValueError`` for shapes that do not exist or have other vocabularies,
    and for rates that cannot be.
    """
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"no shape {', '.join(map(repr, unknown)) or 'given'}; there are {', '.join(known)}")
    shapes = [known[name] for name in names]
    if len({shape.vocab_size for shape in shapes}) > 1:
        raise ValueError(f"the shapes {', '.join(names)} have different vocabularies")
    rates = nested(agreement, len(names) - 1)
    if not 0 <= wander < 0.2:
        raise ValueError(f"wander must lie in [0, 0.2), not {wander}")
    if rates and rates[-1] > 1 - wander:
        raise ValueError(f"an agreement of {rates[-1]} needs a target that wanders less than {wander}: lower wander")
    device = torch.device(device)
    cycle = Cycle.draw(shapes[0].vocab_size, seed)
    seeded = []
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        progress(f"planting {name}")
        seeded.append(_seeded(shape, cycle, seed * 1000 + i + 1, device, dtype))
    models = [s.model for s in seeded]
    if not texts:
        every = (1.0,) * (len(names) - 1)
        return PlantedChain(tuple(names), tuple(models), cycle, every, (0.0,) * len(names), None)

    def taken(model: _Seeded, ids: torch.Tensor, wanted: torch.Tensor) -> Callable[[float], float]:
        """Of k: how often the model would choose ``wanted [n, T]`` (a next or a mate) after the prompts in ``ids``."""
        begin = prompt_tokens - 1
        difference, effect = model.differences(ids, begin)
        is_next = wanted == cycle.next(ids[:, begin:])
        return lambda k: float(((difference + k * effect > 0) == is_next).double().mean())

    progress(f"calibrating {names[-1]}")
    vocabulary = shapes[0].vocab_size
    prompts = random_prompts(vocabulary, texts, prompt_tokens, seed + 1)
    ids = prompts
    for _ in range(new_tokens):  # the text of a target that never wanders, for its calibration
        ids = torch.cat([ids, cycle.next(ids[:, -1:])], dim=1)
    own = taken(seeded[-1], ids[:, :-1], ids[:, prompt_tokens:])
    weights = [_bisect(own, 1 - wander) if wander else 0.0]
    seeded[-1].set(weights[0])
    text = write(models[-1], prompts, new_tokens)
    for model, name, rate in reversed(list(zip(seeded, names, rates, strict=False))):
        progress(f"calibrating {name}")
        k = _bisect(taken(model, text[:, :-1], text[:, prompt_tokens:]), rate) if rate < 1 else 0.0
        model.set(k)
        weights.insert(0, k)
    progress("measuring the agreement")
    fresh = random_prompts(vocabulary, texts, prompt_tokens, seed + 2)
    measured = measure(models, cycle, fresh, new_tokens)
    return PlantedChain(tuple(names), tuple(models), cycle, rates, tuple(weights), measured)
