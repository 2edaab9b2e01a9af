"""A head on a layer of a frozen causal model: evidence of every token without a second model.

Shapes: B sequences of T tokens, C channels of a hidden state; m samples.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.log import print0, progress
from interop.samples import Samples
from losses import token_log_probs
from reward.posterior import natural_share
from reward.states import StateHead, train_state_head
from training.optimizers import Best

NUM_LAYERS = 6  # layers that `fit` tries
SELECTION = 0.2  # share of the samples, the last ones, that choose layer and epoch
MAX_FLOAT16 = 65504.0


class TrunkHead(nn.Module):
    """A StateHead on one layer of the generator q, a CausalModel.

    One pass of the generator, with its adapters disabled, gives the head's inputs and log q.
    """

    missing = "the reward has no head yet: call its fit(), or load()"
    finding = (
        "the head on this model's states does not predict where its text begins: "
        "small models' states do not: use a larger model, or a natural model, or more text"
    )
    layer: Tensor  # () int64: number of blocks before the states that are read

    def __init__(self, generator: Any) -> None:
        super().__init__()
        config = generator.model.config.get_text_config()
        self.generator = generator
        self.device = generator.model.device
        self.num_layers: int = config.num_hidden_layers
        self.num_inputs = config.hidden_size + 1  # and log q
        self.kind = f"a head on {self.num_layers} layers of {config.hidden_size} channels"
        self.register_buffer("layer", torch.tensor(self.num_layers, device=self.device))
        self.state_head = StateHead(self.num_inputs).to(self.device)

    @torch.no_grad()
    def inputs(self, idx: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the head's inputs (L, B, T, C + 1) float16 of L layers, and log q (B, T - 1).

        Hidden states beyond the range of float16 are clamped. log q is float32.
        """
        outputs = self.generator.outputs(idx, output_hidden_states=True)
        log_q = token_log_probs(outputs.logits[:, :-1], idx[:, 1:])
        of_tokens = F.pad(log_q, (1, 0)).unsqueeze(-1)  # (B, T, 1): the first token has none
        states = [outputs.hidden_states[layer].float() for layer in layers]
        inputs = torch.stack([torch.cat((each, of_tokens), -1) for each in states])
        return inputs.clamp(-MAX_FLOAT16, MAX_FLOAT16).half(), log_q

    @torch.no_grad()
    def output(self, idx: Tensor) -> Tensor:
        """Return the evidence (B, T) of ids (B, T); the first token's is 0."""
        inputs, _ = self.inputs(idx, [int(self.layer)])
        return F.pad(self.state_head(inputs[0])[:, 1:], (1, 0))

    def collect(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the head's inputs (L, m, T, C + 1) float16 of sequences (m, T), on the CPU."""
        shape = (len(layers), *ids.shape, self.num_inputs)
        inputs = torch.empty(shape, dtype=torch.float16, device="cpu")
        batches = torch.arange(len(ids)).split(self.generator.rows_at_a_time())
        for rows in progress("Hidden states", iterable=batches):
            inputs[:, rows] = self.inputs(ids[rows].to(self.device), layers)[0].cpu()
        return inputs

    def fit(
        self, select: Samples, report: Samples, seed: int, layers: Sequence[int] = ()
    ) -> tuple[dict[str, Any], Tensor]:
        """Train a head on each of some layers; keep the one with the lowest selection loss.

        Without `layers`, new heads are trained on layers that are spread over the depth. Else the
        present head is trained further on the layer given. The last samples of `select` choose
        layer and epoch. Return figures, and P(natural) (m,) of the samples to report.
        """
        is_new = not layers
        if is_new:
            spread = np.linspace(self.num_layers / NUM_LAYERS, self.num_layers, NUM_LAYERS)
            layers = np.unique(np.ceil(spread)).astype(int).tolist()
        labels = select.labels().to(self.device)
        cut = int(len(labels) * (1 - SELECTION)) // 2 * 2  # a block's two samples stay together
        best = Best()
        losses = {}
        for layer, inputs in zip(layers, self.collect(select.ids, layers), strict=True):
            if is_new:
                with torch.random.fork_rng([]):
                    torch.manual_seed(seed)
                    self.state_head.load_state_dict(StateHead(self.num_inputs).state_dict())
                self.state_head.standardize.set_statistics(inputs[:cut])
            x = inputs.to(self.device)
            train = (x[:cut], labels[:cut])
            title = f"Head on layer {layer}"
            chosen_by = (x[cut:], labels[cut:])
            figures = train_state_head(self.state_head, train, chosen_by, seed, title)
            losses[layer] = figures["val_loss"]
            self.layer.fill_(layer)
            best.update(figures["val_loss"], layer, self.fitted().items(), figures)
        copy_tensors(best.weights, self.fitted())
        best.figures["layer"] = best.at
        best.figures["val_loss_by_layer"] = losses
        by_layer = ", ".join(f"{layer}: {loss:.3f}" for layer, loss in losses.items())
        constant = math.log(select.ids.size(1) - 1)  # of equal P(K)
        print0(
            f"Head on layer {best.at} of {self.num_layers}; selection loss, -log P(K), by layer: "
            f"{by_layer} (a constant: {constant:.3f})"
        )
        batches = report.ids.split(self.generator.rows_at_a_time())
        evidence = [self.output(part.to(self.device)) for part in batches]
        return best.figures, natural_share(torch.cat(evidence)).cpu()

    def fitted(self) -> dict[str, Tensor]:
        """Return the tensors that `fit` sets."""
        tensors = self.state_head.state_dict()
        tensors["layer"] = self.layer
        return tensors


def copy_tensors(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy the values to the targets of the same names."""
    for name, target in targets.items():
        target.copy_(values[name])
