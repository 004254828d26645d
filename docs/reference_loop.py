"""A chain of models in lockstep, in plain Python: draft, verify, commit, roll back."""

from __future__ import annotations

import torch
from transformers import DynamicCache


def greedy(logits, position):
    """The largest logit of each row. `position` is the text position of row 0."""
    return logits.argmax(-1).tolist()


def coupled(seed, temperature):
    """Sampling with shared Gumbel noise: a function of (seed, position) that is the same in every stage."""

    def choose(logits, position):
        rows = []
        for p, row in enumerate(logits / temperature, start=position):
            uniform = torch.rand(len(row), generator=torch.Generator().manual_seed(seed * 1_000_003 + p))
            rows.append(row - torch.log(-torch.log(uniform)))
        return torch.stack(rows).argmax(-1).tolist()

    return choose


class Stage:
    """One model, its tokens and its KV cache. The cache is always shorter than the tokens."""

    def __init__(self, model, prompt, choose):
        self.model, self.choose = model, choose
        self.tokens, self.cache = list(prompt), DynamicCache(config=model.config)

    def step(self, draft_tokens):
        """Feed what the cache lacks and the draft tokens, then keep those that this model would have chosen."""
        missing = self.tokens[self.cache.get_seq_length() :]
        logits = self.model(torch.tensor([missing + draft_tokens]), past_key_values=self.cache).logits[0]
        own = self.choose(logits[len(missing) - 1 :], len(self.tokens))  # own[j]: the choice behind j draft tokens
        accepted = 0
        while accepted < len(draft_tokens) and draft_tokens[accepted] == own[accepted]:
            accepted += 1
        self.tokens += own[: accepted + 1]  # commit: the accepted draft tokens and one token of its own
        self.roll_back(len(self.tokens) - 1)  # the rejected draft tokens leave the cache

    def roll_back(self, length):
        """Drop the keys and values of all positions from `length` on."""
        excess = self.cache.get_seq_length() - length
        if excess > 0:
            self.cache.crop(-excess)

    def adopt(self, tokens):
        """Follow the stage downstream: drop everything from the first difference on, then take over its tokens."""
        same = 0
        while same < min(len(self.tokens), len(tokens)) and self.tokens[same] == tokens[same]:
            same += 1
        if same < min(len(self.tokens), len(tokens)):
            self.tokens = self.tokens[:same]
            self.roll_back(same)
        self.tokens += tokens[len(self.tokens) :]


def advance(chain, i, lookahead):
    """One step of stage `i`, after its upstream neighbour has drafted `lookahead` tokens. Stage 0 has no neighbour."""
    draft_tokens = []
    if i > 0:
        chain[i - 1].adopt(chain[i].tokens)
        while len(chain[i - 1].tokens) < len(chain[i].tokens) + lookahead:
            advance(chain, i - 1, lookahead)
        draft_tokens = chain[i - 1].tokens[len(chain[i].tokens) :][:lookahead]
    chain[i].step(draft_tokens)


@torch.inference_mode()
def generate(models, prompt, max_new_tokens, lookahead=4, eos_token_id=None, choose=greedy):
    """The target's text. `models`: the smallest draft first, the target last; `prompt`: token ids of one row."""
    chain = [Stage(model, prompt, choose) for model in models]
    target = chain[-1]
    while len(target.tokens) < len(prompt) + max_new_tokens and eos_token_id not in target.tokens[len(prompt) :]:
        advance(chain, len(chain) - 1, lookahead)
    new = target.tokens[len(prompt) :][:max_new_tokens]
    return new[: new.index(eos_token_id) + 1] if eos_token_id in new else new
