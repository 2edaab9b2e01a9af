"""Trains the generator: a GPT learns the next token of a corpus.

    python train.py --config config/train_shakespeare.py

Floor 5. In: train.bin and val.bin (made by data/NAME/prepare.py; characters also need meta.pkl). Out, in out_dir: the
best model (checkpoint_name), the state from which `--init_from resume` goes on, and one JSON record a step.
Option names are nanoGPT's.
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from checkpoint import build_model, data_record, load_checkpoint, load_state, save_checkpoint, save_state
from data_loader import WholeSplitBatches, dataset_folder, get_batch, open_token_file
from model import GPT, GPTConfig
from objectives import language_model_loss, perplexity
from optimization import EarlyStopping, clip_gradients, learning_rate_factor, make_optimizers
from run_log import RunLog, counted, format_size, progress, say, wandb_tracker
from runtime import (
    UserError,
    autocast,
    check_writable,
    interruption_tells,
    random_stream,
    run_main,
    seed_step,
    select_device,
    select_dtype,
)
from settings import Problems, parse_settings
from tokenization_manager import TokenizationManager


@dataclass
class TrainSettings:
    """Train a GPT on a corpus of tokens."""

    out_dir: str = "out"
    """folder for everything this run writes"""
    checkpoint_name: str = "model_checkpoint.pt"
    """file name of the best model, within out_dir"""
    init_from: Literal["scratch", "resume"] = "scratch"
    """start anew, or go on from the state in out_dir"""
    eval_interval: int = 250
    """steps between evaluations"""
    eval_iters: int | None = None
    """random batches in an evaluation; None: the whole validation split"""
    eval_only: bool = False
    """evaluate once and stop"""
    log_interval: int = 10
    """steps between records"""
    always_save_checkpoint: bool = False
    """write the checkpoint at every evaluation, not only at the best"""
    wandb_log: bool = False
    """also send the records to Weights & Biases (needs the wandb package)"""
    wandb_project: str = "crossover"
    """Weights & Biases project"""
    wandb_run_name: str = "train"
    """Weights & Biases run name"""

    dataset: str = "shakespeare_char"
    """folder of train.bin and val.bin: a path, or a name below data/"""
    gradient_accumulation_steps: int = 1
    """batches whose gradients are added up for one step"""
    batch_size: int = 16
    """sequences in a batch"""
    block_size: int = 128
    """longest context, in tokens"""

    n_layer: int = 4
    """transformer blocks"""
    n_head: int = 4
    """attention heads"""
    n_embd: int = 128
    """channels"""
    dropout: float = 0.0
    """share of activations dropped in training"""
    bias: bool = False
    """biases in linear layers and norms"""
    position: Literal["rope", "learned"] = "rope"
    """rotary positions, or nanoGPT's learned ones"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices inside the blocks, AdamW for the rest"""
    learning_rate: float = 1e-3
    """peak learning rate of AdamW"""
    muon_learning_rate: float = 2e-2
    """peak learning rate of Muon"""
    max_iters: int = 1000
    """steps"""
    weight_decay: float = 1e-1
    """decoupled weight decay of matrices"""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean"""
    beta2: float = 0.99
    """AdamW's decay of the squared gradient's mean"""
    grad_clip: float = 1.0
    """largest gradient norm; 0: no clipping"""
    decay_lr: bool = True
    """cosine decay after the warm-up"""
    warmup_iters: int = 20
    """steps of linear warm-up"""
    lr_decay_iters: int | None = None
    """step at which the decay ends; None: max_iters"""
    min_lr: float | None = None
    """learning rate at the end of the decay; None: a tenth of the peak. Muon's decays by the same factor"""
    patience: int | None = None
    """stop after this many evaluations without improvement; None: never"""
    min_delta: float = 0.001
    """a smaller fall of the validation loss is no improvement to the patience"""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """arithmetic of the passes; auto: bfloat16 on CUDA, else float32"""
    compile: bool = False
    """compile the model with torch.compile"""
    seed: int = 1337
    """seed of weights, batches and dropout"""

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_range(self, "eval_interval", "eval_iters", "log_interval", "patience", minimum=1)
        problems.check_range(self, "gradient_accumulation_steps", "batch_size", "block_size", minimum=1)
        problems.check_range(self, "n_layer", "n_head", "n_embd", minimum=1)
        problems.check_range(self, "max_iters", "warmup_iters", "lr_decay_iters", "seed", minimum=0)
        problems.check_range(self, "learning_rate", "muon_learning_rate", above=0)
        problems.check_range(self, "min_lr", "weight_decay", "grad_clip", "min_delta", minimum=0)
        problems.check_range(self, "dropout", "beta1", "beta2", minimum=0, below=1)
        # Asked of heads and width alone, so that it is told beside whatever else is wrong.
        heads = GPTConfig(n_head=self.n_head, n_embd=self.n_embd, position=self.position)
        if (problem := heads.problem()) and problem not in problems.errors:
            width = self.n_head * 2 * max(1, round(self.n_embd / self.n_head / 2))
            problems.require(False, problem, f"Change --n_head or --n_embd, for instance to --n_embd {width}")
        if obstacle := check_writable(self.out_dir):
            problems.require(False, obstacle, "Choose a folder you may write to with --out_dir")
        return problems

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

    @property
    def checkpoint_path(self) -> Path:
        return Path(self.out_dir, self.checkpoint_name)

    @property
    def state_path(self) -> Path:
        return self.checkpoint_path.with_suffix(".resume")

    @property
    def log_path(self) -> Path:
        return self.checkpoint_path.with_suffix(".jsonl")

    def way_on(self) -> str:
        """What somebody who interrupts the training is told; the first state is there after the first evaluation."""
        if self.state_path.is_file():
            return "Go on from the last evaluation with --init_from resume."
        return "Nothing was saved yet: run the same command again."


