"""How ranks become a chain: they compare their settings, each loads its own model, and they connect."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipespec.checks.devices import AUTO, Devices, arrange, place_of_each, rank_device
from pipespec.checks.models import Vocabulary, check_architecture, check_runnable, check_vocabularies, vocabulary_of
from pipespec.config import SpeculationConfig
from pipespec.engine.chain import stage_names
from pipespec.models.loading import load_model
from pipespec.process.ranks import START_S, RankError, Ranks, rank_and_world
from pipespec.schedules.asynchronous.remote import DraftRank, RemoteDriver
from pipespec.schedules.base import Decoder
from pipespec_kernels.state import MAX_STAGES


def join(
    given: Sequence[PreTrainedModel | str | Path],
    config: SpeculationConfig,
    *,
    device: Devices = None,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    start_s: float = START_S,
) -> tuple[PreTrainedModel, Decoder]:
    """Take this rank's place in a chain. All ranks call this with the same chain.

    Args, where they differ from those of ``Pipeline``:
        given: Models or paths, drafts first, target last. Only this rank's own one is loaded: rank 0 has the target, rank 1 the first draft, and so on.
        config: Of the whole chain.
        device: ``"cuda"`` is the GPU of number LOCAL_RANK.
        start_s: Longest time until all ranks are there, and again until all have loaded their models.

    Returns:
        This rank's model, and what runs it: a :class:`RemoteDriver` on rank 0, else a :class:`DraftRank`.

    Raises:
        ValueError: There are no ranks, their number is not that of the models, or a model cannot take part.
        RankError: Another rank is missing, cannot take part, or has another version or other settings.
        Exception: Those of :func:`pipespec.checks.devices.arrange` and :func:`pipespec.models.loading.load_model`.
    """
    rank, world = rank_and_world()
    if world != len(given):
        raise ValueError(
            f"schedule='ranks': a chain of {len(given)} models needs as many ranks, and there are {world}: start with "
            f"torchrun --nproc-per-node {len(given)}"
        )
    if world > MAX_STAGES:
        raise ValueError(f"a pipeline has at most {MAX_STAGES} stages, got {world}")
    own = (rank - 1) % world
    name = stage_names(world)[own]
    wanted = device_of_stage(device, stage_names(world), own)
    ranks = Ranks.join(terms_of(given, config), start_s)

    error, facts = None, ""
    model: PreTrainedModel | None = None
    try:
        (placed,) = arrange([given[own]], device=wanted, dtype=dtype, trust_remote_code=trust_remote_code, names=[name])
        model = load_model(given[own], device=placed, dtype=dtype, trust_remote_code=trust_remote_code)
        check_architecture(name, model)
        facts = json.dumps(vocabulary_of(name, model, given[own]))
        check_runnable([model])
    except Exception as failure:
        error = failure
    try:
        answers = ranks.agree(error, own=facts)
    except RankError:
        if error is not None:
            raise error from None
        raise
    target, *drafts = (Vocabulary(*json.loads(answer)) for answer in answers)
    try:
        check_vocabularies([*drafts, target])
    except ValueError:
        ranks.leave()
        raise
    assert model is not None
    # The inline drafts run in the process of a model. Their corpus may have to be encoded by the target's tokenizer.
    source = given[-1] if isinstance(given[-1], (str, Path)) else given[-1].config._name_or_path
    specs = list(config.drafts)
    for i in config.stages_of(config.model_stages[own])[:-1]:
        specs[i] = specs[i].for_target(source, model)
    config = replace(config, drafts=tuple(specs))
    if rank:
        return model, DraftRank(model, config, ranks)
    return model, RemoteDriver(model, config, ranks)


def device_of_stage(device: Devices, names: Sequence[str], own: int) -> Devices:
    """What ``device=`` says about one stage. The other stages' devices are on other machines, and are not checked."""
    place = place_of_each(device, names)[own]
    if place is None or place == AUTO:
        return place
    if isinstance(place, (str, torch.device)):
        return rank_device(place)
    return [[rank_device(each) for each in place]]


def terms_of(given: Sequence[Any], config: SpeculationConfig) -> dict[str, Any]:
    """What all ranks must share."""
    return {
        "byte order": sys.byteorder,
        "models": len(given),
        "drafts": [draft.label for draft in config.drafts],
        "lookahead": config.lookahead,
        **{f"config.json of the {name}": _digest(m) for name, m in zip(stage_names(len(given)), given, strict=True)},
    }


def _digest(model: Any) -> str | None:
    """Digest of a model's configuration; None where this machine does not have it."""
    if isinstance(model, PreTrainedModel):
        return None
    with suppress(OSError, ValueError):
        content = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        # The same weights may have been saved by several versions of transformers.
        content.pop("transformers_version", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return None
