# nanoGPT's own recipe for a CPU, on Shakespeare by characters. shakespeare_complete_cpu.py is timed
# against it.
#
#     python data/shakespeare_char/prepare.py
#     python train.py --config config/nanogpt_cpu.py

train = dict(
    out_dir="out/nanogpt_cpu",
    dataset="shakespeare_char",
    n_layer=4,
    n_head=4,
    n_embd=128,
    dropout=0.0,
    position="learned",
    block_size=64,
    batch_size=12,
    optimizer="adamw",
    learning_rate=1e-3,
    max_iters=2000,
    warmup_iters=100,
    eval_interval=2000,
)
