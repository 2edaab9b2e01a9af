# A generator of one play, and a natural model of 28 other works: the reward knows what the
# generator does not.
#
#     python run_cycles.py --config config/shakespeare_library_cpu.py
#
# The natural model stands for what a user has: a pretrained model whose training text is not at
# hand. GRPO moves the generator toward it at the prefixes that the generator writes itself, by the
# expectation over the whole vocabulary (credit=auto: exact). docs/results.md has its figures.

# Byte-pair tokens learned from the 28 works, for both corpora. Works that are not named are in no
# part.
prepare = dict(
    source="complete",
    tokenizer="data/shakespeare_library",
    train_documents=("TWELFTH NIGHT",),
    val_documents=("COMEDY OF ERRORS",),
    test_documents=("TEMPEST",),
)

# No model reads Hamlet, Othello, As You Like It, Much Ado, King John, Julius Caesar, Pericles,
# Timon, and short poems.
prepare_natural = dict(
    source="complete",
    tokenization="learned_bpe",
    vocab_size=320,
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
    short_contexts=(8, 16),
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
    n_layer=3,
    n_head=2,
    n_embd=64,
    block_size=80,
    batch_size=26,
    short_contexts=(8, 16),
    optimizer="muon",
    learning_rate=1e-2,
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
    group_size=1,
    max_steps=130,
    updates_per_step=3,
    optimizer="muon",
    learning_rate=8e-3,
    lr_schedule="linear",
    reward_threshold=1.0,
    eval_interval=43,
)

# The controls, which the policy is compared with. First, the generator's recipe from new weights,
# in the seconds of natural model, reward model and GRPO together.
control_plain = dict(
    dataset="shakespeare_play",
    init_from="scratch",
    n_layer=3,
    n_head=2,
    n_embd=64,
    block_size=80,
    batch_size=26,
    dropout=0.2,
    short_contexts=(8, 16),
    optimizer="muon",
    learning_rate=5e-3,
    weight_decay=0.1,
    grad_clip=0.0,
    max_iters=2000,
    warmup_iters=3,
    lr_schedule="cooldown",
    eval_interval=400,
)

# Second, GRPO of sampled tokens in the seconds of the policy: groups of 8 completions.
control_sampled = dict(
    dataset="shakespeare_play",
    prompts_per_step=16,
    group_size=8,
    max_steps=100,
    optimizer="muon",
    learning_rate=4e-3,
    lr_schedule="linear",
    reward_threshold=1.0,
    eval_interval=50,
)

# Third, the natural model's distribution at prefixes of natural text (off-policy), in the seconds
# of the policy.
control_distil = dict(
    dataset="shakespeare_play",
    credit="exact",
    prefixes="natural",
    prompts_per_step=48,
    group_size=1,
    max_steps=150,
    updates_per_step=3,
    optimizer="muon",
    learning_rate=8e-3,
    lr_schedule="linear",
    eval_interval=50,
)
