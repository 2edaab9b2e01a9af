"""Trains the reward model: which share of a text is natural, and which the generator's own, read off its tokens.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --trunk logs/natural_model.pt

In: a generator's checkpoint, a reward dataset made with it, and for a likelihood head a model of natural text, or
several, made by train.py. Out: the reward model that does best on the validation blocks that select, its R2 measured on
those that report (data_loader.ValidationParts; also as a picture), and JSON records.
"""

import math
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from feature_cache import MOST_IN_MEMORY, forget_features, frozen_depth, frozen_features, to_device
from generation.sampling import Sampling
from model import GPT, check_same_fields
from reports.figures import skill_picture, write_png
from reward.heads import REWARD_MODELS, Ensemble, HeadRewardModel, LikelihoodRewardModel, RewardModel
from reward.posterior import log_mixture, mixture_loss, mixture_weights
from reward.skill import (
    MIN_BLOCKS,
    better_than_constant,
    bootstrap_r_squared,
    describe_skill,
    measure_skill,
    r_squared,
    skill_figures,
)
from reward_dataset_loader import (
    RewardDataset,
    check_model_compatibility,
    check_variety,
    open_checked_splits,
    read_metadata,
    rows_by_part,
    samples_per_block,
    sampling_of,
)
from runtime.cli import parse_settings, split_config
from runtime.device import autocast, random_stream, seed_step, select_device, select_dtype
from runtime.distributed import Ranks, parallel, start_ranks
from runtime.files import hash_file
from runtime.process import UserError, is_stage, run_main, warn
from runtime.resume import Run, Values
from runtime.run_log import check_finite, counted, detail, format_size, name_full_pass, not_finite, say
from runtime.settings import Problems, Settings, setting
from training.checkpoint import (
    build_model,
    check_origin,
    check_same_tokens,
    check_unseen,
    hash_model,
    load_checkpoint,
    save_checkpoint,
)
from training.optimizers import Best, EarlyStopping, TrainableWeights, gradient_scaler, make_optimizers, take_step

# Heads that are trained here: the others' models are train.py's.
TRAINED_HEADS = {"head": tuple(name for name, kind in REWARD_MODELS.items() if not kind.is_ratio)}
MAX_MIXTURE = 20.0  # a mixture of e^-20 is none at all


