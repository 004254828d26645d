"""The oracles of :mod:`pipespec_kernels.ops`: simple and slow, in plain torch, on any device. Results are int32 on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipespec_kernels.kept import kept
from pipespec_kernels.noise import ACCEPT, DRAFT, RESIDUAL, Noise


def check_counts(query_lens: Tensor, num_draft_tokens: Tensor, width: int) -> None:
    """Raise ``ValueError`` with the first row whose counts are impossible. Reading counts on a device waits for it."""
    for row, (fed, draft_tokens) in enumerate(zip(query_lens.tolist(), num_draft_tokens.tolist(), strict=True)):
        if fed < 0 or fed > width or (fed > 0 and not 0 <= draft_tokens < fed):
            raise ValueError(
                f"row {row}: need 0 <= num_draft_tokens < query_lens <= Q: query_lens={fed}, num_draft_tokens={draft_tokens}, Q={width}"
            )


def argmax(logits: Tensor) -> Tensor:
    """Id of the largest logit in every row of ``logits[B, Q, V]``: the first of equals, or the first NaN if there is one."""
    return torch.argmax(logits, dim=-1).to(device="cpu", dtype=torch.int32)


def verify(
    logits: Tensor, tokens: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Verification, one row and one position after the other; see :func:`pipespec_kernels.ops.verify`."""
    batch, width, _ = logits.shape
    selected = torch.full((batch, width), -1, dtype=torch.int32, device="cpu")
    accepted = torch.zeros(batch, dtype=torch.int32, device="cpu")
    for row in range(batch):
        fed, draft_tokens = int(query_lens[row]), int(num_draft_tokens[row])
        if fed == 0:
            continue
        column = fed - 1 - draft_tokens  # its logits decide about the first draft token
        for j in range(draft_tokens + 1):
            if noise is None:
                choice = int(torch.argmax(logits[row, column + j]))
            else:
                choice = _sample_row(logits, noise, row, column + j)
            selected[row, j] = choice
            if j == draft_tokens or choice != int(tokens[row, column + 1 + j]):
                accepted[row] = j
                break
    return selected, accepted


def note_invalid_positions(
    found: Tensor, logits: Tensor, selected: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, positions: Tensor
) -> None:
    """Lower ``found`` to the first position of each row whose chosen logit is not finite; see :func:`pipespec_kernels.ops.verify`.

    ``positions``: of the tokens that column 0 chooses. Reading results on a device waits for it.
    """
    rows, steps = (selected >= 0).nonzero(as_tuple=True)
    columns = (query_lens - 1 - num_draft_tokens)[rows] + steps
    rows, columns, ids = (index.to(logits.device) for index in (rows, columns, selected[selected >= 0].long()))
    bad = ~torch.isfinite(logits[rows, columns, ids])
    if bool(bad.any()):
        rows, columns = rows[bad].to(found.device), columns[bad].to(found.device)
        found.scatter_reduce_(0, rows, positions.to(found.device)[rows] + columns, "amin")


def sample(logits: Tensor, noise: Noise) -> Tensor:
    """Gumbel-max sampling of every row; see :func:`pipespec_kernels.ops.sample`."""
    batch, width, _ = logits.shape
    rows = [[_sample_row(logits, noise, row, column) for column in range(width)] for row in range(batch)]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(batch, width)


def _sample_row(logits: Tensor, noise: Noise, row: int, column: int) -> int:
    x = logits[row, column]
    x = x if x.dtype is torch.float64 else x.float()
    ids = torch.arange(x.numel(), device=x.device)
    g = gumbel(philox_draw(int(noise.seeds[row]), int(noise.positions[row]) + noise.offset + column, noise.stream, ids))
    y = x * float(noise.inv_temperature[row]) + g.to(x.dtype)
    if noise.cutoff is not None:
        y = torch.where(x < float(noise.cutoff[row, column]), -torch.inf, y)
    return int(torch.argmax(y))


