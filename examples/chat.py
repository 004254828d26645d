"""A conversation with streamed answers. ``python examples/chat.py model.gguf``, or ``TARGET DRAFT``; an empty line ends it."""

import sys

from transformers import TextStreamer

from pipespec import Pipeline, load_tokenizer
from pipespec.demo import family_path

target, *drafts = sys.argv[1:] or (family_path("target"), family_path("small"))
tokenizer = load_tokenizer(target)
if tokenizer.chat_template is None:  # the bundled models complete code
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

with Pipeline(target, drafts) as pipe:
    messages = []
    while line := input("> ").strip():
        messages.append({"role": "user", "content": line})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        # The whole conversation: the pipeline reads only what is new.
        text = pipe.generate(
            **inputs, max_new_tokens=64, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        )
        answer = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    print(pipe.report)
