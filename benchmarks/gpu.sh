#!/bin/bash
# What the project measures on one GPU, in less than ten minutes:
#
#     bash benchmarks/gpu.sh
#
# It needs a torch with CUDA, requirements-dev.txt and requirements-interop.txt, and the texts of
# Shakespeare as data/NAME/prepare.py leaves them, in data/shakespeare, _char, _play and _library.
# With NANOGPT, a checkout of nanoGPT, its bench.py is timed too. NVIDIA's name of the card comes
# first: figures of different cards cannot be compared.
set -e
out=${OUT:-out/gpu}
TIMEFORMAT="%R s"
seconds() {
    echo "+ $*"
    time "$@" > "$out/last.txt" 2>&1 || { tail -n 20 "$out/last.txt"; exit 1; }
}
mkdir -p "$out"
nvidia-smi --query-gpu=name --format=csv,noheader

seconds python -m pytest -n 8 -q -m "not interop"

# The first design's job: 878 blocks of 1,024 tokens, 20 samples each, 10.65M parameters
shape="--n_layer 6 --n_head 6 --n_embd 384 --block_size 1024"
seconds python train.py --out_dir "$out" --max_iters 20 --eval_interval 20 $shape --overwrite True
seconds python prepare_reward_data.py --model_path "$out/model_checkpoint.pt" --max_blocks 878 \
    --samples_per_chunk 20 --output_dir "$out/data"

seconds python run_cycles.py --config config/shakespeare_library_cpu.py --device cuda \
    --out_dir "$out/run"

python benchmarks/grpo.py --num_runs 3

# GPT-2's shape on one GPU: 12 sequences of 1,024 tokens at a time, 5 a step; 61,440 tokens
for compile in False True; do
    seconds python train.py --config config/train_gpt2.py --dataset shakespeare \
        --out_dir "$out/gpt2_$compile" --batch_size 12 --max_iters 50 --eval_interval 50 \
        --compile "$compile" --overwrite True
    tail -n 2 "$out/last.txt"
done
if [ -n "$NANOGPT" ]; then
    (cd "$NANOGPT" && python bench.py)
fi
