"""Trains the generator: a GPT learns the next token of a corpus.

    python train.py --config config/train_shakespeare.py

Reads train.bin and val.bin, which data/NAME/prepare.py makes; writes to out_dir the best model
(checkpoint_name), the state from which `--init_from resume` goes on, and records. Option names are
nanoGPT's."""

import copy
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from common.device import (
    autocast,
    check_compiler,
    peak_memory_mb,
    random_stream,
    seed_step,
    select_device,
    select_dtype,
)
from common.distributed import Ranks, no_sync, parallel, start_ranks
from common.files import is_hub_name
from common.log import check_tracker, counted, format_metrics, format_size, print0
from common.process import UserError, run_main
from common.settings import Errors, Settings, parse_settings, setting
from corpus.corpus import Corpus, open_corpus
from data_loader import WholeSplitBatches, get_batch, validation_part
from losses import next_token_loss, perplexity, text_log_probs
from metrics.bootstrap import bootstrap_blocks
from metrics.calibration import fit_calibration
from model import GPT, GPTConfig
from tokenization_manager import TokenizationManager
from training import checkpoint as ckpt
from training import optimizers as optim
from training.lineage import check_same_splits, check_tokenizer, data_record, hash_model
from training.run import RESUME_HINT, Run

# what a checkpoint to start from decides
SHAPE = ("block_size", "n_layer", "n_head", "n_embd", "bias", "position")
SHORT_SHARE = 0.6  # of the steps have short contexts, if any
# share of the steps in which the learning rate falls to 0
COOLDOWN = {"cooldown": 0.6, "linear": 1.0}
MIN_DELTA = 0.001  # nats per token by which select_loss must fall within the patience
NANOGPT_DEFAULTS = {  # of nanoGPT's train.py, where they differ from those of TrainSettings
    "dataset": "openwebtext",
    "gradient_accumulation_steps": 40,
    "batch_size": 12,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "position": "learned",
    "learning_rate": 6e-4,
    "beta2": 0.95,
    "warmup_iters": 2000,
    "compile": True,
}
# of the select part that an evaluation reads, in evenly spaced windows, always the same
EVAL_TOKENS = 65_536


