"""Can these models form a chain? Asked before any work is done; every refusal says what was wrong and what to do."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from pipespec.angles import angles_change_at, rope_type
from pipespec.compat import embedding_size, head_size
from pipespec.placement import check_placement
from pipespec.progress import level_of_caller
from pipespec.stage import stage_names
from pipespec_kernels.state import MAX_STAGES


def check_schedule(schedule: str, known: Sequence[str]) -> None:
    """Raises ``ValueError`` for a schedule that does not exist."""
    if schedule not in known:
        raise ValueError(f"schedule={schedule!r} is not one of {', '.join(map(repr, known))}")


def check_chain(models: Sequence[PreTrainedModel], given: Sequence[Any]) -> None:
    """``models``: drafts, then the target; ``given``: what the user passed for each (a path, or the model itself).

    Raises ``ValueError`` if they cannot form one chain, ``TypeError`` for a model of the wrong architecture.
    """
    if len(models) > MAX_STAGES:
        raise ValueError(f"a pipeline has at most {MAX_STAGES} stages, got {len(models)}")
    names = stage_names(len(models))
    for i, model in enumerate(models):
        if any(model is other for other in models[:i]):
            raise ValueError(
                f"{names[i]} is the same object as another stage; every stage needs its own cache and weights"
            )
    for name, model in zip(names, models, strict=True):
        check_architecture(name, model)
    target = models[-1]
    vocabulary = embedding_size(target)
    digest = _tokenizer_digest(given[-1], target)
    for name, model, source in zip(names, models, given, strict=True):
        head = head_size(model)
        if head != embedding_size(model):
            raise ValueError(
                f"{name} has {head} logits per position for {embedding_size(model)} tokens: its head does not fit the vocabulary"
            )
        if model is target:
            break
        own = _tokenizer_digest(source, model)
        if own is not None and digest is not None and own != digest:
            raise ValueError(
                f"{name} has another tokenizer than the target (other tokens, or the same with other ids): its drafts would mean other "
                "words; drafts must use the target's tokenizer"
            )
        # Variants of one model pad their embedding to different sizes; only the tokenizer can tell that from another vocabulary.
        if embedding_size(model) != vocabulary and (own is None or digest is None):
            unknown = name if own is None else "the target"
            raise ValueError(
                f"{name} has a vocabulary of {embedding_size(model)} tokens, the target {vocabulary}: drafts must use the target's "
                f"tokenizer, and {unknown} has no tokenizer.json by which that could be seen. Where it is the same one and only the "
                "padding differs, put tokenizer.json beside the weights of both"
            )
    check_placement(models)


def check_angles(target: PreTrainedModel, most: int) -> None:
    """Warns (``RuntimeWarning``) where a text of ``most`` tokens can differ from ``generate()``'s: which tokens it feeds at once shows in it."""
    limit = angles_change_at(target)
    if limit is not None and most > limit:
        warnings.warn(
            f"beyond {limit} tokens the target's rotary angles depend on the longest position of each forward "
            f"({rope_type(target)}), and forwards are others here than generate()'s: around there and from there on the text may differ "
            "from it",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )


def check_architecture(name: str, model: PreTrainedModel) -> None:
    """Raises ``TypeError`` unless this is a decoder with a language-model head and full attention in every layer."""
    config, kind = model.config, type(model).__name__
    missing = [f for f in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not hasattr(config, f)]
    if getattr(model, "lm_head", None) is None and model.get_output_embeddings() is None and hasattr(model, "layers"):
        raise TypeError(f"{name} is a {kind} without a language-model head; load it with AutoModelForCausalLM")
    decoder = getattr(model, model.base_model_prefix, None)
    if config.is_encoder_decoder or missing or not hasattr(decoder, "layers"):
        raise TypeError(
            f"{name} is a {kind}, not a LLaMA-like decoder (model.layers, attention with a key/value cache)"
        )
    if getattr(model, "lm_head", None) is None and model.get_output_embeddings() is None:  # a classifier
        raise TypeError(f"{name} is a {kind} without a language-model head; load it with AutoModelForCausalLM")
    lacking = _NEEDED - _parameters(model)
    if lacking:
        raise TypeError(f"{name} is a {kind}, not LLaMA-like: its forward() takes no {', '.join(sorted(lacking))}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or (window and not hasattr(config, "layer_types")):
        raise TypeError(
            f"{name} is a {kind} with other than full attention in its layers ({', '.join(sorted(kinds))}); only full attention can be "
            "rolled back row by row"
        )


_NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep"}


def _parameters(model: PreTrainedModel) -> set[str]:
    """Names that ``forward()`` takes; where it passes on what it does not know, those of the class it extends, too."""
    names: set[str] = set()
    for forward in (model.forward, *(c.__dict__["forward"] for c in type(model).__mro__ if "forward" in c.__dict__)):
        parameters = inspect.signature(forward).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


def _tokenizer_digest(given: Any, model: PreTrainedModel) -> str | None:
    """Digest of token -> id of the tokenizer that came with the weights; None where there is none to be seen."""
    source = given if isinstance(given, (str, Path)) else getattr(model.config, "_name_or_path", "")
    if not source:
        return None
    try:  # a folder's own file, or a hub name's in the local cache; nothing is downloaded for a check
        file = cached_file(str(source), "tokenizer.json", local_files_only=True)
    except OSError:
        return None
    if file is None:
        return None
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab")
    pairs = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    added = sorted((t["id"], t["content"]) for t in content.get("added_tokens", []))
    return hashlib.sha256(json.dumps([pairs, added]).encode()).hexdigest()
