"""Trains the reward model: which share of a text is natural, and which the generator's own, read off its tokens.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --data_dir data/reward_dataset

Floor 5. In: a generator's checkpoint, a reward dataset made with it, and the corpus where it lies. Out: the reward
model that does best on the selection half of the validation blocks, its skill measured on the other half (also as a
picture), and JSON records. First the trunk may learn more about natural text; then the head learns from labels.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from checkpoint import build_model, check_same_tokens, load_checkpoint, save_checkpoint
from data_loader import TokenSplits, WholeSplitBatches, dataset_folder, get_batch, load_binary, load_text
from generation import Sampling
from model import GPT, check_same_fields
from objectives import (
    crossover_loss,
    mixture_loss,
    natural_share,
    reward_loss,
    token_log_probs,
)
from optimization import EarlyStopping, clip_gradients, learning_rate_factor, make_optimizers
from reward_dataset_loader import RewardDataset, check_model_compatibility, open_checked_splits
from reward_model import LikelihoodRewardModel
from run_log import RunLog, counted, format_size, progress, say
from runtime import (
    UserError,
    check_writable,
    hash_file,
    hash_tokens,
    random_stream,
    run_main,
    seed_step,
    select_device,
    warn,
)
from settings import Problems, parse_settings
from skill import (
    MIN_BLOCKS,
    better_than_constant,
    bootstrap_r_squared,
    describe_skill,
    draw_skill,
    measure_skill,
    r_squared,
    skill_figures,
)
from tokenization_manager import TokenizationManager

ROWS_AT_A_TIME = 256  # at most, in passes without gradients
DEFAULT_LOSS = {"last": "mse", "position": "nll", "likelihood": "nll"}
DEFAULT_LM_ITERS = 400
LM_WARMUP, LM_FLOOR = 20, 0.05  # steps, and the share of the peak at which the decay ends
MAX_MIXTURE = 20.0  # a mixture of e^-20 is none at all


@dataclass
class RewardModelSettings:
    """Train a reward model on sequences that are natural up to a crossover."""

    base_model_path: str | None = None
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = "data/reward_dataset"
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = "logs/reward_model.pt"
    """where the reward model is written; records (.jsonl) and a picture (.png) go beside it"""

    head: Literal["likelihood", "position", "last"] = "likelihood"
    """likelihood: a language model of natural text against the generator; position, last: a new head on the trunk"""
    trunk: str | None = None
    """checkpoint of a model of natural text to start from, of the same tokenization; None: the generator"""
    dataset: str | None = None
    """folder of the corpus's train.bin and val.bin, for lm_iters; None: what the reward data were made from"""
    lm_iters: int | None = None
    """steps in which the trunk first learns more natural text; None: 400 for a likelihood head without trunk, else 0"""
    lm_batch_size: int = 16
    """sequences in a batch of natural text"""
    lm_learning_rate: float = 2e-3
    """peak learning rate of AdamW on natural text; cosine decay to a twentieth"""
    lm_muon_learning_rate: float = 1e-2
    """peak learning rate of Muon for the matrices on natural text"""
    lm_eval_interval: int = 100
    """steps between evaluations on natural text of the selection half, by which the best is kept"""
    dropout: float = 0.0
    """share of activations dropped in training"""

    reward_head_hidden_dim: int = 256
    """width of the hidden layer of a last or position head"""
    unfreeze_layers: int = 0
    """last, position: train this many of the last transformer blocks too; 0: the head alone, -1: the whole trunk"""
    loss: Literal["mse", "cross_entropy", "token", "nll"] | None = None
    """what is minimised; token (a label for every token) and nll (-log P(K)) not for last. None: last mse, else nll"""
    learning_rate: float = 1e-3
    """learning rate of AdamW for head and unfrozen blocks, constant"""
    weight_decay: float = 0.01
    """decoupled weight decay of matrices"""
    grad_clip: float = 1.0
    """largest gradient norm; 0: no clipping"""
    batch_size: int = 64
    """sequences in a batch"""
    max_epochs: int = 20
    """passes over the training samples, at most"""
    patience: int = 3
    """stop after this many epochs without improvement"""
    min_delta: float = 1e-5
    """a smaller fall of the selection loss is no improvement"""
    control: bool = True
    """train once more on shuffled labels: what that sees is not there"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = 42
    """seed of the head's weights and the samples' order"""

    @property
    def num_lm_iters(self) -> int:
        """Steps on natural text."""
        if self.lm_iters is not None:
            return self.lm_iters
        return DEFAULT_LM_ITERS if self.head == "likelihood" and self.trunk is None else 0

    @property
    def loss_name(self) -> str:
        """What is minimised."""
        return self.loss or DEFAULT_LOSS[self.head]

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_model_files(self, "base_model_path", *(["trunk"] if self.trunk is not None else []))
        problems.check_range(self, "reward_head_hidden_dim", "batch_size", "max_epochs", "patience", minimum=1)
        problems.check_range(self, "lm_batch_size", "lm_eval_interval", minimum=1)
        problems.check_range(self, "unfreeze_layers", minimum=-1)
        problems.check_range(self, "learning_rate", "lm_learning_rate", "lm_muon_learning_rate", above=0)
        problems.check_range(self, "lm_iters", "weight_decay", "grad_clip", "min_delta", "seed", minimum=0)
        problems.check_range(self, "dropout", minimum=0, below=1)
        problems.require(
            self.head != "last" or self.loss in (None, "mse", "cross_entropy"),
            f"loss={self.loss}: a last head knows one share a sequence, nothing of its tokens",
            "Leave out loss, or choose --head position or likelihood",
        )
        if self.head == "likelihood":
            problems.require(
                self.unfreeze_layers == 0,
                f"unfreeze_layers={self.unfreeze_layers} is ignored with a likelihood head: lm_iters trains its trunk",
                "Leave out unfreeze_layers, or choose --head position or last",
            )
            problems.require(
                self.lm_iters != 0 or self.trunk is not None,
                "lm_iters=0 without a trunk: a likelihood head would hold the generator against itself",
                "Let the trunk learn natural text with --lm_iters, or name a model of it with --trunk",
            )
        if obstacle := check_writable(self.output_path, is_file=True):
            problems.require(False, obstacle, "Choose a place you may write to with --output_path")
        return problems


def main() -> None:
    settings = parse_settings(RewardModelSettings, "train_reward_model")
    device = select_device(settings.device)

    # the generator
    checkpoint, generator_sha256 = load_checkpoint(settings.base_model_path), hash_file(settings.base_model_path)
    generator = build_model(checkpoint, "generator", settings.base_model_path, device)

    # data, and the trunk to begin with: the generator's own, or another model of natural text
    train_set, val_set = open_checked_splits(settings.data_dir)
    for dataset in (train_set, val_set):
        check_model_compatibility(dataset.get_tokenization_info(), dataset.block_size, generator.config)
        check_variety(dataset)
    check_origin(settings, generator_sha256, checkpoint["tokenization"], train_set)
    trunk = load_trunk(settings, checkpoint, generator_sha256, train_set.metadata, device)
    select_rows, report_rows, judged_on = halves_by_block(val_set)

    say(f"Using device: {device}")
    say(f"Reward data: {settings.data_dir}, {len(train_set):,} + {len(val_set):,} samples")
    say(f"Trunk: {settings.trunk or settings.base_model_path}, {format_size(trunk.num_parameters())}")
    # What can be refused is refused before the records of an earlier run are replaced.
    sampling = sampling_of(train_set.metadata)
    splits = natural_text(settings, train_set.metadata, checkpoint) if settings.num_lm_iters else None
    if settings.head == "likelihood":
        model, learn = LikelihoodRewardModel(trunk, generator, sampling).to(device).eval(), learn_mixture
    else:
        model, learn = reward_gpt(settings, trunk).to(device), learn_head
    say(f"Head: {settings.head}; loss: {settings.loss_name}")

    with RunLog(Path(settings.output_path).with_suffix(".jsonl"), unit="epoch") as log:
        # the trunk learns natural text
        diverged = None
        if splits is not None:
            unseen = splits.val[: first_reported_token(val_set, len(splits.val))]
            diverged = learn_natural_text(trunk, generator, splits.train, unseen, settings, log, device)
            if settings.head != "likelihood":
                model.transformer.load_state_dict(trunk.transformer.state_dict())

        # the head learns labels
        untrained = untrained_copy(model) if settings.control else None
        learned = learn(model, train_set, val_set, select_rows, settings, device, log)
        diverged = diverged or learned.get("diverged")

        # skill, on blocks that selected nothing
        truth = torch.from_numpy(val_set.y[report_rows, 0])
        blocks = torch.from_numpy(report_rows // samples_per_block(val_set))
        prediction = predict(model, val_set, report_rows, device)
        skill = measure_skill(prediction, truth, blocks, val_set.block_size, settings.seed)
        training = {**learned, "skill": skill, "settings": asdict(settings), "generator_sha256": generator_sha256}
        records = checkpoint["tokenization"], checkpoint["data"]
        save_checkpoint(settings.output_path, model, *records, training)
        if settings.control:
            # Only now: whatever becomes of the control, the model is there.
            try:
                learn(untrained, train_set, val_set, select_rows, settings, device, None, learned["epoch"])
                control = predict(untrained, val_set, report_rows, device)
            except UserError as error:
                warn(f"the control on shuffled labels failed: {str(error).removeprefix('ERROR: ')}")
                control = None
            skill |= control_figures(control, truth, blocks, settings.seed)
            save_checkpoint(settings.output_path, model, *records, training)
        log.log(learned["epoch"], quiet=True, final=True, **skill)

    picture = Path(settings.output_path).with_suffix(".png")
    draw_skill(skill, f"{settings.head} head", picture)
    print_skill(skill, judged_on, settings.head)
    say(f"Saved {settings.output_path} and {picture}")
    if diverged:
        raise UserError(diverged)


# ---------------------------------------------------------------------------------------------------------------------
# models


def load_trunk(
    settings: RewardModelSettings,
    generator: Mapping[str, Any],
    generator_sha256: str,
    metadata: Mapping[str, str],
    device: torch.device,
) -> GPT:
    """The model of natural text to begin with, as a generator of the same block size; UserError where it cannot be."""
    contents, path = generator, settings.base_model_path
    if settings.trunk is not None:
        path = settings.trunk
        contents = load_checkpoint(path)
        if not settings.num_lm_iters and hash_file(path) == generator_sha256:
            raise UserError(
                f"ERROR: {path} is the generator itself, which knows nothing that it does not: give lm_iters"
            )
        names = ("vocab_size", "num_real_tokens")
        check_same_fields(contents["config"], generator["config"], names, path, "the generator")
        if contents["config"].block_size < generator["config"].block_size:
            raise UserError(
                f"ERROR: block_size is {contents['config'].block_size} in {path} and "
                f"{generator['config'].block_size} in the generator: a trunk must not read less"
            )
        told = f"{path} numbers its characters otherwise than the generator"
        check_same_tokens(generator["tokenization"], contents["tokenization"], told)
        check_unseen(contents["data"], metadata, path)
    contents = {**contents, "config": replace(contents["config"], dropout=settings.dropout)}
    trunk = build_model(contents, "generator", path, device)
    trunk.crop_block_size(generator["config"].block_size)
    return trunk


def check_unseen(trained: Mapping[str, Any] | None, metadata: Mapping[str, str], path: str) -> None:
    """Raise UserError for a trunk that was trained on another split: it may know the text that is to judge it."""
    theirs = metadata.get("val_sha256")
    if trained is None or theirs is None:
        warn(f"{path} does not tell its training text; make sure that the reward data's validation text is not in it")
    elif trained["val_sha256"] != theirs:
        raise UserError(
            f"ERROR: {path} was trained with another validation split (sha256 {trained['val_sha256']:.12}...) than the "
            f"reward data's ({theirs:.12}...): it may know the text that is to judge it; use a trunk of the same split"
        )


def reward_gpt(settings: RewardModelSettings, trunk: GPT) -> GPT:
    """A GPT with a new last or position head on the trunk's weights, frozen but for what is to be trained."""
    seed_step(settings.seed, "reward_head")
    model = GPT(
        replace(
            trunk.config,
            mode="reward",
            reward_head_type=settings.head,
            reward_head_hidden_dim=settings.reward_head_hidden_dim,
        )
    )
    model.transformer.load_state_dict(trunk.transformer.state_dict())
    count = freeze_trunk(model, settings.unfreeze_layers)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    what = "the head alone" if count == 0 else f"the head and {count} of {model.config.n_layer} blocks"
    say(f"Training {what}: {trainable:,} of {model.num_parameters():,} parameters")
    return model


