# Shakespeare with GPT-2 tokens, a model of 10.65M parameters besides its embedding, for a GPU.
#
#     python data/shakespeare/prepare.py
#     python train.py --config config/train_shakespeare.py
#
# On a CPU, make it smaller: --n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12
# --max_iters 500

out_dir = "logs"  # of model_checkpoint.pt, which the guides use next
dataset = "shakespeare"

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
block_size = 1024
batch_size = 12

learning_rate = 1e-3
max_iters = 2000
warmup_iters = 100
eval_interval = 100
patience = 5
