"""Does on-policy training give what nothing else gives? Arms of equal seconds on five seeds' own
plays.

    python benchmarks/evidence.py

In: config/evidence.py. Out: `records` of all arms and seeds (those in it are not made again), a
picture, the tables of docs/results.md, which has the protocol. train_grpo.py trains the policies,
one thing exchanged. R rows, N positions.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import pad

import train_grpo
from benchmarks.reward_models import as_words, markdown
from common.files import read_json, write_json
from common.log import counted, print0
from common.process import UserError, run_child, run_main
from common.settings import Settings, parse_settings, read_config
from corpus.corpus import open_corpus
from data_loader import WholeSplitBatches, evenly_spaced, open_token_file, validation_part
from generation.completions import Completer
from generation.sampling import Sampling
from grpo import evaluation, rollouts
from grpo.settings import GRPOSettings
from losses import token_log_probs
from metrics.calibration import calibrated_losses, fit_calibration, log_probs_at
from metrics.reward_skill import area_under_curve
from metrics.samples import distinct_n, unknown_words, words_of
from reports.figures import write_png
from reward.posterior import crossover_loss, natural_share
from reward.scorer import RewardScorer, Scores
from training.checkpoint import build_model, load_checkpoint

# rows of a curve's point; rows that fit the head, and its penalty
CURVE_ROWS, HEAD_ROWS, RIDGE = 300, 600, 1.0


@dataclass
class EvidenceSettings(Settings):
    """On-policy training against what else the same seconds give."""

    config_file: str = "config/evidence.py"
    """works of each seed, arms, temperatures, contrasts"""
    records: str = "benchmarks/evidence.json"
    """records of the arms"""
    out_dir: str = "out/evidence"
    """models, corpora and logs"""
    job: str = ""
    """do this alone, as the script asks itself: natural, SEED/base, SEED/judge or SEED/ARM"""


class Lab:
    """The settings file, each seed's works (own, validation, test, the judge's), how models and
    corpora are made.
    """

    def __init__(self, settings: EvidenceSettings) -> None:
        self.config: dict[str, Any] = read_config(settings.config_file)
        self.out, self.natural = Path(settings.out_dir), Path(settings.out_dir, "natural.pt")
        works, seeds = self.config["works"], self.config["seeds"]
        self.works = {f"s{seed}": works[place:] + works[:place] for place, seed in enumerate(seeds)}

    def words(self, section: str, **options: Any) -> list[str]:
        return as_words(
            ({"config": ROOT / self.config["models"], "section": section} if section else {})
            | options
        )

    def run(self, script: str, section: str = "", **options: Any) -> None:
        run_child(script, [sys.executable, str(ROOT / script), *self.words(section, **options)])

    def train(self, section: str, dataset: Path, path: Path, **options: Any) -> dict[str, Any]:
        where = {
            "dataset": dataset,
            "out_dir": path.parent,
            "checkpoint_name": path.name,
            "overwrite": True,
        }
        self.run("train.py", section, **where, **options)
        return load_checkpoint(path)["training"]

    def corpus(self, folder: Path, train: tuple[str, ...], works: tuple[str, ...]) -> None:
        named = {
            "train_documents": train,
            "val_documents": works[1:2],
            "test_documents": works[2:3],
        }
        self.run("data/shakespeare_char/prepare.py", source="complete", out_dir=folder, **named)

    def load(self, path: Path) -> Any:
        return build_model(load_checkpoint(path), str(path)).eval().requires_grad_(False)


def do_job(lab: Lab, job: str) -> dict[str, Any]:
    """Make what a job names; its figures."""
    seed, _, name = job.rpartition("/")
    folder, number, began = lab.out / seed, int(seed[1:] or 0), time.monotonic()
    works, figures = lab.works.get(seed, ()), dict[str, Any]()
    if name == "natural" and not seed:
        lab.run("data/shakespeare_char/prepare.py", "prepare_natural", out_dir=lab.out / "natural")
        lab.train("natural_model", lab.out / "natural", lab.natural)
    elif name == "judge":
        lab.corpus(folder / "judge", works[3:], works)
        lab.train(
            "natural_model", folder / "judge", folder / "judge.pt", **lab.config["judge_model"]
        )
    elif name == "base":
        figures = make_base(lab, works, number, folder)
    else:
        path, figures = train_arm(lab, name, number, folder)
        figures = {
            "seconds": time.monotonic() - began,
            **figures,
            **measure(lab, lab.load(path), folder, number),
        }
    return {"seconds": time.monotonic() - began, **figures}


def make_base(lab: Lab, works: tuple[str, ...], seed: int, folder: Path) -> dict[str, Any]:
    """A generator, reward data, reward models with the shared natural model and with one of the own
    play; seconds.
    """
    own, generator, data = folder / "own", folder / "generator.pt", folder / "reward_data"
    lab.corpus(own, works[:1], works)
    began = time.monotonic()
    lab.train("train", own, generator, seed=seed)
    trained = time.monotonic()
    reads = {f"{split}_bin": own / f"{split}.bin" for split in ("train", "val")} | {
        "model_path": generator
    }
    written = {"input_mode": "binary", "output_dir": data, "overwrite": True, "seed": seed}
    lab.run("prepare_reward_data.py", "prepare_reward_data", **reads, **written)
    reads, written = (
        {"base_model_path": generator, "data_dir": data},
        {"overwrite": True, "seed": seed},
    )
    reward = partial(lab.run, "train_reward_model.py", "train_reward_model", **reads, **written)
    reward(natural_model_path=lab.natural, output_path=folder / "reward.pt")
    figures = {"seconds": trained - began, "reward_seconds": time.monotonic() - trained}
    lab.train(
        "natural_model",
        own,
        folder / "own_natural.pt",
        seed=seed,
        **lab.config["own_natural_model"],
    )
    reward(natural_model_path=folder / "own_natural.pt", output_path=folder / "own_reward.pt")
    return figures


def train_arm(lab: Lab, name: str, seed: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The path of an arm's model, and which step or cell was kept: the lowest calibrated loss of
    the select part.
    """
    given, path = dict(lab.config["arms"][name]), folder / f"{name}.pt"
    made = {
        "natural": (lab.natural, lab.out / "natural.json"),
        "generator": (path, folder / "base.json"),
    }
    if name in made:
        return made[name][0], read_json(made[name][1])
    if "cells" not in given:
        return path, train_policy(lab, seed, given, folder, path)
    cells: list[tuple[float, Path, dict[str, Any]]] = []
    for number, cell in enumerate(given["cells"]):
        path = folder / f"{name}_{number}.pt"
        training = lab.train("control_plain", folder / "own", path, seed=seed, **cell)
        cells.append(
            (training["calibrated_loss"], path, {"cell": cell, "kept_step": training["step"]})
        )
    _, path, kept = min(cells)
    return path, {**kept, "cells": [loss for loss, *_ in cells]}


