"""Trains the bundled model family: one target and two drafts of the LLaMA architecture, one tokenizer.

    python -m tools.demo_family.train --out python/pipespec/demo/family

Phases, each of which is skipped where its output exists in the work folder:

``tokenizer``  a byte-level BPE vocabulary on the training modules (:func:`training_files`)
``target``     the target, on the training modules, for ``--target-minutes``
``pretrain``   both drafts on the training modules, as a start for their distillation
``text``       text that the target writes itself, from heads and random places of the training modules
``drafts``     both drafts, distilled from the target on its own text and on the corpus
``evaluate``   losses and agreement of the exported weights on held-out prompts, and the model card
``module``     the draft module for the target in 4 stages (speculative pipeline decoding), its figures and card

Budgets are minutes of wall clock. The learning rate is a function of the fraction of the budget that has
passed, so a slower machine trains for fewer steps but still ends with a small rate. The order of the data
depends on the seed alone.

Two processes may share the work folder: ``pretrain`` needs no target.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

from bench import plot
from pipespec.demo import MODULE_STAGES, corpus
from pipespec_train import acceptance
from pipespec_train import trainer as training
from pipespec_train.trainer import learning_rate
from tools.demo_family import card

VOCAB = 2048
POSITIONS = 512
BOS, EOS, PAD = "<|begin|>", "<|endoftext|>", "<|pad|>"
PHASES = ("tokenizer", "target", "pretrain", "text", "drafts", "evaluate", "module")

#: name -> (hidden, layers, heads, intermediate). The target is deep and narrow on purpose: at batch 1
#: on a CPU the time of a step is proportional to the number of layers.
SHAPES = {
    "target": (256, 12, 4, 688),
    "medium": (192, 4, 3, 512),
    "small": (160, 2, 5, 432),
}
DRAFTS = ("medium", "small")

# Words with the space before them, single digits, runs of punctuation, and a line's end together with
# the next line's indent: in source text an indent is one decision, so it should be one token.
_SPLIT = r"\n[ \t\n]*| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z0-9_]+|[ \t]+|\s+"


def say(text: str) -> None:
    """A progress line with the time of day, written at once."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


# Generated tables and data in the form of Python source: long, and unlike a program.
_SKIPPED_FILES = (
    "_sysconfigdata*.py",
    "config-*/*.py",
    "encodings/cp*.py",
    "encodings/iso8859*.py",
    "encodings/koi8*.py",
    "encodings/mac_*.py",
    "encodings/hp_roman8.py",
    "encodings/kz1048.py",
    "encodings/palmos.py",
    "encodings/ptcp154.py",
    "encodings/tis_620.py",
    "encodings/aliases.py",
    "html/entities.py",
    "locale.py",
    "pydoc_data/*.py",
    "stringprep.py",
    "_pydatetime.py",
)


def training_files(root: Path | None = None) -> list[corpus.SourceFile]:
    """Every usable module of the standard library (or of ``root``) that is not held out, sorted by name."""
    files = corpus.source_files(root or corpus.stdlib())
    return [
        f for f in files if f.module not in corpus.HELD_OUT and not any(Path(f.name).match(p) for p in _SKIPPED_FILES)
    ]


# --- tokenizer ---------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCAB`` entries that puts the begin token before every text."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    if tok.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the corpus gives a vocabulary of {tok.get_vocab_size()} entries, not {VOCAB}")
    bos = tok.token_to_id(BOS)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tok: PreTrainedTokenizerFast, files: list[corpus.SourceFile]) -> np.ndarray:
    """All files as one stream of token ids (uint16), the end token after each, no begin tokens."""
    pieces = tok([f.text for f in files], add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray([*p, tok.eos_token_id], dtype=np.uint16) for p in pieces])


class Windows:
    """Batches of training windows, a function of the seed and the batch's number alone.

    A window is the begin token followed by ``length - 1`` consecutive tokens of the stream. Every pass
    over the stream cuts it at another offset and visits the pieces in another order.
    """

    def __init__(self, stream: np.ndarray, batch: int, length: int, bos: int, seed: int) -> None:
        self.stream, self.batch, self.length, self.bos, self.seed = stream, batch, length, bos, seed
        # One piece is given up to the offset, so that every pass has the same number of pieces.
        self.per_pass = (len(stream) // (length - 1) - 1) // batch
        if self.per_pass < 1:
            raise ValueError("the stream is shorter than one batch")
        self._pass = -1
        self._starts = np.zeros(0, dtype=np.int64)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Batch ``number``: token ids, int64, [batch, length]."""
        which, index = divmod(number, self.per_pass)
        if which != self._pass:
            rng = np.random.default_rng([self.seed, which])
            body = self.length - 1
            self._starts = int(rng.integers(body)) + body * rng.permutation(len(self.stream) // body - 1)
            self._pass = which
        out = np.full((self.batch, self.length), self.bos, dtype=np.int64)
        for row, start in enumerate(self._starts[index * self.batch : (index + 1) * self.batch]):
            out[row, 1:] = self.stream[start : start + self.length - 1]
        return torch.from_numpy(out)


# --- models ------------------------------------------------------------------------------------


def new_model(name: str, tok: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A freshly initialised fp32 model of the family."""
    hidden, layers, heads, intermediate = SHAPES[name]
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=tok.bos_token_id,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
        )
    )


