"""Block drafters for the tests: random ones in the published formats, and a reference in plain torch that shares no code with the package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.conftest import VOCABULARY
from tests.pipespec.heads import DRAFTED, HIDDEN, write

LAYERS, HEADS, KV_HEADS, DIM, RANK = 2, 4, 2, 8, 6
MASK = VOCABULARY - 3


def make_weights(
    *, features: int = 3, seed: int = 1, markov: str = "", drafted: int = VOCABULARY, own_ends: bool = False
) -> dict[str, torch.Tensor]:
    """Random weights by their published names. ``own_ends``: with an embedding and a head, as a reduced vocabulary needs one."""
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise) * (0.3 if len(shape) == 2 else 0.1) + (len(shape) == 1)

    h, inner = HIDDEN, 40
    weights = {"fc.weight": draw(h, features * h), "hidden_norm.weight": draw(h), "norm.weight": draw(h)}
    for i in range(LAYERS):
        at = f"layers.{i}."
        weights |= {
            f"{at}input_layernorm.weight": draw(h),
            f"{at}post_attention_layernorm.weight": draw(h),
            f"{at}self_attn.q_proj.weight": draw(HEADS * DIM, h),
            f"{at}self_attn.k_proj.weight": draw(KV_HEADS * DIM, h),
            f"{at}self_attn.v_proj.weight": draw(KV_HEADS * DIM, h),
            f"{at}self_attn.o_proj.weight": draw(h, HEADS * DIM),
            f"{at}self_attn.q_norm.weight": draw(DIM),
            f"{at}self_attn.k_norm.weight": draw(DIM),
            f"{at}mlp.gate_proj.weight": draw(inner, h),
            f"{at}mlp.up_proj.weight": draw(inner, h),
            f"{at}mlp.down_proj.weight": draw(h, inner),
        }
    if own_ends or drafted != VOCABULARY:
        weights |= {"embed_tokens.weight": draw(VOCABULARY, h), "lm_head.weight": draw(drafted, h)}
    if markov:
        weights |= {
            "markov_head.markov_w1.weight": draw(VOCABULARY, RANK),
            "markov_head.markov_w2.weight": draw(drafted, RANK),
            "confidence_head.proj.weight": draw(1, h + RANK),
            "confidence_head.proj.bias": draw(1),
        }
    if markov == "gated":
        weights |= {"markov_head.gate_proj.weight": draw(RANK, h + RANK), "markov_head.gate_proj.bias": draw(RANK)}
    if markov == "rnn":
        weights |= {
            "markov_head.joint_proj.weight": draw(3 * RANK, 2 * RANK + h),
            "markov_head.joint_proj.bias": draw(3 * RANK),
        }
    if drafted != VOCABULARY:
        ids = torch.randperm(VOCABULARY, generator=noise)[:drafted].sort().values
        inside = torch.zeros(VOCABULARY, dtype=torch.bool)
        inside[ids] = True
        weights |= {"d2t": ids - torch.arange(drafted), "t2d": inside}
    return weights


def layers(**more: Any) -> dict[str, Any]:
    """The config of the drafter's layers."""
    return {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * LAYERS,
    } | more


def write_z_lab(folder: Path, weights: dict[str, torch.Tensor], size: int = 5, **more: Any) -> Path:
    """Write a drafter as z-lab does: a config of its layers with ``dflash_config``, whose ``target_layer_ids`` are layers."""
    own = {"block_size": size, "mask_token_id": MASK, "target_layer_ids": [1, 3, 4]} | more.pop("dflash_config", {})
    record = {"architectures": ["DFlashDraftModel"], "dflash_config": own, "num_target_layers": 8} | layers()
    return write(folder, weights, record | more)


def write_deepspec(folder: Path, weights: dict[str, torch.Tensor], size: int = 4, **more: Any) -> Path:
    """Write a drafter as DeepSpec does: one flat config."""
    record = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": size,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3, 4],
        "num_anchors": 512,
        "enable_confidence_head": False,
        "markov_rank": 0,
    }
    return write(folder, weights, record | layers() | more)


def write_speculators(
    folder: Path, weights: dict[str, torch.Tensor], kind: str, size: int = 4, proposed: int | None = None, **more: Any
) -> Path:
    """Write a drafter in the format of ``speculators``, whose ``aux_hidden_state_layer_ids`` are hidden states."""
    methods = [{"proposal_type": "greedy", "speculative_tokens": proposed}] if proposed else []
    record = {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "proposal_methods": methods},
        "transformer_layer_config": layers(),
        "draft_vocab_size": DRAFTED if "d2t" in weights else VOCABULARY,
        "block_size": size,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "markov_rank": 0,
    }
    return write(folder, weights, record | more)


