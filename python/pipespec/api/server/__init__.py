"""The server: OpenAI's and Anthropic's APIs over a pipeline.

It is an application of its own on Starlette. ``transformers serve`` tokenizes on the event loop, has no queue that the calls of a pipeline could share, and
turns answers that its parsers do not understand into errors. Each file does one thing:

* ``app`` has the routes, keys and limits; ``completions``, ``responses`` and ``messages`` write the answers of the APIs.
* ``generation`` runs the texts of a request; ``jobs`` queues them and lets them take turns.
* ``prompts`` makes token ids of messages, ``sampling`` options of fields, ``grammars`` matchers of schemas.
* ``dialects`` finds thoughts and tool calls in a text; ``fields`` and ``metrics`` serve all of them.
"""

from pipespec.api.server.app import make_app

__all__ = ["make_app"]