def freeze_trunk(model: GPT, unfreeze_layers: int) -> int:
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


def sampling_of(metadata: Mapping[str, str]) -> Sampling:
    """How the written text of a dataset was sampled; plainly, where its metadata do not say."""
    top_k = metadata.get("top_k")
    try:
        return Sampling(float(metadata.get("temperature", 1.0)), None if top_k is None else int(top_k))
    except ValueError:
        raise UserError(
            f"ERROR: the reward data's metadata have temperature={metadata.get('temperature')} and top_k={top_k}: no "
            "such sampling is possible"
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# data


def check_variety(dataset: RewardDataset) -> None:
    """Raise UserError for data in which there is nothing to learn."""
    name, shares = f"{dataset.data_dir}, {dataset.split} split", dataset.y[:, 0]
    low, high = float(shares.min()), float(shares.max())
    remedy = "make the data anew with prepare_reward_data.py"
    if low == high:
        kind = {1.0: "all natural", 0.0: "all written"}.get(low, "all natural up to the same place")
        raise UserError(
            f"ERROR: {name}: every label is K/N = {low:g}: texts {kind} hold nothing to tell apart; {remedy}"
        )
    first = int(dataset.x[0, 0])
    step = max(1, 2**24 // dataset.block_size)
    if all((dataset.x[row : row + step] == first).all() for row in range(0, len(dataset), step)):
        raise UserError(f"ERROR: {name}: every token is {first}: a constant text teaches nothing; {remedy}")


def check_origin(
    settings: RewardModelSettings, generator_sha256: str, record: dict | None, dataset: RewardDataset
) -> None:
    """Hold the dataset against the generator: the same tokenizer, and the very model that wrote it."""
    if record is not None:
        dataset.get_tokenization_info().check_compatible(TokenizationManager.from_record(record).info())
    writer = dataset.metadata.get("model_sha256")
    if writer is not None and writer != generator_sha256:
        raise UserError(
            f"ERROR: {settings.data_dir} was written by another model (sha256 {writer:.12}...) than "
            f"{settings.base_model_path} ({generator_sha256:.12}...); name that model, or make data with this one"
        )


def samples_per_block(dataset: RewardDataset) -> int:
    """How many rows share a natural block; 1 where the metadata do not say."""
    return dataset.samples_per_chunk or 1


def halves_by_block(dataset: RewardDataset) -> tuple[np.ndarray, np.ndarray, str]:
    """Rows of the first and of the second half of the blocks: one selects, the other reports; and its name."""
    rows, per_block = np.arange(len(dataset)), samples_per_block(dataset)
    num_blocks = len(dataset) // per_block
    if num_blocks < 2:
        warn("a single validation block: it both selects the model and reports its skill, which is so too favourable")
        return rows, rows, "the validation block that also selected it"
    middle, name = num_blocks // 2 * per_block, "validation blocks that did not select it"
    if dataset.samples_per_chunk is None:
        warn(
            f"{dataset.data_dir / 'val_metadata.txt'} has no samples_per_chunk: halves and interval go by rows, not by "
            "natural blocks; where rows share a block, the skill is too favourable and its interval too narrow"
        )
        name = "validation rows that did not select it (but may share text with some that did)"
    return rows[:middle], rows[middle:], name


def first_reported_token(dataset: RewardDataset, num_tokens: int) -> int:
    """Where in the validation split of `num_tokens` the blocks begin that report skill; text before that may select."""
    used = len(dataset) // samples_per_block(dataset)
    total = num_tokens // dataset.block_size
    return max(2, used // 2 * total // used * dataset.block_size)


def natural_text(
    settings: RewardModelSettings, metadata: Mapping[str, str], checkpoint: Mapping[str, Any]
) -> TokenSplits:
    """The corpus that the reward data were made from; UserError where it is not found, or is another."""
    vocab_size, mode = checkpoint["config"].num_real_tokens, metadata.get("input_mode")
    way_out = "name the folder of its train.bin and val.bin with --dataset, or use --lm_iters 0 (and --trunk)"
    try:
        if settings.dataset is not None:
            folder = dataset_folder(settings.dataset)
            splits = load_binary(folder / "train.bin", folder / "val.bin", vocab_size)
        elif mode == "binary":
            splits = load_binary(metadata["train_bin"], metadata["val_bin"], vocab_size)
        elif mode == "text" and checkpoint["tokenization"] is not None:
            tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])
            splits = load_text(metadata["data_path"], tokenizer, float(metadata["train_split"]))
        else:
            raise UserError("ERROR: the reward data do not say what corpus they were made from")
    except (UserError, KeyError, ValueError) as error:
        reason = str(error).removeprefix("ERROR: ").splitlines()[0]
        if isinstance(error, KeyError):
            reason = f"the reward data's metadata have no {error}"
        raise UserError(f"ERROR: no natural text to learn: {reason}; {way_out}") from None
    if "val_sha256" not in metadata:
        warn("the reward data do not tell their corpus: make sure that their validation text is not trained on here")
    for name in ("train", "val"):
        ours, theirs = hash_tokens(getattr(splits, name)), metadata.get(f"{name}_sha256")
        if theirs is not None and theirs != ours:
            raise UserError(
                f"ERROR: this is not the corpus that the reward data were made from: the hash of its {name} split is "
                f"{ours[:12]}..., theirs {theirs[:12]}...; {way_out}"
            )
    if len(splits.train) <= checkpoint["config"].block_size:
        raise UserError(f"ERROR: {len(splits.train)} tokens of natural text are no more than one block: use more text")
    return splits


def to_device(array: np.ndarray | Tensor, rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows of a memory map or a tensor, on the device; token ids as int64."""
    part = array[rows] if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array[rows]))
    return (part.long() if part.dtype == torch.uint16 else part).to(device)


def shuffled(targets: np.ndarray, seed: int) -> np.ndarray:
    """The labels (n, 2) in random order."""
    return targets[random_stream(seed, "control").permutation(len(targets))]


# ---------------------------------------------------------------------------------------------------------------------
# natural text


def learn_natural_text(
    trunk: GPT,
    generator: GPT,
    tokens: np.ndarray,
    unseen: np.ndarray,
    settings: RewardModelSettings,
    log: RunLog,
    device: torch.device,
) -> str | None:
    """Train the trunk as a language model; keeps the weights that know `unseen` text best. What diverged, if so.

    Of a likelihood head the best mixture with the generator is judged, for that is what it uses: a trunk that is no
    better than the generator by itself, but knows other things, is of use to it.
    """
    num_iters = settings.num_lm_iters
    optimizers = make_optimizers(
        trunk,
        "muon",
        settings.lm_learning_rate,
        settings.lm_muon_learning_rate,
        settings.weight_decay,
        (0.9, 0.99),
        device.type,
    )
    batches = WholeSplitBatches(unseen, trunk.config.block_size, trunk.rows_at_a_time(), device)
    generator_log_probs = log_probs_of_text(generator, batches)
    best_state, best_step, best_loss, diverged = None, 0, math.inf, None
    seed_step(settings.seed, "lm_dropout")
    with progress(num_iters, "Natural text", "step") as bar:
        try:
            for step in range(num_iters + 1):
                if step % settings.lm_eval_interval == 0 or step == num_iters:
                    log_probs = log_probs_of_text(trunk, batches)
                    own_loss = loss = -log_probs.mean().item()
                    if settings.head == "likelihood":
                        loss = mixture_loss(log_probs - generator_log_probs) - generator_log_probs.mean().item()
                    if not math.isfinite(loss):
                        raise UserError(f"ERROR: the loss on natural text is {loss} at step {step}")
                    log.log(step, unit="step", phase="natural_text", lm_val_loss=own_loss, lm_select_loss=loss)
                    if loss < best_loss:
                        best_state = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
                        best_step, best_loss = step, loss
                if step == num_iters:
                    break
                factor = learning_rate_factor(step, LM_WARMUP, num_iters, LM_FLOOR)
                optimizers.set_learning_rate_factor(factor)
                draw = random_stream(settings.seed, "natural_text", step)
                x, y = get_batch(tokens, trunk.config.block_size, settings.lm_batch_size, draw, device)  # (B, T) each
                trunk.train()
                _, loss = trunk(x, y)
                loss.backward()
                clip_gradients(trunk.named_parameters(), settings.grad_clip)
                optimizers.step()
                optimizers.zero_grad()
                bar.update()
        except UserError as error:
            remedy = "lower lm_learning_rate and lm_muon_learning_rate"
            if best_step == 0:  # nothing was learned
                raise UserError(f"{error}; {remedy}") from None
            diverged = f"{error}; saved is a reward model of step {best_step}; {remedy}"
    trunk.load_state_dict(best_state)
    trunk.eval()
    say(f"Natural text: kept step {best_step}, lm_select_loss {best_loss:.4f}")
    return diverged


@torch.no_grad()
def log_probs_of_text(model: GPT, batches: WholeSplitBatches) -> Tensor:
    """Log-probabilities (n,) of all targets of the batches, on the CPU."""
    model.eval()
    parts = [token_log_probs(model.logits(model.trunk(x)), y).flatten().cpu() for x, y in batches]
    return torch.cat(parts)


# ---------------------------------------------------------------------------------------------------------------------
# heads


@torch.no_grad()
def log_ratios(model: LikelihoodRewardModel, x: np.ndarray, rows: np.ndarray, device: torch.device) -> Tensor:
    """log p - log q (n, N - 1) float32 of the rows' tokens, on the CPU."""
    parts = []
    with progress(len(rows), "Log-likelihood ratios", "seq") as bar:
        for part in np.array_split(rows, -(-len(rows) // model.generator.rows_at_a_time())):
            natural, written = model.log_probs(to_device(x, part, device))
            parts.append((natural - written).cpu())
            bar.update(len(part))
    return torch.cat(parts)


def learn_mixture(
    model: LikelihoodRewardModel,
    train_set: RewardDataset,
    val_set: RewardDataset,
    rows: np.ndarray,
    settings: RewardModelSettings,
    device: torch.device,
    log: RunLog | None,
    num_epochs: int | None = None,
) -> dict[str, Any]:
    """Fit the one number that a likelihood head learns from labels; those shuffled, without a `log`.

    On the selection rows, not on training rows: what the trunk has learned by heart looks more natural than it is.
    """
    targets = torch.from_numpy(val_set.y[rows] if log else shuffled(val_set.y[rows], settings.seed)).to(device)
    ratios = log_ratios(model, val_set.x, rows, device).to(device)
    optimizer = torch.optim.LBFGS([model.mixture], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = crossover_loss(model.calibrated(ratios), targets, settings.loss_name)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        model.mixture.clamp_(-MAX_MIXTURE, MAX_MIXTURE)
    val_loss, weight = closure().item(), model.mixture.sigmoid().item()
    if not math.isfinite(val_loss):
        raise UserError(f"ERROR: val_loss is {val_loss}: the models are damaged; take earlier checkpoints")
    model.requires_grad_(False)
    if log:
        log.log(1, val_loss=val_loss, mixture=weight)
    return {"epoch": 1, "val_loss": val_loss, "mixture": weight}


def learn_head(
    model: GPT,
    train_set: RewardDataset,
    val_set: RewardDataset,
    select_rows: np.ndarray,
    settings: RewardModelSettings,
    device: torch.device,
    log: RunLog | None,
    num_epochs: int | None = None,
) -> dict[str, Any]:
    """Train a last or position head and the unfrozen blocks; keeps the epoch of least loss on the selection rows.

    Without a `log`: on shuffled labels, and `num_epochs` of them whatever comes out.
    """
    targets = train_set.y if log else shuffled(train_set.y, settings.seed)
    frozen = not any(parameter.requires_grad for parameter in model.transformer.parameters())
    # A frozen trunk says the same in every epoch: what a last head reads of it is computed once.
    cached = frozen and settings.head == "last"
    train_inputs = pooled_features(model, train_set, "train") if cached else train_set.x
    val_inputs = pooled_features(model, val_set, "val") if cached else val_set.x
    optimizers = make_optimizers(
        model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay, device_type=device.type
    )
    stopping = EarlyStopping(settings.patience, settings.min_delta)
    best_state, learned = None, {"epoch": 0, "val_loss": math.inf}
    max_epochs = num_epochs or settings.max_epochs
    for epoch in range(1, max_epochs + 1):
        seed_step(settings.seed, "dropout", epoch)
        order = random_stream(settings.seed, "order", epoch).permutation(len(train_set))
        loss_sum = 0.0
        model.train(not frozen)
        try:
            with progress(-(-len(order) // settings.batch_size), f"Epoch {epoch}/{max_epochs}", "step") as bar:
                for first in range(0, len(order), settings.batch_size):
                    rows = np.sort(order[first : first + settings.batch_size])  # sorted: a memory map reads forward
                    output = head_output(model, to_device(train_inputs, rows, device), cached)
                    loss = head_loss(output, to_device(targets, rows, device), settings)
                    loss.backward()
                    clip_gradients(model.named_parameters(), settings.grad_clip)
                    optimizers.step()
                    optimizers.zero_grad()
                    loss_sum += loss.item() * len(rows)
                    bar.update()
            val_loss, prediction = evaluate(model, val_inputs, val_set.y, select_rows, settings, device, cached)
            if not math.isfinite(val_loss):
                raise UserError(
                    f"ERROR: val_loss is {val_loss} in epoch {epoch}: the training diverged; lower the learning rate"
                )
        except UserError as error:
            if best_state is None:
                raise
            learned["diverged"] = f"{error}; saved is the model of epoch {learned['epoch']}"
            break
        if log is None:
            continue
        figures = skill_figures(prediction, torch.from_numpy(val_set.y[select_rows, 0]), val_set.block_size)
        log.log(epoch, train_loss=loss_sum / len(order), val_loss=val_loss, **figures)
        if val_loss < learned["val_loss"]:
            best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            learned = {"epoch": epoch, "val_loss": val_loss}
        stopping.update(val_loss)
        if stopping.should_stop:
            say(f"Stopped after epoch {epoch}: no improvement of {settings.min_delta} in {settings.patience} epochs")
            break
    if log:
        model.load_state_dict(best_state)
    model.eval()
    return learned


@torch.no_grad()
def pooled_features(model: GPT, dataset: RewardDataset, name: str) -> Tensor:
    """What a last head reads, (n, C) float32 on the CPU: the trunk's hidden state at every sample's last token."""
    device = next(model.parameters()).device
    features = torch.empty(len(dataset), model.config.n_embd)
    with progress(len(dataset), f"Features ({name})", "seq") as bar:
        size = model.rows_at_a_time(ROWS_AT_A_TIME)
        for first in range(0, len(dataset), size):
            rows = np.arange(first, min(first + size, len(dataset)))
            features[rows] = model.trunk(to_device(dataset.x, rows, device))[:, -1].float().cpu()
            bar.update(len(rows))
    return features


def head_output(model: GPT, inputs: Tensor, cached: bool) -> Tensor:
    """A last head's scores (B, 2) before the softmax, of tokens or `cached` features; a position head's evidence."""
    if model.config.reward_head_type == "position":
        return model.evidence(inputs)
    return model.reward_head[:-1](inputs if cached else model.trunk(inputs)[:, -1])


def head_loss(output: Tensor, targets: Tensor, settings: RewardModelSettings) -> Tensor:
    """The loss () of what `head_output` gives, against targets (B, 2)."""
    return (reward_loss if settings.head == "last" else crossover_loss)(output, targets, settings.loss_name)


@torch.no_grad()
def evaluate(
    model: GPT,
    inputs: np.ndarray | Tensor,
    targets: np.ndarray,
    rows: np.ndarray,
    settings: RewardModelSettings,
    device: torch.device,
    cached: bool,
) -> tuple[float, Tensor]:
    """Mean loss over the rows, and P(natural) (n,) of each."""
    model.eval()
    total, predictions, size = 0.0, [], model.rows_at_a_time(ROWS_AT_A_TIME)
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        output = head_output(model, to_device(inputs, part, device), cached)
        total += head_loss(output, to_device(targets, part, device), settings).item() * len(part)
        natural = output.softmax(-1)[:, 0] if settings.head == "last" else natural_share(output)
        predictions.append(natural.cpu())
    return total / len(rows), torch.cat(predictions)


def untrained_copy(model: GPT | LikelihoodRewardModel) -> GPT | LikelihoodRewardModel:
    """A model with the same trunks and a head of its own, as it is now."""
    if isinstance(model, LikelihoodRewardModel):
        return LikelihoodRewardModel(model.natural, model.generator, model.sampling).to(model.mixture.device).eval()
    return copy.deepcopy(model)


def control_figures(prediction: Tensor | None, truth: Tensor, blocks: Tensor, seed: int) -> dict[str, float | None]:
    """R2, with its interval, of a head learned from shuffled labels: None where that failed, or R2 is undefined."""
    r2, (low, high) = math.nan, (None, None)
    if prediction is not None:
        r2, (low, high) = r_squared(prediction, truth), bootstrap_r_squared(prediction, truth, blocks, seed)
    return {"control_r2": None if math.isnan(r2) else r2, "control_r2_low": low, "control_r2_high": high}


@torch.no_grad()
def predict(
    model: GPT | LikelihoodRewardModel, dataset: RewardDataset, rows: np.ndarray, device: torch.device
) -> Tensor:
    """P(natural) (n,) of some rows, as whoever uses the model sees it."""
    parts = np.array_split(rows, -(-len(rows) // model.rows_at_a_time()))
    predictions = (model(to_device(dataset.x, part, device))[0][:, 0].cpu() for part in parts)
    return torch.cat(list(counted(predictions, len(parts), "Skill")))


def print_skill(skill: dict[str, Any], of_what: str, head: str) -> None:
    """Tell how well the reward model sees, and plainly so where it does not."""
    say(f"\nSkill on {of_what}:")
    say(describe_skill(skill))
    if head != "likelihood" and better_than_constant(skill.get("control_r2_low")):
        say("The control sees as well: some of this skill was not learned from labels (try more blocks, another seed).")
    if not better_than_constant(skill["r2_low"]):
        why = (
            f"these samples give no interval (fewer than {MIN_BLOCKS} blocks, or labels that are alike)"
            if skill["r2_low"] is None
            else "its interval is not above 0"
        )
        say(f"This reward model is NO BETTER THAN A CONSTANT as far as is shown: {why}.")
        say("A policy that climbs it may climb noise, and train_grpo.py will refuse it. What to try is in")
        say("docs/reward_model_training3.md: --head likelihood, more --lm_iters, a --trunk that knows more, more data.")


if __name__ == "__main__":
    run_main(main)
