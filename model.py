"""A GPT with a generator head or a reward head on one trunk.

    python -c "from model import GPT, GPTConfig; print(GPT(GPTConfig(n_layer=2)).num_parameters())"

This module reads and writes no files. Parameter names follow nanoGPT, so that nanoGPT's checkpoints
load (position='learned').
Shapes: B sequences, T positions, C = n_embd channels, H = n_head heads, D = C / H channels of a
head, V = vocab_size token ids.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import autocast, total_memory
from common.process import UserError
from lm.completions import generate
from lm.kv_cache import KVCache
from lm.sampling import Sampling

REWARD_HEADS = ("last", "likelihood")
ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}  # the argument `approximate` of nn.GELU
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "reward_head_hidden_dim")
CHOICES = {
    "mode": ("generator", "reward"),
    "position": ("rope", "learned"),
    "reward_head_type": REWARD_HEADS,
    "activation": tuple(ACTIVATIONS),
}
# Bounds that keep the config of a damaged file from filling the memory.
MAX_SIZE = 2**24  # of every size
MAX_TABLE = 2**25  # of the table of positions, and of the reward head's weights


@dataclass
class GPTConfig:
    """The architecture of a GPT. Every checkpoint stores it."""

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    mode: str = "generator"  # 'generator' or 'reward'
    reward_head_hidden_dim: int = 256
    # 'rope' (inside attention) or 'learned' (transformer.wpe, as in nanoGPT and GPT-2)
    position: str = "rope"
    # Number of ids that the tokenizer uses; higher ids are padding. None: see num_real_tokens.
    num_tokens: int | None = None
    reward_head_type: str = "last"  # 'last' or 'likelihood': see reward/heads.py
    # The fields below describe pretrained GPT-2 models.
    activation: str = "gelu"  # 'gelu' (exact) or 'gelu_tanh' (GPT-2's approximation)
    tied_embeddings: bool = True  # input and output embeddings share one matrix

    @property
    def num_real_tokens(self) -> int:
        """Return the number of ids that are tokens. Higher ids are padding."""
        if self.num_tokens is not None:
            return self.num_tokens
        if self.vocab_size == 50304:  # GPT-2's padded vocabulary
            return 50257
        return self.vocab_size

    @property
    def min_weights(self) -> int:
        """Return a lower bound of the number of weights: embeddings and matrices of all blocks."""
        return self.n_embd * (self.vocab_size + 12 * self.n_layer * self.n_embd)

    def problem(self) -> str | None:
        """Return the reason why this configuration is impossible, or None if it is possible.

        A config from a file can hold values of any type.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            # A whole number may stand for a float.
            is_bool = isinstance(value, bool)  # Python's bool is an int, too
            if is_bool != (field.type is bool) or not isinstance(value, field.type | int):
                return f"{field.name}={value!r:.60}: wrong type {type(value).__name__}"
        for name in SIZES:
            value = getattr(self, name)
            if value < 1:
                return f"{name}={value}: must be >= 1"
            if value > MAX_SIZE:
                return f"{name}: must be <= {MAX_SIZE}"
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                return f"{name}={value!r:.60}: must be one of {', '.join(known)}"
        if not 0 <= self.dropout < 1:
            return f"dropout={self.dropout}: must be >= 0 and < 1"
        if not 1 <= self.num_real_tokens <= self.vocab_size:
            return f"num_tokens={self.num_tokens}: must be >= 1 and <= vocab_size={self.vocab_size}"
        if self.n_embd % self.n_head != 0:
            return f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}"
        head_size = self.n_embd // self.n_head
        if self.position == "rope" and head_size % 2:
            return f"rotary positions need an even head size, not n_embd / n_head = {head_size}"
        if max(self.block_size, self.reward_head_hidden_dim) * self.n_embd > MAX_TABLE:
            return f"block_size or reward_head_hidden_dim: times n_embd, must be <= {MAX_TABLE}"
        return None


