"""Judge the text of models by SmolLM2, and by a reader that is fitted to each.

    python benchmarks/judges.py --judge_model smollm2/ --seeds 1 2 3 4 5

Reads the models that benchmarks/seeds.py makes in out/seeds/SEED, and their corpora. The judge, a
causal model of transformers that has learned from none of them, gives the loss of their text at
natural diversity. A reader knows the model and the natural model of the next seed. It is fitted on
the validation play, continued at temperature 1, and its error of K is measured on the test play: it
is larger for text that is harder to tell from natural text. Prints means, and the policy's paired
differences. Packages: requirements-interop.txt.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.seeds import MODELS, print_table
from common.files import read_json, write_json
from common.log import print0
from common.process import run_main
from common.settings import Settings, parse_settings
from data_loader import open_corpus, open_token_file, validation_part
from evaluate import EvaluateSettings, load_model, load_text_quality
from lm.causal import load_model as load_causal
from lm.causal import load_tokenizer
from lm.checkpoint import build_model, load_checkpoint
from lm.completions import Completer
from reading.reader import Reader
from reward.heads import LikelihoodRewardModel, fit_natural_model

FIGURES = ("judge_loss", "smollm2_loss", "reader_error")
SAMPLES = 300
ROWS = 16  # texts that the judge reads at a time


@dataclass
class JudgesSettings(Settings):
    """Judge the models of benchmarks/seeds.py by a causal model and by fresh readers."""

    judge_model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """the judge: a folder or hub name of transformers"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """the seeds; the readers have the natural model of the next one, the last that of the first"""
    seeds_dir: str = "out/seeds"
    """folder of their runs"""
    output_path: str = "out/judges.json"
    """figures of every model and seed, as JSON; those that are there are not measured again"""


class CausalJudge:
    """A causal model that judges texts, in the place of `metrics.judge.Judge`."""

    def __init__(self, name: str) -> None:
        self.model = load_causal(name, torch.bfloat16).eval()
        self.tokenizer = load_tokenizer(name)

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the tokens (n,) of each text."""
        found = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [torch.tensor(ids, dtype=torch.long) for ids in found]

    @torch.no_grad()
    def loss(self, texts: Sequence[str], prompts: Sequence[str]) -> np.ndarray:
        """Return the mean nats per character (n,) of texts, each after its prompt."""
        rows = []
        labels = []  # -100, which has no loss, for prompts and padding
        for prompt, text in zip(self.encode(prompts), self.encode(texts), strict=True):
            rows.append(torch.cat((prompt, text)))
            labels.append(torch.cat((torch.full_like(prompt, -100), text)))
        losses = []
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            ids = torch.nn.utils.rnn.pad_sequence(rows[part], batch_first=True)  # (B, T)
            targets = torch.nn.utils.rnn.pad_sequence(labels[part], True, -100)
            logits = self.model(input_ids=ids).logits[:, :-1].float().mT  # (B, V, T - 1)
            losses.append(F.cross_entropy(logits, targets[:, 1:], reduction="none").sum(1))
        lengths = np.array([max(1, len(text)) for text in texts])
        return torch.cat(losses).numpy() / lengths


class Judges:
    """The figures of models of the default: see the top of this file."""

    def __init__(self, judge_model: str, dataset: str = "shakespeare_play") -> None:
        """Load the judge, and the corpora. dataset: its val.bin and test.bin are used."""
        settings = EvaluateSettings(
            split="test", samples=SAMPLES, word_dataset="shakespeare_library"
        )
        self.judge = CausalJudge(judge_model)
        self.corpus = open_corpus(dataset, 2)
        vocab_size = self.corpus.tokenizer.vocab_size
        self.tokens = open_token_file(self.corpus.folder / "test.bin", "test", vocab_size)
        self.quality = load_text_quality(settings, self.corpus, self.tokens, 80)
        natural = self.quality.natural_rows(self.quality.report)
        self.natural_loss = self.judged(natural)

    def judged(self, rows: Tensor) -> float:
        """Return the judge's loss of rows (R, N) after their prompts, in nats per character."""
        prompts, texts = self.quality.texts(rows)
        return float(self.judge.loss(texts, prompts).mean())

    def of_text(self, path: str) -> dict[str, Any]:
        """Return the losses of a model's text at natural diversity, by the 6-grams and the judge.

        A loss below that of natural text counts as this.
        """
        model = load_model(path, self.corpus, torch.device("cpu"), None)
        completer = Completer(model, model.config.block_size)
        quality = self.quality.of_model(completer)
        prompts = self.quality.report
        rows = prompts.complete(completer, quality["temperature"]).ids[:, 0]  # (R, N)
        loss = self.judged(rows)
        return {
            "judge_loss": quality["judge_loss"],
            "smollm2_loss": max(loss, self.natural_loss),
            "smollm2_raw": loss,
            "smollm2_natural": self.natural_loss,
        }

    def of_reader(self, path: str, natural_model: str) -> dict[str, Any]:
        """Return the error of K in tokens of a reader of a model, and its R2."""
        contents = load_checkpoint(path)
        generator = build_model(contents, path)
        natural = fit_natural_model(load_checkpoint(natural_model), natural_model, contents)
        pair = LikelihoodRewardModel(natural, generator).eval()
        reader = Reader(pair, generator.config.block_size, ("1",))
        blocks = []
        for tokens in (validation_part(self.corpus.val, reader.length, "select"), self.tokens):
            ids = torch.from_numpy(tokens.astype(np.int64))
            blocks.append(ids.unfold(0, reader.length, reader.length))
        reader.report_blocks = len(blocks[1])
        reader.fit(*blocks)
        figures = reader.figures["1"]
        return {"reader_error": figures["mae_tokens"], "reader_r2": figures["r2"]}


def main() -> None:
    settings = parse_settings(JudgesSettings, "judges")
    torch.set_num_threads(1)
    judges = Judges(settings.judge_model)
    path = Path(settings.output_path)
    records: dict[str, Any] = {}
    if path.is_file():
        records = read_json(path)
    next_seed = dict(zip(settings.seeds, (*settings.seeds[1:], settings.seeds[0]), strict=True))
    for seed in settings.seeds:
        natural_model = f"{settings.seeds_dir}/{next_seed[seed]}/natural_model_v1.pt"
        for name in MODELS:
            model = f"{settings.seeds_dir}/{seed}/{name}.pt"
            if model not in records:
                reading = judges.of_reader(model, natural_model)
                records[model] = {**judges.of_text(model), **reading}
                write_json(path, records)
                print0(f"{model}: {records[model]}")
    values = {}
    for name in MODELS:
        of_seeds = [records[f"{settings.seeds_dir}/{seed}/{name}.pt"] for seed in settings.seeds]
        values[name] = np.array([[record[figure] for record in of_seeds] for figure in FIGURES])
    print_table(values, FIGURES)


if __name__ == "__main__":
    run_main(main)
