#!/bin/bash
# The first call of a session, in the root of the repository: the first half of the data, and small studies on the CPU
# cores, which go on beside the other calls.
#
#     bash results/2026-11-17-verdicts/call_1.sh sgt-small prism-small-adamw      # with carry/lm/part-1 and carry/python
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
python3 scripts/carry_data.py unpack carry/lm/part-1 --to /dev/shm/data
bash results/2026-11-17-verdicts/cpu.sh 12 1600 "$@"
