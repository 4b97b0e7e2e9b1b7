#!/bin/bash
# Small runs side by side, each on one core, in the root of the repository; runs named first-* are kept, for others to
# begin from:
#
#     bash results/2026-11-19-second-budget/run.sh LIST FOLDER PROCESSES
#
# They are run before the others. In LIST, FIRST stands for FOLDER. A line whose result is in FOLDER is not run again.
# On a GPU, with `python lists.py tune 768` as LIST, data in /dev/shm/data and four runs side by side:
#
#     BASE=results/2026-11-17-depth/base.toml MORE="--data.path /dev/shm/data --eval.windows 542" bash .../run.sh ... 4
set -u
export PYTHONPATH=src:results/2026-11-19-second-budget OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE RUNS_PYTHON=${PYTHON:-python3} FOLDER=$2 MORE=${MORE:-}
export BASE=${BASE:-results/2026-11-17-depth/rule-test.toml}
mkdir -p "$FOLDER"
one() {
    name=${1%% *} keep=()
    [ -s "$FOLDER/$name.jsonl" ] && return
    [[ $name == first-* ]] && keep=(--keep "$name" "$FOLDER/$name")
    echo "$1 $MORE" > "$FOLDER/$name.txt"
    $RUNS_PYTHON scripts/runs.py "$BASE" "$FOLDER/$name.txt" --out "$FOLDER/$name.jsonl" \
        ${keep[@]+"${keep[@]}"} > "$FOLDER/$name.log" 2>&1
}
export -f one
lines() { grep -v '^#' "$LIST" | grep "$@" | sed "s|FIRST|$FOLDER|" | xargs -r -P "$PROCESSES" -d '\n' -n 1 bash -c 'one "$1"' one; }
LIST=$1 PROCESSES=$3
lines '^first-'
lines -v '^first-'
cat "$FOLDER"/*.jsonl 2>/dev/null | wc -l
# What failed is named, with what it said last.
failed=0
for name in $(grep -v '^#' "$LIST" | cut -d' ' -f1); do
    [ -s "$FOLDER/$name.jsonl" ] || { failed=1; echo "no result: $name: $(tail -1 "$FOLDER/$name.log")"; }
done
exit $failed
