"""Drafts of your own: a model of the target's first layers, and an index of your notes. ``python examples/own_draft.py TARGET``"""

import copy
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from pipespec import NgramDraft, Pipeline
from pipespec.demo import family_path

target_path = sys.argv[1] if len(sys.argv) > 1 else family_path("target")
tokenizer = AutoTokenizer.from_pretrained(target_path)
target = AutoModelForCausalLM.from_pretrained(target_path)

# Any causal model with the target's tokenizer is a draft. This one is not trained to be one, so it is seldom right.
draft = copy.deepcopy(target)
draft.model.layers = draft.model.layers[: max(1, len(draft.model.layers) // 2)]
draft.config.num_hidden_layers = len(draft.model.layers)
if getattr(draft.config, "layer_types", None):
    draft.config.layer_types = draft.config.layer_types[: len(draft.model.layers)]

with tempfile.TemporaryDirectory() as folder:
    notes = Path(folder) / "notes.txt"
    notes.write_text("def mean(values):\n    return sum(values) / len(values)\n", encoding="utf-8")
    index = NgramDraft(min_match=2, corpus=tokenizer(notes.read_text())["input_ids"])

    inputs = tokenizer("def mean(values):", return_tensors="pt")
    texts = set()
    for drafts in ([], [draft], [index, draft]):
        with Pipeline(target, drafts) as pipe:
            output = pipe.generate(**inputs, max_new_tokens=48, do_sample=False)
            texts.add(tokenizer.decode(output[0]))
            print(pipe.report, end="\n\n")
    assert len(texts) == 1, "drafts change the speed, never the text"
    print(*texts)
