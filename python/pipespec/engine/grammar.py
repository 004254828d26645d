"""Grammar: which tokens may follow, as bitmasks, one for each column of a step.

A matcher of a grammar library advances over the text of a row. For a step it goes on over the draft tokens, so that each column has the mask of its own
prefix. Before the next step it rolls back to what the text still holds. So one matcher per row serves all stages that run in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from pipespec.engine.sampling import Step, common_length


@runtime_checkable
class TokenMatcher(Protocol):
    """The state of a grammar after the tokens of one row; ``xgrammar.GrammarMatcher`` is one."""

    def accept_token(self, token_id: int, /) -> bool:
        """Advance by a token. Returns False, and changes nothing, if it may not follow."""

    def rollback(self, num_tokens: int, /) -> None:
        """Take back the last tokens, end tokens included."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> Any:
        """Write which tokens may follow into ``bitmask[index]``: bit ``v % 32`` of word ``v // 32`` is 1 where id ``v`` may.

        ``bitmask`` is int32 ``[n, ceil(V / 32)]`` on the CPU. Returns False if all tokens may follow.
        """

    def is_terminated(self) -> bool:
        """Whether the text is complete, so that no token is left to constrain."""


class Grammar:
    """The matchers of a call, and the tokens that they have accepted.

    Args:
        matchers: per row, at the beginning of its grammar; None: the row is free.
        starts: per row, the length of its prompt, which matchers do not see.
    """

    def __init__(self, matchers: Sequence[TokenMatcher | None], starts: Sequence[int]) -> None:
        self._matchers, self._starts = list(matchers), list(starts)
        self._accepted: list[list[int]] = [[] for _ in matchers]

    @classmethod
    def of(cls, given: Any, starts: Sequence[int]) -> Grammar | None:
        """From the argument ``grammar`` of ``generate()``: a matcher, or a sequence with one per row, or None.

        Raises:
            TypeError: something is no matcher.
            ValueError: another number of matchers than rows, one matcher for several rows, or one that has reached its end.
        """
        if given is None:
            return None
        matchers = list(given) if isinstance(given, (list, tuple)) else [given]
        for matcher in matchers:
            if matcher is not None and not isinstance(matcher, TokenMatcher):
                raise TypeError(
                    f"grammar must be a matcher with accept_token, rollback, fill_next_token_bitmask and is_terminated, such as "
                    f"xgrammar.GrammarMatcher, or a list of them, not {type(matcher).__name__}"
                )
        if len(matchers) != len(starts):
            raise ValueError(f"grammar: {len(matchers)} matchers for {len(starts)} rows (num_return_sequences counts)")
        used = [id(matcher) for matcher in matchers if matcher is not None]
        if len(set(used)) < len(used):
            raise ValueError("grammar: one matcher for several rows; each row needs its own, since their texts differ")
        for row, matcher in enumerate(matchers):
            if matcher is not None and matcher.is_terminated():
                raise ValueError(
                    f"grammar: the matcher of row {row} has reached its end before the first token: was it used for another call? Make a new one for each "
                    "call, or reset it"
                )
        return cls(matchers, starts) if used else None

    def bitmask(self, text: np.ndarray, step: Step, vocabulary: int, *, is_target: bool) -> torch.Tensor:
        """The masks of the columns of a step that choose a token. Other columns get masks of ones.

        Args:
            text: int32 ``[B, positions]``, with the tokens before the draft tokens.
            step: with the counts on the CPU.
            vocabulary: tokens of the logits.
            is_target: whether a token in the text that the grammar does not accept is an error. A draft is free after it.

        Returns:
            int32 ``[B, Q, ceil(vocabulary / 32)]`` on the CPU.

        Raises:
            ValueError: the grammar does not accept the text, or is for another vocabulary; or its matcher fails.
        """
        batch, width = step.tokens.shape
        words = -(-vocabulary // 32)
        masks = torch.full((batch, width, words), -1, dtype=torch.int32, device="cpu")
        flat, fed = masks.view(batch * width, words), step.tokens.cpu()
        for row in np.flatnonzero(step.query_lens).tolist():
            matcher = self._matchers[row]
            if matcher is None:
                continue
            last = int(step.query_lens[row]) - 1
            first = last - int(step.num_draft_tokens[row])
            own = text[row, self._starts[row] : int(step.kv[row]) + 1 + first].tolist()
            follows = self._follow(row, matcher, own, is_target=is_target)
            for column in range(first, last + 1):
                if not follows or matcher.is_terminated():
                    break
                index = row * width + column
                try:
                    constrains = matcher.fill_next_token_bitmask(flat, index)
                except Exception as error:
                    raise ValueError(
                        f"the grammar of row {row} does not fill a bitmask for the target's {vocabulary} tokens ({error}): make it for as many, for "
                        f"example with xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size={vocabulary})"
                    ) from error
                if constrains is False:
                    flat[index] = -1
                if column < last:
                    token = int(fed[row, column + 1])
                    # After a masked token no choice is used.
                    follows = 0 <= token < vocabulary and bool(flat[index, token >> 5] >> (token & 31) & 1)
                    follows = follows and self._accept(row, matcher, token)
        return masks

    def _follow(self, row: int, matcher: TokenMatcher, text: list[int], *, is_target: bool) -> bool:
        """Take the matcher to the end of ``text``. Returns whether it is there, or has terminated on the way."""
        accepted = self._accepted[row]
        common = common_length(accepted, text)
        if common < len(accepted):
            rejected = len(accepted) - common
            try:
                matcher.rollback(rejected)
            except Exception as error:
                raise ValueError(
                    f"the grammar of row {row} does not take back its last tokens, {rejected} of them ({error}): draft tokens that the target "
                    "rejects are taken back, so make the matcher with a larger rollback limit"
                ) from error
            del accepted[common:]
        for place, token in enumerate(text[common:], common):
            if matcher.is_terminated():
                return True
            if not self._accept(row, matcher, token):
                if is_target:
                    raise ValueError(
                        f"the grammar of row {row} does not accept token {token}, its generated token {place}: was the matcher used before, or does "
                        "it forbid every token there?"
                    )
                return False
        return True

    def _accept(self, row: int, matcher: TokenMatcher, token: int) -> bool:
        try:
            accepted = matcher.accept_token(token)
        except Exception as error:
            raise ValueError(
                f"the grammar of row {row} fails at token {token} ({error}): accept_token() returns False for a token that may not follow"
            ) from error
        if accepted:
            self._accepted[row].append(token)
        return accepted
