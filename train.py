"""Train the generator: a GPT that predicts the next token of a corpus.

    python train.py --config config/train_shakespeare.py

Reads train.bin and val.bin, which data/NAME/prepare.py makes. Writes to out_dir the best model
(checkpoint_name), the state for `--init_from resume`, and records. Option names are nanoGPT's.
Shapes: B sequences of T tokens.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from common.device import (
    autocast,
    check_compiler,
    random_stream,
    seed_step,
    select_device,
    select_dtype,
)
from common.distributed import parallel, start_ranks
from common.log import format_metrics, format_size, print0
from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import Corpus, get_batch, open_corpus
from lm import checkpoint as ckpt
from lm.losses import measure_loss
from model import GPT, GPTConfig
from tokenization_manager import TokenizationManager
from training import optimizers as optim
from training.run import RESUME_HINT, Run

MIN_DELTA = 0.001  # nats per character: a smaller improvement does not reset the patience
NO_CHECKPOINT = ("scratch", "resume")  # values of init_from that name no checkpoint
# The shape of a new model, unless it is set; a checkpoint has its own
NEW_SHAPE: dict[str, Any] = {
    "block_size": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "bias": False,
    "position": "rope",
}


@dataclass
class TrainSettings(Settings):
    """Train a GPT on a corpus of tokens."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "eval_iters": "no effect: an evaluation always reads the same part of the validation split",
        "log_interval": "no effect: every step is in the .jsonl file",
        "always_save_checkpoint": "no effect: an evaluation always saves the state, "
        "and the model if it is the best so far",
        "beta1": "no effect: it is always 0.9",
        "backend": "no effect: it is nccl on CUDA and gloo on the CPU",
    }

    out_dir: str = setting("out", free=True)
    """folder for all files of this run"""
    checkpoint_name: str = setting("model_checkpoint.pt", free=True)
    """file name of the best model, within out_dir"""
    init_from: str = setting("scratch", reads="file", changeable=True)
    """scratch; resume: the run in out_dir; a checkpoint, ours or nanoGPT's; or gpt2 to gpt2-xl"""
    overwrite: bool = setting(False, free=True)
    """replace a model that exists in out_dir"""
    eval_interval: int = setting(250, minimum=1)
    """steps between evaluations"""
    eval_only: bool = setting(False, free=True)
    """evaluate the checkpoint in out_dir, or of init_from, on the validation split, and exit"""
    wandb_log: bool = setting(False, free=True)
    """also send the records to Weights & Biases (pip install wandb first)"""
    wandb_project: str = setting("crossover", free=True)
    """project in Weights & Biases"""
    wandb_run_name: str = setting("train", free=True)
    """name of the run in Weights & Biases"""
    dataset: str = setting("shakespeare_char", reads="dataset", changeable=True)
    """folder of train.bin and val.bin: a path, or a name below data/"""
    gradient_accumulation_steps: int = setting(1, minimum=1)
    """batches whose gradients are summed for one step"""
    batch_size: int = setting(16, minimum=1)
    """sequences in a batch"""
    block_size: int | None = setting(None, minimum=1)
    """longest context, in tokens, which crops a longer checkpoint; None: 128 in a new model"""
    n_layer: int | None = setting(None, minimum=1)
    """transformer blocks; None: 4 in a new model"""
    n_head: int | None = setting(None, minimum=1)
    """attention heads; None: 4 in a new model"""
    n_embd: int | None = setting(None, minimum=1)
    """width of the embeddings; None: 128 in a new model"""
    dropout: float = setting(0.0, minimum=0, below=1)
    """dropout probability in training"""
    bias: bool | None = None
    """whether linear layers and layer norms have a bias; None: not in a new model"""
    position: Literal["rope", "learned"] | None = None
    """rotary position embeddings, or nanoGPT's learned ones; None: rope in a new model"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices in the blocks, at 5 times the learning rate; AdamW for the rest"""
    learning_rate: float = setting(1e-3, above=0)
    """peak learning rate of AdamW"""
    beta2: float = setting(0.99, minimum=0, below=1)
    """decay rate of AdamW's mean of squared gradients"""
    max_iters: int = setting(1000, minimum=0, changeable=True)
    """total optimizer steps, including those before a resumption"""
    weight_decay: float = setting(1e-1, minimum=0)
    """decoupled weight decay of matrices"""
    grad_clip: float = setting(1.0, minimum=0)
    """largest gradient norm; 0: no clipping"""
    lr_schedule: Literal["cosine", "cooldown", "linear", "constant"] = "cosine"
    """after the warm-up; cosine: to a tenth; linear: to 0; cooldown: to 0 over the last 60 %"""
    lr_decay_iters: int | None = setting(None, minimum=1)
    """last step of the cosine; None: max_iters"""
    min_lr: float | None = setting(None, minimum=0)
    """learning rate at the end of the cosine; None: a tenth of learning_rate"""
    decay_lr: bool = True
    """False: learning_rate at every step, without warm-up or schedule"""
    warmup_iters: int = setting(20, minimum=0)
    """steps of linear warm-up"""
    patience: int | None = setting(None, minimum=1, changeable=True)
    """stop after so many evaluations without improvement by 0.001 nats a character; None: never"""
    device: str = setting("auto", free=True)
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward pass; auto: bfloat16 on CUDA, else float32"""
    compile: bool = setting(False, free=True)
    """compile the model with torch.compile"""
    seed: int = setting(1337, minimum=0)
    """seed of weights, batches and dropout"""

    def check_settings(self, errors: Errors) -> None:
        """Check names, schedules and the shape of new models."""
        name = self.checkpoint_name
        errors.check(
            Path(name).name == name and Path(name).suffix == ".pt",
            f"checkpoint_name={name}: must be a plain name that ends in .pt",
            "Change --out_dir",
        )
        of_cosine = self.min_lr is not None or self.lr_decay_iters is not None or not self.decay_lr
        errors.check(
            self.lr_schedule == "cosine" or not of_cosine,
            f"lr_schedule={self.lr_schedule}: decay_lr, min_lr and lr_decay_iters are for cosine: "
            "leave them out",
        )
        if self.init_from in NO_CHECKPOINT:
            impossible = GPTConfig(**self.new_shape()).problem() or ""
            errors.check(not impossible, impossible, "Change --n_head or --n_embd")

    def new_shape(self) -> dict[str, Any]:
        """Return the fields of GPTConfig that give a new model its shape."""
        shape = dict(NEW_SHAPE)
        for name in NEW_SHAPE:
            value = getattr(self, name)
            if value is not None:
                shape[name] = value
        return shape


@dataclass
class FurtherTrainSettings(TrainSettings):
    """Settings of train.py for a model initialized from a checkpoint that run_cycles.py chooses.

    An explicit init_from takes precedence.
    """

    init_from: str = setting("", reads="file", changeable=True)


def run(settings: TrainSettings) -> dict[str, Any]:
    """Train a model and save the best; return its figures, with `eval_only` only its val_loss."""
    ranks = start_ranks(select_device(settings.device))
    dtype = select_dtype(settings.dtype, ranks.device)
    require(
        settings.batch_size % ranks.world_size == 0,
        f"batch_size={settings.batch_size}: must be a multiple of the number of ranks, "
        f"{ranks.world_size}",
    )
    output = Path(settings.out_dir, settings.checkpoint_name)

    # data, and the checkpoint to start from or to evaluate, if there is one
    path = settings.init_from
    if settings.eval_only and path in NO_CHECKPOINT:
        path = str(output)
    start = None
    block_size = settings.new_shape()["block_size"]
    if path not in NO_CHECKPOINT:
        start = ckpt.load_checkpoint(path)
        start["config"].dropout = settings.dropout
        model = ckpt.build_model(start, path, ranks.device).train()
        if not settings.eval_only:
            fit_shape(model, settings, path)
        block_size = model.config.block_size
    corpus = open_corpus(settings.dataset, block_size + 1, ranks)
    if start is not None:
        ckpt.check_tokenizer(start, corpus.tokenizer)
    measure = partial(
        measure_loss,
        corpus=corpus,
        dtype=dtype,
        max_rows=settings.batch_size,
        ranks=ranks,
    )
    if settings.eval_only:
        val_loss = measure("val_loss", model)
        print0(format_metrics(val_loss))
        return val_loss
    first_batch = 0
    if start is not None:
        ckpt.check_splits(start["data"], corpus.record)
        # not to repeat its batches
        first_batch = (start["training"] or {}).get("batches") or 0
    if settings.compile:
        check_compiler(ranks.device)

    # the run, and its model: that of the saved state or of the checkpoint, or a new one
    run = Run(output, settings, {**corpus.record, **settings.new_shape()}, ranks)
    run.start_wandb(settings, settings.wandb_project, settings.wandb_run_name)
    if run.is_resumed:
        with run.reading_state():
            model = GPT(ckpt.checked_contents(run.saved)["config"])
            first_batch = int(run.saved["first_batch"])
    elif start is None:
        model = new_model(settings, corpus.tokenizer)
    best = train(run, settings, model.to(ranks.device), first_batch, corpus, dtype, measure)

    # the best model, evaluated on the whole validation split
    print0(
        f"Stopped at step {run.step} by {run.reason}\n"
        f"Best select_loss: {best.value:.4f}, at step {best.at}"
    )
    with run.reading_state():  # in a resumed run the weights can be those of a damaged state
        best.restore(model)
    val_loss = measure("val_loss", model)
    run.log(run.step, final=True, kept_step=best.at, **val_loss)
    figures = {**best.figures, **val_loss, "characters_per_token": corpus.characters_per_token}
    save_model(run, settings, model, corpus, figures)
    print0(f"Saved {run.output}")
    return figures


def train(
    run: Run,
    settings: TrainSettings,
    model: GPT,
    first_batch: int,
    corpus: Corpus,
    dtype: torch.dtype,
    measure: Callable[[str, GPT], dict[str, Any]],
) -> optim.Best:
    """Train the model, and return the weights of its best evaluation, which are saved already.

    Step s reads batch first_batch + s of the corpus. measure: returns the figures of
    `lm.losses.measure_loss`, by the name of the loss and the model.
    """
    ranks = run.ranks
    block_size = model.config.block_size
    tokens_per_step = settings.gradient_accumulation_steps * settings.batch_size * block_size

    # everything that a resumed run restores
    optimizers = optim.make_optimizers(
        model, settings.optimizer, settings.learning_rate, settings.weight_decay, settings.beta2
    )
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16)
    schedule = make_schedule(settings)
    best = optim.Best(settings.patience, MIN_DELTA * corpus.characters_per_token)
    run.track(config=model.config, first_batch=first_batch, schedule=schedule)
    run.track(model=model, optimizers=optimizers, scaler=scaler, best=best)
    schedule.check_num_steps("max_iters", settings.max_iters)
    print0(f"Using device: {ranks.device} ({str(dtype).removeprefix('torch.')})")
    print0(f"Model: {format_size(model.num_parameters())}; {tokens_per_step:,} tokens a step")

    def evaluate(step: int, **figures: Any) -> None:
        """Evaluate and log a step, save the state, then the model if it is the best so far."""
        losses = measure("select_loss", model)
        run.log(step, **figures, **losses)
        record = {"step": step, "batches": first_batch + step, **losses}
        best.update(losses["select_loss"], step, model.state_dict().items(), record)
        run.save(step)
        if best.at == step:
            save_model(run, settings, model, corpus, record)

    # loop
    # A run that was interrupted between evaluations may be resumed with no steps left.
    has_ended = run.step >= settings.max_iters or best.reason() != ""
    if run.evaluated < run.step and (has_ended or not run.is_resumed):
        evaluate(run.step)
    computed_model: Any = torch.compile(model) if settings.compile else model
    trained_model: Any = parallel(computed_model, ranks)
    for step in run.steps(settings.max_iters, best.reason):
        start_time = time.perf_counter()
        optimizers.set_learning_rate_factor(schedule.factor(step))
        rng = random_stream(settings.seed, "train", first_batch + step)
        seed_step(settings.seed + ranks.rank, "dropout", step)  # ranks drop other activations
        loss_sum = torch.zeros((), device=ranks.device)
        for micro_step in range(1, settings.gradient_accumulation_steps + 1):
            # All ranks draw the same batch, and each reads its rows: x and y are (B / ranks, T).
            rows = ranks.share(settings.batch_size)
            x, y = get_batch(corpus.train, block_size, settings.batch_size, rng, ranks.device, rows)
            # DDP averages gradients only in the last micro-step.
            is_last = micro_step == settings.gradient_accumulation_steps
            trained_model.require_backward_grad_sync = is_last
            with autocast(ranks.device, dtype):
                _, loss = trained_model(x, y)
            loss = loss / settings.gradient_accumulation_steps
            scaler.scale(loss).backward()
            loss_sum += loss.detach()
        norm = optim.take_step(model, optimizers, settings.grad_clip, scaler)
        tokens_per_second = round(tokens_per_step / (time.perf_counter() - start_time))
        train_loss = sum(ranks.collect(float(loss_sum))) / ranks.world_size

        # records, evaluation, state
        figures = {
            "train_loss": train_loss,
            "gradient_norm": norm,
            "learning_rate": optimizers.learning_rate,
            "tokens_per_second": tokens_per_second,
        }
        run.bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{tokens_per_second:,}", refresh=False)
        num_steps = step + 1
        if num_steps % settings.eval_interval == 0 or num_steps == settings.max_iters:
            evaluate(num_steps, **figures)
        else:
            run.log(num_steps, quiet=True, **figures)
    return best


def save_model(
    run: Run, settings: TrainSettings, model: GPT, corpus: Corpus, figures: dict[str, Any]
) -> None:
    """Write the checkpoint of a model, with the settings and the figures of its training."""
    training = {"settings": asdict(settings), **figures}
    ckpt.save_checkpoint(run.output, model, corpus.tokenizer.to_record(), corpus.record, training)


def fit_shape(model: GPT, settings: TrainSettings, path: str) -> None:
    """Crop the model of a checkpoint to a block size that is set.

    Raise UserError if a setting contradicts the shape of the model.
    """
    block_size = settings.block_size
    if block_size is not None and block_size < model.config.block_size:
        model.crop_block_size(block_size)
    for name in NEW_SHAPE:
        value = getattr(settings, name)
        actual = getattr(model.config, name)
        require(
            value in (actual, None),
            f"{name}={value}: {path} has {name}={actual}: leave out --{name}",
        )


def new_model(settings: TrainSettings, tokenizer: TokenizationManager) -> GPT:
    """Return a model with random weights.

    A BPE vocabulary is padded to a multiple of 64 ids; padding ids are never used.
    """
    seed_step(settings.seed, "weights")
    config = GPTConfig(
        vocab_size=tokenizer.vocab_size, dropout=settings.dropout, **settings.new_shape()
    )
    if tokenizer.method != "char":
        config.num_tokens = config.vocab_size
        config.vocab_size = math.ceil(config.vocab_size / 64) * 64
    model = GPT(config)
    if settings.optimizer == "muon":
        model.init_orthogonal()
    return model


def make_schedule(settings: TrainSettings) -> optim.Schedule:
    """Return the learning-rate schedule of a run that starts with these settings."""
    if not settings.decay_lr:
        return optim.Schedule("constant", settings.max_iters, warmup_steps=0)
    min_factor = 0.1
    if settings.min_lr is not None:
        min_factor = settings.min_lr / settings.learning_rate
    return optim.Schedule(
        settings.lr_schedule,
        settings.max_iters,
        settings.warmup_iters,
        min_factor,
        settings.lr_decay_iters,
    )


def main() -> None:
    run(parse_settings(TrainSettings, "train"))


if __name__ == "__main__":
    run_main(main, RESUME_HINT, several_ranks=True, memory_remedy="lower --batch_size")
