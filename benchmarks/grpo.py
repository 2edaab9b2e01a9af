"""A GRPO step against TRL's on the same work: seconds a step, in turns, as ratios.

    python benchmarks/grpo.py --num_runs 3

The work: 128 completions of 96 tokens after prompts of 32, groups of 8, GPT-2's shape of 4 layers and 128 channels, 67
tokens, one optimizer update a step. Ours is timed with two reward models: the seeds' head on the start's trunk, with
the KL in the loss (beta 0.04) as TRL has it, and the default, a likelihood head on a natural model and the generator,
with the choices that train_grpo.py makes for it. TRL's reward costs nothing. Models are untrained: speed does not
depend on what they know. Without TRL (requirements-bench.txt) ours is timed alone.
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import train_grpo
from generation.completions import Completer
from generation.sampling import Sampling
from grpo import rollouts
from grpo.policy_evaluation import draw_prompts
from model import GPT, GPTConfig
from reward.frozen_scorer import RewardScorer
from reward.heads import LastRewardModel, LikelihoodRewardModel, RewardModel
from runtime.cli import parse_settings
from runtime.distributed import Ranks, parallel
from runtime.process import run_main
from runtime.run_log import say
from runtime.settings import Settings, setting
from training.optimizers import make_optimizers, take_step

SHAPE = GPTConfig(block_size=128, vocab_size=67, n_layer=4, n_head=4, n_embd=128, position="learned")
PROMPTS, GROUP, PROMPT_LENGTH, NEW_TOKENS = 16, 8, 32, 96
BETA, LEARNING_RATE = 0.04, 1e-4
GOALS = {"ours, last head": 1 / 3, "ours, likelihood head": 0.45}  # of TRL's seconds


@dataclass
class GRPOBenchSettings(Settings):
    """GRPO steps against TRL's."""

    num_runs: int = setting(5, minimum=1)
    """rounds: steps of each way in turn, after a warm-up of each"""
    steps: int = setting(3, minimum=1)
    """steps in a round"""
    prompts: int = setting(PROMPTS, minimum=1)
    """prompts in a step"""
    trl: bool = True
    """time TRL as well, where it is installed"""


