"""Can these models form a chain? Asked before any work is done; every refusal says what was wrong and what to do."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from pipespec.cache import RowCache
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
    names = [f"draft {i}" for i in range(len(models) - 1)] + ["target"]
    for i, model in enumerate(models):
        if any(model is other for other in models[:i]):
            raise ValueError(
                f"{names[i]} is the same object as another stage; every stage needs its own cache and weights"
            )
    for name, model in zip(names, models, strict=True):
        check_architecture(name, model)
    target = models[-1]
    vocabulary = _vocabulary(target)
    digest = _tokenizer_digest(given[-1], target)
    for name, model, source in zip(names, models, given, strict=True):
        head = model.get_output_embeddings().weight.shape[0]
        if head != _vocabulary(model):
            raise ValueError(
                f"{name} has {head} logits per position for {_vocabulary(model)} tokens: its head does not fit the vocabulary"
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
        if _vocabulary(model) != vocabulary and (own is None or digest is None):
            unknown = name if own is None else "the target"
            raise ValueError(
                f"{name} has a vocabulary of {_vocabulary(model)} tokens, the target {vocabulary}: drafts must use the target's "
                f"tokenizer, and {unknown} has no tokenizer.json by which that could be seen. Where it is the same one and only the "
                "padding differs, put tokenizer.json beside the weights of both"
            )
    check_placement(models)


def check_placement(models: Sequence[PreTrainedModel]) -> None:
    """Raises ``ValueError`` for a model that lies where, or computes in what, no stage can run."""
    for i, model in enumerate(models):
        _check_placement(f"draft {i}" if i < len(models) - 1 else "target", model)


def check_memory(models: Sequence[PreTrainedModel], rows: int, capacity: int) -> None:
    """Raises ``ValueError`` if the caches of ``rows`` x ``capacity`` positions cannot fit the memory of this machine (CPU stages)."""
    need = sum(RowCache.bytes_for(m.config, rows, capacity, m.dtype) for m in models if m.device.type == "cpu")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > total:
        raise ValueError(
            f"the key/value caches for {rows} x {capacity} positions need {need / 2**30:.1f} GiB, this machine has {total / 2**30:.1f}: "
            "lower max_new_tokens or the batch"
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


def _check_placement(name: str, model: PreTrainedModel) -> None:
    devices = {p.device for p in model.parameters()}
    if any(d.type == "meta" for d in devices):
        raise ValueError(f"{name} has weights that are not loaded (on the meta device, or offloaded); load it whole")
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over {', '.join(sorted(map(str, devices)))}; each stage must lie on one device (no device_map='auto')"
        )
    dtype = model.dtype
    if dtype.itemsize < 2 or not dtype.is_floating_point:
        raise ValueError(f"{name} computes in {dtype}; use float32, bfloat16 or float16")
    if dtype.itemsize == 2 and str(dtype) == "torch.float16" and model.device.type == "cpu":
        raise ValueError(
            f"{name} is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
        )
    if model.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {model.device}; stages run on cpu or cuda")


def _vocabulary(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().weight.shape[0]


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