@dataclass
class RewardModelSettings(Settings):
    """Train a reward model on sequences that are natural up to a crossover."""

    GROUPS: ClassVar[dict[str, str]] = {
        **{"run": "base_model_path", "model": "head", "training": "reward_head_hidden_dim", "machine": "tracker"},
    }

    base_model_path: str | None = setting(None, model_file="required", changeable=True)
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = setting("data/reward_dataset", changeable=True)
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = setting("logs/reward_model.pt", output="file", changeable=True)
    """where the reward model is written; records (.jsonl) and a picture (.png) go beside it"""
    init_from: Literal["scratch", "resume"] = setting("scratch", changeable=True)
    """start anew, or go on with a run that was interrupted"""

    head: Literal["likelihood", "position", "last"] = "likelihood"
    """likelihood: a language model of natural text against the generator; position, last: a new head on the trunk"""
    trunk: str | tuple[str, ...] | None = setting(None, model_file="optional", changeable=True)
    """natural model of the same tokenization, or several, whose mixture is p; likelihood: required. None: generator"""
    dropout: float = setting(0.0, minimum=0, below=1, belongs_to=TRAINED_HEADS)
    """share of activations dropped in training"""

    reward_head_hidden_dim: int = setting(256, minimum=1, belongs_to=TRAINED_HEADS)
    """width of the hidden layer of a last or position head"""
    unfreeze_layers: int = setting(0, minimum=-1, belongs_to=TRAINED_HEADS)
    """last, position: train this many of the last transformer blocks too; 0: the head alone, -1: the whole trunk"""
    loss: Literal["mse", "cross_entropy", "token", "nll"] | None = None
    """what is minimised; token (a label for every token) and nll (-log P(K)) not for last. None: last mse, else nll"""
    learning_rate: float = setting(1e-3, above=0, belongs_to=TRAINED_HEADS)
    """learning rate of AdamW for head and unfrozen blocks, constant"""
    weight_decay: float = setting(0.01, minimum=0, belongs_to=TRAINED_HEADS)
    """decoupled weight decay of matrices"""
    grad_clip: float = setting(1.0, minimum=0, belongs_to=TRAINED_HEADS)
    """largest gradient norm; 0: no clipping"""
    batch_size: int = setting(64, minimum=1, belongs_to=TRAINED_HEADS)
    """sequences in a batch"""
    max_epochs: int = setting(20, minimum=1, unit="epochs", belongs_to=TRAINED_HEADS, changeable=True)
    """passes over the training samples, at most"""
    patience: int = setting(3, minimum=1, unit="epochs", belongs_to=TRAINED_HEADS, changeable=True)
    """stop after this many epochs without improvement"""
    min_delta: float = setting(1e-5, minimum=0, belongs_to=TRAINED_HEADS)
    """a smaller fall of the selection loss is no improvement"""
    control: bool = True
    """train once more on shuffled labels: R2 of a last or position head should then not be above 0"""
    cache_features: bool = setting(True, changeable=True)
    """compute what the frozen part of the trunk says of the data once, not in every epoch (last, position)"""
    tracker: Literal["none", "wandb", "tensorboard"] = setting("none", changeable=True)
    """also send the records to Weights & Biases or TensorBoard (needs the package of that name)"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward pass, of frozen models too; auto: bfloat16 on CUDA, else float32"""
    seed: int = setting(42, minimum=0)
    """seed of the head's weights and the samples' order"""

    # Options of the language-model training that was part of this script, and is train.py's.
    REMOVED: ClassVar[tuple[str, ...]] = (
        *("lm_iters", "lm_batch_size", "lm_learning_rate", "lm_muon_learning_rate", "lm_eval_interval", "dataset"),
    )

    def mixed_precision(self, device: torch.device) -> AbstractContextManager:
        """A context for forward passes without gradients."""
        return autocast(device, select_dtype(self.dtype, device))

    @property
    def model_class(self) -> type[RewardModel]:
        """The head's class."""
        return REWARD_MODELS[self.head]

    @property
    def trunks(self) -> tuple[str, ...]:
        """The models that `trunk` names."""
        return (self.trunk,) if isinstance(self.trunk, str) else self.trunk or ()

    @property
    def loss_name(self) -> str:
        """Name of the loss."""
        return self.loss or self.model_class.losses[0]

    def check_further(self, problems: Problems) -> None:
        """Note a loss that is not the head's, a missing trunk, and a tracker that is not installed."""
        problems.require(
            self.loss_name in self.model_class.losses,
            f"loss={self.loss}: a {self.head} head knows one share a sequence, nothing of its tokens",
            "Leave out loss, or choose --head position or likelihood",
        )
        if self.model_class.is_ratio and self.trunk is None:
            needed = f"a {self.head} head needs a model of natural text: make it with `{self.natural_model_command()}`"
            problems.require(False, needed, f"Name it with --trunk {self.natural_model_path}")
        problems.require(
            self.model_class.is_ratio or len(self.trunks) <= 1,
            f"trunk names {len(self.trunks)} models, but a {self.head} head stands on one",
            "Name one with --trunk, or choose --head likelihood, which reads their mixture",
        )
        problems.check_tracker(self.tracker)

    @property
    def natural_model_path(self) -> Path:
        """Path of the model that `natural_model_command` makes: beside the reward model."""
        return Path(self.output_path).with_name("natural_model.pt")

    def natural_model_command(self) -> str:
        """The command line with which train.py makes a model of natural text from the generator."""
        config, _ = split_config(sys.argv[1:])
        words = ["python", "train.py", *(["--config", config, "--section", "natural_model"] if config else [])]
        words += ["--init_from", self.base_model_path or "GENERATOR"]
        words += ["--dataset", corpus_folder(self.data_dir) or "CORPUS"]
        path = self.natural_model_path
        return shlex.join([*words, "--out_dir", str(path.parent), "--checkpoint_name", path.name])

    def instead_of(self, removed: str) -> str:
        """The error for a removed option."""
        return (
            f"ERROR: {removed}: the model of natural text is trained by train.py: `{self.natural_model_command()}`, "
            f"and named here with --trunk {self.natural_model_path}; in a settings file of run_cycles.py, "
            "natural_model = dict(NAME=VALUE)"
        )


def corpus_folder(data_dir: str) -> str | None:
    """The folder of the token files that reward data were made from; None where their metadata name none."""
    try:
        metadata = read_metadata(Path(data_dir, "train_metadata.txt"))
    except (OSError, UserError):  # faults of the data are reported elsewhere
        return None
    path = metadata.get("train_bin") or metadata.get("data_path")
    return path and str(Path(path).parent)


