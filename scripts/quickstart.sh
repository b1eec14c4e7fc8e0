#!/usr/bin/env bash
# The whole job on this machine, in a few minutes: raw text -> tokenizer -> indexed dataset -> parallel pretraining
# -> sharded checkpoint -> resume in another layout -> generated text. Every command is echoed: read it as a tutorial.
#
#   bash scripts/quickstart.sh [FOLDER]      # results go to FOLDER (default: quickstart/, made anew)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PATH="$(realpath -m "${VENV:-.venv}")/bin:$PATH"

OUT="${1:-quickstart}"
if [ -e "$OUT" ] && [ ! -f "$OUT/.quickstart" ]; then
    echo "quickstart: $OUT exists and was not made by this script; name another folder" >&2
    exit 2
fi
rm -rf "$OUT"
mkdir -p "$OUT"
touch "$OUT/.quickstart"

step() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() {
    printf '$'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

# All GPUs where there are some (an even number of them), else two ranks on the CPU, each with its share of the cores.
RANKS="$(python - <<'PY'
import torch
gpus = torch.cuda.device_count()
print(gpus if gpus >= 2 and gpus % 2 == 0 else (1 if gpus else 2))
PY
)"
if [ "$RANKS" = 1 ]; then SPLIT=1; else SPLIT=2; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( $(nproc) / RANKS > 0 ? $(nproc) / RANKS : 1 ))}"

step "1. Train a byte-pair tokenizer on the sample corpus (Moby Dick, public domain)"
run python tools/train_tokenizer.py --input data/moby_dick.jsonl --vocab-size 1024 --output "$OUT/tokenizer"

step "2. Turn the text into an indexed dataset: .bin holds the tokens, .idx where each document lies"
run python tools/preprocess_data.py --input data/moby_dick.jsonl --output-prefix "$OUT/moby_dick" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/tokenizer/vocab.json" \
    --merge-file "$OUT/tokenizer/merges.txt" --append-eod --workers 2
run python tools/inspect_dataset.py "$OUT/moby_dick_text_document" | tee "$OUT/dataset.txt"

cat >"$OUT/gpt.args" <<ARGS
# The model: 4 layers, 1.0M parameters.
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
--attention-dropout 0 --hidden-dropout 0
# The data.
--data-path $OUT/moby_dick_text_document --split 90,5,5 --num-workers 0
--tokenizer-type GPT2BPETokenizer --vocab-file $OUT/tokenizer/vocab.json --merge-file $OUT/tokenizer/merges.txt
# The recipe.
--micro-batch-size 8 --global-batch-size 16 --train-iters 400
--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20
--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
# What it reports and keeps.
--log-interval 50 --eval-interval 100 --eval-iters 8
--save $OUT/checkpoints --load $OUT/checkpoints --save-interval 200
--tensorboard-dir $OUT/tensorboard --metrics-file $OUT/metrics.jsonl
ARGS
step "3. Pretrain, every layer split over $SPLIT ranks (tensor parallel), and stop half-way"
run cat "$OUT/gpt.args"
run torchrun --standalone --nproc-per-node "$RANKS" pretrain_gpt.py "@$OUT/gpt.args" \
    --tensor-model-parallel-size "$SPLIT" --exit-interval 200

step "4. Resume from that checkpoint in another layout: the layers dealt over $SPLIT stages (pipeline parallel)"
run torchrun --standalone --nproc-per-node "$RANKS" pretrain_gpt.py "@$OUT/gpt.args" \
    --pipeline-model-parallel-size "$SPLIT"

step "5. What came of it"
run python tools/generate_text.py --load "$OUT/checkpoints" --prompt "The whale" "Call me" \
    --max-new-tokens 60 --temperature 0.8 --top-p 0.9
ENTROPY="$(sed -n 's/.*unigram entropy (nats): //p' "$OUT/dataset.txt")"
run python tools/plot_loss.py "$OUT/metrics.jsonl" --output "$OUT/loss.png" \
    --mark 200 "resumed: tensor $SPLIT -> pipeline $SPLIT" --reference "$ENTROPY" "unigram entropy"
python - "$OUT" "$ENTROPY" <<'PY'
import json
import math
import sys

out, entropy = sys.argv[1], float(sys.argv[2])
records = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
loss = [r["lm_loss"] for r in records if r.get("split") == "valid"][-1]
print(f"validation loss        {loss:.4f} nats a token (perplexity {math.exp(loss):.2f})")
print(f"unigram entropy        {entropy:.4f} nats a token: what knowing only token frequencies would give")
print(f"better than that by    {entropy - loss:.4f} nats")
print(f"checkpoint             {out}/checkpoints")
print(f"TensorBoard            tensorboard --logdir {out}/tensorboard")
print(f"loss curve             {out}/loss.png")
sys.exit(0 if loss <= entropy - 1 else "quickstart: the model has not learned what it should have")
PY
