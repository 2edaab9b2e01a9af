# A generator of one play, and a natural model of 28 other works: the reward knows what the
# generator does not.
#
#     python run_cycles.py --config config/shakespeare_library_cpu.py
#
# The natural model stands for what a user has: a pretrained model whose training text is not at
# hand. GRPO moves the generator toward it at the prefixes that the generator writes itself, by the
# expectation over the whole vocabulary (credit=auto: exact). docs/results.md has its figures.

# Each corpus's prepare.py lists its works. Both have byte-pair tokens learned from the 28 works.

run_cycles = dict(
    dataset="shakespeare_play",
    natural_dataset="shakespeare_library",
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
    prompts_per_step=48,
    max_steps=260,
    updates_per_step=3,
    optimizer="muon",
    learning_rate=4e-3,
    lr_schedule="linear",
    reward_threshold=1.0,
    eval_interval=65,
)

# The controls, which the policy is compared with. First, the generator's recipe from new weights,
# in about the seconds of generator and GRPO together.
control_plain = dict(
    dataset="shakespeare_play",
    init_from="scratch",
    n_layer=3,
    n_head=2,
    n_embd=64,
    block_size=80,
    batch_size=26,
    dropout=0.2,
    optimizer="muon",
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=2500,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=500,
)

# Second, the policy's target at prefixes of natural text, in no fewer seconds than GRPO.
control_distil = dict(
    dataset="shakespeare_play",
    credit="exact",
    prefixes="natural",
    prompts_per_step=48,
    max_steps=420,
    updates_per_step=3,
    optimizer="muon",
    learning_rate=3e-3,
    lr_schedule="linear",
    eval_interval=105,
)

# Third, the natural model's text in place of its distribution: a model of the policy's size that
# learns it for GRPO's seconds.
control_natural = dict(
    dataset="shakespeare_library",
    init_from="scratch",
    n_layer=3,
    n_head=2,
    n_embd=64,
    block_size=80,
    batch_size=26,
    optimizer="muon",
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=2700,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=675,
    seed=1339,
)
