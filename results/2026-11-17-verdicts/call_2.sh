#!/bin/bash
# The second call of a session, with carry/lm/part-2 (part 1 is there): the last seed of SGT's pair and one more rate for
# each arm of Prism's, four runs side by side; then Prism's pair at the better rates, for the rest of the seconds.
#
#     bash results/2026-11-17-verdicts/call_2.sh SECONDS
#
# The next calls need nothing carried, but `rates` of prism-51m-whole-first.toml as this call has settled them:
#     bash results/2026-11-17-verdicts/call_3.sh SECONDS
set -u
begun=$SECONDS here=results/2026-11-17-verdicts data=${DATA:-/dev/shm/data} python=${PYTHON:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1
for part in carry/lm/part-*; do
    # Removed, as gpu.sh would unpack it again under the runs that read it.
    [ -d "$part" ] && $python scripts/carry_data.py unpack "$part" --to "$data" && rm -r "$part"
done
bash $here/gpu.sh sgt-51m-first 2 "$1" ${OPTIONS:-} &
for arm in uniform-4 prism; do
    grep "^$arm" $here/prism-51m-edges.txt | sed "s|/dev/shm/data|$data|" > "/tmp/edge-$arm.txt"
    $python scripts/runs.py "${BASE:-$here/base-51m.toml}" "/tmp/edge-$arm.txt" --out "/tmp/edge-$arm.jsonl" &
done
wait
cat /tmp/edge-*.jsonl > "$OUT/prism-51m-edges.jsonl"
$python $here/settle.py $here/prism-51m-whole-first.toml $here/prism-51m-rates.jsonl "$OUT/prism-51m-edges.jsonl" || exit 1
cp $here/prism-51m-whole-first.toml /tmp/settled.toml
echo "rates after $((SECONDS - begun)) s"
bash $here/call_3.sh $(($1 - SECONDS + begun))
