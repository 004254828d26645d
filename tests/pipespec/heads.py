"""Draft heads for the tests: random ones in both formats, and a reference in plain torch that shares no code with the package."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from pipespec.engine.head import HeadStage
from tests.conftest import DEVICE, VOCABULARY, random_prompts

DRAFTED, HIDDEN, LAYERS = 200, 32, 8
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def make_target(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A tiny LLaMA with random weights, whose texts are no repetition."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).to(DEVICE).eval()


def only(count: int, weights: dict[str, torch.Tensor]) -> dict[int, float]:
    """A ``logit_bias`` that leaves so many of the tokens that a head drafts. It then agrees with the target often."""
    drafted = torch.arange(DRAFTED) + weights["d2t"]
    kept = drafted[:: DRAFTED // count].tolist()
    return {token: -torch.inf for token in range(VOCABULARY) if token not in kept}


def make_weights(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, features: int = 3, seed: int = 1, own_embedding: bool = False,
    qwen3: bool = False, **flags: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Random weights of a head by the names of the original format."""
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise) * (0.2 if len(shape) == 2 else 0.1) + (len(shape) == 1)

    h, inner = HIDDEN, 48
    at = "midlayer."
    weights = {
        "fc.weight": draw(h, features * h),
        f"{at}hidden_norm.weight": draw(h),
        f"{at}input_layernorm.weight": draw(h),
        f"{at}post_attention_layernorm.weight": draw(h),
        f"{at}self_attn.q_proj.weight": draw(heads * head_dim, 2 * h),
        f"{at}self_attn.k_proj.weight": draw(kv_heads * head_dim, 2 * h),
        f"{at}self_attn.v_proj.weight": draw(kv_heads * head_dim, 2 * h),
        f"{at}self_attn.o_proj.weight": draw(h, heads * head_dim),
        f"{at}mlp.gate_proj.weight": draw(inner, h),
        f"{at}mlp.up_proj.weight": draw(inner, h),
        f"{at}mlp.down_proj.weight": draw(h, inner),
        "norm.weight": draw(h),
        "lm_head.weight": draw(DRAFTED, h),
    }
    if qwen3:
        weights |= {f"{at}self_attn.{name}_norm.weight": draw(head_dim) for name in "qk"}
    if own_embedding:
        weights["embed_tokens.weight"] = draw(VOCABULARY, h)
    if flags.get("norm_before_fc"):
        weights["input_norm.weight"] = draw(features * h)
    if flags.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": draw(h) for i in range(features)}
    ids = torch.randperm(VOCABULARY, generator=noise)[:DRAFTED].sort().values
    inside = torch.zeros(VOCABULARY, dtype=torch.bool)
    inside[ids] = True
    return weights | {"d2t": ids - torch.arange(DRAFTED), "t2d": inside}


def layer_config(weights: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    """The config of the head's layer."""
    at, dim = "midlayer.self_attn.", more.pop("head_dim", 8)
    return {
        "model_type": "qwen3" if f"{at}q_norm.weight" in weights else "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": weights[f"{at}q_proj.weight"].shape[0] // dim,
        "num_key_value_heads": weights[f"{at}k_proj.weight"].shape[0] // dim,
        "head_dim": dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": False,
    } | more


def write_original(folder: Path, weights: dict[str, torch.Tensor], **more: Any) -> Path:
    """Write a head as the authors of EAGLE-3 do: one flat config, and ``midlayer``."""
    layer = layer_config(weights, head_dim=more.pop("head_dim", 8))
    record = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED} | layer | more
    return write(folder, weights, record)


