"""Tests of benchmarks/detect_peers.py: each peer beside the formula or the layers of its paper.

pytest tests/test_detect_peers.py
"""

import pytest
import torch

from benchmarks.detect_peers import Samples, SeqXGPT, counted, cross_entropy, log_rank
from lm.sampling import Sampling
from reading.reader import describe_tokens, expected_crossover


def test_scores_are_those_of_the_papers():
    torch.manual_seed(0)
    p_logits, logits = torch.randn(2, 40, 11)
    ids = torch.randint(11, (40,))
    p = p_logits.softmax(-1)
    q = logits.softmax(-1)
    log_q, _, surprise, _ = describe_tokens(logits, ids, [Sampling()]).T
    own = q[torch.arange(40), ids]
    # GLTR: the place among the tokens, from the likeliest on
    places = (q.argsort(-1, descending=True) == ids[:, None]).nonzero()[:, 1]
    torch.testing.assert_close(log_rank(logits[None], ids[None])[0], (1 + places).log())
    # Binoculars: log-perplexity, and the cross-entropy that divides it
    torch.testing.assert_close(log_q, own.log())
    divisor = -torch.einsum("tv,tv->t", p, q.log())
    torch.testing.assert_close(cross_entropy(p_logits, logits), divisor)
    # Fast-DetectGPT: the distance of log q from its mean over q, in its standard deviations
    mean = torch.einsum("tv,tv->t", q, q.log())
    variance = torch.einsum("tv,tv->t", q, (q.log() - mean[:, None]) ** 2)
    torch.testing.assert_close(surprise, (own.log() - mean) / variance.sqrt(), atol=1e-4, rtol=1e-4)


def test_seqxgpt_has_the_layers_of_its_paper_and_reads_the_whole_text():
    network = SeqXGPT(2, 40).eval()
    widths = [tuple(each.weight.shape) for each in network.convolutions[::2]]
    assert widths == [(64, 2, 5), (128, 64, 3), (128, 128, 3), (128, 128, 3), (64, 128, 3)]
    columns = torch.randn(1, 40, 2)
    found = network(columns)
    columns[:, -1] += 1
    assert not torch.equal(network(columns)[:, 0], found[:, 0])


def test_natural_tokens_are_counted():
    probability = torch.tensor([[0.9, 0.8, 0.5, 0.1]])
    seen = Samples(*[torch.zeros(1, 4)] * 6)
    log_posterior = counted(lambda _: probability.logit()[..., None])(seen)
    assert expected_crossover(log_posterior).item() == pytest.approx(2.3)
