#!/bin/bash
# The second call of a session, in the root of the repository: the rest of the data, the check of Prism's rates, and the
# rates of 354M.
#
#     bash results/2026-11-17-verdicts/call_2.sh      # with carry/lm/part-2; part 1 is there
set -u
begin=$SECONDS
export PYTHONPATH=src PYTHONUNBUFFERED=1
V=results/2026-11-17-verdicts D=results/2026-11-17-depth
python3 scripts/carry_data.py unpack carry/lm/part-2 --to /dev/shm/data
python3 scripts/runs.py $V/base-51m.toml $V/prism-51m-rates.txt --out "$OUT/prism-51m-rates.jsonl" --limit 450
echo "rates after $((SECONDS - begin)) s"
python3 scripts/runs.py $D/base-354m.toml $D/tune-354m.txt --out "$OUT/tune-354m.jsonl" --limit $((580 - SECONDS + begin))
cat /tmp/rule-test-2/*.jsonl > "$OUT/rule-test-2.jsonl"
pgrep -fc runs.py
wc -l "$OUT"/*.jsonl
echo "all after $((SECONDS - begin)) s"
