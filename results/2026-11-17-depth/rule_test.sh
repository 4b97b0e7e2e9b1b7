#!/bin/bash
# Many small runs side by side, each on one core, in the root of the repository:
#
#     bash results/2026-11-17-depth/rule_test.sh LIST OUT PROCESSES SECONDS
#
# The lines of LIST are dealt out to the processes, whose results are OUT.0, OUT.1, ... put together in OUT at the end.
set -u
export PYTHONPATH=src OMP_NUM_THREADS=1
here=results/2026-11-17-depth list=$1 out=$2 processes=$3 seconds=$4 python=${PYTHON:-python3}
for number in $(seq 0 $((processes - 1))); do
    awk -v n="$processes" -v i="$number" 'NR % n == i' "$list" > "$out.$number.txt"
    $python scripts/runs.py $here/rule-test.toml "$out.$number.txt" --out "$out.$number" --limit "$seconds" > "$out.$number.log" 2>&1 &
done
wait
cat "$out".[0-9]* 2>/dev/null | grep '^{' > "$out"
rm -f "$out".[0-9]*.txt
wc -l < "$out"
