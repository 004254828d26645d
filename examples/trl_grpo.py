"""GRPO by TRL, whose completions an attached model generates; drafts come from the prompt, so a step of the optimizer never makes them stale.
``python examples/trl_grpo.py TARGET``"""

import sys
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import pipespec
from pipespec.demo import family_path

(target,) = sys.argv[1:] or [family_path("small")]
tokenizer = AutoTokenizer.from_pretrained(target)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
pipe = pipespec.attach(model)
pipespec.trust("trl")  # the trainer wraps the model's forward(); when it generates, that calls the original one


def reward(completions, **kwargs):
    """Many lines are good."""
    return [float(text.count("\n")) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    # With bf16 or gradient checkpointing TRL replaces code of the model, and transformers decodes.
    args = GRPOConfig(
        folder,
        max_steps=2,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=16,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    prompts = Dataset.from_dict({"prompt": ["def mean(values):", "def median(values):"]})
    trainer = GRPOTrainer(model, reward, args, prompts, processing_class=tokenizer)
    trainer.train()
print(trainer.state.log_history[-1])
print(pipe.report)
