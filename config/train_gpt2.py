# GPT-2's size, 124M parameters, with GPT-2 tokens on GPUs: 491,520 tokens per step, as in nanoGPT.
# `dataset` is a folder with train.bin and val.bin of a large corpus; nanoGPT's
# data/openwebtext/prepare.py writes them in this form. On 8 GPUs:
#
#     torchrun --standalone --nproc_per_node=8 train.py --config config/train_gpt2.py
#
# On one GPU, which makes all batches of a step:
#
#     python train.py --config config/train_gpt2.py --batch_size 12 --gradient_accumulation_steps 40

out_dir = "out/gpt2"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 96  # of all ranks together: 12 per GPU
gradient_accumulation_steps = 5

optimizer = "muon"
learning_rate = 4e-3  # of AdamW; Muon has 5 times this
weight_decay = 0.1
max_iters = 100000
lr_schedule = "cooldown"
warmup_iters = 700
eval_interval = 1000
dtype = "bfloat16"
compile = True
