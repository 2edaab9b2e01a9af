"""Uses of TRL's GRPOTrainer, with CrossoverTrainer in its place.

pytest tests/test_interop_trl_uses.py
"""

import copy

import numpy as np
import pytest
import torch

from common.process import UserError
from interop.crossover_reward import CrossoverReward
from lm.causal import load_model, load_tokenizer

pytestmark = pytest.mark.interop
PROMPTS = ["One.", "A longer one", "three ", "Four"]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
SETTINGS = (
    "--max_steps 1 --num_generations 2 --per_device_train_batch_size 4 "
    "--per_device_eval_batch_size 4 --max_completion_length 4 --learning_rate .01 "
    "--logging_steps 1 --report_to none --save_strategy no --use_cpu True --bf16 False "
    "--disable_tqdm True"
)


def make_trainer(models, folder, settings="", kind=None, **arguments):
    """Return a trainer of two prompts a step; `settings` are options of GRPOConfig."""
    from datasets import Dataset
    from transformers import HfArgumentParser
    from trl import GRPOConfig

    from interop.crossover_trainer import CrossoverTrainer

    options = [*SETTINGS.split(), "--output_dir", str(folder), *settings.split()]
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(options)
    if kind is None:
        kind = CrossoverTrainer
    if issubclass(kind, CrossoverTrainer):
        arguments.setdefault("reward", CrossoverReward(models[1], models[0], weight=0.5))
    arguments.setdefault("model", models[0])
    arguments.setdefault("train_dataset", Dataset.from_dict({"prompt": 4 * PROMPTS}))
    return kind(args=args, **arguments)


def capitals(completions, **_):
    """Return the number of characters before "a" in each completion: capitals, digits, ..."""
    return [float(sum(letter < "a" for letter in str(text))) for text in completions]


class LastByte:
    """A callable with log_extra, log_metric and a column; None where the column is 0."""

    def __call__(self, completion_ids, factor, log_extra, log_metric, trainer_state, **_):
        lengths = [len(ids) for ids in completion_ids]
        log_extra("length", lengths)
        log_metric("mean_length", trainer_state.global_step + sum(lengths) / len(lengths))
        pairs = zip(completion_ids, factor, strict=True)
        return [factor * ids[-1] if factor else None for ids, factor in pairs]


async def first_byte(completion_ids, **_):
    return [ids[0] / 256 for ids in completion_ids]


def keeping(kind):
    """Return a subclass that keeps its batch before shuffling."""

    class Keeping(kind):
        def _generate_and_score_completions(self, inputs):
            self.kept = super()._generate_and_score_completions(inputs)
            return self.kept

    return Keeping


# Functions, where a name stands for a reward model; their weights; further settings.
FUNCTIONS = {
    "weights": ([capitals, first_byte], "--reward_weights .5 -2", ""),
    "None for one function": ([capitals, LastByte()], "", "--scale_rewards batch"),
    "None for all functions": ([LastByte()], "", "--scale_rewards none"),
    "a reward model": (
        [capitals, "model", LastByte()],
        "--reward_weights 1 2 .3",
        "--multi_objective_aggregation normalize_then_sum --scale_rewards none",
    ),
}


