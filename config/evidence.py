# The experiment of benchmarks/evidence.py: works, seeds, arms and contrasts. docs/results.md has
# the protocol.
#
#     python benchmarks/evidence.py

# the sections of the models, and the works of the natural model
models = "config/shakespeare_library_cpu.py"

# The eight works that no model of `models` reads. Seed 6 has the first as its own, the second for
# validation, the third for the test, and the rest for its judge. Each next seed begins one work
# later.
works = (
    "HAMLET",
    "OTHELLO",
    "AS YOU LIKE IT",
    "MUCH ADO",
    "KING JOHN",
    "JULIUS CAESAR",
    "PERICLES",
    "TIMON",
)
seeds = (6, 7, 8, 9, 10)

judge_model = dict(max_iters=400, eval_interval=100, seed=2024)  # changes of natural_model
own_natural_model = dict(max_iters=300, eval_interval=100, dropout=0.1)  # changes of natural_model

# Options of train_grpo.py, for the seconds of GRPO; learning rates are those of the pilot. `cells`,
# `exchange`, `refresh`, `shuffled` and `reward_model` are options of benchmarks/evidence.py.
arms = dict(
    generator=dict(),
    natural=dict(),
    plain=dict(cells=({"dropout": 0.05, "max_iters": 9000}, {"dropout": 0.1, "max_iters": 9000})),
    grpo=dict(max_steps=80, learning_rate=4e-3),
    exact=dict(
        credit="exact", prompts_per_step=128, group_size=1, max_steps=66, learning_rate=2e-3
    ),
    off_policy=dict(credit="exact", prefixes="natural", max_steps=84, learning_rate=2e-3),
    mixed=dict(
        exchange="mixed",
        credit="exact",
        prompts_per_step=128,
        group_size=1,
        max_steps=75,
        learning_rate=2e-3,
    ),
    supervised=dict(exchange="teacher", max_steps=42, learning_rate=1e-3),
    placebo=dict(exchange="placebo", max_steps=80, learning_rate=4e-3),
    off_forward=dict(
        credit="exact", prefixes="natural", kl="forward", max_steps=84, learning_rate=2e-3
    ),
    exact_forward=dict(
        credit="exact",
        kl="forward",
        prompts_per_step=128,
        group_size=1,
        max_steps=66,
        learning_rate=1e-3,
    ),
    corrected=dict(exchange="head", max_steps=80, learning_rate=4e-3),
    refreshed=dict(exchange="head", refresh=20, max_steps=80, learning_rate=4e-3),
    shuffled=dict(exchange="head", refresh=20, shuffled=True, max_steps=80, learning_rate=4e-3),
    own_play=dict(reward_model="own_reward", max_steps=80, learning_rate=4e-3),
)

temperatures = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
figures = ("calibrated_loss", "share_of_ceiling", "judge_loss", "auc", "unknown_words", "seconds")
curves = dict(
    plain="s--", grpo="o-", exact="^-", off_policy="v-", supervised="p-", placebo="x:", natural="D:"
)

contrasts = dict(
    main=(
        ("H1", "calibrated_loss", "grpo", "plain"),
        ("H2", "calibrated_loss", "exact", "off_policy"),
        ("H3", "calibrated_loss", "grpo", "placebo"),
        ("H4", "judge_loss", "grpo", "plain"),
    ),
    reward=(
        ("S1", "calibrated_loss", "corrected", "grpo"),
        ("S2", "calibrated_loss", "refreshed", "corrected"),
        ("S3", "calibrated_loss", "refreshed", "shuffled"),
        ("S4", "calibrated_loss", "own_play", "plain"),
    ),
    further=(
        ("", "calibrated_loss", "grpo", "off_policy"),
        ("", "calibrated_loss", "exact", "grpo"),
        ("", "calibrated_loss", "exact", "plain"),
        ("", "calibrated_loss", "mixed", "off_policy"),
        ("", "calibrated_loss", "exact_forward", "off_forward"),
        ("", "calibrated_loss", "off_forward", "off_policy"),
        ("", "calibrated_loss", "grpo", "supervised"),
        ("", "calibrated_loss", "exact", "supervised"),
        ("", "judge_loss", "grpo", "off_policy"),
        ("", "judge_loss", "exact", "off_policy"),
        ("", "judge_loss", "grpo", "supervised"),
        ("", "judge_loss", "grpo", "placebo"),
        ("", "auc", "grpo", "plain"),
        ("", "auc", "exact", "off_policy"),
        ("", "auc", "grpo", "supervised"),
    ),
    # Added after the runs of the main arms: what a reviewer of the protocol missed.
    added=(
        ("", "judge_gap", "grpo", "plain"),
        ("", "unknown_words", "grpo", "plain"),
        ("", "calibrated_loss", "refreshed", "grpo"),
        ("", "calibrated_loss", "shuffled", "grpo"),
        ("", "calibrated_loss", "own_play", "generator"),
    ),
)
