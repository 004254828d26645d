"""attach() to a model with a LoRA adapter. ``python examples/peft_model.py TARGET ADAPTER``; without arguments an adapter is made."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipespec
from pipespec.demo import family_path

target, *adapter = sys.argv[1:] or [family_path("target")]
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
if adapter:
    model = PeftModel.from_pretrained(model, adapter[0])
else:
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))

inputs = tokenizer("def mean(values):", return_tensors="pt")
alone = model.generate(**inputs, max_new_tokens=32, do_sample=False)
pipespec.attach(model)  # an n-gram index drafts; drafts=[...] adds models
fast = model.generate(**inputs, max_new_tokens=32, do_sample=False)
assert torch.equal(alone, fast)
print(tokenizer.decode(fast[0]))
print(pipespec.attached(model).report)
pipespec.detach(model)
