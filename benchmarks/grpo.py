"""Compare the seconds of a GRPO step with TRL's.

    python benchmarks/grpo.py --num_runs 3

A step has 128 completions in groups of 8 and one optimizer update. The model is a GPT-2 of 4 layers
and 128 channels with 128 positions. TRL's prompts have 32 tokens, ours 1 to 64; both generate about
96 tokens per completion. Our side runs train_grpo.py in a process, with two reward models: a last
head, with the KL in the loss (beta 0.04) as in TRL, and the default likelihood head. TRL's reward
is a function that takes no time. Models are trained for a few steps only, because speed does not
depend on their weights. Without TRL (requirements-bench.txt), only our side is timed.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.reward_models import ROOT, Pipeline
from common.log import print0, read_records
from common.process import UserError, run_main
from common.settings import Settings, parse_settings, setting
from model import GPTConfig
from tokenization_manager import save_meta

SHAPE = GPTConfig(
    block_size=128, vocab_size=67, n_layer=4, n_head=4, n_embd=128, position="learned"
)
PROMPTS, GROUP, PROMPT_LENGTH, NEW_TOKENS = 16, 8, 32, 96
BETA, LEARNING_RATE = 0.04, 1e-4
GOALS = {"ours, last head": 1 / 3, "ours, likelihood head": 0.45}  # shares of TRL's seconds


@dataclass
class GRPOBenchSettings(Settings):
    """Compare GRPO steps with TRL's."""

    num_runs: int = setting(5, minimum=1)
    """rounds, each with `steps` of every way, after one warm-up round"""
    steps: int = setting(3, minimum=1)
    """steps of each way in a round"""
    prompts: int = setting(PROMPTS, minimum=1)
    """prompts per step"""
    trl: bool = True
    """also time TRL if it is installed"""


class Ours:
    """Run train_grpo.py on small models of random text."""

    def __init__(self, folder: Path, prompts: int, head: str) -> None:
        pipeline, corpus = Pipeline(folder), folder / "corpus"
        corpus.mkdir(exist_ok=True)
        draw = np.random.default_rng(0)
        for name, size in (("train", 2**16), ("val", 2**14)):
            draw.integers(SHAPE.vocab_size, size=size).astype(np.uint16).tofile(
                corpus / f"{name}.bin"
            )
        save_meta(
            corpus / "meta.pkl", [chr(ord("0") + number) for number in range(SHAPE.vocab_size)]
        )
        shape = {
            name: getattr(SHAPE, name)
            for name in ("n_layer", "n_head", "n_embd", "block_size", "position")
        }
        few = {"batch_size": 4, "warmup_iters": 0, "device": "cpu"}
        generator = pipeline.generator("generator", corpus, 2, **shape, **few)
        data = pipeline.reward_data(
            "data", generator, corpus, max_blocks=30, samples_per_chunk=2, device="cpu"
        )
        options = {"head": head, "device": "cpu"}
        if head == "likelihood":
            options["natural_model_path"] = pipeline.generator(
                "natural", corpus, 4, **shape, **few, seed=1
            )
        else:
            options["max_epochs"] = 1
        reads = {"base_model_path": generator, "data_dir": data}
        path = folder / f"{head}.pt"
        pipeline.make(path.name, "train_reward_model", **reads, **options, output_path=path)
        self.output = folder / f"policy_{head}.pt"
        self.options = {"base_model_path": generator, "reward_model_path": path, "dataset": corpus}
        self.options |= {
            "output_path": self.output,
            "prompts_per_step": prompts,
            "group_size": GROUP,
        }
        self.options |= {"learning_rate": LEARNING_RATE, "device": "cpu", "overwrite": True}
        self.options |= {"allow_unpredictive_reward": True}

    def steps(self, count: int) -> list[float]:
        """Return the seconds of `count` steps. The first step and the last, which evaluates, are
        left out.
        """
        options = self.options | {"max_steps": count + 2, "eval_interval": count + 2}
        words = [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [sys.executable, str(ROOT / "train_grpo.py"), *words], capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(
                f"ERROR: train_grpo.py ended with status {done.returncode}: {done.stderr[-500:]}"
            )
        records = read_records(self.output.with_suffix(".jsonl"))
        clock = {record["step"]: record["seconds"] for record in records if not record.get("final")}
        return [clock[step + 1] - clock[step] for step in range(1, count + 1)]


class TRL:
    """Run TRL's GRPOTrainer on models of the same shape; each call of `steps` starts a trainer."""

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
        # TRL loads the reference of the KL from the model's folder.
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        draw = np.random.default_rng(0)
        texts = ["".join(draw.choice(characters, PROMPT_LENGTH)) for _ in range(1024)]
        self.prompts, self.folder = Dataset.from_dict({"prompt": texts}), folder

    def steps(self, count: int) -> list[float]:
        """Return the seconds of `count` steps."""
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
            # one more, because the trainer prepares the first step's batch before that step begins
            max_steps=count + 1,
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
        heads = zip(GOALS, ("last", "likelihood"), strict=True)
        ways: dict[str, Ours | TRL] = {
            name: Ours(Path(folder), settings.prompts, head) for name, head in heads
        }
        if settings.trl:
            try:
                ways["TRL"] = TRL(f"{folder}/trl", settings.prompts)
            except ImportError as error:
                print0(f"TRL is not timed: {error}; pip install -r requirements-bench.txt")
        for way in ways.values():
            way.steps(1)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(settings.num_runs):
            for name, way in ways.items():
                seconds[name].append(statistics.median(way.steps(settings.steps)))
    print0(
        f"{os.cpu_count()} processors, torch {torch.__version__}; medians of "
        f"{settings.num_runs} rounds"
    )
    for name, own in seconds.items():
        line = f"{name:<21} {statistics.median(own):7.3f} s a step"
        if name in GOALS and "TRL" in seconds:
            ratio = statistics.median(
                mine / theirs for mine, theirs in zip(own, seconds["TRL"], strict=True)
            )
            line += f", {ratio:.3f} of TRL's (goal: {GOALS[name]:.3f})"
        print0(line)


if __name__ == "__main__":
    run_main(main)
