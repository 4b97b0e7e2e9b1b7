# One call: a 124M run and its pruning, then 24 heads at 51M placed in three ways; head counts on the CPU cores meanwhile.
begin=$SECONDS
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
R=results/2026-11-17-heads
mkdir -p /tmp/data/text
for f in carry/text/*.xz; do python3 -c "import lzma,shutil,sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2],'wb'))" $f /tmp/data/text/$(basename $f .xz) & done; wait
python3 -m meristem data prepare /tmp/data/text/*.jsonl --tokenizer carry/text/gpt2 --held-out 0.02 --out /tmp/data/gpt2 --workers 14 > $OUT/prepare.txt 2>&1
tail -1 $OUT/prepare.txt; echo "data after $((SECONDS-begin)) s"
(python3 scripts/head_counts.py run --out $OUT/second-test.jsonl --tasks second-test --seeds 4000-4009 --processes 12 --limit 510 > /tmp/heads.txt 2>&1 &)
echo "base --train.seed 2 --data.seed 2 --train.steps 800 --optimizer.lr 3e-3 --data.path /tmp/data/gpt2" > /tmp/base.txt
python3 scripts/runs.py results/2026-11-17-stacking/base.toml /tmp/base.txt --out $OUT/base.jsonl --keep base /tmp/base 2>&1 | tail -1
echo "base after $((SECONDS-begin)) s"
timeout 260 python3 scripts/prune_124m.py /tmp/base --out $OUT/prune.json --limit 215 > $OUT/prune.txt 2>&1; tail -4 $OUT/prune.txt
echo "pruned after $((SECONDS-begin)) s"
python3 scripts/runs.py $R/51m.toml $R/budget-51m.txt --out $OUT/budget-51m.jsonl --facts heads,demand,worth,predicted_heads --limit $((560-SECONDS+begin)) 2>&1 | grep -E " s  |no time"
echo "all after $((SECONDS-begin)) s"; wc -l $OUT/second-test.jsonl
