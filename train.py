"""Trains the generator: a GPT learns the next token of a corpus.

    python train.py --config config/train_shakespeare.py

In: train.bin and val.bin (made by data/NAME/prepare.py; characters also need meta.pkl), and with
`--init_from PATH` a checkpoint to train further. Out, in out_dir: the best model (checkpoint_name), the state from
which `--init_from resume` goes on, and JSON records. Option names are nanoGPT's.
"""

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from data_loader import WholeSplitBatches, get_batch, validation_part
from losses import loss_sums, next_token_loss, perplexity
from model import GPT, GPTConfig
from reward.skill import bootstrap_mean, format_loss
from runtime.cli import parse_settings
from runtime.device import autocast, peak_memory_mb, random_stream, seed_step, select_device, select_dtype
from runtime.distributed import Ranks, gradients_stay, parallel, start_ranks
from runtime.files import check_appended_hash, is_hub_name
from runtime.process import UserError, run_main
from runtime.resume import Run, Values
from runtime.run_log import Tracker, counted, detail, format_size, make_tracker, name_full_pass, say
from runtime.settings import Problems, Settings, setting
from tokenization_manager import TokenizationManager
from training.checkpoint import (
    Corpus,
    build_model,
    check_same_splits,
    checked_contents,
    data_record,
    hash_weights,
    load_checkpoint,
    open_corpus,
    save_checkpoint,
)
from training.optimizers import (
    Best,
    EarlyStopping,
    Optimizers,
    cooldown_factor,
    gradient_scaler,
    learning_rate_factor,
    make_optimizers,
    take_step,
)


