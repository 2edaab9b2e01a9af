# The data-limited regime of docs/evidence.md: two plays of Shakespeare to train on, a generator of 0.8M parameters with
# dropout whose plain training is exhausted (benchmarks/exhaustion.py), three natural models of the same size.
#
#     python benchmarks/evidence.py --regime data_limited
#
# All models are those of the last step. Rates, dropout and steps were chosen with seed 0 on selection text.

run_cycles = dict(
    natural_models=3,
)

train = dict(
    out_dir="out/evidence_data_limited",
    dataset="out/evidence/corpus_data_limited",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=128,
    batch_size=16,
    dropout=0.05,
    init="orthogonal",
    short_contexts=(8, 16),
    short_share=0.3,
    optimizer="muon",
    muon_learning_rate=0.05,
    muon_momentum=0.85,
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=1600,
    warmup_iters=3,
    lr_schedule="cooldown",
    min_lr=0.0,
    eval_interval=400,
)

natural_model = dict(
    out_dir="out/evidence_data_limited",
    dataset="out/evidence/corpus_data_limited",
    init_from="scratch",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=128,
    batch_size=16,
    dropout=0.05,
    init="orthogonal",
    short_contexts=(8, 16),
    short_share=0.3,
    optimizer="muon",
    muon_learning_rate=0.05,
    muon_momentum=0.85,
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=1600,
    warmup_iters=3,
    lr_schedule="cooldown",
    min_lr=0.0,
    eval_interval=400,
)

# The plain arm. Its steps take at least the seconds of the on-policy arm (reward data and reward model included) and a
# fifth of the natural models'. benchmarks/evidence.py replaces its rates by the base's (--plain_rate 1).
control_plain = dict(
    dataset="out/evidence/corpus_data_limited",
    batch_size=16,
    dropout=0.1,
    optimizer="muon",
    muon_learning_rate=6e-3,
    muon_momentum=0.85,
    learning_rate=1.2e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=2200,
    warmup_iters=3,
    lr_schedule="cooldown",
    cooldown=1.0,
    min_lr=0.0,
    eval_interval=400,
)

prepare_reward_data = dict(
    samples_per_chunk=4,
    max_blocks=200,
)

train_reward_model = dict(
    head="likelihood",
)

# The on-policy arm; the off-policy arm has states="natural" besides. No stop but the last step, which is kept.
train_grpo = dict(
    prompts_per_step=64,
    group_size=1,
    max_steps=100,
    learning_rate=1e-3,
    lr_schedule="linear",
    credit="distribution",
    divergence_beta=0.0,
    eval_interval=1000,
    best_by="last",
    reward_threshold=1.0,
    plateau_patience=1000,
    update_kl_cap=100.0,
    start_kl_cap=100.0,
    natural_loss_cap=100.0,
)
