#!/bin/bash
# The second call of a session: the rest of the data, and SGT's primary contrast. The same command goes on in the next
# calls, without anything to carry.
#
#     bash results/2026-11-17-verdicts/call_2.sh SECONDS      # with carry/lm/part-2; part 1 is there
set -u
MPS=1 bash results/2026-11-17-verdicts/gpu.sh sgt-51m-first 4 "$1"
python3 results/2026-11-17-verdicts/chosen.py "$OUT/sgt-51m.jsonl"
for file in /tmp/*-small*/lines.jsonl; do cp "$file" "$OUT/$(basename "$(dirname "$file")").jsonl"; done
wc -l "$OUT"/*.jsonl
