"""Grammars: what constrains the text of a request, as a matcher of xgrammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipespec.api.server.dialects import Dialect
from pipespec.api.server.fields import Fields, RequestError
from pipespec.api.server.prompts import arguments_of
from pipespec.models.properties import end_tokens, head_size
from pipespec.process.threads import Lock

_CACHE = 64 << 20
"""Bytes of compiled grammars that xgrammar keeps."""

_LARGEST = 1 << 18
"""Characters of a format. Some take minutes to compile."""

_ANY_JSON = {"type": "object"}

Format = dict[str, Any]
"""A part of a structural tag of xgrammar."""


def _schema(schema: Any, style: str = "json") -> Format:
    # Free white space would let a small model write nothing else.
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": 1}


def wanted_format(body: Fields) -> tuple[str, Format] | None:
    """What a request asks for by ``response_format``, by the fields of vLLM or by llama.cpp's ``grammar``: the field's name, and the format; None: any text.

    Raises:
        RequestError: A form that is not known, or without its schema.
    """
    found = [
        *_of_response_format(body.object("response_format"), "response_format"),
        *_of_structured(body.object("structured_outputs"), ""),
        *_of_structured(body, "guided_"),
    ]
    if (grammar := body.text("grammar", None)) is not None:
        found.append(("grammar", {"type": "grammar", "grammar": grammar}))
    if (schema := body.any("json_schema")) is not None:
        found.append(("json_schema", _schema(schema)))
    if len(found) > 1:
        raise RequestError(f"{found[0][0]} and {found[1][0]} both constrain the text: give one of them", found[1][0])
    if found:
        check_free_end(body, found[0][0])
    return found[0] if found else None


def check_free_end(body: Fields, name: str) -> None:
    """Refuse what would keep a text from ending where the format that field ``name`` asks for does."""
    for field, is_set in (
        ("ignore_eos", body.flag("ignore_eos", False)),
        ("min_tokens", body.integer("min_tokens", 0)),
    ):
        if is_set:
            raise RequestError(f"{field} and {name} contradict each other: the text ends where its format does", field)


def _of_response_format(given: Fields, name: str) -> list[tuple[str, Format]]:
    kind = given.text("type", "text")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(name, _schema(given.any("schema") or _ANY_JSON))]
    if kind == "json_schema":
        # OpenAI's Responses API has the schema without the object around it.
        around = given.object("json_schema") if "json_schema" in given else given
        return [(name, _schema(around.required("schema", "a JSON schema")))]
    raise RequestError(f"{name} {kind!r} is not supported: text, json_object or json_schema", name)


def _of_structured(given: Fields, prefix: str) -> list[tuple[str, Format]]:
    """vLLM's ``structured_outputs``, and its older fields with a prefix."""
    found: list[tuple[str, Format]] = []
    if (schema := given.any(f"{prefix}json")) is not None:
        found.append((f"{prefix}json", _schema(arguments_of(schema))))
    if choices := given.strings(f"{prefix}choice"):
        texts = [{"type": "const_string", "value": choice} for choice in choices]
        found.append((f"{prefix}choice", {"type": "or", "elements": texts}))
    if (pattern := given.text(f"{prefix}regex", None)) is not None:
        found.append((f"{prefix}regex", {"type": "regex", "pattern": pattern}))
    if (grammar := given.text(f"{prefix}grammar", None)) is not None:
        found.append((f"{prefix}grammar", {"type": "grammar", "grammar": grammar}))
    return found


def forced_calls(dialect: Dialect, tools: Sequence[dict[str, Any]], *, several: bool) -> Format:
    """The format of a text that calls one of ``tools``, or ``several``, and says nothing else.

    Raises:
        RequestError: The model's dialect cannot be forced.
    """
    if dialect.call is None or not any(dialect.render):
        raise RequestError(f"tool_choice: a call cannot be forced in this model's dialect ({dialect.name}): use auto or none", "tool_choice")  # fmt: skip
    tags = []
    for tool in tools:
        name = json.dumps(tool["function"]["name"])[1:-1]
        before, after = (part.replace("NAME", name) for part in dialect.render)
        schema = _schema(tool["function"]["parameters"], dialect.style)
        tags.append(
            {"type": "tag", "begin": dialect.call[0] + before, "content": schema, "end": after + dialect.call[1]}
        )
    if several and dialect.call[1]:
        return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return {"type": "or", "elements": tags}


class Grammars:
    """Makes a matcher for each call, for the vocabulary and end tokens of the target."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = Lock()
        self._compiler: Any = None

    def compile(self, name: str, wanted: Format, thoughts_end: str | None = None) -> Any:
        """Compile a format. :meth:`matcher` makes matchers of the result.

        Args:
            name: Of the field that asks for it, for messages.
            thoughts_end: What ends the thoughts that the prompt has opened, which come before the text and are free; None: there are none.

        Raises:
            RequestError: xgrammar does not take it, or is not installed.
        """
        try:
            import xgrammar
        except ImportError as error:
            message = f"{name} needs xgrammar where the server runs: pip install 'pipespec[serve]'"
            raise RequestError(message, name) from error
        if thoughts_end is not None:
            thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": thoughts_end}
            space = {"type": "regex", "pattern": "\\s{0,2}"}
            wanted = {"type": "sequence", "elements": [thoughts, space, wanted]}
        try:
            text = json.dumps(wanted)
        except RecursionError as error:
            raise RequestError(f"{name} is nested too deeply", name) from error
        if len(text) > _LARGEST:
            raise RequestError(f"{name} has {len(text)} characters: give {_LARGEST} at most", name)
        with self._lock:
            if self._compiler is None:
                ends, size = end_tokens(self._model) or None, head_size(self._model)
                info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=size, stop_token_ids=ends)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE)
            try:
                if wanted["type"] == "json_schema":
                    return self._compiler.compile_json_schema(json.dumps(wanted["json_schema"]), any_whitespace=False)
                return self._compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": wanted}))
            except (KeyError, TypeError, RuntimeError, ValueError, RecursionError) as error:
                raise RequestError(f"{name} has no schema that xgrammar takes: {error}", name) from error

    @staticmethod
    def matcher(compiled: Any) -> Any:
        """The argument ``grammar`` of one call of ``generate()``."""
        import xgrammar

        return xgrammar.GrammarMatcher(compiled)
