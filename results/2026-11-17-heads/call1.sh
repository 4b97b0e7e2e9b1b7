# One call on the GPU machine: data, the small model's heads side by side, the 51M model's alone, head counts beside them.
begin=$SECONDS
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
R=results/2026-11-17-heads
mkdir -p /tmp/data/text
for f in carry/text/*.xz; do python3 -c "import lzma,shutil,sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2],'wb'))" $f /tmp/data/text/$(basename $f .xz) & done; wait
python3 -m meristem data prepare /tmp/data/text/train-00.jsonl --held-out 0.05 --out /tmp/data/bytes --workers 14 > $OUT/prepare.txt 2>&1
python3 -m meristem data prepare /tmp/data/text/*.jsonl --tokenizer carry/text/gpt2 --held-out 0.02 --out /tmp/data/gpt2 --workers 14 >> $OUT/prepare.txt 2>&1
tail -3 $OUT/prepare.txt; echo "data after $((SECONDS-begin)) s"
(python3 scripts/head_counts.py run --out $OUT/tune.jsonl --tasks tuning --seeds 1000-1005 --processes 8 --limit 420 > $OUT/tune.txt 2>&1 &)
python3 scripts/best_rates.py $R/small.toml $R/arms.txt --rates 2e-3 --lengths 150 --tune 99 --out $OUT/small-solo.jsonl --limit 60
echo "solo after $((SECONDS-begin)) s"
(nvidia-cuda-mps-control -d && echo "MPS is on") || echo "no MPS"
for i in 0 1 2 3 4 5; do python3 scripts/best_rates.py $R/small.toml $R/arms-grown.txt --rates 1e-3,2e-3,4e-3 --lengths 1300,1950 --tune 100 --part $i/6 --out /tmp/small-$i.jsonl --limit 200 > /tmp/small-$i.txt 2>&1 & done
wait $(jobs -p)
cat /tmp/small-?.jsonl > $OUT/small.jsonl; cat /tmp/small-?.txt | tail -40
echo quit | nvidia-cuda-mps-control 2>/dev/null
echo "small after $((SECONDS-begin)) s"
python3 scripts/best_rates.py $R/51m.toml $R/arms.txt --rates 2e-3,4e-3,8e-3 --lengths 270,540 --tune 100 --out $OUT/51m.jsonl --limit $((560-SECONDS+begin))
echo "all after $((SECONDS-begin)) s"; sleep 1; tail -2 $OUT/tune.txt
