"""A pretrained model goes on growing: it is imported, SGT loops two of its heads, and it is trained on meanwhile.

In the end it is exported, and transformers loads and runs it.

The Llama here is small and has random weights, so that nothing is downloaded. Any folder that holds config.json,
safetensors and tokenizer.json of a Llama, Mistral, SmolLM, Qwen2, Qwen3 or OLMo can stand in its place.
"""

import os
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from meristem import export_run, import_model, load_run, train
from meristem.config import build_config
from meristem.data import load_tokenizer, prepare

sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 320}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained("llama")

imported = import_model("llama", "runs/imported", tokenizer="bytes")
print(imported.plan)

sources = sorted(Path(os.__file__).parent.glob("a*.py"))
prepare(sources, "data", tokenizer=load_tokenizer(imported.path), held_out=0.2)
settings = {
    "model.start_from": str(imported.path),
    "data.path": "data",
    "train.steps": 40,
    "train.batch_size": 8,
    "train.device": "cpu",
    "optimizer.lr": 3e-3,
    "growth.policies": ["sgt"],
    "growth.sgt.heads_per_layer": 2,
    "growth.sgt.max_layers": 1,
    "growth.sgt.start": 10,
    "growth.sgt.window": 10,
}
outcome = train(build_config(settings), "runs/looped")

model = load_run(outcome.folder, device="cpu").model
print(f"held-out loss {outcome.held_out:.3f} after {outcome.step} updates; loops: {model.plan.loops}")

print(export_run(outcome.folder, "exported"))
exported = AutoModelForCausalLM.from_pretrained("exported")  # trust_remote_code=True where there is no Meristem
tokenizer = AutoTokenizer.from_pretrained("exported")
prompt = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(exported.generate(**prompt, max_new_tokens=20)[0]))