@pytest.mark.parametrize(("functions", "weights", "settings"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_advantages_of_functions_are_those_of_trl(models, tmp_path, functions, weights, settings):
    from datasets import Dataset
    from pandas import read_parquet
    from pandas.testing import assert_frame_equal
    from trl import GRPOTrainer

    from interop.crossover_trainer import CrossoverTrainer

    data = Dataset.from_dict({"prompt": PROMPTS, "factor": [2, 0, 2, 0]})

    def train(name, kind):
        trainer = make_trainer(
            models,
            tmp_path / name,
            f"--log_completions True {settings} {weights}",
            keeping(kind),
            reward_funcs=[models[0] if f == "model" else f for f in functions],
            train_dataset=data,
        )
        trainer.train()
        table = read_parquet(tmp_path / name / "completions/completions_00001.parquet")
        return trainer.kept, trainer.state.log_history[0], table

    theirs, figures, table = train("theirs", GRPOTrainer)
    both, both_figures, both_table = train("both", CrossoverTrainer)
    task_advantages = theirs["advantages"][:, None] * both["completion_mask"]
    if weights:  # TRL's scaling removes their common size
        sizes = [abs(float(weight)) for weight in weights.split()[1:]]
        task_advantages = task_advantages * max(sizes)
    assert task_advantages.abs().max() > 0.01
    torch.testing.assert_close(both["advantages"], task_advantages)
    for name, value in figures.items():
        if name.startswith(("reward", "frac", "completions", "mean_length")):
            assert both_figures[name] == value, name
    assert_frame_equal(both_table, table)


def check_training(trainer):
    """Train; check that figures are finite and that weights change. Return the figures by name."""
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps
    figures = {}
    for record in trainer.state.log_history:
        figures.update(record)
        assert np.isfinite([value for value in record.values() if value is not None]).all(), record
    after = trainer.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return figures


def rollout(prompts, trainer):
    """Return completions of the user's own generator, and a column for reward functions.

    An environment wrote the second token of the first completion.
    """
    ids = trainer.processing_class(prompts)["input_ids"]
    written = [[5, 6, 40], [7], [8, 9], [10]]
    zeros = [[0.0] * len(row) for row in written]
    return {
        "prompt_ids": ids,
        "completion_ids": written,
        "logprobs": zeros,
        "env_mask": [[1, 0, 1], [1], [1, 1], [1]],
        "score": [1, 2, 2, 3],
    }


class Game:
    """An environment of TRL with a reward of its own, which differs between completions."""

    def reset(self, **_):
        self.reward = torch.rand(()).item()

    def get_reward(self):
        return self.reward


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options)


@pytest.fixture(scope="module")
def named(models, tmp_path_factory):
    """Arguments of the trainer by name."""
    from datasets import Dataset, load_dataset
    from peft import get_peft_model
    from transformers import EarlyStoppingCallback

    texts = Dataset.from_dict({"prompt": 4 * PROMPTS})
    chats = Dataset.from_dict({"prompt": 4 * CHATS})
    few = texts.select(range(3))  # the last batch of an evaluation is not full
    folder = tmp_path_factory.mktemp("data")
    file = str(folder / "chats.jsonl")
    chats.to_json(file)
    model = load_model(models[0])
    return {
        "chats": chats,
        "iterable": texts.to_iterable_dataset(),
        "stream": load_dataset(
            "json", data_files=file, split="train", streaming=True, cache_dir=folder
        ),
        "few": few,
        "splits": {"a": few, "b": few},
        "rollout": rollout,
        "score": lambda score, **_: score,
        "module": model,
        "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None),
        "callbacks": [EarlyStoppingCallback(1)],
        "lora": lora(),
        "adapted": get_peft_model(load_model(models[0]), lora()),
    }


# Options of GRPOConfig, and arguments of the trainer as name=value, with values of `named`. The
# second step of two iterations is off the policy.
USES = """
--loss_type grpo --num_iterations 2 --max_steps 2
--loss_type bnpo --num_iterations 2 --max_steps 2
--loss_type dr_grpo --num_iterations 2 --max_steps 2
--loss_type dapo --num_iterations 2 --max_steps 2
--loss_type cispo --num_iterations 2 --max_steps 2
--loss_type sapo --num_iterations 2 --max_steps 2
--loss_type vespo --num_iterations 2 --max_steps 2
--loss_type luspo --importance_sampling_level sequence --num_iterations 2 --max_steps 2
--loss_type grpo --importance_sampling_level sequence --num_iterations 2 --max_steps 2
--loss_type dapo --importance_sampling_level sequence --num_iterations 2 --max_steps 2
--scale_rewards none
--scale_rewards batch
--multi_objective_aggregation normalize_then_sum
--beta .1 --use_bias_correction_kl True --num_iterations 2 --max_steps 2
--beta .1 --sync_ref_model True --ref_model_sync_steps 1
--epsilon .1 --epsilon_high .3 --delta 1.5 --num_iterations 2 --max_steps 2
--off_policy_mask_threshold .1 --num_iterations 2 --max_steps 2
--steps_per_generation 4 --gradient_accumulation_steps 2
--generation_batch_size 8 --max_steps 2
--num_iterations 2 --gradient_accumulation_steps 3 --max_steps 2
--num_generations 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 2
--mask_truncated_completions True --max_completion_length 12
--top_entropy_quantile .5
--entropy_coef .1
--use_adaptive_entropy True --max_steps 2
--gradient_checkpointing_kwargs {"use_reentrant":true}
--gradient_checkpointing False
--pad_to_multiple_of 8
--cast_lm_head_to_fp32 True --model_init_kwargs {"dtype":"bfloat16"}
--bf16 True
--max_steps -1 --num_train_epochs .5
--shuffle_dataset False
--cache_implementation static --generation_kwargs {}
--disable_dropout False
--optim sgd --lr_scheduler_type cosine --weight_decay .1 --max_grad_norm 0
--report_to tensorboard --logging_steps 2
--dataloader_num_workers 1
--remove_unused_columns True
--log_completions True --num_completions_to_print 1 --log_unique_prompts True
train_dataset=chats
train_dataset=chats --chat_template_kwargs {"enable_thinking":false}
train_dataset=iterable
train_dataset=stream --steps_per_generation 2 --max_steps 3
reward_funcs=score rollout_func=rollout
model=module optimizers=optimizers
model=adapted --beta .1
peft_config=lora --beta .1
peft_config=lora --gradient_checkpointing False
eval_dataset=few --eval_strategy steps --eval_steps 1
eval_dataset=few --eval_strategy steps --eval_steps 1 --num_generations_eval 1
eval_dataset=few --eval_strategy steps --eval_steps 1 --num_generations_eval 4 --log_completions True
eval_dataset=splits --eval_strategy steps --eval_steps 1 --eval_on_start True
eval_dataset=stream --eval_strategy steps --eval_steps 1
eval_dataset=few callbacks=callbacks --eval_strategy steps --eval_steps 1 --save_strategy steps --load_best_model_at_end True --metric_for_best_model eval_reward
"""


@pytest.mark.parametrize("use", USES.strip().splitlines())
def test_a_use_of_grpotrainer_works(models, named, tmp_path, use):
    values, dashes, options = use.partition("--")
    arguments = {"reward_funcs": [capitals]}
    for argument in values.split():
        name, value = argument.split("=")
        arguments[name] = named[value]
    figures = check_training(make_trainer(models, tmp_path, dashes + options, **arguments))
    prefixes = ["", "eval_"] if "eval_dataset" in arguments else [""]
    for prefix in prefixes:
        assert figures[f"{prefix}reward"] >= 0
        assert 0 < figures[f"{prefix}crossover/natural"] < 1


def test_cudnn_attention_is_off_in_generation_loss_and_backward(models, named, tmp_path):
    from lm.causal import complete

    noted = []

    def note(*_):
        noted.append(torch.backends.cuda.cudnn_sdp_enabled())

    trainer = make_trainer(models, tmp_path, eval_dataset=named["few"])
    trainer.model.model.layers[0].register_forward_pre_hook(note)
    trainer.model.lm_head.weight.register_hook(note)
    blocks = torch.ones(2, 5, dtype=torch.int64)
    for compute in (
        trainer.train,
        trainer.evaluate,
        lambda: complete(trainer.model, blocks, torch.tensor([1, 2]), seed=0),
    ):
        noted.clear()
        compute()
        assert noted and not any(noted)
        assert torch.backends.cuda.cudnn_sdp_enabled()


def test_tf32_of_a_reward_can_be_switched_off(models, tmp_path, monkeypatch):
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    make_trainer(models, tmp_path, "--tf32 False")
    assert precisions == ["highest"]


def test_a_batch_of_truncated_completions_teaches_and_logs_nothing(models, tmp_path, capsys):
    from interop.crossover_trainer import CrossoverTrainer

    class Truncated(CrossoverTrainer):
        """The second of three batches does not end."""

        def _generate_single_turn(self, prompt_ids, *_):
            end = [self.eos_token_ids[0]]
            if self.state.global_step == 1:
                end = []
            return [[40 + row, *end] for row in range(len(prompt_ids))], None

    settings = "--mask_truncated_completions True --max_steps 3 --logging_steps"
    figures = []
    for steps in (1, 3):
        trainer = make_trainer(models, tmp_path, f"{settings} {steps}", Truncated)
        trainer.train()
        figures += trainer.state.log_history[:-1]
        warnings = [line for line in capsys.readouterr().err.splitlines() if "WARN" in line]
        assert len(warnings) == 1 and "no token of the batch counts" in warnings[0]
    assert figures[1]["grad_norm"] == 0 and "crossover/divergence" not in figures[1]
    values = [record.get("crossover/divergence") for record in figures]
    assert values[3] == pytest.approx((values[0] + values[2]) / 2)


@pytest.mark.parametrize("load", [str, load_model])
def test_lora_reads_its_start_from_the_same_weights(models, tmp_path, load):
    model = load(models[0])
    tokenizer = load_tokenizer(models[0])
    reward = CrossoverReward(models[1], model, weight=0.5, tokenizer=tokenizer)
    arguments = {"model": model, "reward": reward, "peft_config": lora()}
    trainer = make_trainer(models, tmp_path, **arguments)
    assert reward.head.generator.model is trainer.model
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    before = reward.head.output(rows)
    check_training(trainer)
    torch.testing.assert_close(reward.head.output(rows), before)


@pytest.mark.parametrize("adapters", [lambda: None, lora])
def test_a_resumed_run_is_the_uninterrupted_one(models, tmp_path, adapters):
    settings = "--max_steps 3 --save_strategy steps --save_steps 1 --use_adaptive_entropy True"
    weights = []
    for start in (None, str(tmp_path / "checkpoint-1")):
        trainer = make_trainer(
            models, tmp_path, settings, reward_funcs=[capitals], peft_config=adapters()
        )
        trainer.train(resume_from_checkpoint=start)
        weights.append(trainer.model.state_dict())
    torch.testing.assert_close(weights[0], weights[1])


def test_an_environment_has_advantages(models, named, tmp_path):
    from interop.crossover_trainer import CrossoverTrainer

    kind = keeping(CrossoverTrainer)
    parts = {"train_dataset": named["chats"], "environment_factory": Game}
    trainer = make_trainer(models, tmp_path, "", kind, **parts)
    assert "rewards/no_task/mean" not in check_training(trainer)
    assert trainer.kept["advantages"].any()


def test_tokens_that_an_environment_wrote_have_no_advantage(models, tmp_path):
    from interop.crossover_trainer import CrossoverTrainer

    kind = keeping(CrossoverTrainer)
    parts = {"rollout_func": rollout, "reward_funcs": [capitals]}
    trainer = make_trainer(models, tmp_path, "", kind, **parts)
    trainer.train()
    is_foreign = trainer.kept["tool_mask"] == 0
    assert trainer.kept["completion_mask"][is_foreign].any()
    assert trainer.kept["advantages"].any() and not trainer.kept["advantages"][is_foreign].any()
    divergence = trainer._terms["divergence"]
    assert (divergence != 0).sum() == (trainer.kept["completion_mask"] * ~is_foreign).sum()


REJECTED = """
--temperature .7
--top_p .9
--top_k 5
--min_p .1
--repetition_penalty 1.2
--generation_kwargs {"num_beams":2}
--vllm_structured_outputs_regex a*
"""


@pytest.mark.parametrize("settings", REJECTED.strip().splitlines())
def test_sampling_that_is_not_plain_is_rejected(models, tmp_path, settings):
    name, _ = settings.removeprefix("--").split()
    with pytest.raises(UserError, match=f"{name}=.*: must be .*, the sampling that [^\n]*$"):
        make_trainer(models, tmp_path, settings)


def test_other_uses_that_cannot_work_are_rejected(models, named, tmp_path):
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self):
            self.tokenizer = load_tokenizer(models[0])

    model = load_model(models[0])
    model.config.image_token_id = 3
    with pytest.raises(UserError, match="the reward reads only text"):
        make_trainer(models, tmp_path, model=model, processing_class=Processor())
    reward = CrossoverReward(models[1], model)
    with pytest.raises(UserError, match="the reward holds the model that is trained"):
        make_trainer(models, tmp_path, model=model, reward=reward)
    other = {"reward": CrossoverReward(model, models[0]), "peft_config": lora()}
    with pytest.raises(UserError, match="the reward holds the model that is trained"):
        make_trainer(models, tmp_path, model=model, **other)
    with pytest.raises(UserError, match=r"the reward's generator by \d\.\d\d nats"):
        make_trainer(models, tmp_path, model=models[1]).train()
    with pytest.raises(UserError, match=r"reward_weights=\[2.0\]: there are no reward_funcs"):
        make_trainer(models, tmp_path, "--reward_weights 2")
    with pytest.raises(UserError, match="has no weight yet"):
        make_trainer(models, tmp_path, reward=reward)
    named["adapted"].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is an adapter: merge it"):
        make_trainer(models, tmp_path, model=str(tmp_path))
    with pytest.raises(UserError, match="is an adapter: merge it"):
        CrossoverReward(models[1], str(tmp_path))


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning", "PromptEncoder"])
def test_adapters_of_virtual_tokens_are_rejected(models, tmp_path, kind):
    import peft

    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UserError, match=f"{kind}Config: .*: use LoRA"):
        make_trainer(models, tmp_path, peft_config=config)


def test_empty_output_layers_are_rejected(models, tmp_path):
    """As DeepSpeed ZeRO stage 3 leaves them."""
    model = load_model(models[0])
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(UserError, match="is empty, as after loading with DeepSpeed ZeRO stage 3"):
        make_trainer(models, tmp_path, model=model)
    with pytest.raises(UserError, match="is empty"):
        CrossoverReward(models[1], model)


def test_figures_are_means_over_the_tokens_since_the_last_log(models, named, tmp_path):
    """Also if an evaluation interrupts the steps."""
    settings = (
        "--max_steps 2 --eval_strategy steps --eval_steps 1 --max_completion_length 12 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --logging_steps"
    )
    figures = []
    for steps in (1, 2):
        trainer = make_trainer(models, tmp_path, f"{settings} {steps}", eval_dataset=named["few"])
        trainer.train()
        figures += [record for record in trainer.state.log_history if "entropy" in record]
    values = [record["crossover/divergence"] for record in figures]
    lengths = [record["completions/mean_length"] for record in figures]
    assert lengths[0] != lengths[1]
    assert values[0] == pytest.approx(figures[0]["loss"])
    assert values[2] == pytest.approx(np.average(values[:2], weights=lengths[:2]))
