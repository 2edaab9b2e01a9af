"""passages.py: rows, numbers and completions against the models and the dataset themselves.

pytest tests/test_passages.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from losses import token_log_probs
from reports.passages import complete_prompts, draw_rows, pieces, read_passages
from reward.heads import make_reward_model
from reward.posterior import crossover_log_posterior
from reward_dataset_loader import RewardDataset, rows_by_part
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint, save_checkpoint

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
    shown, played = read_passages(reward_data, predictive_reward_model, generator, CPU)
    _, reporting, _ = rows_by_part(dataset)
    assert shown and played
    for passage in shown + played:
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


def test_a_position_head_knows_tokens_and_the_generator_is_asked_apart(reward_data, generator, opened, tmp_path):
    dataset, tokenizer = opened
    path, base = tmp_path / "position.pt", load_checkpoint(generator)
    model = make_reward_model(replace(base["config"], mode="reward", reward_head_type="position"))
    save_checkpoint(path, model, base["tokenization"], base["data"], {})
    passage = read_passages(reward_data, path, generator, CPU)[0][0]
    ids = torch.from_numpy(dataset.x[[row_of(dataset, tokenizer, "".join(passage.tokens))]].astype(np.int64))
    with torch.no_grad():
        assert passage.natural == pytest.approx(model.eval().token_probabilities(ids)[0].tolist(), abs=1e-6)
    assert passage.natural_log_probs is None and passage.generator_log_probs[1] < 0
    assert sum(passage.posterior) == pytest.approx(1, abs=1e-5)


def test_a_last_head_gives_a_share_and_the_generator_its_log_probabilities(
    reward_data, reward_model, generator, opened
):
    dataset, tokenizer = opened
    passage = read_passages(reward_data, reward_model, generator, CPU)[0][0]
    ids = torch.from_numpy(dataset.x[[row_of(dataset, tokenizer, "".join(passage.tokens))]].astype(np.int64))
    with torch.no_grad():
        share = build_model(load_checkpoint(reward_model), "reward", reward_model)(ids)[0][0, 0].item()
        base = build_model(load_checkpoint(generator), "generator", generator)
        written = token_log_probs(base.logits(base.trunk(ids[:, :-1])), ids[:, 1:])[0].tolist()
    assert passage.predicted == pytest.approx(share * ids.shape[1], abs=1e-4)
    assert passage.natural is passage.posterior is passage.natural_log_probs is None
    assert passage.generator_log_probs == pytest.approx([None, *written], abs=1e-6)


def test_the_game_has_blocks_of_its_own(opened):
    """Nothing else on the page shows natural text of a block to play with."""
    dataset, _ = opened
    _, reporting, _ = rows_by_part(dataset)
    drawn, again = draw_rows(dataset), draw_rows(dataset)
    blocks = [rows // dataset.samples_per_chunk for rows in (drawn.shown, drawn.played, drawn.prompts)]
    assert not set(blocks[1]) & (set(blocks[0]) | set(blocks[2])) and len(set(blocks[1])) == len(blocks[1]) > 0
    rows = np.concatenate([drawn.shown, drawn.played, drawn.prompts])
    assert np.isin(rows, reporting).all() and (dataset.y[drawn.prompts, 0] >= 0.75).all()
    assert len(set(blocks[0])) == min(6, len(set(reporting // dataset.samples_per_chunk)) - len(blocks[1]))
    for name in ("shown", "played", "prompts"):
        assert getattr(drawn, name).tolist() == getattr(again, name).tolist()


def test_many_blocks_give_six_ten_and_three_rows():
    class Rows:  # 30 validation blocks of 4 rows, of which the last half reports
        samples_per_chunk, block_size, metadata = 4, 16, {}
        y = np.tile([[0.25], [0.5], [0.8], [0.9]], (30, 1))

        def __len__(self) -> int:
            return 120

    drawn = draw_rows(Rows())
    assert [len(rows) for rows in (drawn.shown, drawn.played, drawn.prompts)] == [
        6,
        10,
        3,
    ]  # of 15 blocks, 5 of them to show
    Rows.y, Rows.__len__ = np.tile(Rows.y, (2, 1)), lambda self: 240
    drawn = draw_rows(Rows())
    assert [len(rows) for rows in (drawn.shown, drawn.played, drawn.prompts)] == [6, 10, 3]
    assert len({row // 4 for row in [*drawn.shown, *drawn.played]}) == 16


def test_completions_go_on_from_the_same_natural_prompt(
    reward_data, predictive_reward_model, generator, knowing, opened
):
    dataset, tokenizer = opened
    generators = {"base": generator, "knowing": knowing, "base again": generator}
    prompts = complete_prompts(reward_data, generators, predictive_reward_model, CPU)
    N, model = dataset.block_size, build_model(load_checkpoint(predictive_reward_model), "reward", "")
    assert prompts
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
