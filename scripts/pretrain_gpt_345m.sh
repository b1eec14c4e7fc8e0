#!/usr/bin/env bash
# GPT-2 medium (345M parameters: 24 layers, 1024 wide, 16 heads) on one node, on all its GPUs, as in
# "Megatron-LM" (Shoeybi et al. 2019, arXiv:1909.08053, section 4): batch 512, cosine from 1.5e-4 to 1e-5.
#
#   DATA=corpus_text_document VOCAB=vocab.json MERGES=merges.txt bash scripts/pretrain_gpt_345m.sh [more flags]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$(realpath -m "${VENV:-.venv}")/bin:$PATH"  # made by scripts/setup.sh; else your own
: "${DATA:?set DATA to the prefix of a .bin/.idx dataset (tools/preprocess_data.py makes one)}"
: "${VOCAB:?set VOCAB to vocab.json}" "${MERGES:?set MERGES to merges.txt}"
CHECKPOINTS="${CHECKPOINTS:-checkpoints/gpt-345m}"
GPUS="${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)}"
if [ "$GPUS" = 0 ]; then
    echo "pretrain_gpt_345m.sh: no GPUs found; set GPUS=N to start N ranks all the same" >&2
    exit 2
fi

exec torchrun --standalone --nproc-per-node "$GPUS" pretrain_gpt.py \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 8 --global-batch-size 512 --train-iters 300000 \
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 3000 --lr-decay-iters 300000 \
    --weight-decay 0.01 --clip-grad 1.0 --init-method-std 0.02 \
    --attention-dropout 0.1 --hidden-dropout 0.1 --bf16 --overlap-grad-reduce \
    --data-path "$DATA" --split 949,50,1 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB" --merge-file "$MERGES" \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 2000 --exit-signal-handler \
    --log-interval 100 --log-throughput --eval-interval 1000 --eval-iters 10 \
    --tensorboard-dir "$CHECKPOINTS/tensorboard" --metrics-file "$CHECKPOINTS/metrics.jsonl" \
    "$@"
