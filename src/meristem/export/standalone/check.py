"""Does this model still say here what it said where it was exported?

Loads the model of this folder, and compares its logits with those in reference.safetensors. Prints the largest
difference, and ends with status 1 if it is above the tolerance:

    python check.py [--tolerance 1e-4]
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the model of this folder with its reference logits.")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of the largest logit, or of 1 if that is less")
    tolerance = parser.parse_args().tolerance
    folder = Path(__file__).resolve().parent
    reference = load_file(folder / "reference.safetensors")
    (architecture,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    auto = AutoModelForCausalLM if architecture.endswith("CausalLM") else AutoModelForSequenceClassification
    remote = (folder / "modeling_meristem.py").is_file()
    model = auto.from_pretrained(folder, trust_remote_code=remote, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=reference["input_ids"], attention_mask=reference["attention_mask"]).logits
    difference = (logits - reference["logits"]).abs().max().item()
    allowed = tolerance * max(1.0, reference["logits"].abs().max().item())
    print(f"largest difference of a logit: {difference:.2e} (allowed: {allowed:.2e})")
    return 0 if difference <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