@dataclass
class TrainSettings(Settings):
    """Train a GPT on a corpus of tokens."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "eval_iters": "an evaluation always reads the same part of the validation split",
        "log_interval": "every step is logged",
        "always_save_checkpoint": "an evaluation always saves the state, and the model if it is the best so far",
        "beta1": "it is always 0.9",
        "backend": "it is nccl on CUDA and gloo on the CPU",
    }

    out_dir: str = setting("out", output="folder", changeable=True)
    """folder for everything this run writes"""
    checkpoint_name: str = "model_checkpoint.pt"
    """file name of the best model, within out_dir"""
    init_from: str = setting("scratch", changeable=True)
    """scratch; resume: the run in out_dir; or a checkpoint, nanoGPT's too, or a hub's name"""
    overwrite: bool = False
    """replace the model of another run in out_dir"""
    eval_interval: int = setting(250, minimum=1, unit="steps")
    """steps between evaluations"""
    eval_only: bool = setting(False, changeable=True)
    """evaluate the checkpoint in out_dir, or of init_from, on the validation split, and exit"""
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = setting("none", changeable=True)
    """also send the records to Weights & Biases, TensorBoard or trackio (needs its package)"""
    wandb_log: bool = setting(False, changeable=True)
    """nanoGPT's name for --tracker wandb"""
    wandb_project: str = setting("crossover", changeable=True)
    """project of the tracker"""
    wandb_run_name: str = setting("train", changeable=True)
    """run name of the tracker"""
    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin and val.bin: a path, or a name below data/"""
    gradient_accumulation_steps: int = setting(1, minimum=1)
    """batches whose gradients are added up for one step"""
    batch_size: int = setting(16, minimum=1)
    """sequences in a batch"""
    block_size: int = setting(128, minimum=1, unit="tokens")
    """longest context, in tokens; that of a longer start is cut down to it, but not to the
    default"""
    n_layer: int = setting(4, minimum=1)
    """transformer blocks"""
    n_head: int = setting(4, minimum=1)
    """attention heads"""
    n_embd: int = setting(128, minimum=1)
    """width of the embeddings"""
    dropout: float = setting(0.0, minimum=0, below=1)
    """share of activations dropped in training"""
    bias: bool = False
    """give new linear layers and layer norms a bias"""
    position: Literal["rope", "learned"] = "rope"
    """rotary positions, or nanoGPT's learned ones"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices in the blocks, at 5 times the learning rate; AdamW for the rest"""
    learning_rate: float = setting(1e-3, above=0)
    """peak learning rate of AdamW"""
    beta2: float = setting(0.99, minimum=0, below=1)
    """decay of AdamW's mean of squared gradients"""
    max_iters: int = setting(1000, minimum=0, unit="steps", changeable=True)
    """optimizer steps in all, those before a resumption included"""
    weight_decay: float = setting(1e-1, minimum=0)
    """decoupled weight decay of matrices"""
    grad_clip: float = setting(1.0, minimum=0)
    """largest gradient norm; 0: no clipping"""
    lr_schedule: Literal["cosine", "cooldown", "linear", "constant"] = "cosine"
    """after the warm-up; cosine: to a tenth; linear: to 0; cooldown: to 0 over the last 60 %"""
    lr_decay_iters: int | None = setting(None, minimum=1, unit="steps")
    """last step of the cosine; None: max_iters"""
    min_lr: float | None = setting(None, minimum=0)
    """learning rate at the end of the cosine; None: a tenth of learning_rate"""
    decay_lr: bool = True
    """False: learning_rate at every step, without warm-up or schedule"""
    short_contexts: tuple[int, ...] = ()
    """context lengths in tokens of the first 60 % of steps, such as 8 16; empty: none"""
    warmup_iters: int = setting(20, minimum=0, unit="steps")
    """steps of linear warm-up"""
    keep: Literal["select_loss", "calibrated_loss"] = "select_loss"
    """loss that selects; calibrated_loss: after a temperature and a unigram weight"""
    patience: int | None = setting(None, minimum=1, unit="evaluations", changeable=True)
    """stop after this many evaluations without an improvement of 0.001 nats per token; None:
    never"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward pass; auto: bfloat16 on CUDA, else float32"""
    compile: bool = setting(False, changeable=True)
    """compile the model with torch.compile"""
    seed: int = setting(1337, minimum=0)
    """seed of weights, batches and dropout"""

    @property
    def start(self) -> str | None:
        """The checkpoint to start from; None: new weights, or those of a state."""
        return None if self.init_from in ("scratch", "resume") else self.init_from

    def __post_init__(self) -> None:
        self.tracker = "wandb" if self.wandb_log else self.tracker

    def check_settings(self, errors: Errors) -> None:
        """Note a start or name that cannot be, contexts or heads that do not fit, a tracker that is
        not installed."""
        known = self.start is None or Path(self.start).exists() or is_hub_name(self.start)
        what = f"init_from={self.start}: must be scratch, resume, or a model's path or name"
        errors.check(known, what, "Check the path")
        plain = self.checkpoint_name == Path(
            self.checkpoint_name
        ).name and self.checkpoint_name not in ("", "..")
        errors.check(
            plain,
            f"checkpoint_name={self.checkpoint_name}: must be a plain name",
            "Change --out_dir",
        )
        if self.init_from == "scratch":  # else the shape is the model's: see `shaped`
            self.check_contexts(errors)
        missing = check_tracker(self.tracker)
        errors.check(not missing, missing)
        is_cosine = self.lr_schedule == "cosine"
        is_plain = self.decay_lr and self.min_lr is None and self.lr_decay_iters is None
        what = f"lr_schedule={self.lr_schedule}: decay_lr, min_lr and lr_decay_iters are for cosine: leave them out"
        errors.check(is_cosine or is_plain, what)
        problem = (
            GPTConfig(n_head=self.n_head, n_embd=self.n_embd, position=self.position).problem()
            or ""
        )
        errors.check(
            not problem or problem in errors.messages, problem, "Change --n_head or --n_embd"
        )

    def notes(self, given: Mapping[str, Sequence[str]]) -> list[str]:
        """Also say where the defaults are not nanoGPT's, if a setting is given that only nanoGPT
        has."""
        notes = super().notes(given)
        of_start = () if self.start is None else SHAPE
        unlike = [
            f"{name}={getattr(self, name)} ({default})"
            for name, default in NANOGPT_DEFAULTS.items()
            if name not in given
            and name not in of_start
            and (name == "dataset" or not self.eval_only)
        ]
        if notes and unlike:
            notes.append(
                f"Not given, and by default not as in nanoGPT (in brackets): {', '.join(unlike)}"
            )
        return notes

    def check_contexts(self, errors: Errors) -> None:
        """Note short contexts that do not divide the block size: a step could not have as many
        tokens as others."""
        for length in self.short_contexts:
            what = f"short_contexts: {length} does not divide block_size={self.block_size}"
            errors.check(
                length > 0 and self.block_size % length == 0, what, "Choose lengths that do"
            )

    def shaped(self, config: GPTConfig) -> "TrainSettings":
        """These settings with the shape of the model that a run has; UserError if they do not fit
        it."""
        errors = Errors()
        for name in SHAPE if self.start is not None else ():
            asked, has = getattr(self, name), getattr(config, name)
            what = f"{name}={asked}: {self.start}, from which this run starts, has {name}={has}"
            errors.check(asked in (has, getattr(TrainSettings, name)), what, f"Leave out --{name}")
        shaped = replace(self, **{name: getattr(config, name) for name in SHAPE})
        shaped.check_contexts(errors)
        errors.raise_if_any()
        return shaped


