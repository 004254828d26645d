"""A draft with another tokenizer: ``python -m bench.bench_tokenizers [--steps N] [--work FOLDER] [--json FILE]``

The bundled target with a draft of the bundled small draft's shape, but with a unigram vocabulary with byte tokens, in the manner of sentencepiece. Tokenizer and
draft are made here: the layers are those of the small draft, the embedding of a token is the mean of those of its text, and both are trained
on the standard library for ``--steps`` steps. Against transformers' assisted generation with ``assistant_tokenizer``, and against the bundled
small draft, with the target's tokenizer and with other ids, which shows what the translation itself costs. The comparison is that of
:mod:`pipespec.bench.comparison`; transformers' rows are tuned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.harness import choose_sizes, markdown_table, save
from pipespec.bench.comparison import SpeedComparison
from pipespec.bench.contenders import GREEDY, GeneratedText, HFContender, PipelineContender, Workload
from pipespec.bench.machine import provenance
from pipespec.demo import corpus, family_path, load_family, prompts
from pipespec.process.progress import quiet_transformers

WINDOW = 128
BATCH = 8


def unigram(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A unigram tokenizer like sentencepiece's: words with the space before them, a space before the text, and a token for each byte."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        texts,
        trainers.UnigramTrainer(
            vocab_size=size - 256, special_tokens=special, unk_token="<unk>", show_progress=False, n_sub_iterations=1
        ),
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] += [[f"<0x{byte:02X}>", -30.0] for byte in range(256)]
    content["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def permuted(name: str, seed: int = 0) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A bundled model and its tokenizer with other ids: another vocabulary, and the same text as before."""
    content = json.loads(AutoTokenizer.from_pretrained(family_path(name)).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    new = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(seed))
    content["model"]["vocab"] = {token: int(new[i]) for token, i in vocabulary.items()}
    for token in content["added_tokens"]:
        token["id"] = int(new[token["id"]])
    for token in content["post_processor"]["special_tokens"].values():
        token["ids"] = [int(new[i]) for i in token["ids"]]
    model = AutoModelForCausalLM.from_pretrained(family_path(name), dtype=torch.float32)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[new] = weight.clone()
    return model, Tokenizer.from_str(json.dumps(content))


