# Depth at equal FLOPs on the GPU; the third test of head counts on the CPU cores meanwhile. Data: carry/lm/part-1 came before.
begin=$SECONDS
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
python3 scripts/carry_data.py unpack carry/lm/part-2 --to /dev/shm/data | tail -1
echo "data after $((SECONDS-begin)) s"
(python3 scripts/head_counts.py run --out $OUT/third-test.jsonl --tasks third-test --seeds 5000-5009 --processes 13 --limit 335 > /tmp/heads.txt 2>&1 &)
sed 's|$| --data.path /dev/shm/data|; s|^#.*||' results/2026-11-17-depth/first.txt > /tmp/list.txt
python3 scripts/runs.py results/2026-11-17-depth/base.toml /tmp/list.txt --out $OUT/depth.jsonl --facts layers,heads,promise,price,rule --limit $((360-SECONDS+begin)) > $OUT/depth.txt 2>&1; grep -E " s  |no time|Error" $OUT/depth.txt
echo "all after $((SECONDS-begin)) s"; sleep 8; wc -l $OUT/third-test.jsonl