@dataclass(frozen=True)
class Data:
    """Reward data, and which rows of the validation set select and which report."""

    train_set: RewardDataset
    val_set: RewardDataset
    select_rows: np.ndarray
    report_rows: np.ndarray

    def reported(self) -> tuple[Tensor, Tensor]:
        """K/N and block (n,) of the rows that report."""
        blocks = self.report_rows // samples_per_block(self.val_set)
        return torch.from_numpy(self.val_set.y[self.report_rows, 0]), torch.from_numpy(blocks)


Tables = tuple[list[Tensor], Tensor]  # log p_i of each natural model and log q, (n, N - 1) float32 each, on the CPU


class LogProbs:
    """What the models of a likelihood head say of the rows that select and of those that report, each read once.

    Fit, control, predictions and losses are all functions of these tables. Those of a part are kept where they take at
    most `most_in_memory` bytes, 4 n (N - 1) for each model; else the rows are read again each time.
    """

    def __init__(
        self,
        model: LikelihoodRewardModel,
        data: Data,
        settings: RewardModelSettings,
        device: torch.device,
        most_in_memory: int = MOST_IN_MEMORY,
    ) -> None:
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.most_in_memory = most_in_memory
        self.kept: dict[str, Tables] = {}

    def rows(self, part: str) -> np.ndarray:
        """Numbers of the rows of a part, 'select' or 'report'."""
        return self.data.select_rows if part == "select" else self.data.report_rows

    def fits(self, part: str) -> bool:
        """Whether the tables of a part are kept."""
        values = len(self.rows(part)) * (self.data.val_set.block_size - 1)
        return 4 * values * (len(self.model.members) + 1) <= self.most_in_memory

    def of(self, part: str) -> Tables:
        """The tables of a part."""
        if part in self.kept:
            return self.kept[part]
        with self.settings.mixed_precision(self.device):
            tables = log_probs_of_each(self.model, self.data.val_set.x, self.rows(part), self.device, part)
        if self.fits(part):
            self.kept[part] = tables
        return tables

    @torch.no_grad()
    def predict(self, model: LikelihoodRewardModel) -> Tensor:
        """`predict` of the rows that report, for a model of the same natural models and generator."""
        if not self.fits("report"):
            return predict(model, self.data, self.settings, self.device)
        members, written = self.of("report")
        size = model.rows_at_a_time()
        parts = zip(*(table.split(size) for table in (*members, written)), strict=True)
        evidence = ([table.to(self.device) for table in part] for part in parts)
        return torch.cat([model.share(model.evidence_from(each[:-1], each[-1])).cpu() for each in evidence])


