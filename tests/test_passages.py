"""passages.py: rows, numbers and completions against the models and the dataset themselves.

pytest tests/test_passages.py
"""

import numpy as np
import pytest
import torch

from checkpoint import build_model, load_checkpoint
from objectives import crossover_log_posterior, token_log_probs
from passages import complete_prompts, draw_rows, pieces, read_passages
from reward_dataset_loader import RewardDataset, rows_by_part
from tokenization_manager import TokenizationManager

pytest_plugins = ["tiny_run"]
CPU = torch.device("cpu")


def row_of(dataset: RewardDataset, tokenizer: TokenizationManager, text: str) -> int:
    """The only row with this text."""
    (row,) = [row for row in range(len(dataset)) if tokenizer.decode(dataset.x[row]) == text]
    return row


@pytest.fixture(scope="module")
def opened(reward_data, generator):
    return RewardDataset(reward_data, "val"), TokenizationManager.from_record(
        load_checkpoint(generator)["tokenization"]
    )


def test_a_likelihood_head_s_passages_have_its_own_numbers(reward_data, predictive_reward_model, generator, opened):
    dataset, tokenizer = opened
    model = build_model(load_checkpoint(predictive_reward_model), "reward", predictive_reward_model)
    passages = read_passages(reward_data, predictive_reward_model, generator, 5, CPU)
    _, reporting, _ = rows_by_part(dataset)
    assert len(passages) == 5
    for passage in passages:
        row = row_of(dataset, tokenizer, "".join(passage.tokens))
        assert row in reporting
        ids = torch.from_numpy(dataset.x[[row]].astype(np.int64))
        N = ids.shape[1]
        assert passage.crossover == round(float(dataset.y[row, 0]) * N) and len(passage.tokens) == N
        with torch.no_grad():
            by_token = model.token_probabilities(ids)[0]
            natural, written = (values[0].tolist() for values in model.log_probs(ids))
            posterior = crossover_log_posterior(model.evidence(ids)).exp()[0]
        assert passage.natural == pytest.approx(by_token.tolist(), abs=1e-6)
        assert passage.predicted == pytest.approx(by_token.sum().item(), abs=1e-4)
        assert passage.natural_log_probs == pytest.approx([None, *natural], abs=1e-6)
        assert passage.generator_log_probs == pytest.approx([None, *written], abs=1e-6)
        # P(K = t) stands at token t: the first that the generator wrote.
        assert passage.posterior == pytest.approx([0.0, *posterior.tolist()], abs=1e-6)
        assert sum(passage.posterior) == pytest.approx(1, abs=1e-5)


def test_a_last_head_gives_a_share_and_the_generator_its_log_probabilities(
    reward_data, reward_model, generator, opened
):
    dataset, tokenizer = opened
    passage = read_passages(reward_data, reward_model, generator, 1, CPU)[0]
    ids = torch.from_numpy(dataset.x[[row_of(dataset, tokenizer, "".join(passage.tokens))]].astype(np.int64))
    with torch.no_grad():
        share = build_model(load_checkpoint(reward_model), "reward", reward_model)(ids)[0][0, 0].item()
        base = build_model(load_checkpoint(generator), "generator", generator)
        written = token_log_probs(base.logits(base.trunk(ids[:, :-1])), ids[:, 1:])[0].tolist()
    assert passage.predicted == pytest.approx(share * ids.shape[1], abs=1e-4)
    assert passage.natural is passage.posterior is passage.natural_log_probs is None
    assert passage.generator_log_probs == pytest.approx([None, *written], abs=1e-6)


def test_rows_report_and_come_from_as_many_blocks_as_there_are(opened):
    dataset, _ = opened
    _, reporting, _ = rows_by_part(dataset)
    blocks = len(set(reporting // dataset.samples_per_chunk))
    rows = draw_rows(dataset, len(reporting) + 5)
    assert sorted(rows) == sorted(reporting)
    assert len(set(rows[:blocks] // dataset.samples_per_chunk)) == blocks
    assert rows.tolist() == draw_rows(dataset, len(reporting)).tolist()
    assert (dataset.y[draw_rows(dataset, 5, least_share=0.75), 0] >= 0.75).all()


def test_completions_go_on_from_the_same_natural_prompt(
    reward_data, predictive_reward_model, generator, knowing, opened
):
    dataset, tokenizer = opened
    generators = {"base": generator, "knowing": knowing, "base again": generator}
    prompts = complete_prompts(reward_data, generators, predictive_reward_model, 2, CPU)
    N, model = dataset.block_size, build_model(load_checkpoint(predictive_reward_model), "reward", "")
    assert len(prompts) == 2
    for prompt, texts in prompts:
        assert len(prompt) == N // 4 and list(texts) == ["natural text", *generators]
        natural = prompt + texts["natural text"].text.removesuffix(" …")
        assert natural in {
            tokenizer.decode(row[: round(share * N)]) for row, share in zip(dataset.x, dataset.y[:, 0], strict=True)
        }
        assert texts["base"] == texts["base again"] and texts["base"].text != texts["knowing"].text
        ids = torch.from_numpy(tokenizer.encode(prompt + texts["knowing"].text).astype(np.int64))[None]
        assert ids.shape == (1, N)
        with torch.no_grad():
            assert texts["knowing"].reward == pytest.approx(model(ids)[0][0, 0].item(), abs=1e-5)


@pytest.mark.parametrize("text", ["plain words\n", "naïve 🎭 日本 ends in half: "])
def test_pieces_are_the_text_also_where_tokens_share_a_character(bpe, text):
    manager = TokenizationManager("bpe")
    ids = manager.encode(text)
    parts = pieces(manager, ids)
    assert "".join(parts) == text and len(parts) == len(ids)
    assert ("" in parts) == ("🎭" in text) and not any("\ufffd" in part for part in parts)


def test_a_character_that_the_sequence_cuts_is_shown_as_such(bpe):
    manager = TokenizationManager("bpe")
    ids = manager.encode("a🎭")[:2]
    assert pieces(manager, ids) == ["a", "\ufffd"]
