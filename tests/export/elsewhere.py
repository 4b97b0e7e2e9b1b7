"""What somebody does with exported folders who has transformers and not Meristem; run by tests as a script.

Arguments: the folder of a language model, and of a classifier. Prints one JSON object.
"""

import json
import sys
from typing import Any


class Blocker:
    """Lets no import of Meristem through."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "meristem":
            raise ImportError(f"{name} is not on this machine")


sys.meta_path.insert(0, Blocker())

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

texts, rows = sys.argv[1:]
torch.manual_seed(0)
said: dict[str, Any] = {"version": transformers.__version__}

config = AutoConfig.from_pretrained(texts, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(texts, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(texts, trust_remote_code=True).eval()
said["kinds"] = [type(config).__name__, type(model).__name__]
inputs = tokenizer(["Page 7: 1", "Pa"], padding=True, return_tensors="pt")
ways: dict[str, dict[str, Any]] = {
    "greedy": {}, "uncached": {"use_cache": False}, "static": {"cache_implementation": "static"},
}  # fmt: skip
for name, how in ways.items():
    said[name] = model.generate(**inputs, max_new_tokens=6, **how)[:, -6:].tolist()
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
said["written"] = writer("Page", max_new_tokens=4, do_sample=False)[0]["generated_text"]
base = AutoModel.from_pretrained(texts, trust_remote_code=True)
said["base"] = type(base).__name__
newly = AutoModelForSequenceClassification.from_pretrained(texts, trust_remote_code=True, num_labels=3)
said["newly"] = list(newly(**inputs).logits.shape)

tokenizer = AutoTokenizer.from_pretrained(rows, trust_remote_code=True)
model = AutoModelForSequenceClassification.from_pretrained(rows, trust_remote_code=True).eval()
inputs = tokenizer(["w3 high w4", "odd"], padding=True, truncation=True, return_tensors="pt")
said["classes"] = model(**inputs).logits.tolist()
judge = pipeline("text-classification", model=model, tokenizer=tokenizer)
said["judged"] = judge(["w3 high w4", "odd"], top_k=None, truncation=True)
print(json.dumps(said))
