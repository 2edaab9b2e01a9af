# The reward of the project's first documents: one P(natural) per sequence, group-relative
# advantages of whole completions, and the KL to the start in the loss. On two CPU cores:
#
#     python run_cycles.py --config config/seeds_literal.py
#
# From those documents: P(natural) of the sequence as reward, 10 samples of a block, temperature 1,
# the threshold of 0.9. Chosen here: models whose reward predicts, learning rate, group size, and
# the weight of the KL. docs/results.md ("One P(natural) a sequence") has the results. The documents
# also have a frozen trunk with a head on its last token. It does not predict K/N:
# --train_reward_model.head last shows how GRPO refuses it.

# Corpora and models are those of config/shakespeare_library_cpu.py.
run_cycles = dict(
    dataset="shakespeare_play",
    natural_dataset="shakespeare_library",
    controls=False,
)

train = dict(
    dataset="shakespeare_play",
    n_layer=3,
    n_head=2,
    n_embd=64,
    block_size=80,
    batch_size=26,
    dropout=0.1,
    optimizer="muon",
    learning_rate=5e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=600,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=300,
)

natural_model = dict(
    dataset="shakespeare_library",
    init_from="scratch",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=80,
    batch_size=26,
    optimizer="muon",
    learning_rate=5e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=1250,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=625,
    seed=1338,
)

prepare_reward_data = dict(
    samples_per_chunk=10,
    max_blocks=60,
)

train_reward_model = dict(
    head="likelihood",
)

train_grpo = dict(
    dataset="shakespeare_play",
    credit="sequence",
    reward="natural",
    reward_threshold=0.9,
    prompts_per_step=16,
    group_size=8,
    updates_per_step=1,
    optimizer="adamw",
    max_steps=80,
    eval_interval=20,
    learning_rate=5e-4,
    lr_schedule="constant",
    beta=0.04,
)