def export(model: LlamaForCausalLM, tok: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load: bf16 weights, tokenizer."""
    saved = copy.deepcopy(model).to(torch.bfloat16)
    saved.config.use_cache = True
    saved.generation_config.bos_token_id = tok.bos_token_id
    saved.generation_config.eos_token_id = tok.eos_token_id
    saved.generation_config.pad_token_id = tok.pad_token_id
    saved.generation_config.do_sample = False
    folder.mkdir(parents=True, exist_ok=True)
    saved.save_pretrained(folder)
    tok.save_pretrained(folder)


def load(folder: Path) -> LlamaForCausalLM:
    """An exported model, its bf16 weights in fp32, ready for inference."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def autocast(on: bool) -> contextlib.AbstractContextManager[Any]:
    """bf16 products where the processor has them; elsewhere they would be slower than fp32."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def compiled(model: LlamaForCausalLM, on: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """``ids [batch, length] -> logits``, through ``torch.compile`` where asked for."""
    body: Callable[..., Any] = torch.compile(model.model, dynamic=False) if on else model.model
    return lambda ids: model.lm_head(body(input_ids=ids, use_cache=False).last_hidden_state)


@torch.no_grad()
def language_loss(model: LlamaForCausalLM, windows: Windows, batches: int, amp: bool) -> float:
    """Mean next-token cross entropy in nats over the first ``batches`` batches of ``windows``."""
    was = model.training
    model.eval()
    total = 0.0
    for i in range(batches):
        ids = windows[i]
        with autocast(amp):
            logits = model(ids, use_cache=False).logits
        total += F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).item()
    model.train(was)
    return total / batches


# --- the training loop -------------------------------------------------------------------------


_WARMUP = 0.02
"""Share of the budget in which the learning rate rises."""
_CHECKPOINT_S = 240.0
"""Seconds between checkpoints."""


class Budget:
    """The wall-clock budget of one phase: seconds that have passed, including those before a resume, of ``limit``."""

    def __init__(self, minutes: float, before: float = 0.0) -> None:
        self.limit = minutes * 60.0
        self._before = before
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._start

    @property
    def fraction(self) -> float:
        return min(1.0, self.elapsed / self.limit)


def optimizers_for(model: LlamaForCausalLM, decay: float = 0.1) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and, without decay, for the norms' gains.

    Muon's updates are scaled to the size of AdamW's, so one learning rate serves both.
    """
    matrices = [p for p in model.model.layers.parameters() if p.dim() > 1]
    groups = [
        {"params": list(model.get_input_embeddings().parameters()), "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True),
        torch.optim.Muon(matrices, lr=1e-3, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
    ]


def train_loop(
    phase: str,
    nets: dict[str, LlamaForCausalLM],
    losses_of: Callable[[int], tuple[dict[str, torch.Tensor], int]],
    held_out: Callable[[], dict[str, float]],
    *,
    minutes: float,
    peaks: dict[str, float],
    checkpoint: Path,
    resume: bool,
) -> dict[str, Any]:
    """Train ``nets`` together until the budget is spent.

    ``losses_of(step)`` gives one loss per net and the number of tokens of the step. Returns the record
    of the run (steps, tokens, seconds, the last training and held-out losses), as the card shows it.
    """
    optimizers = {name: optimizers_for(net) for name, net in nets.items()}
    step = tokens = 0
    before = 0.0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, net in nets.items():
            net.load_state_dict(state["nets"][name])
            for opt, saved in zip(optimizers[name], state["optimizers"][name], strict=True):
                opt.load_state_dict(saved)
        step, tokens, before = state["step"], state["tokens"], state["seconds"]
        say(f"{phase}: resumed at step {step} after {before / 60:.1f} min")

    def save() -> None:
        state = {
            "nets": {name: net.state_dict() for name, net in nets.items()},
            "optimizers": {name: [o.state_dict() for o in opts] for name, opts in optimizers.items()},
            "step": step,
            "tokens": tokens,
            "seconds": budget.elapsed,
        }
        partial = checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, checkpoint)  # A run that is killed while it saves leaves the one before.

    budget = Budget(minutes, before)
    mean: dict[str, float] = {}
    seen, since = tokens, budget.elapsed
    next_save = budget.elapsed + _CHECKPOINT_S
    next_say = budget.elapsed + 20
    for net in nets.values():
        net.train()
    while budget.elapsed < budget.limit:
        values, count = losses_of(step)
        for name, loss in values.items():
            loss.backward()
            torch.nn.utils.clip_grad_norm_(nets[name].parameters(), 1.0)
            for opt in optimizers[name]:
                for group in opt.param_groups:
                    group["lr"] = peaks[name] * learning_rate(budget.fraction, _WARMUP)
                opt.step()
                opt.zero_grad(set_to_none=True)
            value = loss.item()
            if not math.isfinite(value):
                raise RuntimeError(f"{phase}: the loss of {name} is {value} at step {step}")
            mean[name] = value if name not in mean else 0.98 * mean[name] + 0.02 * value
        step += 1
        tokens += count
        now = budget.elapsed
        if now >= next_say:
            shown = ", ".join(f"{k} {v:.3f}" for k, v in mean.items())
            held = ", ".join(f"{k} {v:.3f}" for k, v in held_out().items())
            say(
                f"{phase}: step {step} tokens {tokens / 1e6:.2f}M loss {shown} held-out {held} "
                f"{(tokens - seen) / (now - since):.0f} tok/s {(budget.limit - now) / 60:.1f} min left"
            )
            seen, since, next_say = tokens, budget.elapsed, budget.elapsed + 60
        if now >= next_save:
            save()
            next_save = budget.elapsed + _CHECKPOINT_S
    save()
    record = {"steps": step, "tokens": tokens, "seconds": budget.elapsed, "loss": mean, "held_out": held_out()}
    say(f"{phase}: done after {step} steps, {tokens / 1e6:.2f}M tokens, {budget.elapsed / 60:.1f} min")
    return record


# --- text --------------------------------------------------------------------------------------

#: Length in tokens of a sequence that the target writes, its prompt and the begin token included.
TEXT_LENGTH = 288
#: Sequences of that length in a step of the drafts.
DRAFT_BATCH = 20
#: Greedy tokens after every prompt in the evaluation.
NEW_TOKENS = 128
#: kind -> (temperature, number of tokens sampled at it before greedy choice takes over)
TEXT_KINDS = {
    "greedy": (0.0, 0),
    "sampled start": (1.0, 16),
    "sampled": (0.7, TEXT_LENGTH),
    "perturbed start": (1.3, 4),
}


def _prompt_batches(
    heads: list[list[int]], stream: np.ndarray, bos: int, batch: int, rng: np.random.Generator
) -> Iterator[torch.Tensor]:
    """Endless prompts [batch, length], one length per batch: two batches of heads, then one of random places.

    Heads of similar length share a batch and lose their oldest tokens down to the shortest head, so no padding
    is needed.
    """
    while True:
        order = sorted(rng.permutation(len(heads)), key=lambda i: len(heads[i]))
        groups = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
        for number, which in enumerate(rng.permutation(len(groups))):
            group = [heads[i] for i in groups[which]]
            length = min(len(h) for h in group)
            yield torch.tensor([[bos, *h[-length:]] for h in group])
            if number % 2:
                length = int(rng.integers(32, 159))
                starts = rng.integers(0, len(stream) - length, size=batch)
                yield torch.tensor([[bos, *stream[s : s + length].tolist()] for s in starts])


#: The target's distribution is stored as its TOP most likely tokens and the total mass of all others.
TOP = 64


class OwnText:
    """Endless batches of the target's own text, each pass in a new order, with the target's distributions once they are computed.

    They are stored in the first pass, since they are half of a step's work. A resumed run starts the passes again.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed, self.number = seed, 0
        self.ids = text_in(folder)
        self.log_p = torch.zeros(*self.ids.shape, TOP, dtype=torch.float16)
        self.tokens = torch.zeros(*self.ids.shape, TOP, dtype=torch.int16)
        self.known = torch.zeros(len(self.ids), dtype=torch.bool)
        self._waiting: list[torch.Tensor] = []

    def rows(self) -> torch.Tensor:
        """The next batch: DRAFT_BATCH indices into ``ids``."""
        if not self._waiting:
            say(f"drafts: pass {self.number} over the target's text, {len(self.ids)} sequences")
            order = np.random.default_rng([self.seed, 2, self.number]).permutation(len(self.ids))
            whole = len(order) // DRAFT_BATCH * DRAFT_BATCH
            self._waiting = list(torch.from_numpy(order[:whole]).split(DRAFT_BATCH))
            self.number += 1
        return self._waiting.pop()


def text_in(folder: Path) -> torch.Tensor:
    """All sequences that the phase ``text`` has written, int64 [n, TEXT_LENGTH]."""
    files = sorted(folder.glob("part*.npy"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no text: the phase text comes first")
    return torch.from_numpy(np.concatenate([np.load(file) for file in files]).astype(np.int64))


def strongest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The TOP largest log-probabilities of ``logits`` [..., VOCAB] in falling order, and their tokens."""
    found = F.log_softmax(logits.float(), dim=-1).topk(TOP, dim=-1)
    return found.values, found.indices


def distillation_loss(
    logits: torch.Tensor, log_p: torch.Tensor, tokens: torch.Tensor, argmax_weight: float
) -> torch.Tensor:
    """KL(target || draft) in nats per position, plus the weighted cross entropy with the target's first choice.

    ``logits`` [n, VOCAB] are the draft's; ``log_p`` and ``tokens`` [n, TOP] come from :func:`strongest`. All
    tokens outside of the TOP count as one.
    """
    log_q = F.log_softmax(logits.float(), dim=-1).gather(1, tokens)
    rest_p = (1.0 - log_p.exp().sum(dim=1)).clamp_min(1e-5)
    rest_q = (1.0 - log_q.exp().sum(dim=1)).clamp_min(1e-5)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=1) + rest_p * (rest_p.log() - rest_q.log())
    return divergence.mean() - argmax_weight * log_q[:, 0].mean()


class GreedyFrom(LogitsProcessor):
    """Leaves the first choice alone in sequences of at least ``length`` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        return torch.full_like(scores, -math.inf).scatter(1, scores.argmax(dim=-1, keepdim=True), 0.0)


def write(
    net: LlamaForCausalLM, prompts: torch.Tensor, length: int, kind: tuple[float, int], eos: int, pad: int
) -> torch.Tensor:
    """Continue ``prompts`` [batch, prompt] to [batch, length]; ``pad`` follows an end token.

    With a large batch, a growing cache would spend most of a step on copies.
    """
    temperature, sampled = kind
    start = prompts.shape[1]
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    )
    out = net.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length - start,
        **sampling,
        repetition_penalty=1.0,
        logits_processor=[GreedyFrom(start + sampled)],
        eos_token_id=eos,
        pad_token_id=pad,
        cache_implementation="static",
    )
    return F.pad(out, (0, length - out.shape[1]), value=pad)


# --- evaluation --------------------------------------------------------------------------------


@torch.inference_mode()
def greedy(net: LlamaForCausalLM, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """transformers' greedy continuation of ``prompt`` [1, n] by at most ``new`` tokens."""
    return net.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)


