#!/bin/bash
# Prism's pair at the rates that call_2.sh has settled, and then what is left of 354M; the lines of the small studies on
# the CPU cores as well. The same command goes on in the next calls.
#
#     bash results/2026-11-17-verdicts/call_3.sh SECONDS
set -u
begun=$SECONDS here=results/2026-11-17-verdicts depth=results/2026-11-17-depth
export PYTHONPATH=src PYTHONUNBUFFERED=1
cp /tmp/settled.toml $here/prism-51m-whole-first.toml
cp /tmp/settled.toml "$OUT"
MPS=1 bash $here/gpu.sh prism-51m-whole-first 4 "$1" ${OPTIONS:-}
left=$(($1 - SECONDS + begun))
if grep -Eq "16/16|; 16 done" "$OUT/prism-51m-whole-progress.txt" && [ $left -gt 40 ]; then
    cp -n $depth/final-354m.jsonl /dev/shm/final-354m.jsonl
    ${PYTHON:-python3} scripts/runs.py $depth/base-354m.toml $depth/final-354m.txt --out /dev/shm/final-354m.jsonl --limit $((left - 10))
    cp /dev/shm/final-354m.jsonl "$OUT"
fi
for file in /tmp/*-small*/lines.jsonl; do cp "$file" "$OUT/$(basename "$(dirname "$file")").jsonl"; done
cat /tmp/deeper/*.jsonl > "$OUT/rule-test-deeper.jsonl" 2> /dev/null
wc -l "$OUT"/*.jsonl
# No more than eight files come back: all in one.
tar -C "$OUT" -czf /tmp/all.tar.gz . && rm -rf "$OUT"/* && mv /tmp/all.tar.gz "$OUT"
