"""OpenAI's client with a server of yours. ``pipespec serve --target TARGET``, then ``python examples/openai_client.py http://127.0.0.1:8000``."""

import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")  # the server has no key, and the client wants one
model = client.models.list().data[0].id
stream = client.completions.create(
    model=model,
    prompt="def mean(values):",
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