@torch.inference_mode()
def matches_along(net: LlamaForCausalLM, text: torch.Tensor, start: int) -> list[bool]:
    """For every token of ``text`` [1, n] from ``start`` on: whether it is ``net``'s argmax after the text before it."""
    first = net(text).logits[0, start - 1 : -1].argmax(dim=-1)
    return (first == text[0, start:]).tolist()


@torch.no_grad()
def agreement_along(net: LlamaForCausalLM, texts: torch.Tensor, start: int) -> float:
    """Share of the tokens of ``texts`` [batch, n] from ``start`` on that are ``net``'s first choice."""
    was = net.training
    net.eval()
    first = net(texts, use_cache=False).logits[:, start - 1 : -1].argmax(dim=-1)
    net.train(was)
    wanted = texts[:, start:]
    kept = wanted != net.config.pad_token_id
    return ((first == wanted) & kept).sum().item() / kept.sum().item()


def accepted_per_round(matches: list[list[bool]], window: int) -> float:
    """Mean number of accepted draft tokens in a round of greedy speculative decoding.

    Exact, and not an estimate from the mean agreement: while a draft is accepted its prefix is the
    target's text, so the draft's proposals from any place are its first choices along that text. A
    round accepts the matches up to the first miss (at most ``window``) and adds the target's own
    token. Rounds that the end of the text cuts short are left out.
    """
    rounds = accepted = 0
    for run in matches:
        at = 0
        while at + window < len(run):
            good = next((i for i in range(window) if not run[at + i]), window)
            rounds, accepted, at = rounds + 1, accepted + good, at + good + 1
    return accepted / rounds