def main() -> None:
    # settings, data, and models: the generator, and the trunk, its own or another model of natural text
    settings = parse_settings(RewardModelSettings, "train_reward_model")
    assert settings.base_model_path is not None  # checked with the settings
    ranks = start_ranks(select_device(settings.device))
    checkpoint, generator_sha256 = load_checkpoint(settings.base_model_path), hash_model(settings.base_model_path)
    generator = build_model(checkpoint, "generator", settings.base_model_path, ranks.device)
    train_set, val_set = open_checked_splits(settings.data_dir)
    for dataset in (train_set, val_set):
        check_model_compatibility(dataset.get_tokenization_info(), dataset.block_size, generator.config)
        check_variety(dataset)
    check_origin(train_set, checkpoint, generator_sha256, settings.base_model_path)
    trunk = load_trunks(settings, checkpoint, generator_sha256, train_set.metadata, ranks.device)
    select_rows, report_rows, measured_on = rows_by_part(val_set)
    data = Data(train_set, val_set, select_rows, report_rows)

    dtype = select_dtype(settings.dtype, ranks.device)
    detail(f"Using device: {ranks.where} ({str(dtype).removeprefix('torch.')})")
    detail(f"Reward data: {settings.data_dir}, {len(train_set):,} + {len(val_set):,} samples")
    trunks = ", ".join(settings.trunks) or settings.base_model_path
    detail(f"Trunk: {trunks}, {format_size(trunk.num_parameters())}")
    sampling = sampling_of(train_set.metadata)
    model = new_reward_model(settings, trunk, generator, sampling).to(ranks.device).eval()
    detail(f"Head: {settings.head}; loss: {settings.loss_name}")

    # run: the head learns labels
    output, reads = Path(settings.output_path), what_is_read(settings, generator_sha256)
    run = Run(output, settings, ranks, reads, unit="epoch")
    run.begin(settings.init_from == "resume")
    untrained = model.copy_to_train() if settings.control else None
    inputs = (
        LogProbs(model, data, settings, ranks.device) if model.is_ratio else head_inputs(model, data, settings, ranks)
    )
    best = learn(run, model, data, inputs)
    detail(f"Stopped by {run.reason}")
    best.restore(model)
    model.eval()

    # metrics, on blocks that selected nothing
    truth, blocks = data.reported()
    prediction = ranks.on_main(lambda: predict_reported(model, data, inputs, settings, ranks.device))
    skill = measure_skill(prediction, truth, blocks, val_set.block_size, settings.seed)
    losses = ranks.on_main(lambda: report_losses(data, inputs, best.figures))
    training = {**best.figures, **losses, "skill": skill}
    training |= {"settings": run.settings_to_record(settings), "generator_sha256": generator_sha256}
    records = checkpoint["tokenization"], checkpoint["data"]
    if ranks.rank == 0:
        save_checkpoint(output, model, *records, training)
    if untrained is not None:
        # Only now: whatever becomes of the control, the model is there.
        try:
            learn(Run(None, replace(settings, max_epochs=best.at), ranks), untrained, data, inputs, control=True)
            control = ranks.on_main(lambda: predict_reported(untrained.eval(), data, inputs, settings, ranks.device))
            check_finite({"P(natural)": control.sum().item()})
        except UserError as error:
            warn(f"the control on shuffled labels failed: {str(error).removeprefix('ERROR: ')}")
            control = None
        skill |= control_figures(control, truth, blocks, settings.seed)
        if ranks.rank == 0:
            save_checkpoint(output, model, *records, training)
    run.log(best.at, final=True, **skill, **losses)

    run.remove_earlier_run()
    if ranks.rank == 0:
        forget_features(features_folder(settings))
        write_png(skill_picture(skill, f"{settings.head} head"), output.with_suffix(".png"))
    print_members(settings.trunks, training)
    print_skill(skill, measured_on, model)
    detail(f"Saved {output} and {output.with_suffix('.png')}")
    ranks.wait()  # for what rank 0 alone writes


def what_is_read(settings: RewardModelSettings, generator_sha256: str) -> dict[str, str | None]:
    """Hashes of the files that a run reads, by what they are: with others it would be another run."""
    files = [Path(settings.data_dir, f"{split}_{part}.bin") for split in ("train", "val") for part in "xy"]
    return {
        "generator": generator_sha256,
        "reward dataset": " ".join(hash_file(path) for path in files),
        "trunk": " ".join(hash_model(path) for path in settings.trunks) or None,
    }


def features_folder(settings: RewardModelSettings) -> Path:
    """Folder of features that are too large for the memory, while the head is trained."""
    return Path(settings.output_path).with_suffix(".features")


# ---------------------------------------------------------------------------------------------------------------------
# models


def load_trunks(
    settings: RewardModelSettings,
    generator: Mapping[str, Any],
    generator_sha256: str,
    metadata: Mapping[str, str],
    device: torch.device,
) -> GPT | Ensemble:
    """The model or models of natural text, of the generator's block size; UserError where they cannot be."""
    models: list[GPT] = []
    seen: dict[str, str] = {}
    for path in settings.trunks:
        contents, digest = load_checkpoint(path), hash_model(path)
        if digest == generator_sha256:
            raise UserError(
                f"ERROR: {path} is the generator itself, which knows nothing that it does not: name another --trunk"
            )
        if digest in seen:
            raise UserError(f"ERROR: {path} is the same file as {seen[digest]}: name each --trunk once")
        seen[digest] = path
        check_trunk(contents, generator, path)
        check_unseen(contents["data"], metadata, path)
        models.append(trunk_of(contents, path, settings.dropout, generator["config"].block_size, device))
    if not models:
        assert settings.base_model_path is not None  # checked with the settings
        path = settings.base_model_path
        return trunk_of(generator, path, settings.dropout, generator["config"].block_size, device)
    return models[0] if len(models) == 1 else Ensemble(models)