@dataclass
class TrainSettings(Settings):
    """Train a GPT on a corpus of tokens."""

    GROUPS: ClassVar[dict[str, str]] = {
        **{"run": "out_dir", "data": "dataset", "model": "n_layer", "optimizer": "optimizer"},
        **{"schedule": "decay_lr", "stopping": "patience", "machine": "device"},
    }

    out_dir: str = setting("out", output="folder", changeable=True)
    """folder for everything this run writes"""
    checkpoint_name: str = "model_checkpoint.pt"
    """file name of the best model, within out_dir"""
    init_from: str = setting("scratch", changeable=True)
    """scratch; resume: go on from the state in out_dir; or the model from which the run starts, with its shape: a
    checkpoint of ours or nanoGPT's, a Hugging Face folder or name (GPT-2, GPT-NeoX), gpt2, gpt2-medium, -large, -xl"""
    eval_interval: int = setting(250, minimum=1, unit="steps")
    """steps between evaluations"""
    eval_iters: int | None = setting(None, minimum=1)
    """nanoGPT's estimate: so many random batches, of the select part in an evaluation, at the end of the whole
    validation split; None: all of its tokens at the end, and eval_tokens in an evaluation"""
    eval_tokens: int | None = setting(65_536, minimum=1, unit="tokens", belongs_to={"eval_iters": (None,)})
    """tokens of the select part that an evaluation reads, in evenly spaced windows, always the same; None: all of it"""
    eval_only: bool = setting(False, changeable=True)
    """evaluate once, also on the whole split, and exit: the checkpoint in out_dir; init_from=resume: its state; a
    PATH: that checkpoint"""
    log_interval: int = setting(10, minimum=1, unit="steps", changeable=True)
    """steps between records"""
    always_save_checkpoint: bool = False
    """write the checkpoint at every evaluation, not only at the best"""
    tracker: Literal["none", "wandb", "tensorboard"] = setting("none", changeable=True)
    """also send the records to Weights & Biases or TensorBoard (needs the package of that name)"""
    wandb_log: bool = setting(False, changeable=True)
    """nanoGPT's name for --tracker wandb"""
    wandb_project: str = setting("crossover", changeable=True)
    """Weights & Biases project"""
    wandb_run_name: str = setting("train", changeable=True)
    """Weights & Biases run name"""

    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin and val.bin: a path, or a name below data/"""
    gradient_accumulation_steps: int = setting(1, minimum=1)
    """batches whose gradients are added up for one step"""
    batch_size: int = setting(16, minimum=1)
    """sequences in a batch"""
    block_size: int = setting(128, minimum=1, unit="tokens")
    """longest context, in tokens; that of a longer start is cut down to it, but not to the default"""

    n_layer: int = setting(4, minimum=1)
    """transformer blocks"""
    n_head: int = setting(4, minimum=1)
    """attention heads"""
    n_embd: int = setting(128, minimum=1)
    """width of the embeddings"""
    dropout: float = setting(0.0, minimum=0, below=1)
    """share of activations dropped in training"""
    bias: bool = False
    """biases in linear layers and norms"""
    position: Literal["rope", "learned"] = "rope"
    """rotary positions, or nanoGPT's learned ones"""
    init: Literal["gpt2", "orthogonal"] = setting("gpt2", belongs_to={"init_from": ("scratch", "resume")})
    """initial weights; gpt2: normal, as in GPT-2; orthogonal: orthogonal in the blocks, output projections zero"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices inside the blocks, AdamW for the rest"""
    learning_rate: float = setting(1e-3, above=0)
    """peak learning rate of AdamW"""
    muon_learning_rate: float = setting(2e-2, above=0)
    """peak learning rate of Muon"""
    muon_momentum: float = setting(0.95, minimum=0, below=1)
    """Muon's decay of the gradient's mean"""
    max_iters: int = setting(1000, minimum=0, unit="steps", changeable=True)
    """optimizer steps in all, those before a resumption included"""
    weight_decay: float = setting(1e-1, minimum=0)
    """decoupled weight decay of matrices"""
    beta1: float = setting(0.9, minimum=0, below=1)
    """AdamW's decay of the gradient's mean"""
    beta2: float = setting(0.99, minimum=0, below=1)
    """AdamW's decay of the squared gradient's mean"""
    grad_clip: float = setting(1.0, minimum=0)
    """largest gradient norm; 0: no clipping"""
    decay_lr: bool = True
    """let the learning rate decay after the warm-up"""
    lr_schedule: Literal["cosine", "cooldown"] = "cosine"
    """cosine: from the warm-up on; cooldown: constant, then linear over the last steps"""
    cooldown: float = setting(0.6, above=0, maximum=1)
    """cooldown: the share of the steps that the decay takes"""
    short_contexts: tuple[int, ...] = ()
    """context lengths in tokens at the start of training, such as 8 16, with as many tokens a step; empty: none"""
    short_share: float = setting(0.6, above=0, maximum=1)
    """share of the steps with short contexts, divided equally among them"""
    warmup_iters: int = setting(20, minimum=0, unit="steps")
    """steps of linear warm-up"""
    lr_decay_iters: int | None = setting(None, minimum=0, unit="steps")
    """step at which the decay ends; None: the max_iters with which the run began"""
    min_lr: float | None = setting(None, minimum=0)
    """learning rate at the end of the decay; None: a tenth of the peak. Muon's decays by the same factor"""
    patience: int | None = setting(None, minimum=1, unit="evaluations", changeable=True)
    """stop after this many evaluations without improvement; None: never"""
    min_delta: float = setting(0.001, minimum=0, unit="nats")
    """minimum decrease of select_loss that resets the patience, in nats per token"""

    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward pass; auto: bfloat16 on CUDA, else float32"""
    compile: bool = setting(False, changeable=True)
    """compile the model with torch.compile"""
    seed: int = setting(1337, minimum=0)
    """seed of weights, batches and dropout"""

    # Settings that a checkpoint to start from decides.
    SHAPE: ClassVar[tuple[str, ...]] = ("block_size", "n_layer", "n_head", "n_embd", "bias", "position")

    @property
    def start_path(self) -> str | None:
        """The checkpoint to start from; None: new weights, or those of a state."""
        return None if self.init_from in ("scratch", "resume") else self.init_from

    def check_further(self, problems: Problems) -> None:
        """Note a start that cannot be, contexts or heads that do not fit, and a tracker that is not installed."""
        if self.start_path is not None:
            problems.require(
                Path(self.start_path).exists() or is_hub_name(self.start_path),
                f"init_from={self.init_from}: must be scratch, resume or a model's path or name, and no such file",
                "Check the path",
            )
            problems.require(
                self.eval_only or Path(self.start_path).resolve() != self.checkpoint_path.resolve(),
                f"init_from={self.init_from}: this run would overwrite it",
                "Choose another --out_dir or --checkpoint_name",
            )
        problems.require(
            self.checkpoint_name == Path(self.checkpoint_name).name and self.checkpoint_name not in ("", ".."),
            f"checkpoint_name={self.checkpoint_name}: must be a plain name, without /",
            "Name the folder with --out_dir",
        )
        if self.init_from == "scratch":  # else another block_size may hold: see `shaped`
            self.check_contexts(problems)
        problems.check_tracker(self.tracker_name)
        # Asked of heads and width alone, so that it is reported beside whatever else is wrong.
        heads = GPTConfig(n_head=self.n_head, n_embd=self.n_embd, position=self.position)
        if (problem := heads.problem()) and problem not in problems.errors:
            width = self.n_head * 2 * max(1, round(self.n_embd / self.n_head / 2))
            problems.require(False, problem, f"Change --n_head or --n_embd, for instance to --n_embd {width}")

    def model_config(self, vocab_size: int, num_tokens: int | None = None) -> GPTConfig:
        """The model these settings describe."""
        return GPTConfig(
            block_size=self.block_size,
            vocab_size=vocab_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            dropout=self.dropout,
            bias=self.bias,
            position=self.position,
            num_tokens=num_tokens,
        )

    def check_contexts(self, problems: Problems) -> None:
        """Note each of the short contexts that does not divide the block size."""
        for length in self.short_contexts:
            problems.require(
                length > 0 and self.block_size % length == 0,
                f"short_contexts: {length} does not divide block_size={self.block_size}",
                "Choose lengths that do, such as powers of 2",
            )

    def shaped(self, config: GPTConfig) -> "TrainSettings":
        """These settings with the shape of the model that a run starts from, or goes on with.

        Raises UserError for options that ask the start for another shape, and for contexts that do not fit this one.
        """
        problems, shape = Problems(), {name: getattr(config, name) for name in self.SHAPE}
        for name, has in shape.items() if self.start_path is not None else ():
            asked, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            problems.require(
                asked in (has, default),
                f"{name}={asked}: {self.start_path}, from which this run starts, has {name}={has}",
                f"Leave out --{name}, or start with --init_from scratch",
            )
        shaped = replace(self, **shape)
        if not self.eval_only:
            shaped.check_contexts(problems)
        problems.raise_if_any()
        return shaped

    @property
    def checkpoint_path(self) -> Path:
        return Path(self.out_dir, self.checkpoint_name)

    @property
    def log_path(self) -> Path:
        return self.checkpoint_path.with_suffix(".jsonl")

    @property
    def tracker_name(self) -> str:
        return "wandb" if self.wandb_log else self.tracker


def main() -> None:
    # settings, data, and the checkpoint to start from or to evaluate, whose shape is the model's
    given = parse_settings(TrainSettings, "train")
    ranks = start_ranks(select_device(given.device))
    device, dtype = ranks.device, select_dtype(given.dtype, ranks.device)
    ranks.everywhere(lambda: ranks.check_divides(batch_size=given.batch_size))
    start, model = ranks.everywhere(lambda: load_start(given, device))
    settings = given if start is None else ranks.everywhere(lambda: given.shaped(model.config))
    corpus = ranks.everywhere(lambda: open_corpus(settings.dataset, settings.block_size + 1, start))
    data = ranks.on_main(lambda: data_record(corpus.train, corpus.val))
    reads = ranks.everywhere(lambda: what_is_read(given, start, data))

    # run. The state holds the settings as given: a start's shape is not among them, and no option of a resumed run.
    run = Run(given.checkpoint_path, given, ranks, reads, tracker=partial(tracker_of, settings))
    if start is None or not given.eval_only:
        run.begin(given.init_from == "resume")
    if run.is_resumed:
        saved = {"model": run.saved("model"), "config": run.saved("facts").get("config")}
        model = build_model(checked_contents(run.path, saved), "generator", run.path, device).train()
        settings = given.shaped(model.config)
    elif model is None:
        model = new_model(settings, corpus.tokenizer).to(device)
    optimizers = optimizers_of(model, settings)
    scaler = gradient_scaler(device, dtype)
    stopping, best = EarlyStopping(settings.patience, settings.min_delta), Best()
    facts = Values(config=replace(model.config), first_batch=0 if start is None else batches_learned(start))
    # The state's parts; those of a resumed run are restored here.
    run.track(model=model, optimizers=optimizers, scaler=scaler, stopping=stopping, best=best, facts=facts)
    if run.is_resumed:
        ranks.on_main(lambda: check_resumable(given, run, best))

    tokens_per_step = settings.gradient_accumulation_steps * settings.batch_size * settings.block_size
    say(f"Using device: {ranks.where} ({str(dtype).removeprefix('torch.')})")
    detail(f"Data: {corpus.describe()}")
    detail(f"Model: {format_size(model.num_parameters())}; {tokens_per_step:,} tokens a step")
    if given.start_path is not None:
        detail(f"Starting from {given.start_path}, block_size {settings.block_size}")
    if settings.eval_only:
        evaluate_once(model, corpus, settings, ranks, dtype)
        return

    def evaluate() -> None:
        losses = selection_loss(model, corpus, settings, ranks, dtype)
        run.note(**losses)
        stopping.update(run.record["select_loss"])
        batches = facts.first_batch + run.step
        figures = {"step": run.step, **losses, "batches": batches, "settings": run.settings_to_record(settings)}
        keep_best(best, model, run, figures, (corpus.tokenizer.to_record(), data))

    compiled = torch.compile(model) if settings.compile else model
    forward = parallel(compiled, ranks)  # type: ignore[arg-type]  # torch.compile makes a module of a module
    horizon = run.began["max_iters"]  # of the schedules: a run that goes on longer does not stretch them
    seconds, num_timed = 0.0, 0
    # Evaluates at steps 0, eval_interval, ... and the last; a signal ends it after a whole step, with the state saved.
    for step in run.steps("max_iters", evaluate, every=settings.eval_interval, until=lambda _: stopping.reason):
        started = time.perf_counter()
        optimizers.set_learning_rate_factor(factor_at(step, settings, horizon))
        length, rows = batch_shape(step, settings, horizon)
        draw = random_stream(settings.seed, "train", facts.first_batch + step)  # batches follow those of the start
        seed_step(settings.seed, "dropout", step, *([ranks.rank] if ranks.rank else []))
        loss_sum = 0.0
        for micro_step in range(settings.gradient_accumulation_steps):
            # (B / ranks, T) each: of a batch that all ranks draw alike, every one has its rows
            x, y = get_batch(corpus.train, length, rows, draw, device, ranks.share(rows))
            with gradients_stay(forward, last=micro_step == settings.gradient_accumulation_steps - 1):
                with autocast(device, dtype):
                    loss = forward(next_token_loss, x, y) / settings.gradient_accumulation_steps
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        norm = take_step(model, optimizers, settings.grad_clip, scaler)
        seconds, num_timed = seconds + time.perf_counter() - started, num_timed + 1

        if (step + 1) % settings.log_interval == 0:
            train_loss = ranks.sum(float(loss_sum))[0] / ranks.world_size
            rate = tokens_per_step * num_timed / seconds
            run.note(train_loss=train_loss, gradient_norm=norm)
            run.note(learning_rate=optimizers.learning_rate, tokens_per_second=round(rate))
            run.note(peak_memory_mb=round(peak_memory_mb(device)))
            run.bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{rate:,.0f}")
            seconds, num_timed = 0.0, 0

    run.remove_earlier_run()
    say(f"Stopped at step {run.step} by {run.reason}")
    measured = f"{best.value:.4f} (perplexity {perplexity(best.value):.3f})"
    say(f"Best select_loss: {measured}, on the selecting part of val.bin")
    measure_kept(run, best, corpus, dtype)
    detail(f"Saved {settings.checkpoint_path}")


# ---------------------------------------------------------------------------------------------------------------------
# the model, first and best


def load_start(settings: TrainSettings, device: torch.device) -> tuple[dict[str, Any] | None, GPT | None]:
    """The checkpoint that a run starts from, or evaluates, and its model with the dropout and context of the settings.

    (None, None) for new weights and for those of a state. Raises UserError for a checkpoint that is no generator's, and
    where --eval_only finds none.
    """
    if settings.start_path is None and not (settings.eval_only and settings.init_from == "scratch"):
        return None, None
    path = settings.start_path or settings.checkpoint_path
    if settings.start_path is None and not settings.checkpoint_path.is_file():
        raise UserError(
            f"ERROR: eval_only: {path} not found: train it first, or name a trained model with --out_dir and "
            "--checkpoint_name"
        )
    start = load_checkpoint(path)
    start["config"] = replace(start["config"], dropout=settings.dropout)
    model = build_model(start, "generator", path, device).train()
    if not settings.eval_only and TrainSettings.block_size != settings.block_size < model.config.block_size:
        model.crop_block_size(settings.block_size)
    return start, model


def batches_learned(start: dict[str, Any]) -> int:
    """How many batches train.py had drawn for a checkpoint's weights; 0 where it does not say."""
    batches = (start["training"] or {}).get("batches")
    return batches if type(batches) is int else 0


