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

for part in ${@:-tests headline train grpo run}; do
    case $part in
    tests)
        seconds "$python" -m pytest -n 8 -q -m "not interop"
        tail -n 1 "$out/last_tests.txt"
        ;;
    headline) # the first design's job: 878 blocks of 1,024 tokens, 20 samples each, 10.65M parameters
        shape="--n_layer 6 --n_head 6 --n_embd 384 --block_size 1024"
        seconds "$python" train.py --out_dir "$out" --max_iters 20 --eval_interval 20 $shape \
            --overwrite True
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
        ;;
    grpo)
        "$python" benchmarks/grpo.py --num_runs 2 || failed=1
        ;;
    run)
        seconds "$python" run_cycles.py --config config/shakespeare_library_cpu.py --device cuda \
            --out_dir "$out/run"
        ;;
    *)
        echo "$part: no such part; the parts are tests, headline, train, grpo and run"
        failed=1
        ;;
    esac
done
exit "${failed:-0}"
