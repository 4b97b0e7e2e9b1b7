#!/bin/bash
# Small studies on the CPU cores beside the GPU, one after the other, in the root of the repository; they go on when the
# call has ended.
#
#     bash results/2026-11-17-verdicts/cpu.sh JOBS SECONDS STUDY...       # such as 12 1600 sgt-small prism-small-adamw
#
# The lines of a study are /tmp/STUDY/lines.jsonl, what it says /tmp/STUDY.txt. The repository is copied first: the next
# call may put other files here.
set -u
jobs=$1 end=$((SECONDS + $2)) here=results/2026-11-17-verdicts
shift 2
for part in carry/python/part-*; do python3 scripts/carry_data.py unpack "$part" --to /tmp/python-data; done
mkdir -p /tmp/repo && cp -r src scripts results /tmp/repo
cd /tmp/repo || exit 1
export PYTHONPATH=src PYTHONUNBUFFERED=1
cat > /tmp/studies.sh <<'STUDIES'
jobs=$1 end=$((SECONDS + $2)) here=$3
shift 3
for study in "$@"; do
    lines=()
    for file in "$here"/lines/"$study"/*.jsonl; do [ -f "$file" ] && lines+=(--lines "$file"); done
    ${PYTHON:-python3} -m meristem compare "$here/$study.toml" --out "/tmp/$study" --jobs "$jobs" \
        --limit $((end - SECONDS)) ${lines[@]+"${lines[@]}"} > "/tmp/$study.txt" 2>&1
done
STUDIES
setsid nohup bash /tmp/studies.sh "$jobs" $((end - SECONDS)) $here "$@" < /dev/null > /dev/null 2>&1 &
sleep 15
tail -3 "/tmp/$1.txt"
