"""lm-eval with an attached model: the same scores, sooner. ``python examples/lm_eval_tasks.py TARGET TASK...``; without tasks one prompt is continued."""

import sys

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipespec
from pipespec.demo import family_path

target, *tasks = sys.argv[1:] or [family_path("target")]
model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
pipe = pipespec.attach(model)
lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(target), backend="causal", batch_size=1)
if tasks:
    print(lm_eval.simple_evaluate(model=lm, tasks=tasks, limit=20)["results"])
else:
    how = {"until": ["\n\n\n"], "max_gen_toks": 48, "do_sample": False}
    (text,) = lm.generate_until([Instance("generate_until", {}, ("def mean(values):", how), 0)])
    print(text)
print(pipe.report)
