"""Let a pruned language model follow a task in TRL, and compare how natural its text stays.

    python benchmarks/task_trl.py --seeds 1 2 3

The task is to write without the letter e. The text is the documentation of Python's standard
library. The start is the whole model without some layers, trained on the text for a few steps. From
there each of ARMS trains for equal seconds of one thread: TRL's GRPOTrainer with the task and a KL
penalty, the same after CrossoverTrainer has distilled the whole model for half of the seconds, or
CrossoverTrainer with the task and the crossover reward, whose natural model is the whole model.

Each model is measured at temperature 1, and at the temperature at which its share of distinct word
pairs is that of natural text. The judge is a character n-gram model of text kept from training. It
sees six characters, so it rates spelling and frequent phrases, neither grammar nor sense. Unknown
words are those that natural text lacks. With all arms, the script prints the differences of the
families at equal task reward, as benchmarks/task_curves.py does.

Every arm has its own file in out_dir, with its figures and texts. With the same settings, an
interrupted run continues with its first unfinished arm. Several processes may share the arms when
the start exists (--arms start --seeds 1); one process takes all the distilled arms of a seed.
Packages: requirements-interop.txt.
Shapes: b blocks of LENGTH tokens.
"""

import ast
import pydoc_data.topics
import random
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.task_curves import print_difference
from benchmarks.task_rewards import no_letter_e
from common.files import read_json, write_json
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from interop.crossover_reward import CrossoverReward
from lm.causal import complete, load_model, load_tokenizer
from lm.completions import Completions
from lm.huggingface import import_optional
from metrics.text_quality import TextQuality

DROPPED = (6, 12, 18, 24)  # layers
START_STEPS = 30  # of the start on text
START_RATE = 2e-5
PROMPT = 32  # tokens
LENGTH = 64  # with the completion
GROUP = 4  # completions of a prompt
PROMPTS = 4  # of a step
ROWS = 16  # sequences read at a time
# Ends of the parts of the blocks: of the figures, for the reward's weight, for training. The judge
# reads the rest.
PARTS = (250, 378, 1078)
SAMPLES = 500  # of the figures, at each temperature
SEED = 42  # of the texts, the start and the figures
COMPARED = (
    ("natural diversity", "judge_loss"),
    ("temperature 1", "judge_loss"),
    ("natural diversity", "natural_loss"),
)
OPTIONS: dict[str, Any] = {  # of all trainers of TRL
    "per_device_train_batch_size": GROUP * PROMPTS,
    "activation_checkpointing": False,
    "bf16": False,  # TRL's default is True; figures of a CPU and a GPU are to be alike
    "save_strategy": "no",
    "report_to": "none",
}
# The KL's weight, to the start or to the distilled model; or the task's beside the crossover reward
ARMS: dict[str, dict[str, Any]] = {
    "start": {},
    "task, KL 0.04": {"beta": 0.04},
    "task, KL 0.3": {"beta": 0.3},
    "distilled, task, KL 0.04": {"beta": 0.04},
    "distilled, task, KL 0.3": {"beta": 0.3},
    "crossover, weight 2": {"reward_weights": [2.0]},
    "crossover, weight 8": {"reward_weights": [8.0]},
}


@dataclass
class TaskSettings(Settings):
    """Compare ways to keep text natural while a model follows a task."""

    whole: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """the whole model, of Llama's architecture: a folder or a hub name"""
    out_dir: str = "out/task_trl"
    """folder of the models and of the figures of each arm"""
    seconds: float = setting(2100.0, above=0)
    """training time of each arm, in seconds of the processor"""
    learning_rate: float = setting(4e-5, above=0)
    """peak learning rate of every arm"""
    arms: tuple[str, ...] = tuple(ARMS)
    """which arms; the start is made first"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the training"""


