# GRPO and distillation where the generator has read more than the default's play: settings of
# run_cycles.py. Natural model and GRPO are those of the default, the generator has the recipe of
# the default's control_natural. Distillation has another rate, which is better here.
#
#     python benchmarks/seeds.py --run_config config/shakespeare_prefixes_cpu.py --seeds 1 2 3 \
#         --out_dir out/five --options=--dataset=shakespeare_five \
#         --sections train natural_model prepare_reward_data train_grpo control_distil
#
# Run benchmarks/corpora.py first. With --options=--dataset=shakespeare_library the generator reads
# all 28 works.

run_cycles = dict(
    natural_dataset="shakespeare_library",
)

train = dict(
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
)

natural_model = dict(
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
    prompts_per_step=48,
    max_steps=260,
    updates_per_step=3,
    optimizer="muon",
    learning_rate=4e-3,
    lr_schedule="linear",
    reward_threshold=1.0,
    eval_interval=65,
)

control_distil = dict(
    credit="exact",
    prefixes="natural",
    prompts_per_step=48,
    max_steps=420,
    updates_per_step=3,
    optimizer="muon",
    learning_rate=5e-3,
    lr_schedule="linear",
    eval_interval=105,
)
