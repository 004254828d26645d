"""Training data of a draft module: text and conversations from files, as batches."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from pipespec_train.record_files import records
from pipespec_train.trainer import TrainingBatch

_STRUCTURED = (".jsonl", ".json", ".parquet")
_TEXT = (".txt", ".md")
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""Names of the roles in ShareGPT files."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_MIN_LENGTH = 10
_SHORT = f"shorter than {_MIN_LENGTH} tokens"


@dataclass(frozen=True)
class TrainingExample:
    """Token ids ``[n]`` int32, and ``wanted [n]`` bool: whether the module learns the token after each."""

    ids: np.ndarray
    wanted: np.ndarray


def load_examples(
    paths: Iterable[str | Path], tokenizer: Any, length: int, *, truncate: bool = False
) -> tuple[list[TrainingExample], str]:
    """Load the examples of files and folders, in order.

    ``.jsonl``, ``.json`` (a list) and ``.parquet`` files hold records with ``text``, ``messages`` or ``conversations``. Messages have role
    and content, or ShareGPT's from and value, and the module learns the assistant's parts of them. Any other file is text. A folder stands
    for its ``.jsonl``, ``.json``, ``.parquet``, ``.txt`` and ``.md`` files. Text is cut into pieces of ``length`` tokens.

    Args:
        length: Maximum number of tokens of an example.
        truncate: Cut longer conversations instead of leaving them out.

    Returns:
        The examples, and the numbers of records left out with the reasons, as text.

    Raises:
        FileNotFoundError: A file or folder does not exist or is empty.
        ValueError: A record cannot be read, or no example is left. The message names file and record.
    """
    if length < _MIN_LENGTH:
        raise ValueError(f"a length of {length} tokens is too short: at least {_MIN_LENGTH}")
    found: list[TrainingExample] = []
    lost: Counter[str] = Counter()
    files = list(_files(paths))
    for file in files:
        if file.suffix not in _STRUCTURED:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text") from error
            found += _windows(tokenizer, text, length, lost)
            continue
        for number, record in enumerate(records(file), 1):
            where = f"{file}, record {number}"
            if not isinstance(record, dict):
                raise ValueError(f"{where}: not an object but {type(record).__name__}")
            messages = record.get("messages", record.get("conversations"))
            if messages is not None:
                example = _conversation(tokenizer, _messages(messages, where), length, truncate, lost)
                found += [example] if example is not None else []
            elif isinstance(record.get("text"), str):
                found += _windows(tokenizer, record["text"], length, lost)
            else:
                keys = ", ".join(map(str, record)) or "nothing"
                raise ValueError(f"{where}: neither text nor messages nor conversations, but {keys}")
    left_out = ", ".join(f"{count} {reason}" for reason, count in lost.items()) or "none left out"
    if not found:
        raise ValueError(f"nothing to learn in {', '.join(map(str, files))}: {left_out}")
    return found, left_out


def _files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (*_STRUCTURED, *_TEXT) and p.is_file())
            if not inside:
                raise FileNotFoundError(f"{path} holds no {', '.join((*_STRUCTURED, *_TEXT))} file")
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise FileNotFoundError(f"there is no file or folder {path}")


def _messages(given: Any, where: str) -> list[dict[str, str]]:
    """Role and content of each message. Raises ValueError for another format."""
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where}: messages must be a list of role and content")
    found = []
    for message in given:
        if not isinstance(message, dict):
            raise ValueError(f"{where}: a message is {type(message).__name__}, not role and content")
        role, content = message.get("role"), message.get("content")
        if role is None and message.get("from") in _ROLES:
            role, content = _ROLES[message["from"]], message.get("value")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(
                f"{where}: a message needs role and content as text, it has {', '.join(map(str, message))}"
            )
        found.append({"role": role, "content": content})
    return found


def _windows(tokenizer: Any, text: str, length: int, lost: Counter[str]) -> list[TrainingExample]:
    """Cut a text into consecutive pieces, each after the tokenizer's initial tokens. All tokens are trained."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    begin = _beginning(tokenizer)
    body = length - len(begin)
    found = []
    for at in range(0, len(ids), body):
        piece = np.asarray([*begin, *ids[at : at + body]], dtype=np.int32)
        if len(piece) < _MIN_LENGTH:
            lost[_SHORT] += 1
            continue
        found.append(TrainingExample(piece, np.ones(len(piece), dtype=bool)))
    return found