def main() -> None:
    given = parse_settings(TrainSettings, "train")
    ranks = start_ranks(select_device(given.device))
    device, dtype = ranks.device, select_dtype(given.dtype, ranks.device)
    ranks.check_divides("batch_size", given.batch_size)
    if given.compile and not given.eval_only:
        check_compiler(device)
    start, model = load_start(given, device)
    settings = given if model is None else given.shaped(model.config)
    corpus = open_corpus(settings.dataset, settings.block_size + 1)
    if start is not None:
        check_tokenizer(start, corpus.tokenizer)
    if given.eval_only and model is not None:
        for name in ("val_loss", "select_loss"):
            print0(format_metrics(measure(model, corpus, settings, ranks, dtype, name)))
        return

    # run, model and optimizers; those of a resumed run are restored from its state
    data = ranks.run_on_rank0(lambda: data_record(corpus.train, corpus.val))
    run = begin_run(given, start, data, ranks)
    if run.is_resumed:
        with run.reading("model"):
            model = GPT(
                ckpt.checked_contents({"model": run.saved["model"], "config": run.facts["config"]})[
                    "config"
                ]
            )
    model = (model or new_model(settings, corpus.tokenizer)).to(device)
    settings = given.shaped(model.config)
    # a longer run stretches no schedule
    run.facts["config"], horizon = replace(model.config), run.facts["max_iters"]
    if settings.max_iters > horizon and settings.lr_schedule in COOLDOWN:
        raise UserError(
            f"ERROR: max_iters={settings.max_iters}: the rate is 0 from step {horizon} on: train anew"
        )
    optimizers = optim.make_optimizers(
        model, settings.optimizer, settings.learning_rate, settings.weight_decay, settings.beta2
    )
    stopping, best = optim.EarlyStopping(settings.patience, MIN_DELTA), optim.Best()
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run.track(model=model, optimizers=optimizers, scaler=scaler, stopping=stopping, best=best)
    tokens_per_step = (
        settings.gradient_accumulation_steps * settings.batch_size * settings.block_size
    )
    print0(
        f"Using device: {ranks.where} ({str(dtype).removeprefix('torch.')})\nData: {corpus.describe()}"
    )
    print0(f"Model: {format_size(model.num_parameters())}; {tokens_per_step:,} tokens a step")

    def evaluate(made: int, **figures: Any) -> None:
        """Log the figures with select_loss, keep the best model, save the state, then the model if
        it is the best."""
        losses = measure(model, corpus, settings, ranks, dtype, "select_loss")
        run.log(made, **figures, **losses)
        stopping.update(losses[settings.keep])
        noted = {
            "step": made,
            "batches": run.facts["first_batch"] + made,
            "settings": asdict(settings),
            **losses,
        }
        best.offer(losses[settings.keep], made, model.state_dict().items(), noted)
        run.save(made)
        if best.at == made:
            ckpt.save_checkpoint(
                run.output, model, corpus.tokenizer.to_record(), data, best.figures
            )

    if not run.is_resumed:
        evaluate(0)
    forward = parallel(torch.compile(model) if settings.compile else model, ranks, dtype)  # type: ignore[arg-type]
    for step in run.steps(settings.max_iters, lambda: stopping.reason):
        began = time.perf_counter()
        optimizers.set_learning_rate_factor(factor_at(step, settings, horizon))
        length, rows = batch_shape(step, settings, horizon)
        draw = random_stream(settings.seed, "train", run.facts["first_batch"] + step)
        seed_step(settings.seed, "dropout", step, *([ranks.rank] if ranks.rank else []))
        loss_sum = torch.zeros((), device=device)
        for left in reversed(range(settings.gradient_accumulation_steps)):
            # (B / ranks, T) each: of a batch that all ranks draw alike, every one has its rows
            x, y = get_batch(corpus.train, length, rows, draw, device, ranks.share(rows))
            with no_sync(forward, last=left == 0):
                loss = forward(next_token_loss, x, y) / settings.gradient_accumulation_steps
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        norm = optim.take_step(model, optimizers, settings.grad_clip, scaler)
        rate = round(tokens_per_step / (time.perf_counter() - began))
        train_loss = ranks.sum(float(loss_sum))[0] / ranks.world_size
        figures = {
            "train_loss": train_loss,
            "gradient_norm": norm,
            "learning_rate": optimizers.learning_rate,
        }
        figures |= {"tokens_per_second": rate, "peak_memory_mb": round(peak_memory_mb(device))}
        run.bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{rate:,}", refresh=False)
        if (step + 1) % settings.eval_interval == 0 or step + 1 == settings.max_iters:
            evaluate(step + 1, **figures)
        else:
            run.log(step + 1, quiet=True, **figures)

    # the best model, measured on the whole validation split
    print0(f"Stopped at step {run.step} by {run.reason}")
    print0(
        f"Best {settings.keep}: {best.value:.4f} (perplexity {perplexity(best.value):.3f}), at step {best.at}"
    )
    best.restore(kept := copy.deepcopy(model))
    val_loss = measure(kept, corpus, settings, ranks, dtype, "val_loss")
    run.log(run.step, final=True, kept_step=best.at, **val_loss)
    ckpt.save_checkpoint(
        run.output, kept, corpus.tokenizer.to_record(), data, best.figures | val_loss
    )
    run.save(run.step, finished=True)
    print0(f"Saved {run.output}")


