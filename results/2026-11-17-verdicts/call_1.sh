#!/bin/bash
# The first call of a session, in the root of the repository: the first half of the data, and a small study on the CPU
# cores, which goes on beside the other calls.
#
#     bash results/2026-11-17-verdicts/call_1.sh prism-small      # with carry/lm/part-1 and carry/python
set -u
export PYTHONPATH=src PYTHONUNBUFFERED=1
python3 scripts/carry_data.py unpack carry/lm/part-1 --to /dev/shm/data
bash results/2026-11-17-verdicts/cpu.sh "$1" 12 1600
