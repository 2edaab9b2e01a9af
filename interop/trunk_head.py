"""A head on a layer of a frozen causal model: evidence of every token without a second model.

    python -c "from interop.trunk_head import TrunkHead; help(TrunkHead)"

Shapes: B sequences of T tokens, C channels of a hidden state; m samples.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import seed_step
from common.log import counted
from interop.samples import Samples
from losses import token_log_probs
from reward.posterior import natural_share
from reward.states import StateHead, train_state_head

NUM_LAYERS = 6  # layers that `fit` tries
SELECTION = 0.2  # share of the blocks that choose layer and epoch
MAX_FLOAT16 = 65504.0


class TrunkHead(nn.Module):
    """A StateHead on one layer of the generator q, a CausalModel.

    One pass of the generator, with its adapters disabled, gives the head's inputs and log q.
    """

    head_type = "trunk"
    missing = "the reward has no head yet: call its fit(), or load()"
    finding = "the head on this model's states does not predict where its text begins"
    way_out = "small models' states do not: use a larger model, or a natural model"

    def __init__(self, generator: Any) -> None:
        super().__init__()
        config = generator.model.config.get_text_config()
        self.generator = generator
        self.device = generator.model.device
        self.num_layers: int = config.num_hidden_layers
        self.num_channels: int = config.hidden_size
        self.layer = self.num_layers  # number of blocks before the states that are read
        self.state_head = self.new_head(0)

    def new_head(self, seed: int) -> StateHead:
        """Return a head with random weights that depend only on the seed."""
        with torch.random.fork_rng([]):
            seed_step(seed, "head")
            head = StateHead(self.num_channels + 1)
        return head.to(self.device)

    @torch.no_grad()
    def inputs(self, idx: Tensor, layers: list[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Return the head's inputs (B, T, C + 1) float16 of each layer, and log q (B, T - 1).

        Hidden states beyond the range of float16 are clamped. log q is float32.
        """
        outputs = self.generator.outputs(idx, output_hidden_states=True)
        log_q = token_log_probs(outputs.logits[:, :-1], idx[:, 1:])
        of_tokens = F.pad(log_q, (1, 0)).unsqueeze(-1)  # (B, T, 1): the first token has none
        inputs = {}
        for layer in layers:
            both = torch.cat((outputs.hidden_states[layer].float(), of_tokens), -1)
            inputs[layer] = both.clamp(-MAX_FLOAT16, MAX_FLOAT16).half()
        return inputs, log_q

    @torch.no_grad()
    def read(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return evidence (B, T) and log-probabilities under q (B, T - 1) of ids (B, T).

        The first token's evidence is 0.
        """
        inputs, log_q = self.inputs(idx, [self.layer])
        evidence = self.state_head(inputs[self.layer])
        return F.pad(evidence[:, 1:], (1, 0)), log_q

    def fit(self, samples: Samples, report: Samples, seed: int) -> tuple[dict[str, Any], Tensor]:
        """Train a head on some layers; keep the one with the lowest selection loss.

        Return figures, and P(natural) (m,) of the samples to report.
        """
        spread = np.linspace(self.num_layers / NUM_LAYERS, self.num_layers, NUM_LAYERS)
        layers = np.unique(np.ceil(spread)).astype(int).tolist()
        inputs = self.collect(samples.ids, layers)
        is_selection = selection_mask(samples)
        losses = {}
        figures: dict[str, Any] = {"val_loss": math.inf}
        for layer in layers:
            head = self.new_head(seed)
            head.standardize.set_statistics(inputs[layer][~is_selection])
            of_layer = self.train_head(head, inputs.pop(layer), samples, seed, layer)
            losses[layer] = of_layer["val_loss"]
            if losses[layer] < figures["val_loss"]:
                figures = of_layer
                self.layer = layer
                self.state_head = head
        figures["layer"] = self.layer
        figures["val_loss_by_layer"] = losses
        return figures, self.predict(report.ids)

    def refit(self, samples: Samples, report: Samples, seed: int) -> tuple[dict[str, Any], Tensor]:
        """Train the present head further; return what `fit` returns."""
        inputs = self.collect(samples.ids, [self.layer])
        figures = self.train_head(self.state_head, inputs[self.layer], samples, seed, self.layer)
        return figures, self.predict(report.ids)

    def collect(self, ids: Tensor, layers: list[int]) -> dict[int, Tensor]:
        """Return the head's inputs (m, T, C + 1) float16 of each layer, on the CPU."""
        shape = (*ids.shape, self.num_channels + 1)
        inputs = {layer: torch.empty(shape, dtype=torch.float16) for layer in layers}
        for rows in self.batches(len(ids), "Hidden states"):
            of_rows, _ = self.inputs(ids[rows].to(self.device), layers)
            for layer in layers:
                inputs[layer][rows] = of_rows[layer].cpu()
        return inputs

    def train_head(
        self, head: StateHead, inputs: Tensor, samples: Samples, seed: int, layer: int
    ) -> dict[str, Any]:
        """Train a head on inputs (m, T, C + 1) of samples; return the figures of its best epoch."""
        is_selection = selection_mask(samples)
        parts = []
        for rows in (~is_selection, is_selection):
            parts.append((inputs[rows].to(self.device), samples.labels()[rows].to(self.device)))
        return train_state_head(head, parts[0], parts[1], seed, f"Head on layer {layer}")

    def predict(self, ids: Tensor) -> Tensor:
        """Return P(natural) (m,) of sequences (m, T)."""
        shares = []
        for rows in self.batches(len(ids), "Report samples"):
            evidence, _ = self.read(ids[rows].to(self.device))
            shares.append(natural_share(evidence).cpu())
        return torch.cat(shares)

    def batches(self, count: int, title: str) -> Any:
        """Yield the numbers of `count` rows in batches, with a progress bar."""
        batches = torch.arange(count).split(self.generator.rows_at_a_time())
        return counted(batches, len(batches), title)

    def describe(self, figures: dict[str, Any]) -> str:
        """Return the chosen layer and the selection losses of all layers as a line of text."""
        losses = []
        for layer, loss in figures["val_loss_by_layer"].items():
            losses.append(f"{layer}: {loss:.3f}")
        chosen = f"Head on layer {self.layer} of {self.num_layers}"
        return f"{chosen}; selection loss by layer: {', '.join(losses)}"

    def fitted(self) -> dict[str, Tensor]:
        """Return what `fit` has chosen: the layer and the head's tensors."""
        tensors = {"layer": torch.tensor(self.layer)}
        for name, tensor in self.state_head.state_dict().items():
            tensors[name] = tensor.cpu()
        return tensors

    def set_fitted(self, tensors: dict[str, Tensor]) -> None:
        """Set what `fitted` has returned."""
        self.layer = int(tensors["layer"])
        weights = {name: tensor for name, tensor in tensors.items() if name != "layer"}
        self.state_head.load_state_dict(weights)


def selection_mask(samples: Samples) -> Tensor:
    """Return which samples (m,) choose layer and epoch: those of the last blocks."""
    num_blocks = int(samples.blocks.max()) + 1
    return samples.blocks >= int(num_blocks * (1 - SELECTION))
