"""A grammar for tests: a matcher with the methods of ``xgrammar.GrammarMatcher``, and the same grammar as a logits processor for transformers."""

from typing import Any

import torch
from transformers import LogitsProcessor

END = 2


class Classes:
    """A matcher with the methods of ``xgrammar.GrammarMatcher``: a token's class modulo 5 follows from the sum of the tokens before it. After ``length`` tokens
    the end may follow, and after twice as many nothing else. Wrong use raises, as there."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary
        self.tokens: list[int] = []
        self.rolled_back = 0

    def allowed(self) -> list[int]:
        over = len(self.tokens) >= 2 * self.length
        classes = [] if over else [sum(self.tokens) % 5, (sum(self.tokens) + 2) % 5]
        ends = [END] if len(self.tokens) >= self.length else []
        return [t for t in range(3, self.vocabulary) if t % 5 in classes] + ends

    def accept_token(self, token_id: int) -> bool:
        assert not self.is_terminated()
        if token_id not in self.allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int = 1) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]
        self.rolled_back += num_tokens

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> bool:
        assert not self.is_terminated()
        assert bitmask.shape[1] == -(-self.vocabulary // 32)
        words = [0] * bitmask.shape[1]
        for token in self.allowed():
            words[token // 32] |= 1 << token % 32
        bitmask[index] = torch.tensor(words).to(torch.int32)
        return True

    def is_terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == END


class Masks(LogitsProcessor):
    """The grammar for transformers, as xgrammar's ``contrib.hf.LogitsProcessor``: it accepts the newest token of each row, then masks."""

    def __init__(self, matchers: list[Any]) -> None:
        self.matchers, self.begun = matchers, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, matcher in enumerate(self.matchers):
            if self.begun and not matcher.is_terminated():
                assert matcher.accept_token(int(input_ids[row, -1]))
            if not matcher.is_terminated():
                at = torch.arange(scores.shape[1])
                bits = torch.zeros(1, -(-len(at) // 32), dtype=torch.int32)
                matcher.fill_next_token_bitmask(bits, 0)
                scores[row, (bits[0, at // 32] >> (at % 32)) & 1 == 0] = -torch.inf
        self.begun = True
        return scores