def load_start(
    settings: TrainSettings, device: torch.device
) -> tuple[dict[str, Any] | None, GPT | None]:
    """The checkpoint that a run starts from, or evaluates, and its model, cut to a smaller context;
    None, None: new."""
    if settings.start is None and not settings.eval_only:
        return None, None
    path = settings.start or Path(settings.out_dir, settings.checkpoint_name)
    start = ckpt.load_checkpoint(path)
    start["config"] = replace(start["config"], dropout=settings.dropout)
    model = ckpt.build_model(start, "generator", path, device).train()
    if (
        not settings.eval_only
        and TrainSettings.block_size != settings.block_size < model.config.block_size
    ):
        model.crop_block_size(settings.block_size)
    return start, model


def begin_run(
    settings: TrainSettings, start: dict[str, Any] | None, data: dict[str, Any], ranks: Ranks
) -> Run:
    """The run, begun; UserError for a start that learned other data. Its batches follow those of
    the start."""
    if start is not None:
        check_same_splits(start["data"], data, allow_mismatch=None)
    resume, learned = settings.init_from == "resume", (start or {}).get("training") or {}
    of_start = {} if resume else {"start": settings.start and hash_model(settings.start)}
    reads: dict[str, Any] = {"data": data, **of_start}  # a state has what became of the start
    run = Run(Path(settings.out_dir, settings.checkpoint_name), settings, ranks, reads)
    facts = {"max_iters": settings.max_iters, "patience": settings.patience}
    run.begin(resume, settings.overwrite, first_batch=learned.get("batches") or 0, **facts)
    return run