def what_is_read(settings: TrainSettings, start: dict[str, Any] | None, data: dict[str, Any]) -> dict[str, Any]:
    """Record of the data, and hash of the checkpoint to train further, which must not have learned other data."""
    if start is None or settings.start_path is None or settings.eval_only:
        return {"corpus": data}
    check_same_splits(start["data"], data, allow_mismatch=None)
    return {"corpus": data, "start": hash_weights(settings.start_path)}


def new_model(settings: TrainSettings, tokenizer: TokenizationManager) -> GPT:
    """A model with random weights.

    BPE's ids are padded to a multiple of 64, which matrix products like; padding ids are never used.
    """
    seed_step(settings.seed, "weights")
    vocab_size = tokenizer.vocab_size
    padded = math.ceil(vocab_size / 64) * 64 if tokenizer.method != "char" else vocab_size
    model = GPT(settings.model_config(padded, vocab_size if padded > vocab_size else None))
    if settings.init == "orthogonal":
        model.init_orthogonal()
    return model


def optimizers_of(model: GPT, settings: TrainSettings) -> Optimizers:
    """The optimizers that the settings ask for."""
    return make_optimizers(
        model,
        settings.optimizer,
        settings.learning_rate,
        settings.muon_learning_rate,
        settings.weight_decay,
        (settings.beta1, settings.beta2),
        settings.muon_momentum,
    )


