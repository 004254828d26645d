"""Agreement of drafts with the target over a text, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.engine.ngram import NgramDraft
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import PREFILL_CHUNK
from pipespec.models.properties import embedding_size, head_size
from pipespec.planning.simulator import NOTHING
from pipespec_kernels import ops
from pipespec_kernels.noise import Noise

MOST_POSITIONS = 2048
"""Most positions of one table."""


@torch.inference_mode()
def choices(
    model: PreTrainedModel,
    text: np.ndarray,
    first: int,
    sampling_params: SamplingParams,
    vocabulary: int,
    row: int = 0,
    *,
    native: bool = True,
) -> np.ndarray:
    """Tokens that ``model`` chooses at positions ``first .. len(text) - 1``, each given the ``text`` before it.

    Args:
        model: A stage of the chain.
        text: int32 [positions].
        first: First position.
        sampling_params: Of the call. Processors other than the fused ones are ignored.
        vocabulary: Size of the target's vocabulary.
        row: Row of the call, for its seed.
        native: See :class:`pipespec.config.SpeculationConfig`.

    Returns:
        int64 [len(text) - first].
    """
    cache = RowCache.for_model(model, 1, len(text) + 1)
    own = embedding_size(model)
    ids = torch.from_numpy(np.minimum(text, own - 1).astype(np.int32))[None].to(model.device)
    out = []
    at = 0
    while at < len(text) - 1:
        end = min(at + (PREFILL_CHUNK if at < first - 1 else 64), len(text) - 1)
        if at < first - 1:
            end = min(end, first - 1)
        keep = end - at if at >= first - 1 else 0
        logits = forward(model, ids[:, at:end], cache, keep=keep, native=native)
        if keep:
            logits = logits[:, :, :vocabulary]
            if sampling_params.seeds is None:
                out.append(ops.argmax(logits)[0])
            else:
                key = torch.from_numpy(np.array(sampling_params.seeds[row : row + 1], dtype=np.uint64).view(np.int64))
                inverse = torch.full((1,), 1 / sampling_params.temperature, dtype=torch.float32)
                cutoff = None
                if sampling_params.cuts:
                    s = sampling_params
                    cutoff = ops.cutoff(logits, inv_temperature=inverse, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
                out.append(ops.sample(logits, Noise(key, np.array([at + 1]), inverse, cutoff))[0])
        at = end
    return torch.cat(out).cpu().numpy().astype(np.int64) if out else np.zeros(0, dtype=np.int64)


def agreement(truth: np.ndarray, drafts: Sequence[np.ndarray]) -> np.ndarray:
    """Table of agreement for the simulator, see :class:`pipespec.planning.simulator.Answers`.

    Args:
        truth: int64 [positions], the target's tokens.
        drafts: One array like ``truth`` per draft; -1 where an n-gram index drafts nothing.

    Returns:
        uint8 [positions, drafts], 0 where a draft chooses the target's token, :data:`pipespec.planning.simulator.NOTHING` where it drafts
        nothing. Equal numbers in a row are equal tokens.

    Raises:
        ValueError: The shapes differ.
    """
    table = np.zeros((len(truth), len(drafts)), dtype=np.uint8)
    for i, own in enumerate(drafts):
        if own.shape != truth.shape:
            raise ValueError(f"draft {i} has {own.shape} tokens, the target {truth.shape}")
        table[:, i] = np.where(own == truth, 0, i + 1)
        for j in range(i):  # drafts with the same wrong token
            alike = (own == drafts[j]) & (own != truth)
            table[alike, i] = table[alike, j]
        table[own < 0, i] = NOTHING
    return table


def lookups(ngram: NgramDraft, text: np.ndarray, first: int) -> np.ndarray:
    """Table of agreement of an n-gram index alone over a text of the target.

    The index is deterministic, so that its draft tokens in a call are exactly these.

    Args:
        ngram: With the ids of its corpus.
        text: int32 [positions].
        first: First position, at least 1.

    Returns:
        uint8 [len(text) - first, 1], as :func:`agreement`.
    """
    return agreement(text[first:].astype(np.int64), [ngram.followers(text, first)])


def agreement_on(
    models: Sequence[PreTrainedModel],
    text: np.ndarray,
    first: int,
    *,
    own_text: bool,
    sampling_params: SamplingParams | None = None,
    row: int = 0,
    native: bool = True,
    ngram: NgramDraft | None = None,
) -> np.ndarray:
    """Table of agreement of ``models`` over ``text`` from position ``first`` on, teacher-forced.

    Args:
        models: Drafts, then the target.
        text: int32 [positions]. At most :data:`MOST_POSITIONS` behind ``first`` are used.
        first: First position.
        own_text: The target generated the text from ``first`` on, so that it need not run again.
        sampling_params: As for :func:`choices`. None: greedy.
        row: As for :func:`choices`.
        native: As for :func:`choices`.
        ngram: With the ids of its corpus: the first draft, before ``models``.

    Returns:
        As :func:`agreement`.
    """
    sampling_params = sampling_params or SamplingParams()
    vocabulary = head_size(models[-1])
    text = text[: first + MOST_POSITIONS]
    truth = (
        text[first:].astype(np.int64)
        if own_text
        else choices(models[-1], text, first, sampling_params, vocabulary, row, native=native)
    )
    drafts = [choices(m, text, first, sampling_params, vocabulary, row, native=native) for m in models[:-1]]
    if ngram is not None:
        drafts.insert(0, ngram.followers(np.concatenate([text[:first], truth]), first))
    return agreement(truth, drafts)