def make_draft(folder: Path, steps: int, size: int) -> None:
    """Train tokenizer and draft, and write them to ``folder``."""
    texts = [f.text for f in corpus.source_files(corpus.stdlib()) if f.module not in corpus.HELD_OUT]
    texts = texts[:: max(1, len(texts) // 200)]
    tokenizer = unigram([line for text in texts[:60] for line in text.splitlines(keepends=True)], size)
    old = AutoTokenizer.from_pretrained(family_path("small"))
    draft = LlamaForCausalLM.from_pretrained(family_path("small"), dtype=torch.float32)
    table = draft.get_input_embeddings().weight.detach().clone()
    # transformers takes vocabularies of one size for the same.
    draft.resize_token_embeddings(len(tokenizer) + 64, mean_resizing=False)
    draft.get_input_embeddings().weight.data.zero_()
    draft.config.bos_token_id, draft.config.eos_token_id, draft.config.pad_token_id = 1, 2, None
    draft.generation_config.bos_token_id, draft.generation_config.eos_token_id = 1, 2
    draft.generation_config.pad_token_id = 2
    with torch.no_grad():
        for i, piece in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
            ids = old(piece.replace("▁", " "), add_special_tokens=False).input_ids or [0]
            draft.get_input_embeddings().weight[i] = table[ids].mean(0)
    stream = np.concatenate(
        [np.array([1, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]) for text in texts]
    )
    optimiser = torch.optim.AdamW(draft.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps + 1)
    generator = np.random.default_rng(0)
    draft.train()
    for step in range(steps):
        starts = generator.integers(len(stream) - WINDOW, size=BATCH)
        batch = torch.from_numpy(np.stack([np.concatenate([[1], stream[at : at + WINDOW]]) for at in starts]))
        loss = draft(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class TranslatingContender(PipelineContender):
    """A pipeline whose first draft has another tokenizer. ``translated``, ``lost``: that draft's tokens, over all texts."""

    translated = lost = 0

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        text = super().run(ids, new_tokens, seed)
        assert self.pipe is not None
        assert self.pipe.report is not None
        first = self.pipe.report.stages[0]
        self.translated, self.lost = self.translated + (first.translated or 0), self.lost + first.lost
        return text


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with quiet_transformers():
        family = load_family()
        draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        own = AutoTokenizer.from_pretrained(folder)
        renumbered, other_ids = permuted("small")
        size = len(family.tokenizer)
        renumbered.resize_token_embeddings(size + 64, mean_resizing=False)
        renumbered.get_input_embeddings().weight.data[size:] = 0
        hf_other_ids = PreTrainedTokenizerFast(tokenizer_object=other_ids)
    family.drafts.update(unigram=draft, renumbered=renumbered)
    both = {"tokenizer": family.tokenizer}
    another, numbered = both | {"draft_tokenizers": own}, both | {"draft_tokenizers": other_ids}
    contenders = [
        HFContender("plain", "transformers, plain"),
        HFContender("assisted-unigram", "transformers, assisted, another tokenizer", ["unigram"], assistant_tokenizer=own, **both),
        HFContender("assisted-renumbered", "transformers, assisted, small with other ids", ["renumbered"], assistant_tokenizer=hf_other_ids, **both),
        PipelineContender("ours-plain", "pipespec, plain", "plain"),
        TranslatingContender("lockstep-unigram", "pipespec, lockstep, another tokenizer", "lockstep", ["unigram"], **another),
        TranslatingContender("workers-unigram", "pipespec, workers, another tokenizer", "workers", ["unigram"], **another),
        TranslatingContender("lockstep-renumbered", "pipespec, lockstep, small with other ids", "lockstep", ["renumbered"], **numbered),
        PipelineContender("lockstep-small", "pipespec, lockstep, small", "lockstep", ["small"]),
    ]  # fmt: skip
    texts = [family.encode(text) for text in ("def main():", *prompts(options.prompts + 1))]
    calibration, measured = texts[:2], texts[2:]
    longest = max(ids.shape[1] for ids in texts)
    workload = Workload(family, options.new_tokens, longest, torch.get_num_threads(), GREEDY | {"eos_token_id": None})
    with SpeedComparison(workload, contenders) as comparison:
        comparison.start(calibration[0])
        comparison.tune(calibration, options.settings)
        for contender in contenders:
            if isinstance(contender, TranslatingContender):
                contender.translated = contender.lost = 0
        for _ in comparison.measure(measured, 1):
            pass
        results = comparison.results()
    rows = []
    for contender, row in zip(contenders, results, strict=True):
        if row.reason is not None:
            raise RuntimeError(f"{row.label}: {row.reason}")
        rows.append(
            {
                "name": row.label,
                "tokens_per_second": row.tokens_per_second,
                "tokens_per_step": row.accepted_length.get("target"),
                "acceptance_rate": row.acceptance_rate.get("target"),
                "draft_model_tokens": getattr(contender, "translated", 0),
                "lost": getattr(contender, "lost", 0),
                "texts_that_differ": row.runs - (row.runs if row.identical is None else row.identical),
                "setting": row.setting,
            }
        )
    return {"rows": rows, "prompts": options.prompts, "new_tokens": options.new_tokens, "training_steps": options.steps}


def table(record: dict[str, Any]) -> str:
    """The rows in Markdown."""
    return markdown_table(
        [
            "contender",
            "tokens/s",
            "tokens per step of the target",
            "accepted",
            "draft model's tokens, lost",
            "texts that differ",
        ],
        [
            [
                row["name"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_step']:.2f}" if row["tokens_per_step"] else "-",
                f"{row['acceptance_rate']:.2f}" if row["acceptance_rate"] is not None else "-",
                f"{row['draft_model_tokens']}, {row['lost']}" if row["draft_model_tokens"] else "-",
                str(row["texts_that_differ"]),
            ]
            for row in record["rows"]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settings", type=int, default=4, help="tried of each row that is tuned (%(default)s)")
    parser.add_argument("--work", type=Path, help="folder of the draft; one that exists is used as it is")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    choose_sizes(options, steps=(300, 40), prompts=(12, 3), new_tokens=(96, 48))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        if not (folder / "config.json").is_file():
            make_draft(folder, options.steps, size=2048)
        record = measure(options, folder)
    print(table(record))
    save(options.json, {"machine": provenance()} | record)


if __name__ == "__main__":
    main()
