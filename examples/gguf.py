"""A GGUF file as the target. ``python examples/gguf.py model.gguf [draft.gguf]``"""

import sys

from pipespec import Pipeline, load_tokenizer

file, *drafts = sys.argv[1:]
tokenizer = load_tokenizer(file)
with Pipeline(file, drafts) as pipe:  # its matrices stay in their blocks
    inputs = tokenizer("def mean(values):", return_tensors="pt")
    output = pipe.generate(**inputs, max_new_tokens=48, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    print(pipe.report)