def check_resumable(settings: TrainSettings, run: Run, best: Best) -> None:
    """Raise UserError where the best model so far is gone or damaged, where the run began from another checkpoint than
    the one that is now at its place, or where further steps would have a learning rate of 0.
    """
    if best.weights is None and best.figures:
        if not settings.checkpoint_path.is_file():
            raise UserError(
                f"ERROR: {settings.checkpoint_path}, the best model so far, is gone; put it back, or delete "
                f"{run.path} and start from scratch"
            )
        check_appended_hash(settings.checkpoint_path)
    start = run.began["init_from"]
    if "start" in run.reads and Path(start).exists() and hash_weights(start) != run.reads["start"]:
        raise UserError(
            f"ERROR: {run.path} is of a run that began from another {start}; put that back, or delete the state and "
            f"start from scratch"
        )
    max_iters, horizon = settings.max_iters, run.began["max_iters"]
    if max_iters > horizon and not settings.eval_only and factor_at(max_iters - 1, settings, horizon) == 0:
        end = horizon if settings.lr_decay_iters is None else settings.lr_decay_iters
        raise UserError(
            f"ERROR: max_iters={max_iters}: the schedule of this run ends at step {end} with a learning rate of 0 "
            f"(min_lr={settings.min_lr:g}): start a longer run with --init_from scratch and another --out_dir"
        )


