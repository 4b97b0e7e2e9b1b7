# What a next head is worth at once in models of so many fixed heads: nothing is born.
begin=$SECONDS
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
R=results/2026-11-17-heads
F=heads,slope,certainty,worth,loss
mkdir -p /tmp/data/text
for f in carry/text/*.xz; do python3 -c "import lzma,shutil,sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2],'wb'))" $f /tmp/data/text/$(basename $f .xz) & done; wait
python3 -m meristem data prepare /tmp/data/text/train-00.jsonl --held-out 0.05 --out /tmp/data/bytes --workers 14 > $OUT/prepare.txt 2>&1
python3 -m meristem data prepare /tmp/data/text/*.jsonl --tokenizer carry/text/gpt2 --held-out 0.02 --out /tmp/data/gpt2 --workers 14 >> $OUT/prepare.txt 2>&1
echo "data after $((SECONDS-begin)) s"
nvidia-cuda-mps-control -d
for i in 1 2 3 4 5; do sed -n ${i}p $R/worth-small.txt > /tmp/w$i.txt; python3 scripts/runs.py $R/small.toml /tmp/w$i.txt --out /tmp/ws-$i.jsonl --facts $F > /tmp/ws-$i.txt 2>&1 & done
wait $(jobs -p)
cat /tmp/ws-?.jsonl > $OUT/worth-small.jsonl; tail -n 1 /tmp/ws-?.txt
echo quit | nvidia-cuda-mps-control
echo "small after $((SECONDS-begin)) s"
python3 scripts/runs.py $R/51m.toml $R/worth-51m.txt --out $OUT/worth-51m.jsonl --facts $F --limit 120 2>&1 | grep " s "
echo "all after $((SECONDS-begin)) s"
