# The whole loop on two CPU cores in under ten minutes, where it has something to give: few data, a generator that gains
# nothing by further steps of its own recipe, and natural models that know more together than the generator does.
#
#     python run_cycles.py --config config/shakespeare_char_cpu.py
#
# The policy is trained by the exact gradient over the vocabulary (credit="exact") of KL(mixture || policy), not
# by GRPO's group-relative advantages. config/shakespeare_complete_cpu.py is the loop in GRPO's form on the complete
# works. Each script reads the section named after it; train.py --section NAME reads natural_model or control_plain.

# A MIDSUMMER NIGHT'S DREAM is in no part; its characters are in the vocabulary.
prepare = dict(
    source="complete",
    plays=("COMEDY OF ERRORS", "MIDSUMMER NIGHT", "TEMPEST", "TWELFTH NIGHT"),
    train_documents=("TWELFTH NIGHT",),
    val_documents=("COMEDY OF ERRORS",),
    test_documents=("TEMPEST",),
)

run_cycles = dict(
    out_dir="out/shakespeare_char_cpu",
    dataset="shakespeare_plays_char",
    num_cycles=1,
    natural_models=3,
    grpo_step_seconds=1.9,
    plain_step_seconds=0.167,
)

train = dict(
    out_dir="out/shakespeare_char_cpu",
    dataset="shakespeare_plays_char",
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
    max_iters=200,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=25,
    patience=5,
)

# Members of the ensemble of natural text: the same recipe from other weights.
natural_model = dict(
    out_dir="out/shakespeare_char_cpu",
    dataset="shakespeare_plays_char",
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
    max_iters=200,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=25,
    seed=1338,
)

# Plain training for the policy's seconds, at 0.12 of the generator's rate and with dropout.
control_plain = dict(
    dataset="shakespeare_plays_char",
    batch_size=16,
    dropout=0.1,
    optimizer="muon",
    learning_rate=1.2e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    warmup_iters=3,
    lr_schedule="linear",
    eval_interval=50,
)

prepare_reward_data = dict(
    samples_per_chunk=10,
    max_blocks=200,
)

train_reward_model = dict(
    head="likelihood",
)

train_grpo = dict(
    prompts_per_step=64,
    group_size=1,
    max_steps=40,
    learning_rate=1e-3,
    lr_schedule="linear",
    credit="exact",
    kl="forward",
    eval_interval=10,
)
