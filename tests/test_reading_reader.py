"""Tests of reading/posterior.py and reader.py: windows, posteriors by hand, a fit.

pytest tests/test_reading_reader.py
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import succeed
from torch.nn import functional as F

from common.process import UserError
from detect import DetectSettings, open_reward_model
from lm.sampling import Sampling, sampling_distribution
from reading import posterior as readings
from reading.page import find_passages
from reading.posterior import in_windows, read
from reading.reader import measure_readings, parse_way, way_log_probs


def of_four(ids):
    """Evidence that depends on a token and the three before it: the sum of these ids (B, T)."""
    return F.pad(ids, (3, 0)).unfold(1, 4, 1).sum(-1).float()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 12, 61, 200])
def test_windows_give_every_token_its_longest_context(n):
    ids = torch.randint(100, (n,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(in_windows(of_four, ids, 8, 2), of_four(ids[None])[0])
    contexts = in_windows(lambda rows: torch.arange(rows.size(1)).expand_as(rows), ids, 8, 2)
    assert torch.equal(contexts[:8], torch.arange(n)[:8])
    assert all(4 <= context < 8 for context in contexts[8:])


def draw_evidence(n, shift=0.0):
    draw = torch.Generator().manual_seed(1)
    return (shift + torch.randn(n, 3, generator=draw)).double()


@pytest.mark.parametrize(("n", "shift"), [(2, 0.0), (6, -1.0), (6, 0.0), (80, 0.5)])
def test_the_posterior_of_one_crossover_by_hand(n, shift):
    """A mixture over the sampling settings, each with the product of its ratios from K on."""
    evidence = draw_evidence(n, shift)
    weights = []
    for crossover in range(1, n + 1):
        prior = 1.0 if crossover == n else 1 / (n - 1)
        written = -evidence[crossover:].sum(0)
        weights.append(prior * written.exp().mean().item())
    by_hand = [weight / math.fsum(weights) for weight in weights]
    posterior = readings.crossover_posterior(evidence[None])[0].exp()
    assert posterior.tolist() == pytest.approx(by_hand)
    # The interval is that of K where there is a crossover.
    reading = read(evidence)
    written = math.fsum(by_hand[:-1])
    assert 1 <= reading.low <= reading.high < n
    assert math.fsum(by_hand[: reading.low - 1]) < 0.02 * written
    assert math.fsum(by_hand[: reading.high]) >= (0.98 - 1e-9) * written


def test_the_posterior_of_passages_by_enumeration(monkeypatch):
    monkeypatch.setattr(readings, "SWITCH_RATE", 0.1)
    evidence = draw_evidence(6)
    natural = torch.zeros(6, dtype=torch.float64)
    total = 0.0
    for rest in itertools.product((0, 1), repeat=5):
        is_written = torch.tensor([0, *rest])
        switches = int(is_written.diff().abs().sum())
        written = -(evidence * is_written[:, None]).sum(0)
        weight = 0.1**switches * 0.9 ** (5 - switches) * written.exp().mean()
        natural += weight * (1 - is_written)
        total += weight
    within, of_ways = readings.passage_posterior(evidence)
    log_total = of_ways.logsumexp(0) - math.log(len(of_ways))
    assert within.tolist() == pytest.approx((natural / total).tolist())
    assert log_total.exp().item() == pytest.approx(float(total))
    # Half of all texts are natural, and the others may switch.
    scaled = read(evidence / readings.PASSAGE_SCALE)
    monkeypatch.setattr(readings, "PASSAGE_SCALE", 1.0)
    reading = read(evidence)
    assert scaled.all_natural == pytest.approx(reading.all_natural)
    assert reading.all_natural == pytest.approx((1 + 0.9**5) / (1 + float(total)))
    assert reading.natural.tolist() == pytest.approx(((1 + natural) / (1 + total)).tolist())


def test_passages_in_the_middle_and_at_the_end():
    evidence = torch.ones(300, 1)
    assert read(evidence).passages == [] and read(evidence).all_natural > 0.99
    evidence[100:150] = -1
    assert read(evidence).passages == [(100, 150)]
    evidence[250:] = -1
    middle, end = read(evidence).passages
    assert middle == (100, 150) and end == (250, 300)
    evidence[100:150] = 1
    reading = read(evidence)
    assert reading.passages == [(250, 300)] and reading.low <= 250 <= reading.high


def test_ways_of_sampling_in_text():
    assert parse_way("0.7") == Sampling(0.7)
    assert parse_way("0.7:0.9") == Sampling(0.7, None, 0.9)
    assert parse_way("1:1:40") == Sampling(1.0, 40)
    for wrong in ("1:0", "1:1.1", "-1", "1:1:2:3", "", "1:1:-2"):
        with pytest.raises(UserError, match="give TEMPERATURE:TOP_P:TOP_K"):
            parse_way(wrong)


def test_top_p_keeps_the_fewest_tokens_of_that_mass():
    logits = torch.tensor([[0.2, 0.5, 0.05, 0.25]]).log()
    kept = sampling_distribution(logits, Sampling(top_p=0.74)).exp()
    assert kept[0].tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3])
    kept = sampling_distribution(logits, Sampling(top_p=0.76)).exp()
    assert kept[0].tolist() == pytest.approx([0.2 / 0.95, 0.5 / 0.95, 0, 0.25 / 0.95])


@pytest.mark.parametrize("way", ["1", "0.6", "0.7:0.8", "1:1:3", "0", "0.9:0.9:5"])
def test_log_probabilities_of_a_way_are_those_that_it_draws_from(way):
    logits = 2 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(30, (40,), generator=torch.Generator().manual_seed(1))
    sampling = parse_way(way)
    found = way_log_probs(logits.log_softmax(-1), ids, [sampling])[:, 0].exp()
    drawn = sampling_distribution(logits, sampling).gather(-1, ids[:, None])[:, 0].exp()
    assert torch.equal(found < 1e-9, drawn < 1e-9) and found.any()
    # the mass of a nucleus is approximated
    assert torch.allclose(found, drawn, rtol=0.4 if sampling.top_p < 1 else 1e-4)


def test_evidence_compares_m_with_each_way_of_sampling(predictive_reward_model):
    path = str(predictive_reward_model)
    reader = open_reward_model(
        path, DetectSettings(reward_model_path=path, sampling=("1", "0.5"), device="cpu")
    ).reader
    model = reader.pair
    ids = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        evidence = reader.evidence(reader.numbers(ids))  # (2, 12, 2)
        assert torch.allclose(evidence[..., 0], model.output(ids), atol=1e-5)
        logits = model.generator.logits(model.generator.trunk(ids[:, :-1]))
        by_hand = model.output(ids)[:, 1:]
    log_q = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    colder = (logits / 0.5).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    written = (0.99 * colder.exp() + 0.01 * log_q.exp()).log()
    assert torch.allclose(evidence[:, 1:, 1], by_hand + log_q - written, atol=1e-5)


def test_a_fit_reads_other_ways_of_sampling(corpus, predictive_reward_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(predictive_reward_model)
    options = {"reward_model_path": path, "device": "cpu", "reader_path": "x.reader.pt"}
    printed = succeed("detect", **options, sampling=["1", "0.5"])
    assert "sampled at 0.5: r2" in printed
    settings = DetectSettings(reward_model_path=path, sampling=("1", "0.5"), device="cpu")
    source = open_reward_model(path, settings)
    reader = source.reader
    reader.load("x.reader.pt", {})
    assert list(reader.figures) == ["1", "0.5"]
    assert reader.figures["0.5"]["coverage"] > 0.8 and reader.figures["0.5"]["width"] > 1
    ids = torch.from_numpy(source.encode((corpus / "input.txt").read_text()[:200])[0]).long()
    assert reader.read(ids).is_usual
    assert reader.figures["0.5"]["r2"] > 0.3
    unlike = replace(reader.read(ids[:1].repeat(200)), passages=[(1, 9)])
    assert not find_passages(ids, unlike, ("1", "1"))["is_usual"]
    # Natural text of no kind looks so.
    assert find_passages(ids, unlike, ("0.5", "0.5"))["is_usual"]
    assert find_passages(ids, unlike, ("1:0.9", "1:0.9"))["is_usual"]
    # the distance of a text: of the mean of its numbers, by 4 tokens and by parts of 16
    assert reader.length == 16
    reader.mean = torch.ones(4)
    reader.std = reader.mean
    reader.precision = 3 * torch.eye(4)
    numbers = torch.full((1, 33, 6), 2.0)
    assert reader.distance(numbers[:, :5]) == 4 * 4 * 3
    assert reader.distance(numbers) == 16 * 4 * 3


def test_coverage_and_width_are_of_texts_that_the_generator_wrote():
    """Of nine equally probable crossovers the interval of 96 % has all; of a certain K one."""
    uniform = torch.full((10,), -math.log(10))
    certain = torch.full((10,), -math.inf)
    certain[3] = 0.0
    log_posterior = torch.stack((uniform, certain, certain, certain))
    figures = measure_readings(log_posterior, torch.tensor([9, 4, 4, 5]))
    assert (figures["coverage"], figures["width"]) == (0.75, (9 + 1 + 1 + 1) / 4)