def cutoff(
    logits: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    query_lens: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
) -> Tensor:
    """The smallest logit of every row that top-k, top-p and min-p keep; see :func:`pipespec_kernels.ops.cutoff`."""
    batch, width, vocab = logits.shape
    out = torch.full((batch, width), -torch.inf, dtype=torch.float32, device="cpu")
    for row in range(batch):
        k, p, share = int(top_k[row]), float(top_p[row]), float(min_p[row])
        if (k == 0 or k >= vocab) and p >= 1 and share <= 0:
            continue
        columns = range(width)
        if query_lens is not None and num_draft_tokens is not None:
            fed = int(query_lens[row])
            columns = range(fed - 1 - int(num_draft_tokens[row]), fed) if fed > 0 else range(0)
        for column in columns:
            x = logits[row, column].cpu()
            if bool(x.isnan().any()) or bool((x == -torch.inf).all()):
                continue
            x = x if x.dtype is torch.float64 else x.float()
            x = torch.sort(x, descending=True).values
            if 0 < k < vocab:
                x = x[x >= x[k - 1]]
            y = x * float(inv_temperature[row])
            weight = torch.where(y == y[0], 1.0, torch.exp(y.double() - y[0].double()))
            if p < 1:
                reached = torch.cumsum(weight, 0) >= p * weight.sum()
                last = int(reached.int().argmax()) if bool(reached.any()) else len(x) - 1
                weight = weight[x >= x[last]]
            kept = x[: len(weight)][weight >= share]
            bar = kept[-1].float()
            if bar > kept[-1]:
                bar = torch.nextafter(bar, torch.tensor(-torch.inf))
            out[row, column] = bar + 0.0
    return out


