"""Dynamic RoPE: rotary embeddings that depend on the length of the text beyond a limit."""

from __future__ import annotations

from transformers import PreTrainedModel

from pipespec.models.properties import text_config


def rope_type(model: PreTrainedModel) -> str:
    """The ``rope_type`` of a model, as transformers names it; empty if it has several, or none."""
    rope = getattr(text_config(model.config), "rope_parameters", None) or {}
    return str(rope.get("rope_type", ""))


def is_dynamic(rope_type: object) -> bool:
    """Whether RoPE of this type depends on the longest position of a forward."""
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def rope_changes_at(model: PreTrainedModel) -> int | None:
    """Positions beyond which a model's RoPE depends on the longest position of a forward; None: it never does."""
    config, kind = text_config(model.config), rope_type(model)
    if not is_dynamic(kind):
        return None
    if kind == "longrope":
        return int(config.rope_parameters.get("original_max_position_embeddings", 0))
    return int(config.max_position_embeddings)


def reset_rope(model: PreTrainedModel) -> None:
    """Restore the frequencies of a new model, after forwards over longer texts. transformers does so for some texts only, and 5.0 never."""
    if "dynamic" not in rope_type(model):
        return
    for rotary in model.modules():
        if "dynamic" in str(getattr(rotary, "rope_type", "")) and hasattr(rotary, "original_inv_freq"):
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            original = rotary.original_inv_freq.to(rotary.inv_freq.device)
            rotary.register_buffer("inv_freq", original, persistent=False)