def keep_best(
    best: Best, model: GPT, run: Run[TrainSettings], figures: dict[str, Any], records: tuple[dict, dict]
) -> None:
    """Offer an evaluated model; write the checkpoint of a new best. `records` are those of the tokenizer and the data.

    New weights are no candidate, but those of a start are. Nothing is written before the first step: a run begun by
    mistake must not replace a trained model.
    """
    settings, step = run.settings, run.step
    no_steps = settings.max_iters == 0
    if step or no_steps or "start" in run.reads:
        weights = model.state_dict().items()
        best.offer(figures["select_loss"], step, weights, figures, settings.always_save_checkpoint)
    if best.weights is None or not (step or no_steps):
        return
    if run.ranks.rank == 0:
        if best.at < step:
            say(f"The start is better than step {step}: {settings.checkpoint_path} holds the start")
        kept = copy.deepcopy(model)
        best.restore(kept)
        save_checkpoint(settings.checkpoint_path, kept, *records, best.figures)
    best.weights = None  # written: the state need not hold them


def measure_kept(run: Run[TrainSettings], best: Best, corpus: Corpus, dtype: torch.dtype) -> None:
    """Measure val_loss of the kept model, once, and note it in the final record and in the checkpoint.

    A run that ends before this has written the checkpoint is resumed from the state of the last evaluation, and does it
    then: all but val_loss is taken from the file, so that the bytes are the same.
    """
    ranks, path = run.ranks, run.settings.checkpoint_path
    contents = ranks.on_main(lambda: load_checkpoint(path))
    kept = build_model(contents, "generator", path, ranks.device)
    settings = replace(run.settings, block_size=kept.config.block_size)
    val_loss, seconds = validation_loss(kept, corpus, settings, ranks, dtype)
    run.log(run.step, final=True, kept_step=best.at, val_loss=val_loss, val_seconds=seconds)
    if ranks.rank == 0:
        training = {**contents["training"], "val_loss": val_loss}
        save_checkpoint(path, kept, contents["tokenization"], contents["data"], training)
    ranks.wait()  # for what rank 0 alone writes


