#!/bin/bash
# Many small runs side by side, each on one core, in the root of the repository:
#
#     bash results/2026-11-17-depth/rule_test.sh LIST FOLDER PROCESSES SECONDS
#
# Every line of LIST is a process of its own, begun when a core is free, in the order of the list; its result is a file
# of FOLDER. After SECONDS no more are waited for; a line whose result is there is not run again.
set -u
export PYTHONPATH=src OMP_NUM_THREADS=1 RUNS_PYTHON=${PYTHON:-python3} FOLDER=$2
mkdir -p "$FOLDER"
one() {
    name=${1%% *}
    [ -s "$FOLDER/$name.jsonl" ] && return
    echo "$1" > "$FOLDER/$name.txt"
    $RUNS_PYTHON scripts/runs.py results/2026-11-17-depth/rule-test.toml "$FOLDER/$name.txt" --out "$FOLDER/$name.jsonl" \
        > "$FOLDER/$name.log" 2>&1
}
export -f one
grep -v '^#' "$1" | timeout -s KILL "$4" xargs -P "$3" -d '\n' -n 1 bash -c 'one "$1"' one
cat "$FOLDER"/*.jsonl 2>/dev/null | wc -l
