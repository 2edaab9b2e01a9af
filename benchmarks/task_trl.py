"""Let a language model follow a task in TRL, and compare how natural its text stays.

    python benchmarks/task_trl.py --whole smollm2/ --gguf_file SmolLM2-135M-Instruct.Q4_1.gguf

The task is to write no word of more than LONGEST letters. The start is the floor of
examples/heal_pruned_model.py. From there each of ARMS trains for equal seconds: TRL's GRPOTrainer
with the task and a KL penalty, or CrossoverTrainer with the task and the crossover reward, whose
natural model is the whole model. Without --text, the text is English paragraphs from the
descriptions of the installed packages.

Each model is measured at temperature 1, and at the temperature at which its share of distinct word
pairs is that of natural text. The judge is a character n-gram model of held-out text, which nothing
else reads; the whole model would not be neutral. It knows little text and sees six characters. So
it rates spelling and frequent phrases, neither grammar nor sense. Unknown words are those that its
text lacks.

An interrupted run continues with its first unfinished arm. Other settings need another out_dir.
"""

import random
import sys
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.files import read_json, write_json, write_text
from common.log import format_metrics
from common.process import run_main
from common.settings import parse_settings, setting
from examples.heal_pruned_model import (
    GROUP,
    LENGTH,
    PROMPT,
    RATE,
    HealSettings,
    arguments,
    load,
    prune,
    train_on_text,
)
from generation.completions import Completions
from interop.causal import complete
from interop.crossover_reward import CrossoverReward, load_model
from metrics.samples import words_of
from metrics.text_quality import TextQuality
from training.huggingface import import_optional

LONGEST = 8
SEED = 42  # of the completions that are measured
# Numbers of held-out blocks, for the reward's weight and for the figures. The rest is the judge's.
FITTED = 24
MEASURED = 80
# Fields of GRPOConfig that weigh the KL penalty, or the task beside the crossover reward
ARMS: dict[str, dict[str, Any]] = {
    "floor": {},
    "task, beta 0.04": {"beta": 0.04},
    "task, beta 1": {"beta": 1.0},
    "crossover, weight 1": {"reward_weights": [1.0]},
    "crossover, weight 4": {"reward_weights": [4.0]},
}


@dataclass
class TaskSettings(HealSettings):
    """Compare ways to keep text natural while a model follows a task."""

    text: tuple[str, ...] = ()
    """UTF-8 text files, or folders of *.txt; none: descriptions of the installed packages"""
    out_dir: str = "out/task_trl"
    """folder of the text, the floor and results.json"""
    num_blocks: int = setting(216, minimum=128)
    """held-out blocks: 24 for the reward's weight, 80 for the figures, the rest for the judge"""
    seconds: float = setting(480.0, above=0)
    """training time of each arm in seconds of the processor, in place of `steps`"""
    arms: tuple[str, ...] = tuple(ARMS)
    """which arms; the floor is the first"""


def short_words(completions: list[str], **_: Any) -> list[float]:
    """Return minus the share of words with more than LONGEST letters, or -1 without words."""
    rewards = []
    for text in completions:
        is_long = [len(word) > LONGEST for word in words_of(text)] or [True]
        rewards.append(-float(np.mean(is_long)))
    return rewards


