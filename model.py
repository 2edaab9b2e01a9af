"""A GPT with a generator head or a reward head on one trunk.

    python -c "from model import GPT, GPTConfig; print(GPT(GPTConfig(n_layer=2)).num_parameters())"

No I/O. Names follow nanoGPT, so that its checkpoints load (position='learned').
Shapes: B batch, T positions, C = n_embd channels, H = n_head, D = C / H, V = vocab_size.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import full_precision, total_memory
from common.process import UserError
from generation.completions import generate
from generation.context import Context
from generation.kv_cache import KVCache
from generation.sampling import Sampling

REWARD_HEADS = ("last", "position", "likelihood")
ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}  # nn.GELU's names of the approximation


@dataclass
class GPTConfig:
    """Everything that says what a GPT is; stored in every checkpoint."""

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    mode: str = "generator"  # 'generator' or 'reward'
    reward_head_hidden_dim: int = 256
    # 'rope' (inside attention) or 'learned' (transformer.wpe: nanoGPT, GPT-2)
    position: str = "rope"
    # ids that the tokenizer uses; the others are padding. None: see num_real_tokens
    num_tokens: int | None = None
    reward_head_type: str = "last"  # 'last', 'position' or 'likelihood': see reward/heads.py
    # Variants that pretrained models need: GPT-2's activation, GPT-NeoX's rotary positions, blocks
    # and output layer.
    activation: str = "gelu"  # 'gelu' (exact) or 'gelu_tanh' (GPT-2's approximation of it)
    # of each head's dimensions that rotary positions turn: see rotary_angles
    rotary_share: float = 1.0
    # attention and MLP both read a block's input (True), or one after the other
    parallel_residual: bool = False
    tied_embeddings: bool = True  # input and output embeddings are one matrix

    @property
    def num_real_tokens(self) -> int:
        """Ids below this are tokens, the others padding. GPT-2's padded vocabulary is known by its
        size."""
        return self.num_tokens or (50257 if self.vocab_size == 50304 else self.vocab_size)

    @property
    def rotary_size(self) -> int:
        """Dimensions of a head that rotary positions turn."""
        return int(self.n_embd // self.n_head * self.rotary_share)

    def problem(self) -> str | None:
        """The reason why this configuration is impossible, as one sentence, or None."""
        counts = (
            "block_size",
            "vocab_size",
            "n_layer",
            "n_head",
            "n_embd",
            "reward_head_hidden_dim",
        )
        for name in (*counts, *(["num_tokens"] if self.num_tokens is not None else [])):
            if type(getattr(self, name)) is not int:  # a checkpoint's config can hold any type
                return f"{name}={getattr(self, name)!r}: must be a whole number"
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)}: must be >= 1"
        if self.mode not in ("generator", "reward"):
            return f"mode={self.mode!r}: mode must be 'generator' or 'reward'"
        choices = {
            "position": ("rope", "learned"),
            "reward_head_type": REWARD_HEADS,
            "activation": tuple(ACTIVATIONS),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                return f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}"
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            return f"dropout={self.dropout!r}: must be >= 0 and < 1"
        if not isinstance(self.rotary_share, int | float) or not 0 < self.rotary_share <= 1:
            return f"rotary_share={self.rotary_share!r}: must be > 0 and <= 1"
        if self.n_embd % self.n_head:
            return f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}"
        size, turned = self.n_embd // self.n_head, self.rotary_size
        if self.position == "rope" and (size % 2 or turned % 2 or turned < 2):
            return f"rotary positions need an even head size, not {turned} of n_embd / n_head = {size} dimensions"
        if self.num_tokens is not None and self.num_tokens > self.vocab_size:
            return f"num_tokens={self.num_tokens}: must be <= vocab_size={self.vocab_size}"
        return None


def check_same_fields(ours: GPTConfig, theirs: GPTConfig, our_name: str, their_name: str) -> None:
    """Raise UserError, with both values, where two models do not read the same sequences of the
    same tokens."""
    for name in ("vocab_size", "num_real_tokens", "block_size"):
        if getattr(ours, name) != getattr(theirs, name):
            values = f"{name} is {getattr(ours, name)} in {our_name} and {getattr(theirs, name)} in {their_name}"
            raise UserError(
                f"ERROR: {values}: they do not match; take two of the same tokenization and size"
            )


# read by torch.load at its safe default, which executes nothing
torch.serialization.add_safe_globals([GPTConfig])


class CausalSelfAttention(nn.Module):
    """Multi-head attention to the past and the present."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.dropout = config.dropout
        self.n_head = config.n_head
        self.layer = layer

    def forward(self, x: Tensor, rotation: Tensor | None, context: Context) -> Tensor:
        qkv = context.to_rows(self.c_attn(x))  # (B, T, 3 C)
        B, T, C = qkv.size(0), qkv.size(1), x.size(-1)
        qkv = qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        queries, keys = qkv[:2]  # (B, H, T, D) each
        if rotation is not None:
            queries, keys = rotate(qkv[:2], rotation)
        dropout = self.dropout if self.training else 0.0
        y = context.attend(self.layer, queries, keys, qkv[2], dropout)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(context.from_rows(y)))


