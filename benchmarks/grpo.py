"""A GRPO step against TRL's on the same work: seconds a step, in turns, as a ratio.

    python benchmarks/grpo.py --num_runs 3

The work: 128 completions of 96 tokens after prompts of 32, groups of 8, GPT-2's shape of 4 layers and 128 channels, 67
tokens, KL on (beta 0.04), one optimizer update a step. TRL's reward costs nothing; ours is a learned reward model, the
seeds' head on the start's trunk. Models are untrained: speed does not depend on what they know. Without TRL
(requirements-bench.txt) ours is timed alone.
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import train_grpo
from generation import Completer, Sampling
from model import GPT, GPTConfig
from objectives import group_advantages
from optimization import clip_gradients, make_optimizers
from policy_eval import written_mask
from reward_model import LastRewardModel, RewardScorer
from runtime.cli import parse_settings
from runtime.distributed import Ranks, parallel
from runtime.process import run_main
from runtime.run_log import say
from runtime.settings import Settings, setting

SHAPE = GPTConfig(block_size=128, vocab_size=67, n_layer=4, n_head=4, n_embd=128, position="learned")
PROMPTS, GROUP, PROMPT_LENGTH, NEW_TOKENS = 16, 8, 32, 96
BETA, LEARNING_RATE = 0.04, 1e-4


@dataclass
class GRPOBenchSettings(Settings):
    """GRPO steps against TRL's."""

    num_runs: int = setting(3, minimum=1)
    """rounds: TRL's steps, then ours, after a warm-up of each"""
    steps: int = setting(3, minimum=1)
    """steps in a round"""
    prompts: int = setting(PROMPTS, minimum=1)
    """prompts in a step"""
    trl: bool = True
    """time TRL as well, where it is installed"""


class Ours:
    """Steps of train_grpo.py's own parts on the benchmark's shapes."""

    def __init__(self, prompts: int = PROMPTS) -> None:
        torch.manual_seed(0)
        self.prompts = prompts
        self.policy = GPT(SHAPE).eval()
        reference = GPT(SHAPE).eval()
        reference.load_state_dict(self.policy.state_dict())
        reward_model = LastRewardModel.on_trunk(reference, reference, Sampling(), SHAPE.reward_head_hidden_dim).eval()
        self.scorer = RewardScorer(reward_model, reference)
        self.optimizers = make_optimizers(self.policy, learning_rate=LEARNING_RATE, weight_decay=0.0)
        self.completer, self.forward = Completer(self.policy, SHAPE.block_size), parallel(self.policy, Ranks())
        self.settings = train_grpo.GRPOSettings(reward="natural", credit="sequence", kl_in_reward=0.0, beta=BETA)
        self.draw = np.random.default_rng(0)

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _step(self) -> None:
        self.parts()

    def parts(self) -> dict[str, float]:
        """Seconds of a step's parts."""
        clock = [time.perf_counter()]
        natural = torch.from_numpy(self.draw.integers(SHAPE.vocab_size, size=(self.prompts, SHAPE.block_size)))
        prefix_lengths = torch.full((self.prompts, GROUP), PROMPT_LENGTH)
        uniforms = torch.from_numpy(self.draw.random((self.prompts, GROUP, SHAPE.block_size), dtype=np.float32))
        completions = self.completer(natural, prefix_lengths, uniforms, Sampling())
        batch = train_grpo.RolloutBatch(
            own_ids=completions.ids.flatten(0, 1),
            old_log_probs=completions.model_log_probs.flatten(0, 1)[:, 1:],
            mask=written_mask(prefix_lengths, SHAPE.block_size),
            first_own_row=0,
            micro_rows=self.policy.rows_at_a_time(),
        )
        clock.append(time.perf_counter())
        batch.score(self.scorer, Ranks())
        batch.advantages = group_advantages(batch.scores.natural, GROUP)
        clock.append(time.perf_counter())
        train_grpo.accumulate_gradients(self.forward, batch, self.settings, Ranks())
        clock.append(time.perf_counter())
        clip_gradients(self.policy.named_parameters(), 1.0)
        self.optimizers.step()
        self.optimizers.zero_grad()
        clock.append(time.perf_counter())
        names = ("generation", "scoring, with the reference", "log-probabilities and gradients", "update")
        return dict(zip(names, np.diff(clock), strict=True))


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
        ways = {"ours": Ours(settings.prompts)}
        if settings.trl:
            try:
                ways["TRL"] = TRL(folder, settings.prompts)
            except ImportError as error:
                say(f"TRL is not timed: {error}; pip install -r requirements-bench.txt")
        for way in ways.values():
            way.steps(1)
        medians: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(settings.num_runs):
            for name, way in ways.items():
                medians[name].append(statistics.median(way.steps(settings.steps)))
    say(f"{os.cpu_count()} processors, torch {torch.__version__}; medians of {settings.num_runs} rounds")
    for name, seconds in medians.items():
        say(f"{name:<5} {statistics.median(seconds):7.3f} s a step")
    if "TRL" in medians:
        ratios = [ours / theirs for ours, theirs in zip(medians["ours"], medians["TRL"], strict=True)]
        say(f"ours over TRL's: {statistics.median(ratios):.3f} (goal: 0.333)")


if __name__ == "__main__":
    run_main(main)