class Completer:
    """Complete rows with a Hugging Face model, as generation.completions.Completer does."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, rows: Tensor, lengths: Tensor, uniforms: Tensor, sampling: Any) -> Any:
        """Return rows (R, N) as (R, 1, N); all but their first lengths (R, 1) tokens are new."""
        ids = complete(self.model, rows, lengths[:, 0], SEED, sampling.temperature)
        return Completions(ids[:, None], uniforms)


def main() -> None:
    settings = parse_settings(TaskSettings, "task_trl")
    settings.text = settings.text or package_text(settings)
    whole, tokenizer, blocks, held_out = load(settings)
    fitted, measured, judged = held_out.split((FITTED, MEASURED, len(held_out) - FITTED - MEASURED))
    library = tokenizer.decode(judged.flatten())
    tokens = measured.flatten().numpy()
    quality = TextQuality(tokenizer, library, tokens, LENGTH, MEASURED - 1, PROMPT / LENGTH)

    floor = f"{settings.out_dir}/floor"
    path = Path(settings.out_dir, "results.json")
    results = {}
    if path.exists():
        results = read_json(path)
    for arm in settings.arms:
        if arm not in results:
            if arm == "floor":
                model = prune(whole, settings.drop)
                options = arguments(settings, settings.floor_steps, 2 * RATE)
                train_on_text(model, tokenizer, blocks, options)
                model.save_pretrained(floor)
                steps = settings.floor_steps
            else:
                model = load_model(floor)
                reward = CrossoverReward(whole, load_model(floor), tokenizer=tokenizer)
                reward.fit(fitted)
                steps = train(model, arm, reward, blocks, settings)
            results[arm] = {"training": {"steps": steps}}
            results[arm].update(measure(Completer(model.eval()), quality))
            write_json(path, results)
        for kind, figures in results[arm].items():
            print(f"{arm}, {kind}: {format_metrics(figures)}")


def package_text(settings: TaskSettings) -> tuple[str]:
    """Write the shuffled paragraphs to a file in out_dir, and return its name."""
    texts = paragraphs()
    random.Random(settings.seed).shuffle(texts)
    path = Path(settings.out_dir, "text.txt")
    write_text(path, "\n\n".join(texts))
    return (str(path),)


def paragraphs() -> list[str]:
    """Return English paragraphs, without code, of the installed packages' descriptions."""
    found = set()
    for package in distributions():
        description = package.metadata.get_payload() or package.metadata.get("Description", "")
        for paragraph in str(description).split("\n\n"):
            words = paragraph.split()
            num_plain = sum(word.strip(".,;:()'\"`*[]").isalpha() for word in words)
            is_prose = len(words) >= 20 and num_plain > 0.8 * len(words)
            if is_prose and paragraph.isascii() and not set(paragraph) & set("|<>=#"):
                found.add(" ".join(words))
    return sorted(found)


def train(
    policy: Any, arm: str, reward: CrossoverReward, blocks: Tensor, settings: TaskSettings
) -> int:
    """Train the policy in the way of an arm; return the number of steps."""
    trl = import_optional("trl")
    from interop.crossover_trainer import CrossoverTrainer

    end = time.process_time() + settings.seconds

    def stop_in_time(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.process_time() > end

    callback = import_optional("transformers").TrainerCallback()
    callback.on_step_end = stop_in_time
    options = arguments(settings, 10**6, 2 * RATE)
    options.update(ARMS[arm], max_completion_length=LENGTH - PROMPT, num_generations=GROUP)
    prompts = reward.tokenizer.batch_decode(blocks[:, :PROMPT])
    policy.get_input_embeddings().requires_grad_(False)  # as in the floor's training
    parts = {
        "reward_funcs": [short_words],
        "args": trl.GRPOConfig(**options),
        "train_dataset": import_optional("datasets").Dataset.from_dict({"prompt": prompts}),
        "processing_class": reward.tokenizer,
        "callbacks": [callback],
    }
    if "beta" in ARMS[arm]:
        return trl.GRPOTrainer(policy, **parts).train().global_step
    return CrossoverTrainer(policy, reward, **parts).train().global_step


@torch.no_grad()
def measure(completer: Any, quality: TextQuality) -> dict[str, Any]:
    """Return figures of a model's completions, and its loss on natural text in nats per token, at
    both temperatures.
    """
    natural = quality.report.natural  # (R, N)
    sweep = quality.of_model(completer)
    logits = completer.model(input_ids=natural).logits[:, :-1].transpose(1, 2)  # (R, V, N - 1)
    results = {"sweep": sweep, "natural text": quality.natural}
    _, natural_texts = quality.texts(quality.natural_rows(quality.report))
    results["natural text"]["task"] = np.mean(short_words(natural_texts)).item()
    for kind, temperature in (("natural diversity", sweep["temperature"]), ("temperature 1", 1.0)):
        samples = quality.write(quality.report, completer, temperature)
        results[kind] = {
            "task": np.mean(short_words(samples.texts)).item(),
            **quality.figures(samples),
            "natural_loss": cross_entropy(logits / temperature, natural[:, 1:]).item(),
            "temperature": temperature,
            "texts": samples.texts,
        }
    return results


if __name__ == "__main__":
    run_main(main)