def _mean(values: list[bool]) -> float:
    return sum(values) / len(values)


# --- phases ------------------------------------------------------------------------------------


class TrainingRun:
    """One run's folders, settings and records. Every phase leaves its output in ``work``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.amp: bool = args.amp
        self._records = self.work / "records.json"
        shown = [f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if k in SHOWN and v != SHOWN[k]]
        self.command = " ".join(["python -m tools.demo_family.train --out DIR --phases", *args.phases, *shown])

    def record(self, phase: str, value: dict[str, Any]) -> None:
        """Keeps a phase's figures for the card."""
        records = self.records()
        records[phase] = {**value, "command": self.command}
        self._records.write_text(json.dumps(records, indent=2) + "\n")

    def records(self) -> dict[str, Any]:
        """The figures of all phases so far."""
        return json.loads(self._records.read_text()) if self._records.exists() else {}

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Phase ``tokenizer``: the one in the work folder, trained there where it is missing."""
        folder = self.work / "tokenizer"
        if (folder / "tokenizer.json").exists():
            return PreTrainedTokenizerFast.from_pretrained(folder)
        files = training_files()
        tok = train_tokenizer([f.text for f in files])
        tok.save_pretrained(folder)
        stream = encode(tok, files)
        held = encode(tok, corpus.held_out_files())
        self.record(
            "corpus",
            {
                "python": platform.python_version(),
                "files": len(files),
                "characters": sum(len(f.text) for f in files),
                "tokens": len(stream),
                "held_out_files": len(corpus.held_out_files()),
                "held_out_tokens": len(held),
            },
        )
        say(f"tokenizer: {len(files)} files, {len(stream)} tokens, held out {len(held)} tokens")
        return tok

    def windows(self, tok: PreTrainedTokenizerFast, batch: int, length: int = POSITIONS) -> Windows:
        """Training windows of the corpus."""
        return Windows(encode(tok, training_files()), batch, length, tok.bos_token_id, self.args.seed)

    def held_out(self, tok: PreTrainedTokenizerFast) -> Windows:
        """Windows of the held-out modules, 8 to a batch."""
        return Windows(encode(tok, corpus.held_out_files()), 8, POSITIONS, tok.bos_token_id, self.args.seed)

    def target(self) -> None:
        """Phase ``target``: next-token training on the corpus."""
        done = self.work / "target"
        if (done / "model.safetensors").exists():
            return
        tok = self.tokenizer()
        net = new_model("target", tok, self.args.seed)
        say(f"target: {net.num_parameters()} parameters")

        args = self.args
        self._next_tokens("target", {"target": net}, args.batch, args.target_minutes, {"target": args.target_rate})
        export(net, tok, done)
        export(net, tok, self.out / "target")

    def pretrain(self) -> None:
        """Phase ``pretrain``: the drafts learn the corpus itself.

        It needs no target, so it can run beside the target's training.
        """
        if all((self.work / f"{name}-pretrained" / "model.safetensors").exists() for name in DRAFTS):
            return
        tok = self.tokenizer()
        nets = {name: new_model(name, tok, self.args.seed + 1 + i) for i, name in enumerate(DRAFTS)}
        self._next_tokens("pretrain", nets, 8, self.args.pretrain_minutes, self._draft_rates())
        for name, net in nets.items():
            export(net, tok, self.work / f"{name}-pretrained")

    def _draft_rates(self) -> dict[str, float]:
        return {"medium": self.args.medium_rate, "small": self.args.small_rate}

    def _next_tokens(
        self,
        phase: str,
        nets: dict[str, LlamaForCausalLM],
        batch: int,
        minutes: float,
        peaks: dict[str, float],
    ) -> None:
        """Next-token training of ``nets`` on the corpus."""
        tok = self.tokenizer()
        data, held = self.windows(tok, batch), self.held_out(tok)
        learn = {name: compiled(net, self.args.compile) for name, net in nets.items()}

        def losses_of(step: int) -> tuple[dict[str, torch.Tensor], int]:
            ids = data[step]
            losses = {}
            for name in nets:
                with autocast(self.amp):
                    logits = learn[name](ids)
                losses[name] = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
            return losses, ids.numel()

        record = train_loop(
            phase,
            nets,
            losses_of,
            lambda: {name: language_loss(net, held, 2, self.amp) for name, net in nets.items()},
            minutes=minutes,
            peaks=peaks,
            checkpoint=self.work / f"{phase}.pt",
            resume=self.args.resume,
        )
        self.record(phase, record)

    def text(self) -> None:
        """Phase ``text``: sequences that the target writes, for the drafts to imitate.

        A draft is judged on the target's own text, which is not distributed like the corpus: it is more
        regular, and it repeats itself. The text starts from heads and from random places of the training
        modules. Where the target has seen the continuation it partly recites, so a share of the sequences
        begins with some sampled tokens and goes on greedily from there.
        """
        folder, part = self.work / "text", self.args.text_part
        done = folder / f"part{part}.json"
        if done.exists():
            return
        folder.mkdir(exist_ok=True)
        tok, net = self.tokenizer(), load(self.work / "target")
        if self.amp:
            net = net.to(torch.bfloat16)
        files = training_files()
        stream = encode(tok, files)
        heads = tok([h.text for h in corpus.heads_of(files)], add_special_tokens=False)["input_ids"]
        heads = [h for h in heads if 24 <= len(h) <= 159]
        rng = np.random.default_rng([self.args.seed, 1, part])
        torch.manual_seed(1000 * self.args.seed + part)
        budget = Budget(self.args.text_minutes)
        counts = dict.fromkeys(TEXT_KINDS, 0)
        sequences, next_say = 0, 20.0
        for number, prompts in enumerate(_prompt_batches(heads, stream, tok.bos_token_id, self.args.text_batch, rng)):
            kind = list(TEXT_KINDS)[number % len(TEXT_KINDS)]
            ids = write(net, prompts, TEXT_LENGTH, TEXT_KINDS[kind], tok.eos_token_id, tok.pad_token_id)
            partial = folder / "partial.npy.tmp"
            with partial.open("wb") as file:
                np.save(file, ids.numpy().astype(np.uint16))
            partial.replace(folder / f"part{part}-{number:03d}.npy")
            counts[kind] += int((ids[:, prompts.shape[1] :] != tok.pad_token_id).sum())
            sequences += len(ids)
            if budget.elapsed >= next_say:
                written = sum(counts.values())
                say(f"text: {written} tokens, {written / budget.elapsed:.0f} tok/s, {budget.fraction:.0%} of the time")
                next_say = budget.elapsed + 30
            if budget.fraction >= 1.0:
                break
        done.write_text(
            json.dumps({"sequences": sequences, "by_kind": counts, "seconds": budget.elapsed, "command": self.command})
        )
        say(f"text: done, {sequences} sequences, {sum(counts.values())} tokens written by the target {counts}")

    def drafts(self) -> None:
        """Phase ``drafts``: both drafts learn the target's distribution; one target pass serves both.

        Every fourth step is a batch of the corpus at full length, so that all positions up to 512 are
        trained; the others are the target's own text.
        """
        if all((self.work / name / "model.safetensors").exists() for name in DRAFTS):
            return
        tok, teacher = self.tokenizer(), load(self.work / "target")
        nets = {name: load(self.work / f"{name}-pretrained") for name in DRAFTS}
        data, held = self.windows(tok, 8), self.held_out(tok)
        own = OwnText(self.work / "text", self.args.seed)
        teach = compiled(teacher, self.args.compile)
        learn = {name: compiled(net, self.args.compile) for name, net in nets.items()}

        def ask(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad(), autocast(self.amp):
                return strongest(teach(ids))

        def lesson(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            cycle, place = divmod(step, 4)
            if place == 3:
                ids = data[cycle]
                return ids, *ask(ids)
            rows = own.rows()
            ids = own.ids[rows]
            if not own.known[rows].all():
                log_p, tokens = ask(ids)
                own.log_p[rows], own.tokens[rows], own.known[rows] = log_p.half(), tokens.to(torch.int16), True
            return ids, own.log_p[rows].float(), own.tokens[rows].long()

        def losses_of(step: int) -> tuple[dict[str, torch.Tensor], int]:
            ids, log_p, tokens = lesson(step)
            # Positions after the end of a text are not trained.
            kept = (ids.flatten() != tok.pad_token_id).nonzero().squeeze(1)
            log_p, tokens = log_p.flatten(0, 1)[kept], tokens.flatten(0, 1)[kept]
            losses = {}
            for name in nets:
                with autocast(self.amp):
                    logits = learn[name](ids)
                losses[name] = distillation_loss(logits.flatten(0, 1)[kept], log_p, tokens, self.args.argmax_weight)
            return losses, int(kept.numel())

        probe = self._probe(tok)
        record = train_loop(
            "drafts",
            nets,
            losses_of,
            lambda: {name: agreement_along(net, *probe) for name, net in nets.items()},
            minutes=self.args.draft_minutes,
            peaks=self._draft_rates(),
            checkpoint=self.work / "drafts.pt",
            resume=self.args.resume,
        )
        record["held_out_loss"] = {name: language_loss(net, held, 4, self.amp) for name, net in nets.items()}
        self.record("drafts", record)
        for name, net in nets.items():
            export(net, tok, self.work / name)

    def _probe(self, tok: PreTrainedTokenizerFast) -> tuple[torch.Tensor, int]:
        """The target's greedy text after 48 heads of held-out modules, for the drafts' progress lines.

        These heads come from the end of the list, so they are not those that the card's figures use.
        """
        heads = [h for h in tok([h.text for h in corpus.function_heads()])["input_ids"] if len(h) > 64][-48:]
        prompts = torch.tensor([[h[0], *h[-63:]] for h in heads])
        net = load(self.work / "target")
        return write(net, prompts, 192, TEXT_KINDS["greedy"], tok.eos_token_id, tok.pad_token_id), 64

    def _text_record(self) -> dict[str, Any]:
        """The figures of all parts of the text together."""
        parts = [json.loads(f.read_text()) for f in sorted((self.work / "text").glob("part*.json"))]
        return {
            "sequences": sum(p["sequences"] for p in parts),
            "by_kind": {kind: sum(p["by_kind"][kind] for p in parts) for kind in TEXT_KINDS},
            "seconds": sum(p["seconds"] for p in parts),
            "commands": [p["command"] for p in parts],
        }

    def evaluate(self) -> None:
        """Phase ``evaluate``: exports the family, measures the exported files and writes the card."""
        tok = self.tokenizer()
        for name in SHAPES:
            shutil.copytree(self.work / name, self.out / name, dirs_exist_ok=True)
        nets = {name: load(self.out / name) for name in SHAPES}
        held = self.held_out(tok)
        batches = min(held.per_pass, 16)
        figures: dict[str, Any] = {
            "parameters": {name: net.num_parameters() for name, net in nets.items()},
            "bytes": sum(f.stat().st_size for f in self.out.rglob("*") if f.is_file() and f.name != "README.md"),
            "held_out_loss": {name: language_loss(net, held, batches, False) for name, net in nets.items()},
            "held_out_loss_tokens": batches * 8 * (POSITIONS - 1),
            "prompts": self.args.prompts,
        }
        say(f"evaluate: held-out loss {figures['held_out_loss']}")
        heads = corpus.function_heads(self.args.prompts)
        prompts = [tok(h.text, return_tensors="pt")["input_ids"] for h in heads]
        figures["prompt_tokens"] = sorted(p.shape[1] for p in prompts)
        for judge, drafts in (("target", ("medium", "small")), ("medium", ("small",))):
            texts = [greedy(nets[judge], p, NEW_TOKENS) for p in prompts]
            written = sum(t.shape[1] - p.shape[1] for t, p in zip(texts, prompts, strict=True))
            say(f"evaluate: {judge} has written {written} tokens")
            if judge == "target":
                ends = [p.shape[1] for p in prompts]
                figures["samples"] = [
                    {"name": heads[i].name, "prompt": heads[i].text, "text": tok.decode(texts[i][0, ends[i] :])}
                    for i in range(min(4, len(texts)))
                ]
            for name in drafts:
                pairs = zip(texts, prompts, strict=True)
                matches = [matches_along(nets[name], text, prompt.shape[1]) for text, prompt in pairs]
                figures[f"{name}->{judge}"] = {
                    "tokens": sum(len(m) for m in matches),
                    "agreement": sum(sum(m) for m in matches) / sum(len(m) for m in matches),
                    "first_half": _mean([x for m in matches for x in m[: NEW_TOKENS // 2]]),
                    "second_half": _mean([x for m in matches for x in m[NEW_TOKENS // 2 :]]),
                    "accepted_at_4": accepted_per_round(matches, 4),
                    "accepted_at_8": accepted_per_round(matches, 8),
                }
                say(f"evaluate: {name}->{judge} {figures[f'{name}->{judge}']}")
        self.record("evaluate", figures)
        self.record("text", self._text_record())
        (self.out / "README.md").write_text(card.write(self.records(), SHAPES, corpus.HELD_OUT))

    def module(self) -> None:
        """Phase ``module``: a draft module for the target in ``--stages`` stages, on the target's own text and the corpus.

        It starts from the target's last layers and head. Every fourth step is the corpus, the others are the target's own text; drafts
        are judged on the latter.
        """
        from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
        from pipespec_spd.partition import Partition

        n: int = self.args.stages
        name = "module" if n == MODULE_STAGES else f"module-{n}"
        work = self.work / name
        tok, target = self.tokenizer(), load(self.work / "target")
        stages = Partition.uniform(target.config.num_hidden_layers, n).ranges
        module = DraftModule.of_target(target, DraftModuleConfig.for_target(target, stages, layers=self.args.blocks))
        own = text_in(self.work / "text")
        count = self.args.module_batch
        data = self.windows(tok, count, TEXT_LENGTH)
        whole = len(own) // count
        # The target's own forward is half of a step: what it says of its own text is kept from the first pass on.
        known = torch.zeros(len(own), dtype=torch.bool)
        k, hidden = len(module.config.anchors), module.config.hidden
        kept = training.Taught(
            torch.empty(*own.shape, k, hidden, dtype=torch.bfloat16),
            torch.empty(*own.shape, hidden, dtype=torch.bfloat16),
        )

        def taught(rows: Any) -> training.Taught:
            if not known[rows].all():
                with autocast(self.amp):
                    fresh = training.teach(target, own[rows], module.config.anchors)
                for store, values in zip(kept, fresh, strict=True):
                    store[rows] = values.bfloat16()
                known[rows] = True
            return training.Taught(*(store[rows] for store in kept))

        def batch(number: int) -> training.TrainingBatch:
            cycle, place = divmod(number, 4)
            if place == 3:
                ids = data[cycle]
                return training.TrainingBatch(ids, ids != tok.pad_token_id)
            turn, index = divmod(3 * cycle + place, whole)
            order = np.random.default_rng([self.args.seed, 3, turn]).permutation(len(own))
            rows = torch.from_numpy(order[index * count : (index + 1) * count])
            return training.TrainingBatch(own[rows], own[rows] != tok.pad_token_id, taught(rows))

        probe, begin = self._probe(tok)
        ends = [int((row != tok.pad_token_id).sum()) for row in probe]
        held = self.held_out(tok)
        length = TEXT_LENGTH
        settings = training.TrainingSettings(
            minutes=self.args.module_minutes,
            rate=self.args.module_rate,
            argmax_weight=self.args.argmax_weight,
            optimizer="muon",
            amp=self.amp,
            seed=self.args.seed,
            validate_every=100,
            save_every=100,
        )
        record = training.train(
            target,
            module,
            batch,
            settings,
            work,
            held_out=[
                training.TrainingBatch(ids[:, :length], torch.ones(len(ids), length, dtype=torch.bool))
                for ids in [held[0], held[1]]
            ],
            extra=lambda net: {
                "acceptance": acceptance.acceptance_along(target, net, probe, [begin] * len(probe), ends).rate
            },
            resume=self.args.resume and (work / training.CHECKPOINT).exists(),
        )
        text = self._text_record()
        record["own_text"] = {"tokens": int((own != tok.pad_token_id).sum()), **text}
        module.save(self.out / name, torch.bfloat16)
        record["measured"] = self._acceptance(
            tok, target, DraftModule.load(self.out / name, target=target, stages=stages)
        )
        (self.out / name / "training.svg").write_text(plot.training(record["history"]), encoding="utf-8")
        self.record(name, record)
        (self.out / name / "README.md").write_text(
            card.write_module(self.records()[name], module.config, corpus.HELD_OUT)
        )

    def _acceptance(self, tok: PreTrainedTokenizerFast, target: LlamaForCausalLM, module: Any) -> dict[str, Any]:
        """What the module in the package does along the target's greedy text after the prompts that the family's figures use."""
        prompts = [tok(h.text, return_tensors="pt")["input_ids"] for h in corpus.function_heads(self.args.prompts)]
        counts = acceptance.Acceptance(0, 0, 0, 0)
        halves = [counts, counts]
        for prompt in prompts:
            begin = prompt.shape[1]
            right = acceptance.drafts_right(target, module, greedy(target, prompt, NEW_TOKENS))[0]
            middle = begin + NEW_TOKENS // 2
            counts += acceptance.replay(right, begin)
            halves[0] += acceptance.replay(right[:, : middle - 1], begin)
            halves[1] += acceptance.replay(right, middle)
        found = {
            "prompts": len(prompts),
            **counts._asdict(),
            "acceptance": counts.rate,
            "accepted_length": counts.length(module.config.n),
            "first_half": halves[0].rate,
            "second_half": halves[1].rate,
        }
        say(f"module: {found}")
        return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the family's folder (target/, medium/, small/)")
    parser.add_argument("--work", type=Path, default=None, help="checkpoints and text (default: OUT/../work)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--target-minutes", type=float, default=48.0)
    parser.add_argument("--draft-minutes", type=float, default=20.0)
    parser.add_argument("--target-rate", type=float, default=4e-3)
    parser.add_argument("--pretrain-minutes", type=float, default=36.0)
    parser.add_argument("--text-minutes", type=float, default=6.0)
    parser.add_argument("--text-part", type=int, default=0, help="number of a further part of the text")
    parser.add_argument("--text-batch", type=int, default=128, help="sequences that the target writes at once")
    parser.add_argument("--medium-rate", type=float, default=5e-3)
    parser.add_argument("--small-rate", type=float, default=6e-3)
    parser.add_argument("--argmax-weight", type=float, default=1.0, help="weight of the target's first choice")
    parser.add_argument("--stages", type=int, default=MODULE_STAGES, help="of the target, for the draft module")
    parser.add_argument("--blocks", type=int, default=1, help="decoder blocks of the draft module")
    parser.add_argument("--module-minutes", type=float, default=30.0)
    parser.add_argument("--module-rate", type=float, default=4e-3)
    parser.add_argument("--module-batch", type=int, default=8, help="sequences in a step of the draft module")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts that the drafts are measured on")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens in a step of the target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of a phase")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=torch.cpu._is_amx_tile_supported())
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser


#: Defaults of the settings that a run's figures depend on; a command in the card names those that differ.
SHOWN = {
    action.dest: action.default
    for action in _parser()._actions
    if action.dest not in ("help", "out", "work", "phases", "resume", "amp", "compile")
}


def main(argv: list[str] | None = None) -> int:
    """Runs the phases asked for, in their order."""
    args = _parser().parse_args(argv)
    args.work = args.work or args.out.parent / "work"
    torch.set_num_threads(args.threads)
    run = TrainingRun(args)
    for phase in PHASES:
        if phase in args.phases:
            getattr(run, phase)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
