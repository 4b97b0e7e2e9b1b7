#!/bin/bash
# The second call of a session, in the root of the repository: the rest of the data; depths of small models on the CPU
# cores; on the GPU the grown allocations of 24 heads from the start, the check of Prism's rates, and Prism's last seeds.
#
#     bash results/2026-11-17-verdicts/call_2.sh      # with carry/lm/part-2 and carry/python; part 1 is there
set -u
begin=$SECONDS
export PYTHONPATH=src PYTHONUNBUFFERED=1
V=results/2026-11-17-verdicts H=results/2026-11-17-heads D=results/2026-11-17-depth
python3 scripts/carry_data.py unpack carry/lm/part-2 --to /dev/shm/data
for part in carry/python/part-*; do python3 scripts/carry_data.py unpack "$part" --to /tmp/python-data; done
(bash $D/rule_test.sh $D/rule-factors.txt "$OUT/rule-factors.jsonl" 11 480 > /tmp/factors.txt 2>&1 &)
cp $H/small-values-51m.jsonl "$OUT/"
python3 scripts/runs.py $H/51m.toml $H/small-values-51m.txt --out "$OUT/small-values-51m.jsonl" --facts heads --limit 120 | grep " s  "
echo "24 heads after $((SECONDS - begin)) s"
python3 scripts/runs.py $V/base-51m.toml $V/prism-51m-rates.txt --out "$OUT/prism-51m-rates.jsonl" --limit $((570 - SECONDS + begin)) > "$OUT/rates.txt" 2>&1
wc -l "$OUT"/*.jsonl
echo "all after $((SECONDS - begin)) s"
