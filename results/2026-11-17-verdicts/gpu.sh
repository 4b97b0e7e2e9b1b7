#!/bin/bash
# One call on the machine, in the root of the repository: unpacks the data that have come, goes on with a study, and
# leaves its lines in $OUT.
#
#     bash results/2026-11-17-verdicts/gpu.sh STUDY JOBS SECONDS [options of compare]
#
# STUDY is a file here without .toml. Lines of earlier days travel with the working tree, in lines/STUDY/; a study
# and its "-first" have the same. With MPS=1 runs share the GPU by NVIDIA's MPS. What compare says of losses is kept in
# $OUT and not shown: nobody has to look before a study is complete.
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
here=results/2026-11-17-verdicts study=$1 jobs=$2 seconds=$3
shift 3
begun=$SECONDS group=${study%-first} data=${DATA:-/dev/shm/data} out=${PLACE:-/dev/shm}/$group python=${PYTHON:-python3}
for part in carry/lm/part-*; do
    [ -d "$part" ] && $python scripts/carry_data.py unpack "$part" --to "$data"
done
lines=()
for file in $here/lines/"$group"/*.jsonl; do
    [ -f "$file" ] && lines+=(--lines "$file")
done
if [ -n "${MPS:-}" ]; then
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
    mkdir -p /tmp/mps
    nvidia-cuda-mps-control -d || { echo "no MPS here" && unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY MPS; }
fi
mkdir -p "$out"
limit=$((seconds - SECONDS + begun))
timeout -s INT $((limit + 15)) $python -m meristem compare $here/"$study".toml --data.path "$data" --out "$out" \
    --jobs "$jobs" --limit $limit ${lines[@]+"${lines[@]}"} "$@" > "$OUT/$group.txt" 2> "$OUT/$group-progress.txt"
status=$?
[ $status -eq 0 ] || tail -5 "$OUT/$group-progress.txt"
grep -c held-out "$OUT/$group-progress.txt"
[ -n "${MPS:-}" ] && echo quit | nvidia-cuda-mps-control
cp "$out/lines.jsonl" "$OUT/$group.jsonl"
cp "$out/launches.jsonl" "$OUT/$group-launches.jsonl"
echo "status $status, $((SECONDS - begun)) s, $(wc -l < "$out/lines.jsonl") runs of this machine"