def _beginning(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    with_, without = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    at = next((i for i in range(len(with_) - len(without) + 1) if with_[i : i + len(without)] == without), 0)
    return list(with_[:at])


def _conversation(
    tokenizer: Any, messages: list[dict[str, str]], length: int, truncate: bool, lost: Counter[str]
) -> TrainingExample | None:
    encoded = encode_conversation(tokenizer, messages)
    if encoded is None:
        lost["whose chat template does not show which part is the assistant's"] += 1
        return None
    ids, said = encoded
    if len(ids) > length:
        if not truncate:
            lost["longer than the limit"] += 1
            return None
        ids, said = ids[:length], said[:length]
    if len(ids) < _MIN_LENGTH:
        lost[_SHORT] += 1
        return None
    wanted = np.append(said[1:], False)  # entry t is about the token after position t
    if not wanted.any():
        lost["without a message of the assistant"] += 1
        return None
    return TrainingExample(np.asarray(ids, dtype=np.int32), wanted)


def encode_conversation(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], np.ndarray] | None:
    """Encode a conversation and mark the tokens of the assistant, their end marks included.

    A template may mark the assistant's parts itself (``{% generation %}``). For other templates they are found by rendering: an assistant's
    message is the text up to and with it, less the text up to the generation prompt before it.

    Returns:
        Token ids, and bool per token; None if the assistant's parts cannot be found.

    Raises:
        ValueError: There is no chat template, or the tokenizer has no offsets (a slow one).
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template, which conversations need; add one, or give records with text"
        )
    if isinstance(tokenizer.chat_template, str) and _GENERATION.search(tokenizer.chat_template):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), np.asarray(found["assistant_masks"], dtype=bool)
    if not tokenizer.is_fast:
        raise ValueError(
            "conversations need a fast tokenizer (tokenizer.json), which gives the offset of each token in the text"
        )

    def render(part: list[dict[str, str]], ask: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=ask))

    text = render(messages, False)
    spans = _assistant_spans(render, messages, text)
    if spans is None:
        return None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    said = [any(a <= begin < end <= b for a, b in spans) for begin, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), np.asarray(said, dtype=bool)


def _assistant_spans(
    render: Callable[[list[dict[str, str]], bool], str], messages: list[dict[str, str]], text: str
) -> list[tuple[int, int]] | None:
    """Character ranges of the assistant's messages in ``text``, end marks included; None if one of them is not found."""
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = [r for ask in (True, False) if i and text.startswith(r := render(messages[:i], ask))]
        begin = max(map(len, before), default=None)
        rendered = render(messages[: i + 1], False)
        end = len(rendered) if text.startswith(rendered) else None
        if begin is None or end is None:
            # The template renders the first or the last message differently: search for the content itself.
            after = begin if begin is not None else spans[-1][1] if spans else 0
            said = message["content"] if message["content"] in text[after:] else message["content"].strip()
            at = text.find(said, after)
            if not said.strip() or at < 0:
                return None
            begin = at if begin is None else begin
            end = at + len(said) if end is None else end
        spans.append((begin, end))
    return spans


class Batches:
    """Batches of ``size`` examples, padded on the right with 0. A batch depends on the seed and its number only.

    Every pass over the data has another order. Examples of similar length share a batch.
    """

    def __init__(self, examples: Sequence[TrainingExample], size: int, seed: int) -> None:
        self.examples, self.size, self.seed = examples, min(size, len(examples)), seed
        self.per_pass = len(examples) // self.size
        self._turn = -1
        self._order = np.zeros(0, dtype=np.int64)

    def __getitem__(self, number: int) -> TrainingBatch:
        return collate([self.examples[i] for i in self.rows(number)])

    def rows(self, number: int) -> list[int]:
        """The examples of a batch, as indices."""
        turn, index = divmod(number, self.per_pass)
        if turn != self._turn:
            draw = np.random.default_rng([self.seed, turn])
            order = draw.permutation(len(self.examples))
            reach = 16 * self.size
            pieces = [
                sorted(order[at : at + reach], key=lambda i: len(self.examples[i].ids))
                for at in range(0, len(order), reach)
            ]
            whole = np.concatenate(pieces)[: self.per_pass * self.size].reshape(self.per_pass, self.size)
            self._order, self._turn = whole[draw.permutation(self.per_pass)], turn
        return [int(i) for i in self._order[index]]

    def steps(self, epochs: float, accumulate: int, processes: int) -> int:
        """Optimizer steps of ``epochs`` passes over the data, the last one begun counted whole.

        Raises:
            ValueError: ``epochs`` is not above 0.
        """
        if not epochs > 0:
            raise ValueError(f"a training run needs more than 0 epochs, not {epochs}")
        return max(1, math.ceil(epochs * self.per_pass / (accumulate * processes)))

    def digest(self) -> str:
        """SHA-256 (hex) of what determines every batch: the examples in their order, the size of a batch, and the seed."""
        state = hashlib.sha256(f"{self.size} {self.seed} {len(self.examples)}".encode())
        for example in self.examples:
            state.update(len(example.ids).to_bytes(4, "little"))
            state.update(example.ids.tobytes())
            state.update(example.wanted.tobytes())
        return state.hexdigest()


def collate(examples: Sequence[TrainingExample]) -> TrainingBatch:
    """Make one batch, padded on the right: ids and ``wanted`` of shape ``[len(examples), longest]``."""
    ids = pad_sequence([torch.from_numpy(e.ids.astype(np.int64)) for e in examples], batch_first=True)
    wanted = pad_sequence([torch.from_numpy(e.wanted) for e in examples], batch_first=True)
    return TrainingBatch(ids, wanted, sum(len(e.ids) for e in examples))


def split(
    examples: Sequence[TrainingExample], share: float, seed: int
) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """Split into training and validation examples, with at least one or ``share`` of them for validation. Raises ValueError for too few."""
    if not 0 < share < 1:
        raise ValueError(f"the validation share must lie between 0 and 1, not {share}")
    held = max(1, round(share * len(examples)))
    if held >= len(examples):
        raise ValueError(f"{len(examples)} examples are too few to hold {held} of them out")
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    return [examples[i] for i in sorted(order[held:])], [examples[i] for i in sorted(order[:held])]


def frequent_tokens(examples: Iterable[TrainingExample], size: int, always: Collection[int] = ()) -> list[int]:
    """The ``size`` most frequent tokens to learn, ascending, with those of ``always`` among them. Of equal counts the lower id counts, also among tokens that do
    not occur: tokenizers number tokens by their frequency."""
    found = np.concatenate([example.ids[1:][example.wanted[:-1]] for example in examples])
    counts = np.bincount(found, minlength=size)
    order = np.argsort(-counts, kind="stable")
    kept = list(dict.fromkeys([*always, *order.tolist()]))
    return sorted(kept[: max(size, len(set(always)))])
