#!/bin/bash
# A small study on the CPU cores beside the GPU, in the root of the repository; it goes on when the call has ended.
#
#     bash results/2026-11-17-verdicts/cpu.sh STUDY JOBS SECONDS       # such as prism-small 12 1600
#
# Its lines are /tmp/STUDY/lines.jsonl. The repository is copied first: the next call may put other files here.
set -u
study=$1 jobs=$2 seconds=$3 here=results/2026-11-17-verdicts
for part in carry/python/part-*; do python3 scripts/carry_data.py unpack "$part" --to /tmp/python-data; done
mkdir -p /tmp/repo && cp -r src scripts results /tmp/repo
cd /tmp/repo || exit 1
export PYTHONPATH=src PYTHONUNBUFFERED=1
lines=()
for file in $here/lines/"$study"/*.jsonl; do [ -f "$file" ] && lines+=(--lines "$file"); done
setsid nohup ${PYTHON:-python3} -m meristem compare $here/"$study".toml --out /tmp/"$study" --jobs "$jobs" --limit "$seconds" \
    ${lines[@]+"${lines[@]}"} > /tmp/"$study".txt 2>&1 < /dev/null &
sleep 15
tail -3 /tmp/"$study".txt