def new_model(settings: TrainSettings, tokenizer: TokenizationManager) -> GPT:
    """A model with random weights. BPE's ids are padded to a multiple of 64; padding ids are never
    used."""
    seed_step(settings.seed, "weights")
    used, shape = (
        tokenizer.vocab_size,
        {name: getattr(settings, name) for name in (*SHAPE, "dropout")},
    )
    vocab_size = math.ceil(used / 64) * 64 if tokenizer.method != "char" else used
    model = GPT(
        GPTConfig(vocab_size=vocab_size, num_tokens=used if used < vocab_size else None, **shape)
    )
    if settings.optimizer == "muon":
        model.init_orthogonal()
    return model


def measure(
    model: GPT, corpus: Corpus, settings: TrainSettings, ranks: Ranks, dtype: torch.dtype, name: str
) -> dict[str, Any]:
    """val_loss, of the whole validation split, or select_loss, of windows of its select part; with
    its 95% interval.

    Every rank reads its share of the batches.
    """
    tokens, most, device = corpus.val, None, model.transformer.wte.weight.device
    if name == "select_loss":
        tokens, most = validation_part(tokens, settings.block_size, "select"), EVAL_TOKENS
    rows = min(settings.batch_size, model.rows_at_a_time())
    batches = WholeSplitBatches(tokens, settings.block_size, rows, device, most)
    share = ranks.share(len(batches))
    own = itertools.islice(batches, share.start, share.stop)

    def figures() -> dict[str, Any]:
        found: dict[str, Any] = bootstrap_blocks(
            name, losses, corpus.interval_tokens, settings.seed
        )
        if name == "select_loss" and settings.keep == "calibrated_loss":
            found["calibrated_loss"] = fit_calibration(model, batches, corpus.unigram)[1]
        return found

    with autocast(device, dtype):
        log_probs = text_log_probs(model, counted(own, share.stop - share.start, "Evaluating"))
        losses = -torch.cat(ranks.collect(log_probs))
        return ranks.run_on_rank0(figures)


def batch_shape(step: int, settings: TrainSettings, horizon: int) -> tuple[int, int]:
    """Length and number of a step's sequences: short ones first, where settings say so; always as
    many tokens."""
    length, part = settings.block_size, SHORT_SHARE * horizon
    if step < part and settings.short_contexts:
        length = settings.short_contexts[int(step / part * len(settings.short_contexts))]
    return length, settings.batch_size * settings.block_size // length


def factor_at(step: int, settings: TrainSettings, horizon: int) -> float:
    """The learning rate of a step, as a share of its peak, in a run that was begun with `horizon`
    steps."""
    if not settings.decay_lr:
        return 1.0
    if settings.lr_schedule in COOLDOWN:
        return optim.cooldown_factor(
            step, settings.warmup_iters, horizon, COOLDOWN[settings.lr_schedule], 0.0
        )
    end = 0.1 if settings.lr_schedule == "cosine" else 1.0
    if settings.min_lr is not None:
        end = settings.min_lr / settings.learning_rate
    return optim.learning_rate_factor(
        step, settings.warmup_iters, settings.lr_decay_iters or horizon, end
    )


if __name__ == "__main__":
    run_main(main, RESUME_HINT)
