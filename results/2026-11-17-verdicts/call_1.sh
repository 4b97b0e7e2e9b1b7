#!/bin/bash
# The first call of a session, in the root of the repository: the first half of the data, and small studies on the CPU
# cores, which go on beside the other calls, as do deeper models for the test of the rule of `depth`.
#
#     bash results/2026-11-17-verdicts/call_1.sh together-small sgt-small-adamw prism-small-adamw      # with carry/lm/part-1 and carry/python
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
python3 scripts/carry_data.py unpack carry/lm/part-1 --to /dev/shm/data
bash results/2026-11-17-verdicts/cpu.sh 12 1600 "$@"
cd /tmp/repo || exit 1
setsid nohup bash results/2026-11-17-depth/rule_test.sh results/2026-11-17-depth/rule-test-deeper.txt /tmp/deeper 2 1560 \
    < /dev/null > /dev/null 2>&1 &