class CalibratedEvaluation(evaluation.PolicyEvaluation):
    """Adds the loss that every arm is kept by: the calibrated loss of the select part."""

    def __call__(self, completer: Completer) -> dict[str, Any]:
        figures = super().__call__(completer)
        if self.part == "select":
            batches = WholeSplitBatches(
                self.text, self.length, 16, self.device, evaluation.EVAL_TOKENS
            )
            figures["calibrated_loss"] = fit_calibration(
                completer.model, batches, self.corpus.unigram
            )[1]
        return figures


class PlaceboScorer(RewardScorer):
    """Exchanges the evidence of a sequence's written tokens at random: right in the mean, wrong at
    each position.
    """

    def score_by_models(self, ids: Tensor, written: Tensor | None = None, *further: Any) -> Scores:
        scores = super().score_by_models(ids, written, *further)
        for row, places in () if written is None else zip(scores.evidence, written, strict=True):
            row[places] = row[places][torch.randperm(int(places.sum()))]
        return scores


class CorrectedScorer(RewardScorer):
    """Adds to each token's evidence a linear function of both models' hidden states there, fitted
    to crossover labels.

    It is fitted (-log P(K)), added to log(m / pi), to text of the policy pi after natural `text`
    (n,); the reward, evidence less log(pi / q), is then that sum. `shuffled`: with labels exchanged
    between sequences.
    """

    def __init__(self, text: np.ndarray, shuffled: bool, *models: Any, **options: Any) -> None:
        super().__init__(*models, **options)
        self.text, self.shuffled, self.fits = text, shuffled, 0
        self.fit(Completer(self.reference, self.reference.config.block_size))

    @torch.no_grad()
    def features(self, ids: Tensor) -> Tensor:
        """Hidden states (R, N - 1, C + 1) at all tokens but the first, each of which has read its
        token, and a 1.
        """
        parts = [
            torch.cat(self.reward_model.hidden_states(rows), -1)[:, 1:] for rows in ids.split(64)
        ]
        return pad(torch.cat(parts), (0, 1), value=1.0)

    def fit(self, completer: Completer) -> None:
        """Fit the weights (C + 1,) to fresh text of the completer's model."""
        N, self.fits = completer.length, self.fits + 1
        draw = np.random.default_rng((self.fits, 1))
        blocks = np.arange(HEAD_ROWS) % (len(self.text) // N)
        # (R, N)
        natural = torch.from_numpy(self.text[blocks[:, None] * N + np.arange(N)].astype(np.int64))
        crossovers = torch.from_numpy(draw.integers(1, N, size=(HEAD_ROWS, 1)))
        uniforms = torch.from_numpy(draw.random((HEAD_ROWS, 1, N), dtype=np.float32))
        ids = completer(natural, crossovers, uniforms, Sampling()).ids[:, 0]
        labels = (
            crossovers[torch.from_numpy(draw.permutation(HEAD_ROWS))]
            if self.shuffled
            else crossovers
        )
        targets, evidence = (
            torch.cat((labels, N - labels), 1) / N,
            super().score_by_models(ids).evidence,
        )
        fixed = (
            evidence
            - log_probs_from(completer.model, ids, 1)
            + log_probs_from(self.reference, ids, 1)
        )
        features = self.features(ids)
        weights = torch.zeros(features.size(-1), requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=30, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (
                crossover_loss(pad(fixed + features @ weights, (1, 0)), targets)
                + RIDGE * weights.square().sum()
            )
            loss.backward()
            return loss

        optimizer.step(closure)
        self.weights = weights.detach()

    def score_by_models(self, ids: Tensor, *further: Any) -> Scores:
        scores = super().score_by_models(ids, *further)
        evidence = scores.evidence + self.features(ids) @ self.weights
        return replace(scores, evidence=evidence, natural=natural_share(pad(evidence, (1, 0))))


def train_policy(
    lab: Lab, seed: int, given: dict[str, Any], folder: Path, path: Path
) -> dict[str, Any]:
    """Train a policy by train_grpo.py, in which `exchange` replaces one thing; its R2, and which
    step was kept.
    """
    own, generator = folder / "own", folder / "generator.pt"
    exchange, reward = (
        given.pop("exchange", ""),
        folder / f"{given.pop('reward_model', 'reward')}.pt",
    )
    every, shuffled, scorers = (
        given.pop("refresh", 0),
        given.pop("shuffled", False),
        list[CorrectedScorer](),
    )
    N = lab.load(generator).config.block_size
    teacher = Completer(lab.load(lab.natural), N) if exchange == "teacher" else None
    text = validation_part(open_corpus(str(own), 2).val, N, "select")

    def corrected(*models: Any, **options: Any) -> RewardScorer:
        scorers.append(CorrectedScorer(text, shuffled, *models, **options))
        return scorers[0]

    def draw(
        completer: Completer, tokens: Any, settings: GRPOSettings, step: int, ranks: Any
    ) -> rollouts.Rollouts:
        """A step's rollouts: natural text in each second step (mixed), the natural model's text
        (teacher), as ever.
        """
        if every and step > 1 and step % every == 1:
            scorers[0].fit(completer)
        if exchange == "mixed" and step % 2 == 0:
            settings = replace(settings, prefixes="natural")
        drawn = rollouts.sample(teacher or completer, tokens, settings, step, ranks)
        return replace(drawn, old_log_probs=None) if teacher else drawn

    gate: dict[str, Any] = {}
    scorer: Any = {"placebo": PlaceboScorer, "head": corrected}.get(exchange, RewardScorer)
    exchanged: dict[str, Any] = {"sample": draw, "RewardScorer": scorer}
    if teacher:  # its text is learned, every sequence with the same weight
        exchanged["compute_advantages"] = lambda rows, *_: (torch.ones(rows.mask.shape), {})
    exchanged["selection_value"] = lambda figures, _: figures["calibrated_loss"]
    exchanged["PolicyEvaluation"] = CalibratedEvaluation
    exchanged["passes_gate"] = lambda skill, _: not gate.update(skill)
    reads = {"base_model_path": generator, "reward_model_path": reward, "dataset": own}
    words = lab.words("train_grpo", **reads, output_path=path, seed=seed, overwrite=True, **given)
    argv = patch("sys.argv", ["train_grpo.py", *words])
    with argv, patch.multiple(train_grpo, **exchanged):
        train_grpo.main()
    training = load_checkpoint(path)["training"]
    return {
        name: (training | gate)[name]
        for name in ("r2", "r2_low", "r2_high", "steps", "kept_step", "stop_reason")
    }


@torch.no_grad()
def log_probs_from(model: Any, ids: Tensor, first: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (R, N - first) of the tokens from `first` on in rows (R, N)."""
    parts = [
        model.logits(model.trunk(rows[:, :-1])[:, first - 1 :]) / temperature
        for rows in ids.split(64)
    ]
    return token_log_probs(torch.cat(parts), ids[:, first:])


def measure(lab: Lab, model: Any, folder: Path, seed: int) -> dict[str, Any]:
    """Losses on the test play, figures of fresh text; judge_loss: where its distinct-3 is natural
    text's.
    """
    corpus, N = open_corpus(str(folder / "own"), 2), model.config.block_size
    test = open_token_file(folder / "own/test.bin", "test", corpus.tokenizer.vocab_size)
    select, temperatures = validation_part(corpus.val, N, "select"), lab.config["temperatures"]
    batches, judge = WholeSplitBatches(test, N, 64), lab.load(folder / "judge.pt")
    calibration = fit_calibration(model, WholeSplitBatches(select, N, 64), corpus.unigram)[0]
    losses = calibrated_losses(model, batches, calibration, corpus.unigram)
    selecting, (curve, natural, texts) = (
        fresh_text(model, judge, text, temperatures, seed) for text in (select, test)
    )
    at_temperature = (-log_probs_at(model, batches, temperatures)[0]).mean(1).tolist()
    for point, loss, other in zip(curve, at_temperature, selecting[0], strict=True):
        point |= {"natural_loss": loss, "select_auc": other["auc"]}
    chosen, plain = min(curve, key=lambda point: point["select_auc"]), temperatures.index(1.0)
    figures = {
        "calibrated_loss": losses.mean().item(),
        "loss": at_temperature[plain],
        **calibration._asdict(),
    }
    figures |= natural | {"auc": chosen["auc"], "auc_temperature": chosen["temperature"]}
    library = open_corpus(str(lab.out / "natural"), 2)
    known, decode = (
        frozenset(words_of(library.tokenizer.decode(library.train))),
        library.tokenizer.decode,
    )
    for name, rows in {"unknown_words": texts[plain], "natural_unknown_words": texts[-1]}.items():
        figures[name] = unknown_words(map(decode, rows.tolist()), known)
    diversity, loss = zip(
        *sorted((point["distinct_3"], point["judge_loss"]) for point in curve), strict=True
    )
    if diversity[0] <= natural["natural_distinct_3"] <= diversity[-1]:
        figures["judge_loss"] = float(np.interp(natural["natural_distinct_3"], diversity, loss))
    return figures | {"curve": curve}


def fresh_text(
    model: Any, judge: Any, text: np.ndarray, temperatures: tuple[float, ...], seed: int
) -> Any:
    """Figures of written halves of rows at each temperature, those of natural halves, and the
    halves (R, N / 2).

    The detector knows the judge and the writer: its score is the mean of log(judge / writer) over a
    half.
    """
    N, num_rows = model.config.block_size, min(CURVE_ROWS, len(text) // model.config.block_size)
    half, blocks = N // 2, evenly_spaced(np.arange(num_rows), len(text) // N, num_rows)
    rows = torch.from_numpy(text[blocks[:, None] * N + np.arange(N)].astype(np.int64))  # (R, N)
    uniforms = torch.from_numpy(
        np.random.default_rng((seed, 2)).random((num_rows, 1, N), dtype=np.float32)
    )
    judged, curve, halves = (
        log_probs_from(judge, rows, half),
        list[dict[str, Any]](),
        list[Tensor](),
    )
    for temperature in temperatures:
        found = Completer(model, N)(
            rows, torch.full((num_rows, 1), half), uniforms, Sampling(temperature)
        )
        ids, written = found.ids[:, 0], found.log_probs[:, 0, half:]
        natural, fresh = (
            judged - log_probs_from(model, rows, half, temperature),
            log_probs_from(judge, ids, half),
        )
        point = {"temperature": temperature, "judge_loss": -fresh.mean().item()}
        point["auc"] = area_under_curve(natural.mean(1), (fresh - written).mean(1))
        curve.append(point | {f"distinct_{n}": distinct_n(ids[:, half:], n) for n in (2, 3)})
        halves.append(ids[:, half:])
    halves.append(rows[:, half:])
    return (
        curve,
        {
            "natural_judge_loss": -judged.mean().item(),
            "natural_distinct_3": distinct_n(halves[-1], 3),
        },
        halves,
    )


def interval(values: list[float]) -> tuple[float, float, float, float]:
    """Mean over seeds, its 95% interval by Student's t, and the two-sided p of a mean of 0; NaN of
    fewer than two.
    """
    sample, n = np.asarray(values), len(values) - 1
    mean, error = sample.mean(), sample.std(ddof=1) / np.sqrt(len(sample)) if n else np.nan
    # of t = sqrt(n) tan(a): density cos(a)^(n - 1)
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)[1:-1]
    mass = np.cumsum(np.cos(angles) ** (n - 1))
    t, distribution = np.sqrt(n) * np.tan(angles), mass / mass[-1]
    half, p = (
        np.interp(0.975, distribution, t) * error,
        2 * (1 - np.interp(abs(mean) / (error or 1), t, distribution)),
    )
    return float(mean), float(mean - half), float(mean + half), float(p)


def holm(p_values: list[float]) -> list[float]:
    order = np.argsort(p_values)  # Holm 1979
    adjusted = np.maximum.accumulate(
        np.arange(len(order), 0, -1) * np.asarray(p_values)[order]
    ).clip(max=1)
    return adjusted[np.argsort(order)].tolist()


def report(config: dict[str, Any], records: dict[str, Any], path: Path) -> None:
    """Print the tables and draw the picture; NaN stands for what is not there yet."""
    seeds = [f"s{seed}" for seed in config["seeds"]]
    of = lambda arm, name: [records.get(f"{seed}/{arm}", {}).get(name, np.nan) for seed in seeds]  # noqa: E731
    for seed, start, end in zip(
        seeds, *(of(arm, "calibrated_loss") for arm in ("generator", "natural")), strict=True
    ):
        for each in (
            records[f"{seed}/{arm}"] for arm in config["arms"] if f"{seed}/{arm}" in records
        ):
            each["share_of_ceiling"] = (start - each["calibrated_loss"]) / (start - end)
            each["judge_gap"] = abs(each.get("judge_loss", np.nan) - each["natural_judge_loss"])

    def less(arm, other, name):
        return [a - b for a, b in zip(of(arm, name), of(other, name), strict=True)]

    cell = lambda mean, low, high, _: f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"  # noqa: E731
    first, *figures = config["figures"]
    rows, compared = list[list[str]](), list[list[str]]()
    for arm in config["arms"]:
        means = [f"{np.mean(of(arm, name)):.4g}" for name in figures]
        rows.append(
            [
                arm,
                *(f"{each:.4f}" for each in of(arm, first)),
                f"{np.mean(of(arm, first)):.4f}",
                *means,
            ]
        )
    print0("\n" + markdown([f"{first} of", *seeds, "mean", *figures], rows))
    for family, contrasts in config["contrasts"].items():
        found = [interval(less(arm, other, name)) for _, name, arm, other in contrasts]
        for (label, name, arm, other), each, p in zip(
            contrasts, found, holm([p for *_, p in found]), strict=True
        ):
            verdict = "no difference shown" if p >= 0.05 else "better" if each[0] < 0 else "worse"
            verdict = "not measured" if np.isnan(p) else verdict
            compared.append(
                [
                    label or family[0].upper(),
                    f"`{arm} - {other}`",
                    name,
                    cell(*each),
                    f"{p:.4f}",
                    verdict,
                ]
            )
    print0(
        "\n"
        + markdown(["family", "contrast", "figure", "mean (95 %)", "p, Holm", "verdict"], compared)
    )

    axes, names = (
        (figure := Figure(figsize=(7, 4), layout="constrained")).subplots(),
        ("distinct_3", "judge_loss"),
    )
    for arm, style in config["curves"].items():
        points = [
            [[point[name] for point in records[f"{seed}/{arm}"]["curve"]] for name in names]
            for seed in seeds
        ]
        axes.plot(*np.mean(points, 0), style, label=arm, markersize=4)
    axes.plot(
        *(np.mean(of("plain", f"natural_{name}")) for name in names),
        "k*",
        markersize=11,
        label="natural text",
    )
    axes.set(
        xlabel="distinct-3",
        ylabel="judge's loss, nats a character",
        title="Fresh text over temperatures",
    )
    axes.legend()
    write_png(figure, path)


def ask(lab: Lab, config_file: str, job: str) -> str:
    """Do a job in a process of its own, once what it needs is there; the job."""
    seed, _, name = job.rpartition("/")
    needs = (
        [f"{seed}/judge", f"{seed}/base"]
        if seed and name in lab.config["arms"]
        else ["natural"][: name == "base"]
    )
    while not all((lab.out / f"{each}.json").is_file() for each in needs):
        time.sleep(1)
    (log := lab.out / f"{job}.log").parent.mkdir(parents=True, exist_ok=True)
    words = lab.words("", job=job, config_file=config_file, out_dir=lab.out)
    with open(log, "w", encoding="utf-8") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.call(
            [sys.executable, __file__, *words], stdout=file, stderr=file, env=environment
        )
    if status:
        raise UserError(
            f"ERROR: {job} failed, see {log}: mend the cause and run the same command again"
        )
    return job


def main() -> None:
    settings = parse_settings(EvidenceSettings, "evidence")
    lab, path = Lab(settings), Path(settings.records)
    if settings.job:
        rounded = partial(json.loads, parse_float=lambda text: round(float(text), 5))
        return write_json(
            lab.out / f"{settings.job}.json", rounded(json.dumps(do_job(lab, settings.job)))
        )
    records = read_json(path) if path.is_file() else {}
    pairs = [(seed, arm) for arm in lab.config["arms"] for seed in lab.works]
    left = [f"{seed}/{arm}" for seed, arm in pairs if f"{seed}/{arm}" not in records]
    seeds = dict.fromkeys(job.partition("/")[0] for job in left)
    before = ["natural"] * bool(left) + [
        f"{seed}/{name}" for name in ("judge", "base") for seed in seeds
    ]
    wanted = [job for job in before if not (lab.out / f"{job}.json").is_file()] + left
    with ThreadPool(2) as pool:  # of processes that have one thread each
        done = pool.imap_unordered(partial(ask, lab, settings.config_file), wanted)
        for job in counted(done, len(wanted), "Jobs"):
            if job in left:
                records[job] = read_json(lab.out / f"{job}.json")
                write_json(path, dict(sorted(records.items())))
    report(lab.config, records, ROOT / "docs/evidence.png")


if __name__ == "__main__":
    run_main(main)
