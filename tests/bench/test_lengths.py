"""bench.lengths: what it feeds and counts, with a system that answers at once."""

from functools import partial

import pytest
import torch

from bench.lengths import compare, measure, measure_rival, table
from bench.real import of_tokens


class System:
    """``generate()`` with a streamer, which gets the tokens in blocks of ``width``."""

    def __init__(self, width=1):
        self.width, self.prompts = width, []

    def __call__(self, *, input_ids, attention_mask, max_new_tokens, eos_token_id, do_sample, streamer):
        assert attention_mask.shape == input_ids.shape
        assert eos_token_id is None
        assert not do_sample
        self.prompts.append(input_ids)
        streamer.put(input_ids)
        for tokens in torch.arange(max_new_tokens).split(self.width):
            streamer.put(tokens)
        streamer.end()


def test_the_first_token_ends_the_reading():
    assert all(speed > 0 for speed in measure(System(width=2), torch.ones(1, 9, dtype=torch.long), 4))


def test_another_program_tells_its_own_times():
    class Rival:
        def run(self, ids, new_tokens, seed):
            assert (new_tokens, seed) == (4, 0)
            return of_tokens([5, 6, 7], 0.5, 0.7)  # its text ends one token earlier

    assert measure_rival(Rival(), torch.ones(1, 9, dtype=torch.long), 3) == pytest.approx((18.0, 10.0))


def test_each_system_reads_the_same_prompts():
    words, ours, theirs = torch.arange(10), System(), System()
    rows = compare({"ours": partial(measure, ours), "theirs": partial(measure, theirs)}, words, (4, 25), 3, 2)
    assert [prompt.shape[1] for prompt in ours.prompts] == [4, 4, 25, 4, 25]
    assert all(map(torch.equal, ours.prompts, theirs.prompts))
    assert ours.prompts[2][0].tolist() == [*range(10), *range(10), *range(5)]
    assert [(row["system"], row["length"], len(row["prompt"])) for row in rows] == [
        ("ours", 4, 2),
        ("theirs", 4, 2),
        ("ours", 25, 2),
        ("theirs", 25, 2),
    ]


def test_decoding_is_a_share_of_that_after_the_shortest_prompt():
    rows = [
        {"system": "ours", "length": 4096, "prompt": [100.0], "decoding": [8.0, 9.0, 10.0]},
        {"system": "ours", "length": 64, "prompt": [90.0], "decoding": [10.0]},
    ]
    assert table(rows).splitlines()[2:] == ["| ours | 64 | 90 | 10.0 | 1.00 |", "| ours | 4,096 | 100 | 9.0 | 0.90 |"]
