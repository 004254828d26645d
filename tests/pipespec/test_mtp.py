"""MTP layers inside checkpoints: the published names, what a layer drafts, and that the text stays the target's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_layers

from pipespec import Pipeline
from pipespec.engine.chain import as_draft
from pipespec.engine.mtp import MtpDraft
from tests.conftest import DEVICE, left_pad, random_prompts
from tests.pipespec import heads
from tests.support.ways import driver_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a draft has failed

SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 30}
VOCABULARY, HIDDEN, DEPTH, HEADS, KV_HEADS, DIM, INNER, EXPERTS = 320, 32, 4, 4, 2, 8, 48, 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": DIM, "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
NETS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SPARSE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    } | NETS,
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": EXPERTS} | NETS | SPARSE,
    "glm4_moe": SPARSE | GROUPS,
    "deepseek_v3": SPARSE | GROUPS | LATENT | {"num_key_value_heads": HEADS, "head_dim": 4},
}  # fmt: skip


def make_checkpoint(folder: Path, family: str) -> PreTrainedModel:
    """A tiny random target in ``folder``, with the weights of an MTP layer by the names in which they are published. Returns the target as it is loaded."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored, noise = load_file(file), torch.Generator().manual_seed(7)
    # Its decoder layer has the names of the target's last one, which has attention and, in families with experts, those.
    last = f"model.layers.{DEPTH - 1}."
    layer = {name.removeprefix(last): tensor for name, tensor in stored.items() if name.startswith(last)}
    assert layer

    def like(tensor: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=noise) * 0.25
        return (drawn + 1.0 if tensor.ndim == 1 and tensor.mean() > 0.5 else drawn).to(tensor.dtype)

    own = one_per_expert({name: like(tensor) for name, tensor in layer.items()})
    norms = [like(stored["model.norm.weight"]) for _ in range(3)]
    joint = torch.randn((HIDDEN, 2 * HIDDEN), generator=noise) * 0.2
    if family.startswith("qwen"):
        named = {f"mtp.layers.0.{name}": tensor for name, tensor in own.items()}
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
    else:
        at = f"model.layers.{DEPTH}."
        named = {f"{at}{name}": tensor for name, tensor in own.items()}
        named |= {f"{at}embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
        named |= {f"{at}shared_head.head.weight": stored["lm_head.weight"].clone()}
        names = (f"{at}enorm", f"{at}hnorm", f"{at}shared_head.norm", f"{at}eh_proj")
    named |= {f"{name}.weight": tensor for name, tensor in zip(names, (*norms, joint), strict=True)}
    save_file(stored | {name: tensor.contiguous() for name, tensor in named.items()}, file, metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).eval()


def one_per_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a layer as they are published, with matrices of each expert. transformers has them together."""
    found = {}
    for name, tensor in weights.items():
        if name == "mlp.experts.gate_up_proj":
            for i, both in enumerate(tensor):
                for part, matrix in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"mlp.experts.{i}.{part}_proj.weight"] = matrix.clone()
        elif name == "mlp.experts.down_proj":
            found |= {f"mlp.experts.{i}.down_proj.weight": matrix.clone() for i, matrix in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, request.param)


def test_the_text_is_the_target_s(checkpoint, monkeypatch) -> None:
    folder, target = checkpoint
    drafted = heads.Drafted(monkeypatch)
    ids, mask = left_pad(random_prompts(2, seed=3, shortest=4, longest=9))
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, **SAMPLED}
    with Pipeline(target, "mtp", lookahead=3, graphs=False) as pipe, Pipeline(target, schedule="plain") as plain:
        assert torch.equal(pipe.generate(ids, **call), plain.generate(ids, **call))
        assert pipe.report.stages[-1].drafted > 0
        assert pipe.report.stages[0].forward.startswith("draft head: an MTP layer")
    assert {len(text) - known for known, text, _ in drafted.found} == {0, 1, 2}
    with Pipeline(folder, ["mtp", "ngram"]) as pipe, Pipeline(target, schedule="plain") as plain:
        assert torch.equal(pipe.generate(ids, **call), plain.generate(ids, **call))


def states_of(target: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """The target's hidden states after its last norm, ``[positions, H]``."""
    with torch.no_grad():
        return target(torch.tensor([text], device=DEVICE), output_hidden_states=True).hidden_states[-1][0].cpu()


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("native", [True, False])
def test_drafts_are_those_of_transformers(family, native, tmp_path, monkeypatch) -> None:
    """Newer versions have such layers."""
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this version has none")
    target = make_checkpoint(tmp_path, family)
    patterns = [rf"model\.layers\.{DEPTH}.*"]
    monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", patterns)
    theirs, drafted = modeling_layers.MtpModel.from_pretrained(target).eval(), heads.Drafted(monkeypatch)
    ids, mask = left_pad(random_prompts(2, seed=4, shortest=4, longest=9))
    with Pipeline(target, "mtp", lookahead=3, graphs=False, native=native) as pipe:
        pipe.generate(ids, attention_mask=mask, max_new_tokens=10, **SAMPLED)
    for known, text, logits in drafted.found:
        states = states_of(target, text[: known - 1])
        positions = torch.arange(len(text) - 1)[None]
        with torch.no_grad():
            for end in range(known, len(text) + 1):
                given = torch.tensor([text[1:end]])
                outputs = theirs.forward_layer(
                    0, states[None].to(DEVICE), positions[:, : end - 1], None, input_ids=given
                )[0].cpu()
                states = torch.cat([states, outputs[-1:]])
            expected = theirs._project_to_logits(outputs[-1:].to(DEVICE))[0].cpu()
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


class Reference:
    """The MTP layer of Qwen3.5 by its formulas, slot by slot, for one text at a time. ``weights``: by their published names."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.w = {name.removeprefix("mtp."): x.double() for name, x in weights.items()}

    def chain(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """The logits after the last token. ``states``: those of the target's positions; tokens ``1 .. len(states)`` belong to their slots."""
        w, at = self.w, "layers.0.self_attn."
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for slot in range(len(tokens) - 1):
            state = states[slot].double() if slot < len(states) else output  # noqa: F821  of the slot before
            embedded = self._norm(w["model.embed_tokens.weight"][tokens[slot + 1]], "pre_fc_norm_embedding")
            hidden = w["fc.weight"] @ torch.cat([embedded, self._norm(state, "pre_fc_norm_hidden")])
            x = self._norm(hidden, "layers.0.input_layernorm")
            query, gate = (w[f"{at}q_proj.weight"] @ x).view(HEADS, 2, DIM).unbind(1)
            keys.append(self._turned(self._norm((w[f"{at}k_proj.weight"] @ x).view(-1, DIM), f"{at}k_norm"), slot))
            values.append((w[f"{at}v_proj.weight"] @ x).view(-1, DIM))
            query = self._turned(self._norm(query, f"{at}q_norm"), slot)
            all_keys, all_values = torch.stack(keys), torch.stack(values)
            mixed = []
            for head, q in enumerate(query):
                of = head // (HEADS // KV_HEADS)
                mixed.append(torch.softmax(all_keys[:, of] @ q / DIM**0.5, 0) @ all_values[:, of])
            hidden = hidden + w[f"{at}o_proj.weight"] @ (torch.cat(mixed) * torch.sigmoid(gate).flatten())
            y = self._norm(hidden, "layers.0.post_attention_layernorm")
            up = F.silu(w["layers.0.mlp.gate_proj.weight"] @ y) * (w["layers.0.mlp.up_proj.weight"] @ y)
            output = self._norm(hidden + w["layers.0.mlp.down_proj.weight"] @ up, "norm")
        return w["lm_head.weight"] @ output

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.w[f"{name}.weight"])

    def _turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        turned, half = DIM // 2, DIM // 4
        angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b, rest = x[:, :half], x[:, half:turned], x[:, turned:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


@pytest.mark.parametrize("native", [True, False])
def test_drafts_of_qwen_are_the_reference_s(native, tmp_path, monkeypatch) -> None:
    target, drafted = make_checkpoint(tmp_path, "qwen3_5_text"), heads.Drafted(monkeypatch)
    reference = Reference(load_file(tmp_path / "model.safetensors"))
    ids, mask = left_pad(random_prompts(2, seed=4, shortest=4, longest=9))
    with Pipeline(target, "mtp", lookahead=3, graphs=False, native=native) as pipe:
        pipe.generate(ids, attention_mask=mask, max_new_tokens=10, **SAMPLED)
    assert {len(text) - known for known, text, _ in drafted.found} == {0, 1, 2}
    for known, text, logits in drafted.found:
        expected = reference.chain(states_of(target, text[: known - 1]), text)
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=2e-4)


# ---- what is refused


def test_a_target_without_the_layer(tmp_path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **COMMON)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no MTP layer: .* neither mtp\.fc nor model\.layers\.4\.eh_proj"):
        Pipeline(tmp_path, "mtp")


def test_a_target_without_files() -> None:
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **COMMON)).eval()
    with pytest.raises(ValueError, match="'mtp' is a layer in the target's safetensors"):
        Pipeline(target, "mtp")


def test_the_layer_of_another_folder(tmp_path) -> None:
    make_checkpoint(tmp_path, "qwen3_5_text")
    assert isinstance(as_draft("mtp"), MtpDraft)
    target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    with Pipeline(target, MtpDraft(tmp_path), lookahead=2) as pipe:
        assert driver_of(pipe).models[0].config.where == f"the MTP layer of {tmp_path}"
    narrow = AutoConfig.from_pretrained(tmp_path, intermediate_size=40)
    with pytest.raises(ValueError, match=r"(?s)is not one for the target's class.*size mismatch"):
        Pipeline(AutoModelForCausalLM.from_config(narrow).eval(), MtpDraft(tmp_path))
