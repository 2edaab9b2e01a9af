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

base = "shakespeare_library_cpu.py"  # corpora and models

run_cycles = dict(
    controls=False,
)

train_grpo = dict(
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