# ---------------------------------------------------------------------------------------------------------------------
# evaluation, schedules, records


def evaluate_once(model: GPT, corpus: Corpus, settings: TrainSettings, ranks: Ranks, dtype: torch.dtype) -> None:
    """Print the losses on the whole validation split and on its selecting part."""
    val_loss, _ = validation_loss(model, corpus, settings, ranks, dtype)
    figures = selection_loss(model, corpus, settings, ranks, dtype)
    measured = format_loss({name.removeprefix("select_"): value for name, value in figures.items()})
    say(f"val_loss {val_loss:.4f} | select_loss {measured}")


def selection_loss(
    model: GPT, corpus: Corpus, settings: TrainSettings, ranks: Ranks, dtype: torch.dtype
) -> dict[str, float | None]:
    """select_loss, of a fixed subset of the selecting part of the validation split, and its 95% interval."""
    selecting = validation_part(corpus.val, settings.block_size, "select")
    of_windows: list[float] = []
    loss, _ = loss_on(selecting, model, settings, ranks, dtype, settings.eval_tokens, of_windows)
    low, high = (
        bootstrap_mean(torch.tensor(of_windows, dtype=torch.float64), settings.seed)
        if math.isfinite(loss)
        else (None, None)
    )
    return {"select_loss": loss, "select_loss_low": low, "select_loss_high": high}