def check_trunk(contents: Mapping[str, Any], generator: Mapping[str, Any], path: str) -> None:
    """Raise UserError for a checkpoint's model that reads other tokens than the generator, or fewer of them."""
    names = ("vocab_size", "num_real_tokens")
    check_same_fields(contents["config"], generator["config"], names, path, "the generator")
    if contents["config"].block_size < generator["config"].block_size:
        raise UserError(
            f"ERROR: block_size is {contents['config'].block_size} in {path} and "
            f"{generator['config'].block_size} in the generator: a trunk must not read less"
        )
    check_same_tokens(contents["tokenization"], generator["tokenization"], path, "the generator")


def trunk_of(contents: Mapping[str, Any], path: str, dropout: float, block_size: int, device: torch.device) -> GPT:
    """A checkpoint's generator, with its dropout and block size changed."""
    contents = {**contents, "config": replace(contents["config"], dropout=dropout)}
    trunk = build_model(contents, "generator", path, device)
    trunk.crop_block_size(block_size)
    return trunk


def new_reward_model(
    settings: RewardModelSettings, trunk: GPT | Ensemble, generator: GPT, sampling: Sampling
) -> RewardModel:
    """A reward model with a new head on the trunk's weights; what learns from labels is frozen but for what is to."""
    seed_step(settings.seed, "reward_head")
    model = settings.model_class.on_trunk(trunk, generator, sampling, settings.reward_head_hidden_dim)
    if not model.is_ratio:
        count = freeze_trunk(model, settings.unfreeze_layers)
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        what = "the head alone" if count == 0 else f"the head and {count} of {model.config.n_layer} blocks"
        say(f"Training {what}: {trainable:,} of {model.num_parameters():,} parameters")
    return model


def freeze_trunk(model: HeadRewardModel, unfreeze_layers: int) -> int:
    """Freeze the trunk but for its last blocks (and the last normalisation with them); returns how many are trained."""
    n_layer = model.config.n_layer
    if unfreeze_layers > n_layer:
        raise UserError(f"ERROR: unfreeze_layers={unfreeze_layers}, but the model has {n_layer} blocks; -1 means all")
    count = n_layer if unfreeze_layers == -1 else unfreeze_layers
    model.transformer.requires_grad_(unfreeze_layers == -1)
    if count:
        model.transformer.h[n_layer - count :].requires_grad_(True)
        model.transformer.ln_f.requires_grad_(True)
    return count


# ---------------------------------------------------------------------------------------------------------------------
# heads


