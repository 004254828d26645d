"""``response_format`` of OpenAI's API: a grammar that the text obeys, by the package xgrammar."""

from __future__ import annotations

import json
from typing import Any

from fastapi import HTTPException

from pipespec.models.properties import end_tokens, head_size


class ResponseFormats:
    """Makes a matcher for each request, for the vocabulary and end tokens of the target. xgrammar keeps what it has compiled, up to 64 MiB."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._compiler: Any = None

    def matcher(self, wanted: Any) -> Any:
        """The argument ``grammar`` of ``generate()`` for ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema": {"schema": SCHEMA}}``.

        Raises:
            HTTPException: Status 400; another form, a schema that xgrammar refuses, or no xgrammar.
        """
        kind = wanted.get("type") if isinstance(wanted, dict) else wanted
        if kind not in ("json_object", "json_schema"):
            raise HTTPException(400, f"response_format {kind!r} is not supported: text, json_object or json_schema")
        try:
            import xgrammar
        except ImportError as error:
            what = "response_format needs xgrammar where the server runs: pip install xgrammar"
            raise HTTPException(400, what) from error
        if self._compiler is None:
            ends, size = end_tokens(self._model) or None, head_size(self._model)
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=size, stop_token_ids=ends)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 << 20)
        try:
            schema = {"type": "object"} if kind == "json_object" else wanted["json_schema"]["schema"]
            # Free spaces would let a small model write nothing else.
            compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            raise HTTPException(400, f"response_format has no schema that xgrammar takes: {error}") from error
        return xgrammar.GrammarMatcher(compiled)