class Reference:
    """A block drafter by its formulas, for one text at a time.

    Args:
        weights: by their published names.
        embedding: ``[vocabulary, hidden]``, the target's.
        head: ``[vocabulary, hidden]``, the target's.
        size: columns of a block.
        from_anchor: whether the anchor's column drafts.
        windows: per layer, positions that a column sees; None: all.
        causal: per layer, whether a column sees only those before it.
        markov: the kind of the bias.
        scale: of the embedding, and of the logits.
        softcap: of the logits.
    """

    def __init__(
        self, weights: dict[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor, *, size: int, from_anchor: bool,
        windows: Sequence[int | None] = (None,) * LAYERS, causal: Sequence[bool] = (False,) * LAYERS, markov: str = "",
        scale: tuple[float, float] = (1.0, 1.0), softcap: float = 0.0,
    ) -> None:  # fmt: skip
        self.w = {name: x.double() if x.is_floating_point() else x for name, x in weights.items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double()) * scale[0]
        self.head = self.w.get("lm_head.weight", head.double()) * scale[1]
        self.size, self.from_anchor, self.windows, self.causal = size, from_anchor, windows, causal
        self.markov, self.softcap = markov, softcap

    def logits(self, features: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
        """The logits ``[draft vocabulary]`` of the token after ``text``, whose first ``len(features)`` tokens the target has read and the next one is the anchor.
        ``features``: ``[n, count * hidden]``."""
        w, n = self.w, len(features)
        context = self._norm(features.double() @ w["fc.weight"].T, "hidden_norm")
        tokens = [text[n]] + [MASK] * (self.size - 1)
        hidden = self.embedding[torch.tensor(tokens)]
        for i in range(LAYERS):
            hidden = self._layer(i, context, hidden)
        hidden = self._norm(hidden, "norm")
        step = len(text) - n - 1
        column = step if self.from_anchor else step + 1
        found = self.head @ hidden[column]
        if self.softcap:
            found = self.softcap * torch.tanh(found / self.softcap)
        return found + self._bias(hidden, text[n:], column) if self.markov else found

    def _layer(self, i: int, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        w, at, n = self.w, f"layers.{i}.", len(context)
        normed = self._norm(hidden, f"{at}input_layernorm")
        both = torch.cat([context, normed])
        key = self._turned(
            (both @ w[f"{at}self_attn.k_proj.weight"].T).view(len(both), -1, DIM), 0, f"{at}self_attn.k_norm"
        )
        value = (both @ w[f"{at}self_attn.v_proj.weight"].T).view(len(both), -1, DIM)
        query = self._turned(
            (normed @ w[f"{at}self_attn.q_proj.weight"].T).view(self.size, -1, DIM), n, f"{at}self_attn.q_norm"
        )
        place, j = n + torch.arange(self.size)[:, None], torch.arange(len(both))
        seen = torch.ones(self.size, len(both), dtype=torch.bool)
        if self.causal[i]:
            seen &= j <= place
        if self.windows[i] is not None:
            seen &= (place - j).abs() < self.windows[i]
        groups = torch.arange(HEADS) // (HEADS // KV_HEADS)
        scores = torch.einsum("chd,jhd->hcj", query, key[:, groups]) / DIM**0.5
        weight = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        mixed = torch.einsum("hcj,jhd->chd", weight, value[:, groups])
        hidden = hidden + mixed.flatten(1) @ w[f"{at}self_attn.o_proj.weight"].T
        y = self._norm(hidden, f"{at}post_attention_layernorm")
        gate = F.silu(y @ w[f"{at}mlp.gate_proj.weight"].T) * (y @ w[f"{at}mlp.up_proj.weight"].T)
        return hidden + gate @ w[f"{at}mlp.down_proj.weight"].T

    def _bias(self, hidden: torch.Tensor, after: Sequence[int], column: int) -> torch.Tensor:
        """``after``: the anchor and the tokens drafted behind it."""
        w, state = self.w, torch.zeros(RANK, dtype=torch.float64)
        previous = list(after) if self.from_anchor else [after[0], *after]
        for k in range(column + 1):
            row = w["markov_head.markov_w1.weight"][previous[k]]
            out = row
            if self.markov == "gated":
                inputs = torch.cat([hidden[k], row])
                out = row * torch.sigmoid(w["markov_head.gate_proj.weight"] @ inputs + w["markov_head.gate_proj.bias"])
            elif self.markov == "rnn":
                inputs = torch.cat([state, row, hidden[k]])
                mixed = w["markov_head.joint_proj.weight"] @ inputs + w["markov_head.joint_proj.bias"]
                gate, candidate, raw = mixed[:RANK], mixed[RANK : 2 * RANK], mixed[2 * RANK :]
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                out = torch.tanh(raw)
        return w["markov_head.markov_w2.weight"] @ out

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def _turned(self, x: torch.Tensor, first: int, name: str) -> torch.Tensor:
        x, half = self._norm(x, name), DIM // 2
        angle = (first + torch.arange(len(x), dtype=torch.float64))[:, None, None]
        angle = angle * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
