"""Cells of a notebook: a text that streams, and what the drafts did. ``python examples/notebook.py TARGET``, or open it in an editor that knows ``# %%``."""

# %% A model and its tokenizer, as always
import sys
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import pipespec
from pipespec.demo import family_path

(target,) = sys.argv[1:] or [family_path("target")]
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")

# %% From here on model.generate() drafts from its own text. A cell that ends in the pipeline shows target, drafts and schedule
pipe = pipespec.attach(model)
print(pipe)

# %% The text arrives in pieces, while generate() runs in a thread
inputs = tokenizer("def mean(values):", return_tensors="pt")
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
options = {"max_new_tokens": 64, "do_sample": False, "streamer": streamer}
thread = Thread(target=model.generate, kwargs={**inputs, **options})
thread.start()
for piece in streamer:
    print(piece, end="", flush=True)
thread.join()

# %% Did it get faster? A cell that ends in the report shows a table
print(pipe.report)

# %% The same model without drafts
pipespec.detach(model)
