"""Do the graphs of this folder still say here what the model said where it was exported?

Runs model.onnx in onnxruntime, and compares its logits with those in reference.safetensors. Prints the largest
difference, and ends with status 1 if it is above the tolerance:

    python check.py [--tolerance 1e-4]
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from safetensors.numpy import load_file


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the graph of this folder with its reference logits.")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of the largest logit, or of 1 if that is less")
    tolerance = parser.parse_args().tolerance
    folder = Path(__file__).resolve().parent
    reference = load_file(folder / "reference.safetensors")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {name: reference[name] for name in ("input_ids", "attention_mask")})
    difference = float(np.abs(logits - reference["logits"]).max())
    allowed = tolerance * max(1.0, float(np.abs(reference["logits"]).max()))
    print(f"largest difference of a logit: {difference:.2e} (allowed: {allowed:.2e})")
    return 0 if difference <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
