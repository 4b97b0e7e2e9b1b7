#!/bin/bash
# The first call of a session, in the root of the repository: the first half of the data, and depths of small models on
# the CPU cores, which go on beside the other calls.
#
#     bash results/2026-11-17-verdicts/call_1.sh      # with carry/lm/part-1 and carry/python
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
python3 scripts/carry_data.py unpack carry/lm/part-1 --to /dev/shm/data
for part in carry/python/part-*; do python3 scripts/carry_data.py unpack "$part" --to /tmp/python-data; done
mkdir -p /tmp/repo && cp -r src scripts results /tmp/repo  # the next call may put other files here
cd /tmp/repo || exit 1
setsid nohup bash results/2026-11-17-depth/rule_test.sh results/2026-11-17-depth/rule-test-2.txt /tmp/rule-test-2 12 1650 \
    > /tmp/rule-test-2.log 2>&1 < /dev/null &
sleep 12
ls /tmp/rule-test-2
