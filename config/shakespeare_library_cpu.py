# A generator of one play, and a natural model of 28 other works: the reward knows what the
# generator does not.
#
#     python run_cycles.py --config config/shakespeare_library_cpu.py
#
# The natural model stands for what a user has: a pretrained model whose training text is not at
# hand. GRPO compares the tokens of 8 completions of a prompt, which the policy samples. The whole
# vocabulary instead of sampled tokens (credit="exact"), and supervised training on text of the
# natural model, gain more: docs/results.md.

# The text has all works, so that both corpora have the same characters. Works that are not named
# are in no part.
prepare = dict(
    source="complete",
    train_documents=("TWELFTH NIGHT",),
    val_documents=("COMEDY OF ERRORS",),
    test_documents=("TEMPEST",),
)

# No model reads Hamlet, Othello, As You Like It, Much Ado, King John, Julius Caesar, Pericles,
# Timon, and short poems.
prepare_natural = dict(
    source="complete",
    train_documents=(
        "ALL'S WELL",
        "ANTONY",
        "CORIOLANUS",
        "CYMBELINE",
        "HENRY IV, THE FIRST",
        "HENRY IV, SECOND",
        "LIFE OF KING HENRY V",
        "HENRY VI, FIRST",
        "HENRY THE SIXTH, SECOND",
        "HENRY THE SIXTH, THIRD",
        "HENRY THE EIGHTH",
        "KING LEAR",
        "LOVE'S LABOUR",
        "MACBETH",
        "MEASURE FOR MEASURE",
        "MERCHANT OF VENICE",
        "MERRY WIVES",
        "MIDSUMMER NIGHT",
        "RAPE OF LUCRECE",
        "RICHARD THE SECOND",
        "RICHARD III",
        "ROMEO AND JULIET",
        "SONNETS",
        "TAMING OF THE SHREW",
        "TITUS ANDRONICUS",
        "TROILUS",
        "TWO GENTLEMEN",
        "WINTER'S TALE",
    ),
    val_documents=("COMEDY OF ERRORS",),
    test_documents=("TEMPEST",),
)

run_cycles = dict(
    dataset="shakespeare_play_char",
    natural_dataset="shakespeare_library_char",
)

# Dropout, learning rate and steps: the point of the grid in docs/results.md with the lowest
# calibrated loss on the select part.
train = dict(
    dataset="shakespeare_play_char",
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
    dataset="shakespeare_library_char",
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
    dataset="shakespeare_play_char",
    prompts_per_step=16,
    group_size=8,
    max_steps=120,
    learning_rate=1e-3,
    lr_schedule="linear",
    eval_interval=20,
)

# The controls, which the policy is compared with. First, the generator's recipe from new weights,
# in the seconds of natural model, reward model and GRPO together.
control_plain = dict(
    dataset="shakespeare_play_char",
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

# Second, GRPO with the evidence of sampled tokens (credit=token, which run_cycles.py sets), in the
# seconds of GRPO.
control_sampled = dict(
    dataset="shakespeare_play_char",
    prompts_per_step=16,
    group_size=8,
    max_steps=120,
    learning_rate=1e-3,
    lr_schedule="linear",
    eval_interval=20,
)

# Third, the natural model's distribution at prefixes of natural text (off-policy), in the seconds
# of GRPO.
control_distil = dict(
    dataset="shakespeare_play_char",
    credit="exact",
    prefixes="natural",
    prompts_per_step=16,
    group_size=8,
    max_steps=180,
    learning_rate=1e-3,
    lr_schedule="linear",
    eval_interval=20,
)
