# Shakespeare by characters, on two CPU cores: two cycles of GRPO, no controls. Plain training of
# this generator is far from exhausted, and lowers the loss more than GRPO.
#
#     python run_cycles.py --config config/shakespeare_complete_cpu.py
#     python train.py --config config/shakespeare_complete_cpu.py    # only its first stage
#
# Each script reads the section named after it; train.py --section natural_model reads that section.
# data/shakespeare_char/prepare.py takes the input.txt of its folder, else tiny Shakespeare, or the
# complete works if that cannot be fetched. For the complete works copy them there first:
# data/shakespeare_library/prepare.py writes them to the input.txt of its folder.

run_cycles = dict(
    out_dir="out/shakespeare_complete_cpu",
    dataset="shakespeare_char",
    num_cycles=2,
)

train = dict(
    out_dir="out/shakespeare_complete_cpu",
    dataset="shakespeare_char",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=128,
    batch_size=16,
    optimizer="muon",
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=300,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=100,
    patience=5,
)

# Trains the generator further on natural text. The reward model compares it with the generator.
natural_model = dict(
    out_dir="out/shakespeare_complete_cpu",
    checkpoint_name="natural_model.pt",
    dataset="shakespeare_char",
    batch_size=16,
    optimizer="muon",
    learning_rate=4e-3,
    weight_decay=0.01,
    grad_clip=1.0,
    max_iters=250,
    warmup_iters=20,
    lr_schedule="linear",
    eval_interval=100,
)

prepare_reward_data = dict(
    samples_per_chunk=10,
    max_blocks=200,
)

train_reward_model = dict(
    head="likelihood",
)

train_grpo = dict(
    prompts_per_step=16,
    group_size=8,
    max_steps=40,
    eval_interval=10,
)
