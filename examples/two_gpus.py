"""The target on one GPU, its draft on another. ``python examples/two_gpus.py TARGET DRAFT``"""

import sys

import torch
from transformers import AutoTokenizer

from pipespec import Pipeline
from pipespec.demo import family_path

if torch.cuda.device_count() < 2:
    sys.exit("two_gpus.py needs two GPUs")
target, draft = sys.argv[1:] or (family_path("target"), family_path("small"))
tokenizer = AutoTokenizer.from_pretrained(target)
with Pipeline(target, [draft], device={"draft 0": "cuda:1", "target": "cuda:0"}) as pipe:
    print("schedule:", pipe.schedule)
    inputs = tokenizer("def mean(values):", return_tensors="pt").to("cuda:0")
    output = pipe.generate(**inputs, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(output[0]))
    print(pipe.report)
