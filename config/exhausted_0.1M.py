# 0.1M parameters, trained long: whether plain training then gives no more is what benchmarks/exhaustion.py checks
# (docs/LOG.md). On tiny Shakespeare by characters, or with --dataset on another corpus:
#
#     python train.py --config config/exhausted_0.1M.py

train = dict(
    out_dir="out/exhausted_0.1M",
    dataset="shakespeare_char",
    n_layer=2,
    n_head=2,
    n_embd=64,
    block_size=128,
    batch_size=32,
    init="orthogonal",
    short_contexts=(8, 16),
    short_share=0.3,
    optimizer="muon",
    muon_learning_rate=0.03,
    muon_momentum=0.9,
    learning_rate=6e-3,
    weight_decay=0.01,
    grad_clip=1.0,
    max_iters=12000,
    warmup_iters=20,
    lr_schedule="cooldown",
    cooldown=0.7,
    min_lr=0.0,
    eval_interval=1000,
)