def write_speculators(folder: Path, weights: dict[str, torch.Tensor], **more: Any) -> Path:
    """Write a head in the format of the package ``speculators``. ``verifier``: the target's folder."""
    verifier = {"name_or_path": str(more.pop("verifier", "target")), "architectures": ["LlamaForCausalLM"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    described = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": methods, "verifier": verifier}  # fmt: skip
    record = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": described,
        "transformer_layer_config": layer_config(weights),
        "draft_vocab_size": DRAFTED,
    }
    named = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    return write(folder, named, record | more)


def write(folder: Path, weights: dict[str, torch.Tensor], record: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(record))
    return folder


class Drafted:
    """Records the logits of each draft token, with the text before it and the number of tokens that the target had committed.

    Args:
        stage_class: whose steps are recorded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage_class: type[HeadStage] = HeadStage) -> None:
        self.found: list[tuple[int, list[int], torch.Tensor]] = []
        score, found = stage_class._score, self.found

        def recording(stage: HeadStage, fed: torch.Tensor, cache: Any) -> tuple[torch.Tensor, int]:
            logits, first = score(stage, fed, cache)
            wide = stage._widened(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device), 1)
            for row, n in enumerate(stage._n_select.tolist()):
                if n and stage._query_lens[row]:
                    text = stage._text[row, : int(stage._kv[row] + stage._query_lens[row])].tolist()
                    found.append((stage.block.length(stage.block.target, row), text, wide[row, 0].cpu()))
            return logits, first

        monkeypatch.setattr(stage_class, "_score", recording)


def check_after_earlier_text(
    pipe: Any, drafted: Drafted, check: Callable[..., None], weights: dict[str, torch.Tensor]
) -> None:
    """Compare the drafts of calls that go on with an earlier text, and with a cache of the caller's, with a reference by ``check``, and tokens with their logits."""
    target, how = pipe.target, {"max_new_tokens": 6, "do_sample": False}
    prompt = random_prompts(1, seed=8, shortest=20, longest=21)[0][None]
    longer = torch.cat([pipe.generate(prompt, max_new_tokens=10, do_sample=False), prompt[:, :5]], 1)
    for again in (longer, longer):
        pipe.generate(again, **how)
    check(drafted.found, target, weights)
    right = {int(x.argmax()) == b[-1] for (n, a, x), (m, b, _) in pairwise(drafted.found) if (m, b[:-1]) == (n, a)}
    assert right == {True}
    drafted.found.clear()
    # What is in the caller's cache has no features: the draft begins after it.
    cache = DynamicCache()
    target(longer[:, :-3], past_key_values=cache)
    expected = target.generate(longer, **how)
    assert torch.equal(pipe.generate(longer, past_key_values=cache, **how), expected)
    assert drafted.found
    check(drafted.found, target, weights, begin=longer.shape[1] - 3)


class Reference:
    """An EAGLE-3 head by its formulas, slot by slot, for one text at a time.

    Args:
        weights: by the names of the original format.
        embedding: ``[vocabulary, hidden]``, the target's, for heads without their own.
        flags: of :data:`FLAGS`.
    """

    def __init__(
        self, weights: dict[str, torch.Tensor], embedding: torch.Tensor, *, head_dim: int = 8, **flags: bool
    ) -> None:
        self.w = {
            name.removeprefix("midlayer."): x.double() if x.is_floating_point() else x for name, x in weights.items()
        }
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.flags, self.dim = flags, head_dim

    def chain(self, features: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The logits over the draft vocabulary after the last token.

        Args:
            features: ``[known, count * hidden]``, of the target's positions.
            tokens: the text. Its tokens ``1 .. known`` belong to slots with features, those after them to slots that read the head's own output.
        """
        known, w = len(features), self.w
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for slot in range(len(tokens) - 1):
            state = self._fuse(features[slot].double()) if slot < known else hidden  # noqa: F821  of the slot before
            normed = self._norm(state, "hidden_norm")
            x = torch.cat([self._norm(self.embedding[tokens[slot + 1]], "input_layernorm"), normed])
            query, key, value = (w[f"self_attn.{n}_proj.weight"] @ x for n in "qkv")
            keys.append(self._turned(key, slot, "k"))
            values.append(value.view(-1, self.dim))
            attended = self._attend(self._turned(query, slot, "q"), torch.stack(keys), torch.stack(values))
            hidden = (normed if self.flags.get("norm_before_residual") else state) + w[
                "self_attn.o_proj.weight"
            ] @ attended
            y = self._norm(hidden, "post_attention_layernorm")
            gate = F.silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
            hidden = hidden + w["mlp.down_proj.weight"] @ gate
            last = self._norm(hidden, "norm")
            if self.flags.get("norm_output"):
                hidden = last
        return w["lm_head.weight"] @ last

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.flags.get("norm_before_fc"):
            features = self._norm(features, "input_norm")
        if self.flags.get("fc_norm"):
            parts = features.split(HIDDEN)
            features = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.w["fc.weight"] @ features

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean() + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def _turned(self, x: torch.Tensor, position: int, name: str) -> torch.Tensor:
        x = x.view(-1, self.dim)
        if (gain := self.w.get(f"self_attn.{name}_norm.weight")) is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        half = self.dim // 2
        angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        shared = query.shape[0] // keys.shape[1]
        out = []
        for head, q in enumerate(query):
            weight = torch.softmax(keys[:, head // shared] @ q / self.dim**0.5, 0)
            out.append(weight @ values[:, head // shared])
        return torch.cat(out)
