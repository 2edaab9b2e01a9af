# The recipe of `run_cycles.py --text`: small models for two CPU cores, the whole run in 15 minutes. Block sizes follow
# the text's length and steps follow the text (text/own_corpus.py); the rest is as in
# config/shakespeare_library_cpu.py. Another one: --config FILE, or single settings as in --train.max_iters 8000.
#
#     python run_cycles.py --text my_novel.txt --natural_text other_novels/

train = dict(
    n_layer=2,
    n_head=2,
    n_embd=64,
    block_size=128,
    batch_size=16,
    dropout=0.05,
    short_contexts=(8, 16),
    optimizer="muon",
    learning_rate=2.5e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=4000,
    warmup_iters=3,
    lr_schedule="cooldown",
    keep="calibrated_loss",
    eval_interval=400,
)

natural_model = dict(
    init_from="scratch",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=128,
    batch_size=16,
    short_contexts=(8, 16),
    optimizer="muon",
    learning_rate=1e-2,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=1200,
    warmup_iters=3,
    lr_schedule="cooldown",
    keep="calibrated_loss",
    eval_interval=200,
    seed=1338,
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
    max_steps=120,
    learning_rate=1e-3,
    lr_schedule="linear",
    eval_interval=20,
)

# What the policy is compared with. The generator's recipe from new weights, in the seconds of natural model, reward
# model and GRPO together.
control_plain = dict(
    init_from="scratch",
    n_layer=2,
    n_head=2,
    n_embd=64,
    block_size=128,
    batch_size=16,
    dropout=0.05,
    short_contexts=(8, 16),
    optimizer="muon",
    learning_rate=2.5e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=10000,
    warmup_iters=3,
    lr_schedule="cooldown",
    keep="calibrated_loss",
    eval_interval=500,
)

# The natural model's distribution at prefixes of the generator's own text (off-policy), in GRPO's seconds.
control_distil = dict(
    credit="exact",
    prefixes="natural",
    prompts_per_step=16,
    group_size=8,
    max_steps=180,
    learning_rate=1e-3,
    lr_schedule="linear",
    eval_interval=20,
)