def stop_in_time(seconds: float) -> Any:
    """Return a callback that stops a training after some seconds of the processor."""

    class StopInTime(import_optional("transformers").TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.end = time.process_time() + seconds

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = time.process_time() > self.end

    return StopInTime()


@dataclass
class Completer:
    """Completes rows, as lm.completions.Completer does."""

    model: Any

    def __call__(self, rows: Tensor, lengths: Tensor, uniforms: Tensor, sampling: Any) -> Any:
        """Complete rows (R, N), all but their first lengths (R, 1) tokens, once each."""
        ids = complete(self.model, rows.cpu(), lengths[:, 0], SEED, [sampling])
        return Completions(ids[:, None], uniforms)


def main() -> None:
    settings = parse_settings(TaskSettings, "task_trl")
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(settings.whole)
    ids = tokenizer("\n\n".join(paragraphs()))["input_ids"]
    blocks = torch.tensor(ids).unfold(0, LENGTH, LENGTH)
    measured, fitted, trained, judged = blocks.tensor_split(PARTS)
    library = tokenizer.decode(judged.flatten())
    tokens = measured.flatten().numpy()
    quality = TextQuality(tokenizer, library, tokens, LENGTH, SAMPLES, library, PROMPT / LENGTH)

    start = f"{settings.out_dir}/start"
    if not Path(start, "model.safetensors").exists():
        make_start(settings.whole, tokenizer, trained, start)
    results = {}
    for seed in settings.seeds:
        for arm in settings.arms:
            path = Path(settings.out_dir, f"{arm}, seed {seed}.json")
            if not path.exists():
                model, steps = train(arm, seed, start, trained, fitted, tokenizer, settings)
                write_json(path, {"steps": steps, **measure(model, quality)})
            results[arm, seed] = read_json(path)
    if settings.arms == tuple(ARMS):
        compare(results)


def compare(results: dict[tuple[str, int], Any]) -> None:
    """Print the crossover reward's differences from the other families at equal task reward."""
    for kind, loss in COMPARED:
        print(loss, "at", kind)
        policies = []
        for (arm, seed), figures in results.items():
            record = {"task": "task", "family": arm.split(",")[0], "seed": seed}
            policies.append({**record, "at_natural": figures[kind]})
        for other in ("task", "distilled"):
            print_difference(policies, "task", "crossover", other, loss)


def paragraphs() -> list[str]:
    """Return the paragraphs of the standard library's documentation in a random order."""
    texts = [*pydoc_data.topics.topics.values()]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    found = {" ".join(text.split()) for each in texts for text in each.split("\n\n")}
    prose = [text for text in sorted(found) if is_prose(text)]
    random.Random(SEED).shuffle(prose)
    return prose


def is_prose(text: str) -> bool:
    """Return whether a paragraph is plain text: at least 20 words, mostly of letters, no code."""
    words = text.split()
    num_plain = sum(word.strip(".,;:()'\"`*[]").isalpha() for word in words)
    is_plain = len(words) >= 20 and num_plain > 0.8 * len(words)
    return is_plain and text.isascii() and not set(text) & set("|<>=#")


def make_start(whole: str, tokenizer: Any, blocks: Tensor, folder: str) -> None:
    """Drop layers of the whole model, train the rest on blocks (b, LENGTH), and save it."""
    trl = import_optional("trl")
    model = load_model(whole, torch.float32)
    layers = model.model.layers
    for number in reversed(DROPPED):
        del layers[number]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(layers)
    data = import_optional("datasets").Dataset.from_dict({"input_ids": blocks.tolist()})
    args = trl.SFTConfig(
        folder,
        max_length=None,
        max_steps=START_STEPS,
        gradient_accumulation_steps=2,
        learning_rate=START_RATE,
        seed=SEED,
        **OPTIONS,
    )
    trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(
    arm: str,
    seed: int,
    start: str,
    blocks: Tensor,
    fitted: Tensor,
    tokenizer: Any,
    settings: TaskSettings,
) -> tuple[Any, int]:
    """Train in the way of an arm; return the policy and the number of its last phase's steps."""
    if arm == "start":
        return load_model(start), 0
    trl = import_optional("trl")
    trainer_class = import_optional("interop.crossover_trainer").CrossoverTrainer
    texts = tokenizer.batch_decode(blocks[:, :PROMPT])
    prompts = import_optional("datasets").Dataset.from_dict({"prompt": texts})
    options = {
        "output_dir": settings.out_dir,
        "num_generations": GROUP,
        "max_completion_length": LENGTH - PROMPT,
        "max_steps": 10**6,
        "lr_scheduler_type": "constant",
        "learning_rate": settings.learning_rate,
        "seed": seed,
        **OPTIONS,
    }
    parts: dict[str, Any] = {"train_dataset": prompts, "processing_class": tokenizer}
    seconds = settings.seconds
    folder = start
    if arm.startswith("distilled"):
        seconds /= 2
        folder = f"{settings.out_dir}/distilled, seed {seed}"
        if not Path(folder, "model.safetensors").exists():
            policy = load_policy(start)
            stop = [stop_in_time(seconds)]
            reward = crossover_reward(start, fitted, tokenizer, settings)
            args = trl.GRPOConfig(**options)
            trainer_class(policy, reward, args, callbacks=stop, **parts).train()
            policy.save_pretrained(folder)
    policy = load_policy(folder)
    parts["args"] = trl.GRPOConfig(**options, **ARMS[arm])
    parts["callbacks"] = [stop_in_time(seconds)]
    if "beta" in ARMS[arm]:
        trainer = trl.GRPOTrainer(policy, no_letter_e, **parts)
    else:
        reward = crossover_reward(start, fitted, tokenizer, settings)
        trainer = trainer_class(policy, reward, reward_funcs=no_letter_e, **parts)
    return policy, trainer.train().global_step


def crossover_reward(
    start: str, blocks: Tensor, tokenizer: Any, settings: TaskSettings
) -> CrossoverReward:
    """Return the reward of the whole model and the start, fitted on blocks (b, LENGTH)."""
    reward = CrossoverReward(settings.whole, load_model(start), tokenizer=tokenizer)
    reward.fit(blocks)
    return reward


def load_policy(folder: str) -> Any:
    """Load a model to train, all but its embedding."""
    policy = load_model(folder)
    policy.get_input_embeddings().requires_grad_(False)  # a quarter of SmolLM2
    return policy


@torch.no_grad()
def measure(model: Any, quality: TextQuality) -> dict[str, Any]:
    """Return TextQuality.of_model's figures as sweep, then figures and texts at both temperatures.

    natural_loss is the loss on natural text at the temperature, in nats per token.
    """
    model = model.eval().to(torch.bfloat16)
    completer: Any = Completer(model)
    natural = quality.natural_rows(quality.report)  # (R, N)
    sweep = quality.of_model(completer)
    results = {"sweep": sweep}
    kinds = {"natural diversity": sweep["temperature"], "temperature 1": 1.0}
    for kind, temperature in kinds.items():
        samples = quality.write(quality.report, completer, temperature)
        loss = 0.0
        for rows in natural.to(model.device).split(ROWS):
            logits = model(input_ids=rows).logits[:, :-1].float() / temperature
            loss += cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="sum").item()
        results[kind] = {
            **quality.figures(samples),
            "task": mean(no_letter_e(samples.texts)),
            "natural_loss": loss / natural[:, 1:].numel(),
            "texts": samples.texts,
        }
    return results


if __name__ == "__main__":
    run_main(main)