class Loop:
    """Steps of train_grpo.py on models that are given: its functions in the order of its main(), without records."""

    def __init__(
        self, policy: GPT, scorer: RewardScorer, tokens: np.ndarray, settings: train_grpo.GRPOSettings
    ) -> None:
        self.ranks = Ranks(device=next(policy.parameters()).device)
        self.policy, self.scorer, self.tokens = policy, scorer, tokens
        self.settings = train_grpo.with_choices_made(settings, scorer)
        self.optimizers = make_optimizers(
            policy, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.completer, self.forward = Completer(policy, policy.config.block_size), parallel(policy, self.ranks)
        self.steps_made = 0

    def step(self) -> dict[str, float]:
        """Seconds of a step's parts."""
        clock, settings, ranks = [time.perf_counter()], self.settings, self.ranks
        self.steps_made += 1
        batch = train_grpo.sample_group(self.completer, self.tokens, settings, self.steps_made, ranks)
        clock.append(time.perf_counter())
        batch.score(self.scorer, ranks, keep_hidden=bool(settings.exact))
        train_grpo.figures_of_rollouts(batch, settings)
        batch.advantages = train_grpo.advantages_of(batch, settings, self.policy, ranks)
        batch.flat_groups(settings.prompts_per_step)
        clock.append(time.perf_counter())
        train_grpo.accumulate_gradients(self.forward, batch, settings, ranks)
        clock.append(time.perf_counter())
        take_step(self.policy, self.optimizers, settings.grad_clip, train_grpo.UNSCALED)
        clock.append(time.perf_counter())
        names = ("generation", "scoring, with the reference", "log-probabilities and gradients", "update")
        return dict(zip(names, np.diff(clock).tolist(), strict=True))


class Ours:
    """A Loop on untrained models of the benchmark's shapes, with prompts of one length, as TRL's are."""

    def __init__(self, prompts: int = PROMPTS, default: bool = False) -> None:
        torch.manual_seed(0)
        policy, reference, natural = (GPT(SHAPE).eval() for _ in range(3))
        reference.load_state_dict(policy.state_dict())
        head: type[RewardModel] = LikelihoodRewardModel if default else LastRewardModel
        trunk, width = natural if default else reference, SHAPE.reward_head_hidden_dim
        reward_model = head.on_trunk(trunk, reference, Sampling(), width).eval()
        settings = train_grpo.GRPOSettings(
            reward_model_path="untrained", prompts_per_step=prompts, group_size=GROUP, learning_rate=LEARNING_RATE
        )
        tokens = np.random.default_rng(0).integers(SHAPE.vocab_size, size=2**16).astype(np.uint16)
        self.loop = Loop(policy, RewardScorer(reward_model, reference), tokens, settings)
        assert default or self.loop.settings.beta == BETA  # as TRL's

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        return [sum(self.parts().values()) for _ in range(count)]

    def parts(self) -> dict[str, float]:
        """Seconds of a step's parts."""
        with mock.patch.object(rollouts, "draw_prompts", prompts_of_one_length):
            return self.loop.step()


def prompts_of_one_length(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `policy_eval.draw_prompts`, with PROMPT_LENGTH for every length."""
    natural, prefix_lengths, uniforms = draw_prompts(*arguments)
    return natural, torch.full_like(prefix_lengths, PROMPT_LENGTH), uniforms


class TRL:
    """TRL's GRPOTrainer on the same shapes; every call of `steps` trains anew from the weights so far."""

    def __init__(self, folder: str, num_prompts: int) -> None:
        import transformers
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers

        transformers.logging.set_verbosity_error()
        self.num_prompts = num_prompts
        characters = [chr(ord("0") + index) for index in range(SHAPE.vocab_size - 2)]
        vocabulary = {word: index for index, word in enumerate([*characters, "<pad>", "<eos>"])}
        raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        )
        config = transformers.GPT2Config(
            vocab_size=SHAPE.vocab_size,
            n_positions=SHAPE.block_size,
            n_embd=SHAPE.n_embd,
            n_layer=SHAPE.n_layer,
            n_head=SHAPE.n_head,
            bos_token_id=None,
            eos_token_id=vocabulary["<eos>"],
            pad_token_id=vocabulary["<pad>"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        torch.manual_seed(0)
        # TRL makes the reference of the KL from a folder: it loads the model a second time from there.
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        draw = np.random.default_rng(0)
        texts = ["".join(draw.choice(characters, PROMPT_LENGTH)) for _ in range(1024)]
        self.prompts, self.folder = Dataset.from_dict({"prompt": texts}), folder

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        import transformers
        from trl import GRPOConfig, GRPOTrainer

        marks = []

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *arguments, **keywords) -> None:
                if not marks:
                    marks.append(time.perf_counter())

            def on_step_end(self, *arguments, **keywords) -> None:
                marks.append(time.perf_counter())

        arguments = GRPOConfig(
            output_dir=os.path.join(self.folder, "out"),
            per_device_train_batch_size=self.num_prompts * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            generation_kwargs={"min_new_tokens": NEW_TOKENS},
            beta=BETA,
            learning_rate=LEARNING_RATE,
            max_steps=count + 1,  # the first is not counted: the trainer prepares its batch before it begins
            loss_type="grpo",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=self.folder,
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            args=arguments,
            train_dataset=self.prompts,
            processing_class=self.tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
        return list(np.diff(marks))[1:]


def main() -> None:
    settings = parse_settings(GRPOBenchSettings, "grpo")
    with TemporaryDirectory() as folder:
        ways: dict[str, Ours | TRL] = {
            name: Ours(settings.prompts, default=default) for name, default in zip(GOALS, (False, True), strict=True)
        }
        if settings.trl:
            try:
                ways["TRL"] = TRL(folder, settings.prompts)
            except ImportError as error:
                say(f"TRL is not timed: {error}; pip install -r requirements-bench.txt")
        for way in ways.values():
            way.steps(1)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(settings.num_runs):
            for name, way in ways.items():
                seconds[name].append(statistics.median(way.steps(settings.steps)))
    say(f"{os.cpu_count()} processors, torch {torch.__version__}; medians of {settings.num_runs} rounds")
    for name, own in seconds.items():
        line = f"{name:<21} {statistics.median(own):7.3f} s a step"
        if name in GOALS and "TRL" in seconds:
            ratio = statistics.median(mine / theirs for mine, theirs in zip(own, seconds["TRL"], strict=True))
            line += f", {ratio:.3f} of TRL's (goal: {GOALS[name]:.3f})"
        say(line)


if __name__ == "__main__":
    run_main(main)
