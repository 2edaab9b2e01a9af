"""sample.py: text that starts as asked, the same for the same seed, and what is refused.

pytest tests/test_sample.py
"""

import pytest
from helpers import make_checkpoint, refuse, refuse_in_one_line, succeed

from tokenization_manager import TokenizationManager, save_meta

pytest_plugins = ["tiny_run"]
LINE = "\n---------------\n"


def test_texts_begin_with_the_start_and_depend_on_the_seed(tmp_path, generator):
    options = {"checkpoint_path": generator, "num_samples": 3, "max_new_tokens": 20, "device": "cpu"}
    out = succeed("sample", start="The", output_path=tmp_path / "texts.txt", **options)
    texts = (tmp_path / "texts.txt").read_text().removesuffix("\n").split(LINE)
    assert len(texts) == 3 and all(text.startswith("The") and len(text) == 23 for text in texts)
    assert out.split(LINE)[:3] == texts and len(set(texts)) > 1
    (tmp_path / "start.txt").write_text("The")
    assert succeed("sample", start=f"FILE:{tmp_path / 'start.txt'}", **options) == out
    assert succeed("sample", start="The", seed=1, **options) != out


def test_greedy_text_is_the_likeliest_whatever_the_seed(generator):
    options = {"checkpoint_path": generator, "num_samples": 1, "max_new_tokens": 30, "device": "cpu", "start": "A"}
    greedy = succeed("sample", temperature=0, **options)
    assert greedy == succeed("sample", temperature=0, seed=5, **options) == succeed("sample", top_k=1, **options)
    assert greedy == succeed("sample", top_p=1e-6, **options)


def test_a_model_without_a_tokenizer_needs_its_meta_file(tmp_path):
    path = make_checkpoint(tmp_path / "model.pt", 3)
    save_meta(tmp_path / "meta.pkl", "abc")
    options = {"checkpoint_path": path, "num_samples": 1, "max_new_tokens": 5, "device": "cpu", "start": "ab"}
    assert succeed("sample", meta_path=tmp_path / "meta.pkl", **options).startswith("ab")
    assert "--meta_path" in refuse_in_one_line("sample", **options)


@pytest.mark.usefixtures("bpe")
def test_a_model_of_gpt2s_size_without_a_tokenizer_is_of_gpt2s(tmp_path):
    path = make_checkpoint(tmp_path / "model.pt", 50304, n_embd=4)
    out = succeed("sample", checkpoint_path=path, num_samples=1, max_new_tokens=2, device="cpu", start="To be")
    assert out.startswith("To be")


def test_starts_that_cannot_be_continued_are_refused(tmp_path, generator):
    options = {"checkpoint_path": generator, "device": "cpu"}
    assert "start is empty" in refuse_in_one_line("sample", start="", **options)
    assert "'%é'" in refuse_in_one_line("sample", start="é%A", **options)
    assert "none.txt" in refuse_in_one_line("sample", start=f"FILE:{tmp_path / 'none.txt'}", **options)
    message = refuse("sample", checkpoint_path=tmp_path / "none.pt", num_samples=0)
    assert "Model file not found" in message and "num_samples=0" in message


def test_a_reward_model_writes_nothing(tmp_path):
    record = TokenizationManager.from_text("abc").to_record()
    path = make_checkpoint(tmp_path / "reward.pt", 3, record, mode="reward")
    assert "a generator is needed" in refuse_in_one_line("sample", checkpoint_path=path, device="cpu")