def validation_loss(
    model: GPT, corpus: Corpus, settings: TrainSettings, ranks: Ranks, dtype: torch.dtype
) -> tuple[float, float]:
    """val_loss, of the whole validation split, and the seconds that it took, which are printed too."""
    began = time.perf_counter()
    loss, count = loss_on(corpus.val, model, settings, ranks, dtype)
    name = corpus.folder / "val.bin"
    if settings.eval_iters is None:
        return loss, name_full_pass(f"{name}", count, began, f"loss {loss:.4f}")
    seconds = round(time.perf_counter() - began, 3)
    detail(f"{settings.eval_iters:,} random batches of {name}: {count:,} tokens in {seconds:.1f} s: loss {loss:.4f}")
    return loss, seconds


def loss_on(
    tokens: np.ndarray,
    model: GPT,
    settings: TrainSettings,
    ranks: Ranks,
    dtype: torch.dtype,
    most: int | None = None,
    of_windows: list[float] | None = None,
) -> tuple[float, int]:
    """Mean loss in nats over tokens of a split, over `most` of them at most, or over random batches (eval_iters).

    Also the number of its targets; and to `of_windows` the losses of its windows of a whole block are added, in order
    of the text or of the draws. Each rank reads its share of the batches.
    """
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
    if settings.eval_iters is None:
        batches = WholeSplitBatches(tokens, settings.block_size, settings.batch_size, ranks.device, most)
        total, num_windows = len(batches), batches.num_full
    else:
        size = min(settings.block_size, len(tokens) - 1)
        draws = (random_stream(settings.seed, "val", index) for index in range(settings.eval_iters))
        batches = (get_batch(tokens, size, settings.batch_size, draw, ranks.device) for draw in draws)
        total, num_windows = settings.eval_iters, settings.eval_iters * settings.batch_size
    share = islice(counted(batches, total, "Evaluating"), ranks.rank, None, ranks.world_size)
    of_rows: list[torch.Tensor] | None = None if of_windows is None else []
    with autocast(ranks.device, dtype):
        loss, count = ranks.sum(*ranks.everywhere(lambda: loss_sums(model, share, of_rows)))
    if of_windows is not None and of_rows is not None:
        own = [0.0] * num_windows
        for number, losses in enumerate(of_rows):
            first = (ranks.rank + number * ranks.world_size) * settings.batch_size
            if first < num_windows:  # else of the shorter last window
                own[first : first + len(losses)] = losses.tolist()
        of_windows += ranks.sum(*own)
    return loss / count if count else math.inf, int(count)


def tracker_of(settings: TrainSettings) -> Tracker | None:
    """The further place of the records, if any."""
    return make_tracker(
        settings.tracker_name, settings.log_path, settings.wandb_run_name, asdict(settings), settings.wandb_project
    )


def batch_shape(step: int, settings: TrainSettings, horizon: int) -> tuple[int, int]:
    """Length and number of a step's sequences: short ones first, where settings say so; always as many tokens.

    `horizon` is the number of steps that the run was begun with.
    """
    length, part = settings.block_size, settings.short_share * horizon
    if step < part:
        lengths = settings.short_contexts or (length,)
        length = lengths[int(step / part * len(lengths))]
    return length, settings.batch_size * settings.block_size // length


def factor_at(step: int, settings: TrainSettings, horizon: int) -> float:
    """The learning rate of a step, as a share of its peak, in a run that was begun with `horizon` steps."""
    decay_iters = horizon if settings.lr_decay_iters is None else settings.lr_decay_iters
    floor = 0.1 if settings.min_lr is None else settings.min_lr / settings.learning_rate
    if not settings.decay_lr:
        floor = 1.0
    if settings.lr_schedule == "cooldown":
        return cooldown_factor(step, settings.warmup_iters, decay_iters, settings.cooldown, floor)
    return learning_rate_factor(step, settings.warmup_iters, decay_iters, floor)


if __name__ == "__main__":
    run_main(main)