def logprobs(
    logits: Tensor,
    selected: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    inv_temperature: Tensor | None = None,
    cutoff: Tensor | None = None,
    top_n: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """All selected columns at once; see :func:`pipespec_kernels.ops.logprobs`. Exponentials in float32, sums in float64 (float64 logits: all in float64)."""
    device, (batch, width, vocab) = logits.device, logits.shape
    chosen = torch.full((batch, width), -torch.inf, dtype=torch.float32, device=device)
    top_ids = torch.full((batch, width, top_n), -1, dtype=torch.int32, device=device)
    top = torch.full((batch, width, top_n), -torch.inf, dtype=torch.float32, device=device)
    steps = torch.arange(width, device=num_draft_tokens.device)
    reads = (steps <= num_draft_tokens[:, None]) & (query_lens > 0)[:, None]
    rows, at = (reads & (selected.cpu() >= 0) & (selected.cpu() < vocab)).nonzero(as_tuple=True)
    columns = (query_lens - 1 - num_draft_tokens)[rows] + at
    rows, at, columns = rows.to(device), at.to(device), columns.to(device)
    x = logits[rows, columns]
    x = x if x.dtype is torch.float64 else x.float()
    y = x if inv_temperature is None else x * inv_temperature.to(x)[rows, None]
    # -inf stays -inf, whatever the temperature.
    dropped = x == -torch.inf
    if cutoff is not None:
        dropped |= x < cutoff.to(x)[rows, columns, None]
    y = y.masked_fill(dropped, -torch.inf)
    largest = y.amax(-1, keepdim=True)
    normalizer = largest.double() + (y - largest).exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    normalizer = torch.where(normalizer.isfinite(), normalizer, torch.nan)
    every = (y.double() - normalizer).float()
    chosen[rows, at] = every.gather(1, selected.to(device)[rows, at].long()[:, None])[:, 0]
    if top_n:
        x = x.masked_fill(dropped, -torch.inf)
        if x.dtype is torch.float64:
            ids = torch.sort(x, descending=True, stable=True).indices[:, :top_n]
        else:
            # Unique keys, so that the order of equal logits is that of their ids.
            bits = (x + 0.0).view(torch.int32)
            order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
            key = (order << 32) | (0x7FFFFFFF - torch.arange(vocab, device=device))
            ids = key.topk(top_n, -1).indices
        found = every.gather(1, ids)
        kept = ~dropped.gather(1, ids) & normalizer.isfinite()
        top[rows, at] = found
        top_ids[rows, at] = torch.where(kept, ids, -1).int()
    return chosen, top_ids, top


def penalize(
    logits: Tensor,
    tokens: Tensor,
    history: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    prompt_lengths: Tensor,
    bias_ids: Tensor | None = None,
    bias: Tensor | None = None,
    query_lens: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    bitmask: Tensor | None = None,
) -> None:
    """Column after column; see :func:`pipespec_kernels.ops.penalize`.

    Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation" (2019), section 4.1, for the repetition penalty;
    the presence and frequency penalties are those of OpenAI's API and vLLM.
    """
    batch, width, vocab = logits.shape
    for row in range(batch):
        n, prompt = int(lengths[row]), int(prompt_lengths[row])
        fed = width if query_lens is None else int(query_lens[row])
        first = 0 if num_draft_tokens is None else fed - 1 - int(num_draft_tokens[row])
        for column in range(first if fed > 0 else 0, fed):
            x = logits[row, column]
            seen = torch.cat([history[row, :n].long(), tokens[row, : column + 1].long()])
            generated = seen[prompt:]
            seen, generated = (ids[(ids >= 0) & (ids < vocab)] for ids in (seen, generated))
            if bias_ids is not None and bias is not None:
                ids = bias_ids[row].long()
                inside = (ids >= 0) & (ids < vocab)
                x[ids[inside]] += bias[row][inside]
            seen = torch.unique(seen)
            penalised = x[seen]
            x[seen] = torch.where(penalised < 0, penalised * repetition[row], penalised / repetition[row])
            ids, counts = torch.unique(generated, return_counts=True)
            x[ids] -= frequency[row] * counts.float()
            x[ids] -= presence[row]
            if bitmask is not None:
                at = torch.arange(vocab, device=x.device)
                x[(bitmask[row, column][at // 32] >> (at % 32)) & 1 == 0] = -torch.inf
        room = min(width, history.shape[1] - n)
        history[row, n : n + room] = tokens[row, :room].to(history.dtype)


def prompt_lookup(
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    n_select: Tensor,
    history: Tensor,
    lengths: Tensor,
    count: int,
    min_match: int,
    max_match: int,
    corpus: Tensor | None,
    selected: Tensor,
) -> None:
    """See :func:`pipespec_kernels.ops.prompt_lookup`; reading counts on a device waits for it."""
    selected.fill_(-1)
    numbers = (x.tolist() for x in (query_lens, num_draft_tokens, n_select, lengths))
    for row, (fed, draft_tokens, selects, begin) in enumerate(zip(*numbers, strict=True)):
        known, length = fed - draft_tokens, begin + fed - draft_tokens
        history[row, begin:length] = tokens[row, :known]
        if fed == 0 or selects == 0:
            continue
        room = min(count, tokens.shape[1] + 1 - known, history.shape[1] - length)
        proposed = _continuation(history[row, :length], corpus, min_match, max_match, room)
        if len(proposed) == 0:
            proposed = tokens[row, known:fed].clone()
        n = len(proposed)
        history[row, length : length + n] = selected[row, :n] = proposed
        tokens[row, known : known + max(n - 1, 0)] = proposed[:-1]
        query_lens[row], num_draft_tokens[row] = (known + n - 1, n - 1) if n else (0, 0)


def _continuation(text: Tensor, corpus: Tensor | None, min_match: int, max_match: int, room: int) -> Tensor:
    """What follows the latest of the longest earlier occurrences of the end of a text, in it or in a corpus, at most ``room`` tokens; empty without one."""
    found: tuple[int, Tensor] = 0, text[:0]
    for stored in (text,) if corpus is None else (text, corpus):
        match = torch.zeros(len(stored) - 1, dtype=torch.int64, device=text.device)
        agrees = torch.ones_like(match, dtype=torch.bool)
        for i in range(min(max_match, len(text))):
            agrees[:i] = False
            agrees[i:] &= stored[: len(match) - i] == text[-1 - i]
            match += agrees
        longest = int(match.max()) if len(match) else 0
        if longest >= min_match and longest > found[0]:
            after = stored[int((match == longest).nonzero()[-1]) + 1 :]
            # Past its end the text goes on with what is proposed.
            found = longest, after.repeat(-(-room // len(after))) if stored is text else after
    return found[1][:room]


def rejection_sample(
    logits: Tensor,
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    draft_logits: Tensor | None,
    noise: Noise,
    *,
    streams: tuple[int, int, int] = (DRAFT, ACCEPT, RESIDUAL),
    draft_inv_temperature: Tensor | None = None,
    draft_cutoff: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling in float64, all rows at once. Of ``streams`` (draft, accept, residual) the first is not used
    here.

    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), algorithm 1;
    Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023), algorithm 2 and equation
    (2) for the residual. A draft token ``h`` drawn from ``q`` is accepted if ``u q(h) < p(h)``. The first rejected one is
    replaced by a draw from ``max(p - q, 0)``, normalised. After the last accepted one comes a draw from ``p``. Without draft logits ``q`` is 1 at the
    draft token. A row without a distribution (NaN) rejects its draft token. If the residual is empty, or the draft has no distribution, the draw is
    from ``p``.
    """
    batch, width, vocab = logits.shape
    fed, draft_tokens = query_lens.long().cpu(), num_draft_tokens.long().cpu()
    ids = torch.arange(vocab)
    rows = torch.arange(batch)
    selected = torch.full((batch, width), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    walking = fed > 0
    for j in range(width):
        column = (fed - 1 - draft_tokens + j).clamp(0, width - 1)
        scores = _scores(logits, column, noise.inv_temperature, noise.cutoff)
        p = torch.softmax(scores, -1)
        draft_token = tokens[rows, (column + 1).clamp(max=width - 1)].long().cpu()
        real = (draft_token >= 0) & (draft_token < vocab)
        safe = torch.where(real, draft_token, 0)
        if draft_logits is None:
            q = torch.zeros_like(p).scatter_(1, safe[:, None], real.double()[:, None])
        else:
            scale = noise.inv_temperature if draft_inv_temperature is None else draft_inv_temperature
            q = torch.softmax(_scores(draft_logits, column, scale, draft_cutoff), -1)

        u = _uniform(noise, column, streams[1])
        tested = walking & (j < draft_tokens)
        passed = tested & real & (u * q[rows, safe] < p[rows, safe])

        residual = (p - q).clamp(min=0)
        usable = tested & (residual.sum(-1) > 0)  # false for a NaN, too
        drawn_from = torch.where(usable[:, None], residual.log(), scores)
        choice = torch.argmax(drawn_from + gumbel(_words(noise, column, streams[2], ids)).double(), -1)
        stops = walking & ~passed
        selected[:, j] = torch.where(passed, draft_token, torch.where(stops, choice, -1)).to(torch.int32)
        accepted += passed.int()
        walking &= passed
    return selected, accepted


def _scores(x: Tensor, column: Tensor, scale: Tensor, cutoff: Tensor | None) -> Tensor:
    """Scaled float64 logits ``[B, V]`` of one column per row, -inf below the cutoff."""
    rows = torch.arange(len(x))
    x = x[rows, column].cpu()
    y = x.double() * scale.double().cpu()[:, None]
    return y if cutoff is None else y.masked_fill(x.float() < cutoff[rows, column].cpu()[:, None], -torch.inf)


def _words(noise: Noise, column: Tensor, stream: int, ids: Tensor) -> Tensor:
    """The random words of every row at its own seed and position: ``[B, len(ids)]``."""
    seeds, at = noise.seeds.cpu()[:, None], (noise.positions.cpu() + column)[:, None]
    same = torch.zeros((len(column), len(ids)), dtype=torch.int64)
    counter = [same + (ids >> 2), same + (at & _WORD), same + (at >> 32 & _WORD), same + stream]
    drawn = torch.stack(philox(counter, (seeds & _WORD, seeds >> 32 & _WORD)))
    return drawn.gather(0, (same + (ids & 3))[None])[0]


def _uniform(noise: Noise, column: Tensor, stream: int) -> Tensor:
    """A uniform number per row, in (0, 1)."""
    return (_words(noise, column, stream, torch.zeros(1, dtype=torch.int64))[:, 0].double() + 0.5) * 2.0**-32


# --- noise -----------------------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], key: tuple[int | Tensor, int | Tensor]) -> list[Tensor]:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).

    ``counter`` and the result are four int64 tensors with values below 2**32, ``key`` two such tensors or numbers. A product of two such wraps around in
    int64, but the bits of both of its halves are right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) & _WORD ^ c1 ^ k0, b & _WORD, (a >> 32) & _WORD ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def philox_draw(seed: int, position: int, stream: int, ids: Tensor) -> Tensor:
    """The 32 random bits of each token id (int64 tensor) at a position, as int64; see ``csrc/protocol/philox.hpp``."""
    same = torch.zeros_like(ids)
    counter = [ids >> 2, same + (position & _WORD), same + (position >> 32 & _WORD), same + stream]
    words = philox(counter, (seed & _WORD, seed >> 32 & _WORD))
    return torch.stack(words).gather(0, (ids & 3)[None])[0]


def gumbel(r: Tensor) -> Tensor:
    """Gumbel noise of 32 random bits (int64 tensor), as float32: the definition in ``csrc/protocol/gumbel.hpp``.

    Every operation rounds to float32 by itself, so the result is the same bit for bit wherever floating point follows IEEE 754.
    """
    u = (r >> 16).float() * 2.0**-16 + ((r & 0xFFFF).float() + 0.5) * 2.0**-32
    small = u * (u * 0.5 + 1.0)
    large = _lg2((1.0 - u).clamp(min=2.0**-25)) * -_LN2
    return _lg2(torch.where(u < 2.0**-10, small, large)) * -_LN2


_LN2 = float.fromhex("0x1.62e43p-1")
_POLYNOMIAL = "0x1.71548ep+0 -0x1.715692p-1 0x1.ec296cp-2 -0x1.6fff1ep-2 0x1.2ecbdap-2 -0x1.13c8aep-2 0x1.5f7cb2p-3"
_P = [float.fromhex(coefficient) for coefficient in _POLYNOMIAL.split()]


def _lg2(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    t = (bits - (exponent << 23)).view(torch.float32) - 1.0
    p = torch.full_like(t, _P[-1])
    for c in reversed(_P[:-1]):
        p = p * t + c
    return exponent.float() + t * p


# --- a decoder layer ---------------------------------------------------------------------------------------------------


def kv_append(
    keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, n_new: Tensor | None = None
) -> None:
    """Row after row; see :func:`pipespec_kernels.ops.kv_append`."""
    width = keys.shape[2]
    counts = [width] * len(lengths) if n_new is None else n_new.tolist()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts, strict=True)):
        for new, cache in ((keys, k_cache), (values, v_cache)):
            cache[row, :, length : length + count] = kept(new[row, :, :count], cache.dtype)


def verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention with an explicit mask, in float64; see :func:`pipespec_kernels.ops.verify_attention`. Returns float64.

    Vaswani et al., "Attention Is All You Need" (2017), equation (1); groups of query heads that share keys and values:
    Ainslie et al., "GQA" (2023), section 2.2; windows: Jiang et al., "Mistral 7B" (2023), section 2; soft caps: Gemma Team, "Gemma 2" (2024),
    section 2.
    """
    batch, heads, width, dim = q.shape
    group = heads // k_cache.shape[1]
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row in range(batch):
        length = int(lengths[row])
        fed = width if query_lens is None else int(query_lens[row])
        keys = k_cache[row, :, : length + fed].double().repeat_interleave(group, 0)  # [Hq, keys, D]
        values = v_cache[row, :, : length + fed].double().repeat_interleave(group, 0)
        scores = q[row, :, :fed].double() @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at, column = torch.arange(length + fed, device=q.device), torch.arange(fed, device=q.device)
        visible = at <= length + column[:, None]
        if window is not None:
            visible &= at > length + column[:, None] - window
        out[row, :, :fed] = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ values
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    one_plus_weight: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x + residual``, normalised, and as it is; see :func:`pipespec_kernels.ops.add_rms_norm`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019), equation (4); rounded as in transformers' ``LlamaRMSNorm``, or with
    ``one_plus_weight`` as in its ``Gemma2RMSNorm``.
    """
    total = x if residual is None else x + residual
    y = total if x.dtype is torch.float64 else total.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if one_plus_weight:
        y = (y * (1.0 + weight.to(y.dtype))).to(x.dtype)
    else:
        y = weight * y.to(x.dtype)
    return y if bias is None else y + bias, total


def silu_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up``; see :func:`pipespec_kernels.ops.silu_mul`.

    Shazeer, "GLU Variants Improve Transformer" (2020), equation (5).
    """
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rope_append(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    n_new: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
) -> Tensor:
    """See :func:`pipespec_kernels.ops.rope_append`.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), equation (34), with the halves of a head in place of its
    even and odd elements, as in transformers' ``apply_rotary_pos_emb``.
    """
    column = torch.arange(q.shape[2], device=q.device)
    counts = torch.full_like(lengths, q.shape[2]) if n_new is None else n_new
    fed = column < counts[:, None]
    at = lengths[:, None] + column if positions is None else positions
    at = torch.where(fed, at, 0)  # padding may have any position
    cos, sin = cos[at][:, None], sin[at][:, None]
    found = []
    for x, norm in ((q, q_norm), (keys, k_norm)):
        if norm is not None:
            x = add_rms_norm(x, None, norm, eps, one_plus_weight)[0]
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        low, high = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-high, low), -1) * sin
        found.append(torch.cat((turned.to(x.dtype), rest), -1))
    kv_append(found[1], values, k_cache, v_cache, lengths, n_new)
    return found[0].masked_fill(~fed[:, None, :, None], 0)


def linear_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    activation: str | None = None,
    residual: Tensor | None = None,
    query_lens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Row after row, so that a row's bits do not depend on the others; see :func:`pipespec_kernels.ops.linear_small`."""
    columns = len(weight) if activation is None else len(weight) // 2
    out = x.new_empty((len(x), columns)) if out is None else out
    if query_lens is not None and not bool((query_lens > 0).any()):
        return out
    for i in range(len(x)):
        row = x[i : i + 1]
        if norm is not None:
            row = add_rms_norm(row, None, norm, eps, one_plus_weight)[0]
        y = F.linear(row, weight, bias)
        if activation is not None:
            # A vector of numbers may round otherwise than its remainder, so a row begins one.
            y = silu_mul(y, activation)
        out[i : i + 1] = y if residual is None else residual[i : i + 1] + y
    return out


def experts_small(x: Tensor, weight: Tensor, chosen: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Row after row; see :func:`pipespec_kernels.ops.experts_small`. ``out``: ``[M, E, N]``."""
    rows = out.shape[2]
    for m, experts in enumerate(chosen.tolist()):
        for j, expert in enumerate(experts):
            own, of = x[m] if x.dim() == 2 else x[m, j], slice(expert * rows, (expert + 1) * rows)
            out[m, j] = linear_small(own[None], weight[of], None if bias is None else bias[of])[0]
    return out


def mix_experts(found: Tensor, shares: Tensor) -> Tensor:
    """The sums ``[M, N]`` of results ``[M, E, N]`` times their shares ``[M, E]``, one after the other, in float32 or float64."""
    wide = torch.promote_types(found.dtype, torch.float32)
    total = found.new_zeros((len(found), found.shape[2]), dtype=wide)
    for j in range(found.shape[1]):
        total = total + found[:, j].to(wide) * shares[:, j, None].to(wide)
    return total.to(found.dtype)


def qkv_append(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    one_plus_weight: bool,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`pipespec_kernels.ops.qkv_append`. Queries of padding are zeros."""
    heads, dim = k_cache.shape[1], k_cache.shape[3]
    y = linear_small(x.flatten(0, 1), weight, bias, norm, eps, one_plus_weight)
    columns = y.view(*x.shape[:2], len(weight) // dim, dim).transpose(1, 2)
    q, keys, values = columns[:, : -2 * heads], columns[:, -2 * heads : -heads], columns[:, -heads:]
    q = rope_append(q, keys, values, cos, sin, k_cache, v_cache, lengths, query_lens)
    return q if out is None else out.copy_(q)
