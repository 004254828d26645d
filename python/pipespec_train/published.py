"""Draft modules as the authors of SPD publish them, converted into a :class:`pipespec_spd.draft_module.DraftModule`.

The file is one dictionary of ``torch.save``: ``config`` and ``state_dict``, format version 11 (arXiv 2605.30852 and its public repository). Its
blocks are Qwen3 decoder layers of the target's width, with the target's own RoPE, whatever the target is. transformers has such layers with
partial RoPE, too, as the dense layers of GLM-4-MoE, whose parameters have the same names. So the blocks are built from those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipespec.models.loading import fill
from pipespec.models.properties import text_config
from pipespec.process.records import parse_json
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig, described, target_digest
from pipespec_spd.partition import Partition, check_target

FORMAT = 11
"""Version of the published files that is read."""

_NAMES = {"aggr_projs": "projections", "spec_layers": "layers", "lm_head": "head"}
"""Published names of the parts, and those of :class:`DraftModule`."""

_BUFFERS = "rotary_emb."
"""Tensors that follow from the configuration of the target."""


def import_module(file: str | Path, target: PreTrainedModel, *, vocabulary: str | Path | None = None) -> DraftModule:
    """Convert a published draft module. ``save()`` of the result writes a folder that :class:`pipespec_spd.SpeculativePipeline` takes.

    The file says nothing of the target's weights but their sizes. The result belongs to the ``target`` that is given.

    Args:
        file: The published file, ``*.pt``. It is loaded without running code from it.
        target: The model that the module was trained for.
        vocabulary: The JSON file of the draft vocabulary, with ``token_ids``; None: the module's own list, or all tokens.

    Returns:
        The module in float32, in eval mode, on the CPU.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: The target cannot be cut into stages.
        ValueError: The file is damaged, of another format version, or does not fit the target.
    """
    check_target(target)
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} does not exist: give the published file of a draft module (*.pt)")
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises errors of many types
        raise ValueError(f"{file} is no file of torch.save, or it is damaged: {error}") from error
    try:
        ids = None if vocabulary is None else _token_ids(Path(vocabulary))
        return _converted(stored["config"], stored["state_dict"], target, ids)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except Exception as error:  # entries that are missing or of other types
        raise ValueError(
            f"{file} is no published draft module, or it is damaged ({type(error).__name__}: {error})"
        ) from error


def _token_ids(file: Path) -> Sequence[int]:
    try:
        record = parse_json(file.read_bytes())
        return [int(token) for token in record["token_ids"]]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{file} is no draft vocabulary: a JSON object with token_ids is needed ({error})") from error


def _converted(
    config: Mapping[str, Any], state: Mapping[str, torch.Tensor], target: PreTrainedModel, given: Sequence[int] | None
) -> DraftModule:
    if (version := config.get("version")) != FORMAT:
        raise ValueError(
            f"it has format version {version}; version {FORMAT} is read: get the module from a branch of that version"
        )
    own = text_config(target.config)
    for name, what in (("hidden_size", "hidden units"), ("vocab_size", "tokens")):
        if config[name] != getattr(own, name):
            raise ValueError(
                f"the module is for a target with {config[name]} {what}; this one has {getattr(own, name)}"
            )
    if not config["trained_with_use_deepest"]:
        raise ValueError(
            "the module was trained without use_deepest: it expects shallow rows of tokens that have left a partly filled pipeline, which "
            "the drafter here does not make"
        )
    tensors = {_renamed(name): x.float() for name, x in state.items() if not name.startswith(_BUFFERS)}
    count = int(config["num_spec_layers"])
    module_config = DraftModuleConfig(
        stages=_stages(config, own.num_hidden_layers),
        anchors=tuple(map(int, config["aggr_feature_bound"])),
        layers=count,
        vocabulary=_vocabulary(config, given),
        target=described(own),
        digest=target_digest(target),
        blocks=_blocks(own, count, tensors),
    )
    module = DraftModule(module_config)
    tensors["norm.weight"] = _norm_weight(target, module)
    fill(module, tensors, "under the names of pipespec")
    _check_rope(target, module)
    return module.eval()


def _stages(config: Mapping[str, Any], layers: int) -> tuple[tuple[int, int], ...]:
    n, counts = int(config["num_stages"]), config.get("stage_layers")
    if counts is None:
        counts = [layers // n] * n
    elif isinstance(counts, str):
        counts = [int(part) for part in counts.split(";") if part.strip()]
    partition = Partition(tuple(int(c) for c in counts))
    if partition.stages != n:
        raise ValueError(f"its config has {n} stages, and layers of {partition.stages}")
    partition.check(layers)
    return partition.ranges


def _vocabulary(config: Mapping[str, Any], given: Sequence[int] | None) -> tuple[int, ...] | None:
    ids = config.get("draft_token_ids") if given is None else given
    if ids is None:
        if config["draft_vocab_size"] != config["vocab_size"]:
            raise ValueError(
                f"the module drafts {config['draft_vocab_size']} of {config['vocab_size']} tokens and does not say which: give the JSON file "
                "of its draft vocabulary (vocabulary=, --vocabulary)"
            )
        return None
    # The published code sorts the ids, and the rows of the head are in that order.
    ids = sorted({int(token) for token in ids})
    if len(ids) != config["draft_vocab_size"]:
        raise ValueError(
            f"the draft vocabulary has {len(ids)} different tokens, the module {config['draft_vocab_size']}"
        )
    return tuple(ids)


def _renamed(name: str) -> str:
    part, dot, rest = name.partition(".")
    return _NAMES.get(part, part) + dot + rest


def _blocks(own: Any, layers: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The configuration of the blocks: Qwen3 layers with the target's sizes and RoPE."""
    rope = {name: value for name, value in dict(own.rope_parameters).items() if not name.startswith("mrope")}
    gate = tensors.get("layers.0.mlp.gate_proj.weight")
    return {
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "first_k_dense_replace": layers,
        "hidden_size": own.hidden_size,
        # Targets with experts may have none, and the module has dense blocks.
        "intermediate_size": own.intermediate_size if gate is None else gate.shape[0],
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "head_dim": getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        "rms_norm_eps": own.rms_norm_eps,
        "hidden_act": own.hidden_act,
        "max_position_embeddings": own.max_position_embeddings,
        "attention_bias": False,
        "rope_parameters": {"partial_rotary_factor": 1.0} | rope,
    }


def _norm_weight(target: PreTrainedModel, module: DraftModule) -> torch.Tensor:
    """The factors of the target's last norm, which some families store without the 1 that they add."""
    norm = target.base_model.norm
    weight = next(norm.parameters())
    ones = torch.ones((1, weight.shape[0]), dtype=torch.float32, device=weight.device)
    with torch.inference_mode():
        scaled: torch.Tensor = norm(ones)[0].float().cpu()
    eps = float(module.config.target["rms_norm_eps"])
    return (scaled * (1 + eps) ** 0.5).clone()


def _check_rope(target: PreTrainedModel, module: DraftModule) -> None:
    like, positions = torch.zeros((1, 3, 1), dtype=torch.float32), torch.tensor([[0, 1, 77]])
    rotary: Any = target.base_model.rotary_emb
    device = rotary.inv_freq.device
    with torch.inference_mode():
        theirs = rotary(like.to(device), positions.to(device))
        ours = module.rotary_emb(like, positions)
    for a, b in zip(theirs, ours, strict=True):
        if a.shape != b.shape or not torch.allclose(a.cpu(), b, atol=1e-5):
            raise ValueError("the target's RoPE is of a kind that the blocks of a published module do not have here")
