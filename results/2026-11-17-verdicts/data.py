"""The shared mixture as two prepared folders, one to train on and one that is held out; three minutes of one core.

python results/2026-11-17-verdicts/data.py ../shared/data /tmp/lm
python scripts/carry_data.py pack /tmp/lm/train --held-out /tmp/lm/val --to carry/lm --mib 46   # as long again
for part in 1 2; do python scripts/carry_data.py unpack carry/lm/part-$part --to /tmp/lm/data; done
"""

import sys
from pathlib import Path

from meristem.data import load_tokenizer, prepare

if __name__ == "__main__":
    shared, out = map(Path, sys.argv[1:])
    tokenizer = load_tokenizer(shared / "tokenizers/gpt2/tokenizer.json")
    for name, files in (("val", ["val.jsonl.zst"]), ("train", [f"train-{i:02}-of-08.jsonl.zst" for i in range(8)])):
        paths = [shared / "lm_text" / file for file in files]
        settings = {"held_out": 0.0, "shard_tokens": 10_000_000, "source": f"lm_text, {name}"}
        index = prepare(paths, out / name, tokenizer=tokenizer, **settings)  # type: ignore[arg-type]
        print(f"{out / name}: {index.train.documents:,} documents, {index.train.tokens:,} tokens")