# torch.load may build this class at its safe default, weights_only=True.
torch.serialization.add_safe_globals([GPTConfig])


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each token to itself and to earlier tokens."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.dropout = config.dropout
        self.n_head = config.n_head
        self.layer = layer

    def forward(self, x: Tensor, rotation: Tensor | None, kv_cache: KVCache | None) -> Tensor:
        """Return the output (B, T, C) of attention for hidden states (B, T, C)."""
        qkv = self.c_attn(x)  # (B, T, 3 C)
        B, T = qkv.shape[:2]
        C = x.size(-1)
        qkv = qkv.view(B, T, 3, self.n_head, C // self.n_head)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        queries, keys = qkv[:2]  # (B, H, T, D) each
        if rotation is not None:
            queries, keys = rotate(qkv[:2], rotation)
        if kv_cache is None:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(
                queries, keys, qkv[2], dropout_p=dropout, is_causal=True
            )  # (B, H, T, D)
        else:
            y = kv_cache.attend(self.layer, queries, keys, qkv[2])
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers with GELU between them; the inner width is 4 C."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(ACTIVATIONS[config.activation])
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers to hidden states (B, T, C); return (B, T, C)."""
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Tensor | None, kv_cache: KVCache | None) -> Tensor:
        """Return the block's output (B, T, C) for hidden states (B, T, C)."""
        y = x + self.attn(self.ln_1(x), rotation, kv_cache)
        return y + self.mlp(self.ln_2(y))


class GPT(nn.Module):
    """A generator, or a reward model with a 'last' head: see `forward`.

    Raise UserError if the config is impossible.
    """

    transformer: Any  # nanoGPT's wte, wpe (only with learned positions), drop, h and ln_f
    rotation: Tensor  # (2, T, D), only with rotary positions

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        problem = config.problem()
        if problem is not None:
            raise UserError(f"ERROR: {problem}")
        if config.mode == "reward" and config.reward_head_type != "last":
            raise UserError(
                f"ERROR: reward_head_type={config.reward_head_type!r}: "
                "use reward.heads.build_reward_model"
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
            angles = rotary_angles(config.block_size, config.n_embd // config.n_head)
            self.register_buffer("rotation", angles, persistent=False)
        if config.mode == "generator":
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            if config.tied_embeddings:
                self.transformer.wte.weight = self.lm_head.weight
        if config.mode == "reward":
            width = config.reward_head_hidden_dim
            self.reward_head = nn.Sequential(
                nn.Linear(config.n_embd, width), nn.ReLU(), nn.Linear(width, 2), nn.Softmax(dim=-1)
            )
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialise as GPT-2: normal 0.02, residual projections scaled down by depth.

        The first layer of the reward head gets He initialisation.
        """
        for name, parameter in self.named_parameters():
            if name == "reward_head.0.weight":
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            elif name.endswith("c_proj.weight"):
                std = 0.02 / math.sqrt(2 * self.config.n_layer)
                nn.init.normal_(parameter, mean=0.0, std=std)
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, mean=0.0, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def init_orthogonal(self) -> None:
        """Initialise the blocks with orthogonal matrices and zero-initialised output projections.

        This suits short training runs.
        """
        for name, parameter in self.transformer.h.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                nn.init.orthogonal_(parameter)

    def num_parameters(self) -> int:
        """Return the number of parameters without position embeddings, as nanoGPT counts them."""
        total = sum(parameter.numel() for parameter in self.parameters())
        if self.config.position == "learned":
            total -= self.transformer.wpe.weight.numel()
        return total

    def rows_at_a_time(self) -> int:
        """Return how many sequences of full length one pass should take.

        On CUDA at most 1,024: their logits with copies, and 64 bytes per channel, layer and
        position, take an eighth of the memory. Elsewhere at most 64: their logits take 1 GiB.
        """
        config = self.config
        memory = total_memory(self.transformer.wte.weight.device)
        logits_bytes = 5 * 4 * config.block_size * config.vocab_size
        if memory is None:
            return max(1, min(64, 2**30 // logits_bytes))
        activation_bytes = 64 * config.n_embd * config.n_layer * config.block_size
        return max(1, min(1024, memory // 8 // (logits_bytes + activation_bytes)))

    def trunk(self, idx: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        """Return the hidden states (B, T, C) of token ids (B, T) after the last normalisation.

        Tokens attend to those before them in their row; with a cache, also to those that it holds.
        """
        start = 0
        if kv_cache is not None:
            start = kv_cache.position
        end = start + idx.size(1)
        limit = self.config.block_size
        if end > limit:  # not require(): torch.compile would trace its message
            raise UserError(f"ERROR: {end} tokens do not fit block_size {limit}: cut them")
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.position == "learned":
            rotation = None
            x = x + self.transformer.wpe.weight[start:end]
        else:
            rotation = self.rotation[:, start:end]  # (2, T, D)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, rotation, kv_cache)
        return self.transformer.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) of hidden states (B, T, C).

        Padding ids get the lowest finite number. The logits have the dtype of the weights, also
        under autocast: bfloat16 logits would change GRPO's probability ratios (MiniMax-M1, arXiv
        2506.13585).
        """
        with autocast(hidden.device, torch.float32):
            return self._logits_in_autocast(hidden.to(self.lm_head.weight.dtype))

    def _logits_in_autocast(self, hidden: Tensor) -> Tensor:
        """Compute the logits in the autocast dtype.

        Use this only for losses averaged over many tokens.
        """
        logits = self.lm_head(hidden)
        if self.config.num_real_tokens < self.config.vocab_size:
            logits[..., self.config.num_real_tokens :] = torch.finfo(logits.dtype).min
        return logits

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output for token ids (B, T) int64, and the loss () if there are targets.

        Generator: logits (B, T, V), or (B, 1, V) of the last position without targets; targets
        (B, T) int64, -1 is ignored; the loss is the mean cross-entropy in nats. Reward model:
        [P(natural), P(synthetic)] (B, 2); targets (B, 2); the loss is the mean squared error.
        """
        if self.config.mode == "reward":
            probabilities = self.output(idx).softmax(-1)  # (B, 2)
            if targets is None:
                return probabilities, None
            return probabilities, F.mse_loss(probabilities, targets)
        x = self.trunk(idx, kv_cache)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self._logits_in_autocast(x)
        flat_logits = logits.view(-1, logits.size(-1))  # (B T, V)
        loss = F.cross_entropy(flat_logits, targets.reshape(-1), ignore_index=-1)
        return logits, loss

    def output(self, idx: Tensor) -> Tensor:
        """Return the reward head's scores (B, 2) of [natural, synthetic] before the softmax."""
        return self.score(self.trunk(idx)[:, -1])

    def score(self, hidden: Tensor) -> Tensor:
        """Return the reward head's scores (B, 2) of hidden states (B, C) of last tokens.

        The dtype is that of the weights, also under autocast.
        """
        with autocast(hidden.device, torch.float32):
            return self.reward_head[:3](hidden.to(self.transformer.wte.weight.dtype))

    def pad_vocabulary(self, vocab_size: int) -> None:
        """Add or remove padding ids so that there are `vocab_size` ids; never remove a token."""
        num_added = vocab_size - self.config.vocab_size
        num_tokens = self.config.num_real_tokens
        if num_added == 0 or vocab_size < num_tokens:
            return
        self.config = replace(self.config, vocab_size=vocab_size, num_tokens=num_tokens)
        for layer in (self.transformer.wte, self.lm_head):
            padded = F.pad(layer.weight.detach(), (0, 0, 0, num_added))  # (vocab_size, C)
            layer.weight = nn.Parameter(padded)
        if self.config.tied_embeddings:
            self.transformer.wte.weight = self.lm_head.weight

    def crop_block_size(self, block_size: int) -> None:
        """Limit sequences to `block_size` tokens, which may not exceed the present limit."""
        self.config = replace(self.config, block_size=block_size)
        if self.config.position == "learned":
            weight = self.transformer.wpe.weight[:block_size].detach().clone()
            self.transformer.wpe.weight = nn.Parameter(weight)

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue ids (B, T) by `max_new_tokens`, or to a full block (None).

        See lm.completions.generate.
        """
        return generate(self, idx, max_new_tokens, Sampling(temperature, top_k), generator)


def rotary_angles(length: int, head_dim: int) -> Tensor:
    """Return the factors (2, T, D) of `rotate` for rotary position embeddings.

    They are cos, and sin with the sign that each half of the dimensions needs. Dimensions d and
    d + D/2 are a pair (Su et al. 2021, arXiv:2104.09864, eq. 34).
    """
    # float64 needs the CPU: Apple's devices lack it.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = 10000.0**-exponents  # (D / 2,)
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, frequencies)  # (T, D / 2)
    cos = angles.cos().repeat(1, 2)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), 1)
    return torch.stack((cos, signed_sin)).float()


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate queries and keys (..., T, D) by their positions' angles (2, T, D)."""
    cos, signed_sin = rotation.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), signed_sin)