@torch.no_grad()
def log_probs_of_each(
    model: LikelihoodRewardModel, x: np.ndarray, rows: np.ndarray, device: torch.device, part: str
) -> Tables:
    """log p_i of each natural model, and log q, (n, N - 1) float32 of the rows' tokens, on the CPU.

    `part` is the name of the rows in the line that says how long it took.
    """
    began = time.perf_counter()
    batches = np.array_split(rows, -(-len(rows) // model.generator.rows_at_a_time()))
    parts = [
        [log_probs.cpu() for log_probs in model.log_probs_of_each(to_device(x, batch, device))]
        for batch in counted(batches, len(batches), "Log-likelihood ratios", passing=False)
    ]
    *members, written = map(torch.cat, zip(*parts, strict=True))
    name_full_pass(f"{len(rows):,} rows of the {part} part, {len(members)} + 1 models", len(rows) * x.shape[1], began)
    return members, written


def natural_tokens(dataset: RewardDataset, rows: np.ndarray) -> Tensor:
    """Which of the rows' tokens t = 1 .. N - 1 are natural, t < K: bool (n, N - 1)."""
    N = dataset.block_size
    return torch.arange(1, N) < torch.from_numpy(dataset.y[rows, :1] * N).round()


def finite(losses: dict[str, float]) -> dict[str, float | None]:
    """The losses, None for those that are not finite."""
    return {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}


def learn_mixture(
    run: Run[RewardModelSettings],
    model: LikelihoodRewardModel,
    data: Data,
    log_probs: LogProbs,
    control: bool = False,
) -> Best:
    """Fit the one weight that a likelihood head learns from labels, shuffled ones as `control`; one step is enough.

    On the selection rows, not on training rows: text that the trunk was trained on gets too high a likelihood.

    Of several trunks the weights u of p = sum_i u_i p_i come first: those of least loss on the rows' natural tokens,
    which need no labels and do not depend on how q was sampled. w then weighs p against q as it does a single model.
    """
    for member in model.members:
        member.requires_grad_(False)
    weights, best = TrainableWeights(model), Best()
    run.track(learning=weights, best=best)
    for _ in run.steps(limit="max_epochs", evaluate=lambda: None, until=lambda _: "one fit is enough", at_start=False):
        learned, figures, mixture = run.ranks.on_main(lambda: fit_mixture(run, model, data, log_probs, control))
        if "weights" in figures:
            model.set_weights(torch.tensor(figures["weights"]))
            learned |= figures
        with torch.no_grad():
            model.mixture.fill_(mixture)
        run.note(**(learned | figures))
        best.offer(learned["val_loss"], 1, weights.named, {"epoch": 1, **learned})
    return best


def fit_mixture(
    run: Run[RewardModelSettings], model: LikelihoodRewardModel, data: Data, log_probs: LogProbs, control: bool
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Validation loss and weight w; losses on natural tokens in nats (None if infinite); and the logit of w.

    Of several trunks the losses of each, and their weights, are among the figures.
    """
    rows, device = data.select_rows, run.ranks.device
    targets = data.val_set.y[rows]
    members, written = log_probs.of("select")
    is_natural = natural_tokens(data.val_set, rows)
    weights = mixture_weights(torch.stack([member[is_natural] for member in members]))
    natural = log_mixture(members, weights.log())
    p, q = natural[is_natural], written[is_natural]
    losses = {"natural_loss": -p.mean().item(), "generator_loss": -q.mean().item()}
    losses["mixture_loss"] = losses["generator_loss"] + mixture_loss(p - q)
    figures: dict[str, Any] = finite(losses)
    if len(members) > 1:
        figures["member_losses"] = [-member[is_natural].mean().item() for member in members]
        figures["weights"] = weights.tolist()
    targets = torch.from_numpy(shuffled(targets, run.settings.seed) if control else targets).to(device)
    ratios = (natural - written).to(device)
    optimizer = torch.optim.LBFGS([model.mixture], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(model.calibrated(ratios), targets, run.settings.loss_name)
        if wrong := not_finite({"val_loss": loss.item(), "the logit of w": model.mixture.item()}):  # LBFGS stumbles
            raise UserError(f"ERROR: {wrong}: the models are damaged; take earlier checkpoints")
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        model.mixture.clamp_(-MAX_MIXTURE, MAX_MIXTURE)
    val_loss, weight = closure().item(), model.mixture.sigmoid().item()
    return {"val_loss": val_loss, "mixture": weight}, figures, model.mixture.item()


@torch.no_grad()
def report_losses(
    data: Data, inputs: "LogProbs | HeadInputs", figures: Mapping[str, Any]
) -> dict[str, float | list[float] | None]:
    """Losses in nats, as `fit_mixture`'s, on the rows that report, of the fitted mixtures; none without an ensemble."""
    if not isinstance(inputs, LogProbs) or "weights" not in figures:
        return {}
    members, written = inputs.of("report")
    is_natural = natural_tokens(data.val_set, data.report_rows)
    each, q = [member[is_natural] for member in members], written[is_natural]
    p, w = log_mixture(each, torch.tensor(figures["weights"]).log()), figures["mixture"]
    mixed = log_mixture([p, q], torch.tensor([w, 1 - w]).log())
    means = {"natural": p, "generator": q, "mixture": mixed}
    losses = {f"report_{name}_loss": -log_probs.mean().item() for name, log_probs in means.items()}
    return finite(losses) | {"report_member_losses": [-log_probs.mean().item() for log_probs in each]}


def shuffled(targets: np.ndarray, seed: int) -> np.ndarray:
    """The labels (n, 2) in random order."""
    return targets[random_stream(seed, "control").permutation(len(targets))]


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a head in every epoch: tokens, with depth None, or `model.features` of them at a depth."""

    train: np.ndarray | Tensor
    val: np.ndarray | Tensor
    depth: int | None


def head_inputs(model: HeadRewardModel, data: Data, settings: RewardModelSettings, ranks: Ranks) -> HeadInputs:
    """The inputs of a head: features of the frozen part of the trunk, computed once, if the settings allow it."""
    depth = frozen_depth(model) if settings.cache_features else None
    if depth is None:
        return HeadInputs(data.train_set.x, data.val_set.x, None)
    folder, dtype = features_folder(settings), select_dtype(settings.dtype, ranks.device)
    compute = partial(frozen_features, dtype=dtype)
    train, val = (compute(model, part, depth, folder, ranks) for part in (data.train_set, data.val_set))
    return HeadInputs(train, val, depth)


def learn(
    run: Run[RewardModelSettings],
    model: RewardModel,
    data: Data,
    inputs: LogProbs | HeadInputs,
    control: bool = False,
) -> Best:
    """Train what the model learns from labels, shuffled ones as `control`."""
    if isinstance(inputs, LogProbs):
        assert model.is_ratio
        return learn_mixture(run, model, data, inputs, control)
    assert not model.is_ratio
    return learn_head(run, model, data, inputs, control)


def learn_head(
    run: Run[RewardModelSettings], model: HeadRewardModel, data: Data, inputs: HeadInputs, control: bool = False
) -> Best:
    """Train a last or position head and the unfrozen blocks; returns the epoch of least loss on the selection rows.

    As `control` on shuffled labels, all epochs, and nothing is selected: the model is left as it ends.
    """
    settings, ranks, num_samples = run.settings, run.ranks, len(data.train_set)
    targets = shuffled(data.train_set.y, settings.seed) if control else data.train_set.y
    optimizers = make_optimizers(model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)
    weights, stopping, best = TrainableWeights(model), EarlyStopping(settings.patience, settings.min_delta), Best()
    epoch_loss = Values(sum=0.0)  # over the epoch's samples so far
    scaler = gradient_scaler(ranks.device, dtype := select_dtype(settings.dtype, ranks.device))
    run.track(learning=weights, optimizers=optimizers, scaler=scaler, stopping=stopping, best=best)
    run.track(epoch_loss=epoch_loss)

    def evaluate() -> None:
        val_loss, prediction = ranks.on_main(lambda: evaluate_head(run, model, data, inputs))
        truth = torch.from_numpy(data.val_set.y[data.select_rows, 0])
        run.note(train_loss=epoch_loss.sum / num_samples, val_loss=val_loss)
        run.note(**skill_figures(prediction, truth, data.val_set.block_size))
        epoch = run.step // steps_per_epoch
        stopping.update(val_loss)
        best.offer(val_loss, epoch, weights.named, {"epoch": epoch, "val_loss": val_loss})
        epoch_loss.sum = 0.0
        train_what_learns(model)

    @lru_cache(maxsize=1)
    def order(epoch: int) -> np.ndarray:
        return random_stream(settings.seed, "order", epoch).permutation(num_samples)

    forward = parallel(model, ranks, dtype)
    loss_of_batch = partial(weighted_loss, depth=inputs.depth, loss=settings.loss_name)
    steps_per_epoch = -(-num_samples // settings.batch_size)
    train_what_learns(model)
    for step in run.steps(
        "max_epochs",
        None if control else evaluate,
        every=steps_per_epoch,
        until=lambda _: stopping.reason,
        unit_steps=steps_per_epoch,
        at_start=False,
    ):
        epoch, first = step // steps_per_epoch + 1, step % steps_per_epoch * settings.batch_size
        rows = np.sort(order(epoch)[first : first + settings.batch_size])  # a memory map reads forward
        mine = rows[ranks.share(len(rows))]
        share = len(mine) / len(rows)
        mine = mine if len(mine) else rows[:1]  # of weight 0: all ranks must take part
        batch = to_device(inputs.train, mine, ranks.device), to_device(targets, mine, ranks.device)
        seed_step(settings.seed, "dropout", epoch, first, ranks.rank)
        loss = forward(loss_of_batch, *batch, share * ranks.world_size)
        scaler.scale(loss).backward()
        take_step(model, optimizers, settings.grad_clip, scaler)
        epoch_loss.sum += ranks.sum(loss.item() / ranks.world_size)[0] * len(rows)
    return best


def weighted_loss(
    model: HeadRewardModel, inputs: Tensor, targets: Tensor, weight: float, depth: int | None, loss: str
) -> Tensor:
    """`weight` times the loss () of that name against targets (B, 2)."""
    return weight * model.loss(model.output(inputs, depth), targets, loss)


def train_what_learns(model: GPT) -> None:
    """Training mode for what is trained; what is frozen drops nothing, whether it runs or is remembered."""
    model.train()
    for block in model.transformer.h:
        block.train(any(parameter.requires_grad for parameter in block.parameters()))
    model.transformer.drop.train(model.transformer.wte.weight.requires_grad)


@torch.no_grad()
def evaluate_head(
    run: Run[RewardModelSettings], model: HeadRewardModel, data: Data, inputs: HeadInputs
) -> tuple[float, Tensor]:
    """Mean loss over the selection rows, and P(natural) (n,) of each."""
    model.eval()
    rows, size, total, predictions = data.select_rows, model.rows_at_a_time(), 0.0, []
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    for part in counted(parts, len(parts), "Evaluating"):
        with run.settings.mixed_precision(run.ranks.device):
            output = model.output(to_device(inputs.val, part, run.ranks.device), inputs.depth)
        targets = to_device(data.val_set.y, part, run.ranks.device)
        total += model.loss(output, targets, run.settings.loss_name).item() * len(part)
        predictions.append(model.share(output).cpu())
    return total / len(rows), torch.cat(predictions)


def control_figures(prediction: Tensor | None, truth: Tensor, blocks: Tensor, seed: int) -> dict[str, float | None]:
    """R2, with its interval, of a head learned from shuffled labels: None where that failed, or R2 is undefined."""
    r2, (low, high) = math.nan, (None, None)
    if prediction is not None:
        r2, (low, high) = r_squared(prediction, truth), bootstrap_r_squared(prediction, truth, blocks, seed)
    return {"control_r2": None if math.isnan(r2) else r2, "control_r2_low": low, "control_r2_high": high}


def predict_reported(
    model: RewardModel,
    data: Data,
    inputs: LogProbs | HeadInputs,
    settings: RewardModelSettings,
    device: torch.device,
) -> Tensor:
    """P(natural) (n,) of the rows that report."""
    if isinstance(inputs, LogProbs):
        assert model.is_ratio
        return inputs.predict(model)
    return predict(model, data, settings, device)


@torch.no_grad()
def predict(model: RewardModel, data: Data, settings: RewardModelSettings, device: torch.device) -> Tensor:
    """P(natural) (n,) of the rows that report, by the model's forward pass."""
    rows, began = data.report_rows, time.perf_counter()
    parts = np.array_split(rows, -(-len(rows) // model.rows_at_a_time()))
    with settings.mixed_precision(device):
        predictions = (model(to_device(data.val_set.x, part, device))[0][:, 0].cpu() for part in parts)
        found = torch.cat(list(counted(predictions, len(parts), "Skill")))
    name_full_pass(f"{len(rows):,} rows of the report part", len(rows) * data.val_set.block_size, began)
    return found


def print_members(paths: tuple[str, ...], figures: Mapping[str, Any]) -> None:
    """Print weights and losses of an ensemble's members, and the losses of their mixture."""
    if "weights" not in figures:
        return
    width = max(len(path) for path in (*paths, "natural model"))
    say(f"\n{'natural model':<{width}}  {'weight':>6}  {'loss, select part':>17}  {'loss, report part':>17}")
    for path, *values in zip(
        paths, figures["weights"], figures["member_losses"], figures["report_member_losses"], strict=True
    ):
        say("{:<{width}}  {:6.3f}  {:17.4f}  {:17.4f}".format(path, *values, width=width))
    mixture = f"{figures['natural_loss']:17.4f}  {figures['report_natural_loss']:17.4f}"
    say(f"{'their mixture':<{width}}  {'':6}  {mixture}")


def print_skill(skill: dict[str, Any], of_what: str, model: RewardModel) -> None:
    """Print how well the reward model predicts, and plainly so where it does not."""
    say(f"\nSkill on {of_what}:")
    say(describe_skill(skill, tables=not is_stage()))
    if not model.is_ratio and better_than_constant(skill.get("control_r2_low")):
        say("The control has R2 above 0 too: some of this was not learned from labels (try more blocks, another seed).")
    if not better_than_constant(skill["r2_low"]):
        why = (
            f"these samples give no interval (fewer than {MIN_BLOCKS} blocks, or labels that are alike)"
            if skill["r2_low"] is None
            else "its interval is not above 0"
        )
        say(f"This reward model is NO BETTER THAN A CONSTANT as far as is shown: {why}.")
        say("GRPO on it may optimise noise, and train_grpo.py may refuse it. For ways out see")
        say("docs/reward_model_training3.md: --head likelihood, a --trunk that knows more natural text, more data.")


if __name__ == "__main__":
    run_main(main)