# A resumed run may go on longer, evaluate or log otherwise, or run elsewhere; all else would make it another run.
CHANGEABLE = {
    *("out_dir", "init_from", "eval_only", "log_interval", "wandb_log", "wandb_project", "wandb_run_name"),
    *("device", "compile", "max_iters", "patience"),
}


def main() -> None:
    settings = parse_settings(TrainSettings, "train")
    device = select_device(settings.device)
    dtype = select_dtype(settings.dtype, device)

    # data
    folder = dataset_folder(settings.dataset)
    if not (folder / "train.bin").is_file():
        remedy = "name a folder that holds it, or a name below data/, with --dataset"
        if (folder / "prepare.py").is_file():
            remedy = f"make it with `python {folder}/prepare.py`"
        raise UserError(f"ERROR: {folder}/train.bin not found: {remedy}")
    tokenizer = TokenizationManager(data_path=folder)
    vocab_size = tokenizer.vocab_size
    train_tokens = open_token_file(folder / "train.bin", "train", vocab_size, settings.block_size + 1)
    val_tokens = open_token_file(folder / "val.bin", "val", vocab_size, 2)
    data = data_record(train_tokens, val_tokens)

    # model: BPE's ids are padded to a multiple of 64, which matrix products like; padding ids are never used
    seed_step(settings.seed, "weights")
    padded = math.ceil(vocab_size / 64) * 64 if tokenizer.method == "bpe" else vocab_size
    model = GPT(settings.model_config(padded, vocab_size if padded > vocab_size else None)).to(device)
    optimizers = make_optimizers(
        model,
        settings.optimizer,
        settings.learning_rate,
        settings.muon_learning_rate,
        settings.weight_decay,
        (settings.beta1, settings.beta2),
        device.type,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    stopping = EarlyStopping(settings.patience, settings.min_delta)
    first_step, best_val_loss = 0, float("inf")
    resumed = settings.init_from == "resume"

    if resumed:
        state = load_resume_state(settings, data)
        if not settings.checkpoint_path.is_file():
            raise UserError(f"ERROR: {settings.checkpoint_path}, the best model so far, is gone; start from scratch")
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        scaler.load_state_dict(state["scaler"])
        stopping.load_state_dict(state["stopping"])
        first_step, best_val_loss = state["step"], state["best_val_loss"]
        say(f"Resuming {settings.state_path} at iteration {first_step}")
    elif settings.eval_only and settings.checkpoint_path.is_file():
        model = build_model(load_checkpoint(settings.checkpoint_path), "generator", settings.checkpoint_path, device)

    tokens_per_step = settings.gradient_accumulation_steps * settings.batch_size * settings.block_size
    say(f"Using device: {device} ({str(dtype).removeprefix('torch.')})")
    say(f"Data: {folder} ({tokenizer.info().describe()}), {len(train_tokens):,} + {len(val_tokens):,} tokens")
    say(f"Model: {format_size(model.num_parameters())}; {tokens_per_step:,} tokens a step")
    forward = torch.compile(model) if settings.compile else model

    def evaluate() -> float:
        if settings.eval_iters is None:
            batches = WholeSplitBatches(val_tokens, settings.block_size, settings.batch_size, device)
            total = len(batches)
        else:
            size = min(settings.block_size, len(val_tokens) - 1)
            draws = (random_stream(settings.seed, "val", index) for index in range(settings.eval_iters))
            batches = (get_batch(val_tokens, size, settings.batch_size, draw, device) for draw in draws)
            total = settings.eval_iters
        with autocast(device, dtype):
            return language_model_loss(model, counted(batches, total, "Evaluating"))

    if settings.eval_only:
        say(f"val_loss {evaluate():.4f}")
        return

    if not resumed:
        settings.state_path.unlink(missing_ok=True)  # an earlier run's state must not pass for this one's
    tracker = None
    if settings.wandb_log:
        tracker = wandb_tracker(settings.wandb_project, settings.wandb_run_name, asdict(settings))
    with (
        RunLog(settings.log_path, first_step if resumed else None, tracker=tracker) as log,
        interruption_tells(settings.way_on),
        progress(settings.max_iters, "Training", "step", initial=first_step) as bar,
    ):
        step_time, step_count, running_loss = 0.0, 0, 0.0
        for step in range(first_step, settings.max_iters + 1):
            due = step % settings.eval_interval == 0 or step == settings.max_iters
            if due and not (resumed and step == first_step):  # a resumed run has this evaluation behind it
                val_loss = evaluate()
                log.log(step, val_loss=val_loss)
                if not math.isfinite(val_loss):
                    raise UserError(
                        f"ERROR: validation loss is {val_loss} at step {step}; the best model so far is kept in "
                        f"{settings.checkpoint_path}. Lower --learning_rate or --muon_learning_rate"
                    )
                stopping.update(val_loss)
                # Nothing is written before the first step: a run begun by mistake must not replace a trained model.
                if (val_loss < best_val_loss or settings.always_save_checkpoint) and (step or not settings.max_iters):
                    best_val_loss = min(val_loss, best_val_loss)
                    figures = {"step": step, "val_loss": val_loss, "settings": asdict(settings)}
                    save_checkpoint(settings.checkpoint_path, model, tokenizer.to_record(), data, figures)
                state = {
                    "model": model.state_dict(),
                    "optimizers": optimizers.state_dict(),
                    "scaler": scaler.state_dict(),
                    "stopping": stopping.state_dict(),
                    "step": step,
                    "best_val_loss": best_val_loss,
                    "settings": asdict(settings),
                    "data": data,
                }
                if step:
                    save_state(settings.state_path, state)
            if stopping.should_stop:
                say(f"Stopped at step {step}: no fall of {settings.min_delta} in {settings.patience} evaluations")
                break
            if step == settings.max_iters:
                break

            started = time.perf_counter()
            optimizers.set_learning_rate_factor(factor_at(step, settings))
            draw = random_stream(settings.seed, "train", step)
            seed_step(settings.seed, "dropout", step)
            loss_sum = 0.0
            for _ in range(settings.gradient_accumulation_steps):
                x, y = get_batch(train_tokens, settings.block_size, settings.batch_size, draw, device)  # (B, T) each
                with autocast(device, dtype):
                    _, loss = forward(x, y)
                scaler.scale(loss / settings.gradient_accumulation_steps).backward()
                loss_sum += loss.detach()
            optimizers.unscale(scaler)
            # Under float16 the scaler itself skips a step whose gradients overflowed.
            gradient_norm = clip_gradients(model.named_parameters(), settings.grad_clip, not scaler.is_enabled())
            optimizers.step(scaler)
            optimizers.zero_grad()
            running_loss = float(loss_sum) / settings.gradient_accumulation_steps
            step_time, step_count = step_time + time.perf_counter() - started, step_count + 1

            if (step + 1) % settings.log_interval == 0:
                rate = tokens_per_step * step_count / step_time
                figures = {"train_loss": running_loss, "gradient_norm": gradient_norm}
                figures["learning_rate"] = optimizers.learning_rate
                log.log(step + 1, quiet=True, **figures, tokens_per_second=round(rate))
                bar.set_postfix(loss=f"{running_loss:.3f}", tok_s=f"{rate:,.0f}")
                step_time, step_count = 0.0, 0
            bar.update()
    say(f"Best validation loss: {best_val_loss:.4f} (perplexity {perplexity(best_val_loss):.3f})")
    say(f"Saved {settings.checkpoint_path}")


def factor_at(step: int, settings: TrainSettings) -> float:
    """The learning rate of a step, as a share of its peak."""
    decay_iters = settings.max_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
    floor = 0.1 if settings.min_lr is None else settings.min_lr / settings.learning_rate
    if not settings.decay_lr:
        floor = 1.0
    return learning_rate_factor(step, settings.warmup_iters, decay_iters, floor)


def load_resume_state(settings: TrainSettings, data: dict) -> dict:
    """The state to go on from; raises UserError where it belongs to another run."""
    if not settings.state_path.is_file():
        raise UserError(f"ERROR: nothing to resume: {settings.state_path} not found; start with --init_from scratch")
    state = load_state(settings.state_path)
    then, now = state["settings"], asdict(settings)
    changed = [name for name in now if name not in CHANGEABLE and then.get(name) != now[name]]
    if changed:
        differences = "; ".join(f"{name} was {then.get(name)!r}, now {now[name]!r}" for name in changed)
        raise UserError(
            f"ERROR: {settings.state_path} is of another run ({differences}); use its settings, or delete it and start "
            "from scratch"
        )
    if state["data"] != data:
        raise UserError(
            f"ERROR: {settings.state_path} was trained on other data; resume with that, or start from scratch"
        )
    for name in sorted(CHANGEABLE - {"init_from"}):
        if then.get(name) != now[name]:
            say(f"Resuming with {name}={now[name]!r} (was {then.get(name)!r})")
    return state


if __name__ == "__main__":
    run_main(main)
