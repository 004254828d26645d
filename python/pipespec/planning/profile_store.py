"""Profiles on disk, one JSON file per chain of models."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from pipespec.engine.ngram import NgramDraft
from pipespec.planning.measure import device_numbers
from pipespec.planning.profile import Profile
from pipespec.process.files import replace
from pipespec.process.records import parse_json
from pipespec.process.signals import pass_on
from pipespec_kernels import __version__, collect_env

_FORMAT = 3


class ProfileWarning(UserWarning):
    """A stored profile could not be used, or a profile could not be stored. The models are measured again."""


def cache_folder() -> Path:
    """Return ``$PIPESPEC_CACHE``, or ``pipespec`` under ``$XDG_CACHE_HOME`` (default: ``~/.cache``).

    Raises:
        FileNotFoundError: There is none of them: the user has no home.
    """
    own = os.environ.get("PIPESPEC_CACHE")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipespec"
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder: set PIPESPEC_CACHE to a folder") from None


def digest(
    models: Sequence[PreTrainedModel], *, threads: int, native: bool = True, ngram: NgramDraft | None = None
) -> str:
    """Digest of all that a profile depends on: models (samples of their weights), the n-gram index, hardware, threads, versions."""
    env = collect_env()
    facts: list[Any] = [_FORMAT, threads, native, env["cpu"]["model"], env["cpu"]["usable_cores"], platform.machine()]
    facts += [torch.__version__, transformers.__version__, __version__]
    if ngram is not None:
        corpus = b"" if ngram.corpus is None else np.asarray(ngram.corpus, dtype=np.int32).tobytes()
        facts.append([ngram.min_match, ngram.max_match, hashlib.sha256(corpus).hexdigest()])
    for model, place in zip(models, device_numbers(models), strict=True):
        config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
        # Which of several equal GPUs is irrelevant. Which models share one is not.
        device = (torch.cuda.get_device_name(model.device), place) if model.device.type == "cuda" else "cpu"
        facts += [config, str(model.dtype), device, model.num_parameters(), _sample(model)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _sample(model: PreTrainedModel) -> str:
    """Digest of a few values of every tensor."""
    seen = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        middle = flat.numel() // 2
        seen.update(flat[middle : middle + 16].float().cpu().numpy().tobytes())
    return seen.hexdigest()


@dataclass(frozen=True)
class StoredProfile:
    """Contents of a file: the profile of a chain, and its last tables of agreement by mode (``"greedy"``, ``"sampled"``)."""

    profile: Profile
    tables: dict[str, np.ndarray]


def store(stored: StoredProfile, folder: Path | None = None) -> bool:
    """Write a profile.

    Returns:
        Whether it was written. If not, one :class:`ProfileWarning` has the reason.
    """
    tables = {mode: table.tolist() for mode, table in stored.tables.items()}
    data = {"format": _FORMAT, "profile": stored.profile.to_json(), "tables": tables}
    try:
        folder = folder or cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / f"{stored.profile.key}.json", json.dumps(data))
    except OSError as error:
        pass_on(error)
        where = "" if folder is None else f" in {folder}"
        _warn_once(f"the profile cannot be kept{where} ({error}); it is measured again next time")
        return False
    return True


def load(key: str, stages: int, folder: Path | None = None) -> StoredProfile | None:
    """Read the profile of ``key``.

    Returns:
        None if there is no file, or if it cannot be used. The second case gives one :class:`ProfileWarning`.
    """
    try:
        file = (folder or cache_folder()) / f"{key}.json"
    except FileNotFoundError:  # store() says so
        return None
    try:
        data = parse_json(file.read_bytes())
        if data["format"] != _FORMAT:
            raise ValueError(f"it has format {data['format']}")
        profile = Profile.from_json(data["profile"])
        if profile.key != key or len(profile.stages) != stages:
            raise ValueError("it belongs to other models")
        tables = {}
        for mode, rows in data["tables"].items():
            table = np.array(rows, dtype=np.uint8)
            if table.ndim != 2 or table.shape[1] != stages - 1 or len(table) == 0:
                raise ValueError(f"its table has shape {table.shape}")
            tables[str(mode)] = table
        return StoredProfile(profile, tables)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        pass_on(error)
        _warn_once(f"{file} is not a usable profile ({type(error).__name__}: {error}); the models are measured again")
        return None


_warned: set[str] = set()


def _warn_once(what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(what, ProfileWarning, stacklevel=4)
