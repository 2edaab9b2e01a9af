#!/bin/bash
# What the project measures on one GPU, meant for ten minutes; or some parts of it:
#
#     bash benchmarks/gpu.sh [PART...]
#
# It needs a torch with CUDA, requirements-dev.txt and requirements-interop.txt, and the texts of
# Shakespeare as data/NAME/prepare.py leaves them, in data/shakespeare, _char, _play and _library.
# NVIDIA's name of the card comes first: figures of different cards cannot be compared.
python=${PYTHON:-python}
out=${OUT:-out/gpu}
TIMEFORMAT="%R s"
seconds() {
    echo "+ $*"
    time "$@" > "$out/last_$part.txt" 2>&1 || { tail -n 20 "$out/last_$part.txt"; echo "FAILED: $*"; failed=1; }
}
mkdir -p "$out"
nvidia-smi --query-gpu=name --format=csv,noheader

shape="--n_layer 6 --n_head 6 --n_embd 384 --block_size 1024" # of the first design, 10.65M parameters
make_generator() {
    [ -f "$out/model_checkpoint.pt" ] || seconds "$python" train.py --out_dir "$out" --max_iters 20 \
        --eval_interval 20 $shape --overwrite True
}

for part in ${@:-cudnn headline train profile tests grpo run}; do
    case $part in
    tests)
        seconds "$python" -m pytest -n 8 -q -m "not interop"
        tail -n 1 "$out/last_tests.txt"
        ;;
    cudnn) # whether anything that is generated still waits for cuDNN: both lines should agree
        make_generator
        for deprioritized in 0 1; do
            export TORCH_CUDNN_SDPA_DEPRIORITIZED=$deprioritized
            seconds "$python" prepare_reward_data.py --model_path "$out/model_checkpoint.pt" \
                --dataset shakespeare_char --max_blocks 64 --output_dir "$out/data_$deprioritized"
            "$python" benchmarks/grpo.py --num_runs 1 || failed=1
        done
        unset TORCH_CUDNN_SDPA_DEPRIORITIZED
        ;;
    headline) # the first design's job: 878 blocks of 1,024 tokens, 20 samples each (goal: 35 s)
        make_generator
        seconds "$python" prepare_reward_data.py --model_path "$out/model_checkpoint.pt" \
            --dataset shakespeare_char --max_blocks 878 --samples_per_chunk 20 --output_dir "$out/data"
        ;;
    train) # GPT-2's shape on one GPU: 12 sequences of 1,024 tokens at a time, 5 a step
        for compile in True False; do
            seconds "$python" train.py --config config/train_gpt2.py --dataset shakespeare \
                --out_dir "$out/gpt2_$compile" --batch_size 12 --max_iters 50 --eval_interval 50 \
                --compile "$compile" --overwrite True
            grep -o '"tokens_per_second": [0-9]*' "$out/gpt2_$compile/model_checkpoint.jsonl" |
                tail -n 5
        done
        # nanoGPT's positions and optimizer in our loop
        seconds "$python" train.py --config config/train_gpt2.py --dataset shakespeare \
            --out_dir "$out/gpt2_nanogpt" --batch_size 12 --max_iters 50 --eval_interval 50 \
            --position learned --optimizer adamw --learning_rate 6e-4 --overwrite True
        grep -o '"tokens_per_second": [0-9]*' "$out/gpt2_nanogpt/model_checkpoint.jsonl" | tail -n 5
        ;;
    profile) # three steps of GPT-2's shape, by kernels
        "$python" - <<'END' || failed=1
import os
import sys

import torch

sys.path.insert(0, os.getcwd())
from common.device import autocast, select_device
from model import GPT, GPTConfig
from training.optimizers import make_optimizers, take_step

device = select_device("auto")
small = dict(block_size=32, n_layer=2, n_head=2, n_embd=32) if device.type == "cpu" else {}
model = GPT(GPTConfig(bias=False, num_tokens=50257, **small)).to(device)
computed = torch.compile(model) if device.type == "cuda" else model
for optimizer in ("muon", "adamw"):
    optimizers = make_optimizers(model, optimizer, 1e-4)
    ids = torch.randint(50257, (12, 1 + model.config.block_size), device=device)

    def step():
        with autocast(device):
            computed(ids[:, :-1], ids[:, 1:])[1].backward()
        take_step(model, optimizers, 1.0)

    for _ in range(5):
        step()
    with torch.profiler.profile() as profiled:
        for _ in range(3):
            step()
    print(optimizer)
    order = f"self_{device.type}_time_total"
    print(profiled.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))
END
        ;;
    grpo)
        "$python" benchmarks/grpo.py --num_runs 2 || failed=1
        ;;
    run)
        seconds "$python" run_cycles.py --config config/shakespeare_library_cpu.py --device cuda \
            --out_dir "$out/run"
        ;;
    *)
        echo "$part: no such part; the parts are cudnn, headline, train, profile, tests, grpo and run"
        failed=1
        ;;
    esac
done
exit "${failed:-0}"
