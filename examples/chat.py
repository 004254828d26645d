"""A conversation with streamed answers. ``python examples/chat.py TARGET DRAFT``; an empty line ends it."""

import sys

import torch
from transformers import AutoTokenizer, TextStreamer

from pipespec import Pipeline
from pipespec.demo import family_path

target, draft = sys.argv[1:] or (family_path("target"), family_path("small"))
tokenizer = AutoTokenizer.from_pretrained(target)
if tokenizer.chat_template is None:  # the bundled models complete code
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

with Pipeline(target, [draft]) as pipe:
    messages, out = [], None
    while line := input("> ").strip():
        messages.append({"role": "user", "content": line})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt = inputs["input_ids"]
        # The cache is of use where the prompt goes on from the text so far, which depends on the template.
        goes_on = out is not None and torch.equal(prompt[:, : out.sequences.shape[1] - 1], out.sequences[:, :-1])
        out = pipe.generate(
            **inputs,
            max_new_tokens=64,
            past_key_values=out.past_key_values if goes_on else None,
            return_dict_in_generate=True,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        answer = tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    print(pipe.report)
