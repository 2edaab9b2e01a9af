# The capacity-limited regime of docs/evidence.md: 18 plays and poems of Shakespeare to train on, a generator of 0.1M
# parameters whose plain training is exhausted (benchmarks/exhaustion.py), under a natural model of 0.8M.
#
#     python benchmarks/evidence.py --phase exploratory --regimes capacity_limited
#
# All models are those of the last step.

run_cycles = dict(
    natural_models=1,
)

train = dict(
    out_dir="out/evidence_capacity_limited",
    dataset="out/evidence/corpus_capacity_limited",
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
    max_iters=15000,
    warmup_iters=20,
    lr_schedule="cooldown",
    cooldown=0.7,
    min_lr=0.0,
    eval_interval=1000,
)

natural_model = dict(
    out_dir="out/evidence_capacity_limited",
    dataset="out/evidence/corpus_capacity_limited",
    init_from="scratch",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=128,
    batch_size=16,
    init="orthogonal",
    short_contexts=(8, 16),
    short_share=0.3,
    optimizer="muon",
    muon_learning_rate=0.05,
    muon_momentum=0.85,
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=2500,
    warmup_iters=3,
    lr_schedule="cooldown",
    min_lr=0.0,
    eval_interval=300,
)

# The plain arm. Its steps take the seconds of the on-policy arm (reward data and reward model included) and a fifth of
# the natural models', as measured with seed 0.
control_plain = dict(
    dataset="out/evidence/corpus_capacity_limited",
    batch_size=32,
    optimizer="muon",
    muon_learning_rate=9e-3,
    muon_momentum=0.9,
    learning_rate=1.8e-3,
    weight_decay=0.01,
    grad_clip=1.0,
    max_iters=3000,
    warmup_iters=20,
    lr_schedule="cooldown",
    cooldown=1.0,
    min_lr=0.0,
    eval_interval=1000,
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
