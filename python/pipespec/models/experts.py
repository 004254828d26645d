"""Where the experts of a feed-forward are in transformers' modules, and how their routers choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipespec.models.quantized import QuantizedExperts
from pipespec_kernels.experts import Experts, Routing

CLASSES = ("Experts", "TopKRouter", "TopkRouter", "SparseMoeBlock", "MoE", "Moe")
"""Ends of the names of the classes."""

NUMBERS = (
    "top_k",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_group",
    "topk_group",
    "topk_method",
    "router_jitter_noise",
    "limit",
    "alpha",
    "has_bias",
    "has_gate",
    "has_post_expert_norm",
    "use_expert_bias",
    "is_transposed",
    "is_concatenated",
)
"""Attributes of the modules that count."""

ALPHA = 1.702
"""Factor within the sigmoid of gpt-oss's activation: that of ``quick_gelu``."""


def softmax(router: Any) -> Routing:
    """Shares of a softmax; of the chosen ones alone where the router does not say otherwise."""
    return Routing(router.top_k, is_normalised=getattr(router, "norm_topk_prob", True))


def by_sigmoids(router: Any) -> Routing:
    """DeepSeek-V3's: sigmoids, of the groups whose two best experts have the largest sums."""
    number = router.routed_scaling_factor
    return Routing(
        router.top_k, "sigmoid", router.norm_topk_prob, number, router.num_group, router.topk_group, group_best=2
    )


def by_sigmoids_of_all(router: Any) -> Routing:
    """LFM2's: sigmoids, without groups."""
    return Routing(router.top_k, "sigmoid", router.norm_topk_prob, router.routed_scaling_factor)


def by_softmax_of_groups(router: Any) -> Routing:
    """DeepSeek-V2's: shares of a softmax, of the groups whose best experts have the largest ones; as they are, times a factor."""
    groups, chosen = (router.num_group, router.topk_group) if router.topk_method == "group_limited_greedy" else (1, 1)
    return Routing(router.top_k, "softmax", False, router.routed_scaling_factor, groups, chosen)


def sparse_mixer(router: Any) -> Routing:
    """PhiMoE's."""
    return Routing(2, "sparse_mixer", jitter=router.router_jitter_noise)


def experts_of(mlp: Any, routing: Callable[[Any], Routing], linear: Callable[[Any], Any]) -> Experts | None:
    """The experts of a feed-forward; None if it has none.

    Args:
        mlp: the module.
        routing: of its router.
        linear: the matrix of a linear module.
    """
    experts = getattr(mlp, "experts", None)
    if experts is None:
        return None
    router = mlp.gate if hasattr(mlp, "gate") else mlp.router
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    gate = getattr(mlp, "shared_expert_gate", None)
    return Experts(
        routing(router),
        linear(router),
        **_stacked(experts, linear),
        router_bias=_detached(router, "bias"),
        choice_bias=_detached(router, "e_score_correction_bias")
        if hasattr(router, "e_score_correction_bias")
        else _detached(mlp, "expert_bias"),
        shared=()
        if shared is None
        else tuple(linear(getattr(shared, f"{name}_proj")) for name in ("gate", "up", "down")),
        shared_router=None if gate is None else linear(gate),
        limit=getattr(experts, "limit", 0.0),
    )


def _stacked(experts: Any, linear: Callable[[Any], Any]) -> Mapping[str, Any]:
    """The matrices of all experts, ``[rows of all, inputs]``. In gpt-oss they are transposed, and gates and ups take turns: these are copied."""
    if isinstance(experts, QuantizedExperts):
        parts = {name: getattr(experts, name) for name in ("gate", "up", "down")}
        return {name: linear(part) for name, part in parts.items()} | {
            f"{name}_bias": _detached(part, "bias") for name, part in parts.items()
        }
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if not _are_transposed(experts):
        return {"gate": gate_up.flatten(0, 1), "up": None, "down": down.flatten(0, 1)}
    rows, bias = gate_up.transpose(1, 2), experts.gate_up_proj_bias.detach()
    return {
        "gate": torch.cat([rows[:, ::2], rows[:, 1::2]], 1).flatten(0, 1),
        "up": None,
        "down": down.transpose(1, 2).flatten(0, 1),
        "gate_bias": torch.cat([bias[:, ::2], bias[:, 1::2]], 1).flatten(),
        "down_bias": experts.down_proj_bias.detach().flatten(),
    }


def _are_transposed(experts: Any) -> bool:
    return not isinstance(experts, QuantizedExperts) and hasattr(experts, "gate_up_proj_bias")


def copied_bytes(module: Any) -> int:
    """Bytes of the matrices of a module of experts that :func:`experts_of` copies."""
    return module.gate_up_proj.nbytes + module.down_proj.nbytes if _are_transposed(module) else 0


def _detached(module: Any, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.detach()