class MLP(nn.Module):
    """Two layers with GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(ACTIVATIONS[config.activation])
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added after; with parallel_residual both read
    the block's input."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.parallel_residual = config.parallel_residual

    def forward(self, x: Tensor, rotation: Tensor | None, context: Context) -> Tensor:
        y = x + self.attn(self.ln_1(x), rotation, context)
        return y + self.mlp(self.ln_2(x if self.parallel_residual else y))


class GPT(nn.Module):
    """A generator, or a reward model with a 'last' head: see `forward`. Raises UserError for an
    impossible config."""

    head_type = "last"
    transformer: Any  # nanoGPT's wte, wpe (with learned positions alone), drop, h and ln_f
    rotation: Tensor  # (2, T, D), with rotary positions alone

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if problem := config.problem():
            raise UserError(problem)
        if config.mode == "reward" and config.reward_head_type != self.head_type:
            raise UserError(
                f"reward_head_type={config.reward_head_type!r}: use reward.heads.make_reward_model"
            )
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        if config.position == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        else:
            angles = rotary_angles(
                config.block_size, config.n_embd // config.n_head, config.rotary_size
            )
            self.register_buffer("rotation", angles, persistent=False)
        if config.mode == "generator":
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            if config.tied_embeddings:
                self.transformer.wte.weight = self.lm_head.weight
        else:
            self.reward_head = self.make_reward_head()
        self._init_weights()

    def make_reward_head(self) -> nn.Sequential:
        """New layers from hidden states (B, C) to probabilities (B, 2): scores of [natural,
        synthetic], softmax."""
        width = self.config.reward_head_hidden_dim
        return nn.Sequential(
            nn.Linear(self.config.n_embd, width), nn.ReLU(), nn.Linear(width, 2), nn.Softmax(dim=-1)
        )

    def _init_weights(self) -> None:
        """GPT-2's initialisation: normal 0.02, residual projections scaled down by depth; He for
        the reward head."""
        for name, parameter in self.named_parameters():
            if name == "reward_head.0.weight":
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            elif parameter.dim() >= 2:
                depth = (
                    math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                )
                nn.init.normal_(parameter, mean=0.0, std=0.02 / depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def init_orthogonal(self) -> None:
        """Orthogonal matrices inside the blocks, and zeros where they write to the residual stream:
        for few steps."""
        for name, parameter in self.transformer.h.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                nn.init.orthogonal_(parameter)

    def num_parameters(self) -> int:
        """The number of parameters; position embeddings are not counted, as in nanoGPT."""
        return sum(
            p.numel() for name, p in self.named_parameters() if name != "transformer.wpe.weight"
        )

    def rows_at_a_time(self) -> int:
        """Sequences of full length that one pass takes, with gradients or without; at most 1,024 on
        CUDA, 64 elsewhere.

        Their logits with copies, and 64 bytes a channel, layer and position, take an eighth of
        CUDA's memory or 1 GiB."""
        config, memory = self.config, total_memory(self.transformer.wte.weight.device)
        logits = 5 * 4 * config.block_size * config.vocab_size
        if memory is None:
            return max(1, min(64, 2**30 // logits))
        kept = 64 * config.n_embd * config.n_layer * config.block_size
        return max(1, min(1024, memory // 8 // (logits + kept)))

    def trunk(self, idx: Tensor, context: Context | None = None) -> Tensor:
        """Return the hidden states (B, T, C) of token ids (B, T) after the last normalisation.

        `context` says what the tokens attend to: by default, to the tokens before them in their
        row. With SharedPrompts, pass its `ids` (n,) and get (n, C)."""
        context = context or Context(idx)
        if context.length > self.config.block_size:
            limit = f"block_size {self.config.block_size}"
            raise UserError(f"a sequence of {context.length} tokens does not fit {limit}")
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.position == "learned":
            rotation = None
            x = x + self.transformer.wpe(context.token_positions)
        else:
            rotation = self.rotation[:, context.row_positions]  # (2, T, D)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, rotation, context)
        return self.transformer.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (B, T, V) of hidden states; those of padding ids are the dtype's lowest
        number.

        In the weights' dtype under autocast too: bfloat16 would change GRPO's ratios (MiniMax-M1,
        arXiv 2506.13585)."""
        with full_precision(hidden.device):
            return self._head(hidden.to(self.lm_head.weight.dtype))

    def _head(self, hidden: Tensor) -> Tensor:
        """As `logits`, in autocast's dtype: for losses, which average rounding errors over many
        tokens."""
        logits = self.lm_head(hidden)
        if self.config.num_real_tokens < self.config.vocab_size:
            logits[..., self.config.num_real_tokens :] = torch.finfo(logits.dtype).min
        return logits

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the loss if there are targets.

        Generator: logits (B, T, V), without targets (B, 1, V) of the last position; targets (B, T)
        int64, -1 ignored; cross-entropy in nats. Reward model: [P(natural), P(synthetic)] (B, 2);
        targets (B, 2); mean squared error."""
        if self.config.mode == "reward":
            last = self.trunk(idx)[:, -1]  # (B, C)
            with full_precision(idx.device):
                # (B, 2)
                probabilities = self.reward_head(last.to(self.transformer.wte.weight.dtype))
            return probabilities, None if targets is None else F.mse_loss(probabilities, targets)
        x = self.trunk(idx, kv_cache)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self._head(x)
        return logits, F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
        )

    def pad_vocabulary(self, vocab_size: int) -> None:
        """Add or remove padding ids, which are never used, so that there are `vocab_size` ids;
        tokens all stay."""
        added, config = vocab_size - self.config.vocab_size, self.config
        if added != 0 and vocab_size >= config.num_real_tokens:
            self.config = replace(config, vocab_size=vocab_size, num_tokens=config.num_real_tokens)
            self.lm_head.weight = nn.Parameter(
                F.pad(self.lm_head.weight.detach(), (0, 0, 0, added))
            )
            own = nn.Parameter(F.pad(self.transformer.wte.weight.detach(), (0, 0, 0, added)))
            self.transformer.wte.weight = self.lm_head.weight if config.tied_embeddings else own

    def crop_block_size(self, block_size: int) -> None:
        """Let the model take sequences of at most `block_size` tokens, no more than before."""
        self.config = replace(self.config, block_size=block_size)
        if self.config.position == "learned":
            self.transformer.wpe.weight = nn.Parameter(
                self.transformer.wpe.weight[:block_size].detach().clone()
            )
        else:
            self.rotation = self.rotation[:, :block_size]

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue idx (B, T) by `max_new_tokens` (None: fill the block); see
        completions.generate."""
        if self.config.mode != "generator":
            raise UserError("a reward model cannot generate: load the checkpoint of a generator")
        return generate(self, idx, max_new_tokens, Sampling(temperature, top_k, top_p), generator)


def rotary_angles(length: int, head_dim: int, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """cos and signed sin (2, T, D) of the rotary position embedding (Su et al. 2021,
    arXiv:2104.09864, eq. 34).

    Of the pairs d and d + D/2 the first rotary_dim / 2 are turned; interop/huggingface.py reorders
    GPT-NeoX's to these."""
    # On the CPU always: operations on the meta device import torch._dynamo, which takes a second.
    frequencies = base ** (
        -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    )
    frequencies = F.pad(frequencies, (0, (head_dim - rotary_dim) // 2))  # 0: not turned
    # (T, D / 2)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
    return torch.stack(
        (angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1))
    ).float()


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn queries and keys (..., T, D) by their positions' angles; pairs are dimensions d and d +
    D/2."""
    cos, signed_sin = rotation.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), signed_sin)
