"""The stages together: one tokenization, training that goes on after a stop, and the guides' examples.

pytest tests/test_integration.py
"""

import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from helpers import (
    TINY_GRPO,
    TINY_TRAIN,
    assert_same_weights,
    call,
    end_in_call,
    make_corpus,
    make_text,
    prepare_options,
    press_ctrl_c,
    refuse_in_one_line,
    start,
    succeed,
    weights,
)

import train
from common.process import UserError
from data_loader import WholeSplitBatches, load_binary, load_text
from evaluate import calculate_perplexity
from reward_dataset_loader import RewardDataset, create_reward_dataloaders
from tokenization_manager import TokenizationInfo, TokenizationManager
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]


# ---------------------------------------------------------------------------------------------------------------------
# tokenization across the components


def test_every_component_names_the_same_tokenization(corpus, generator, reward_data, reward_model):
    info = TokenizationManager(data_path=corpus).info()
    assert info.method == "char"
    for split in ("train", "val"):
        assert RewardDataset(reward_data, split).get_tokenization_info() == info
    for path in (generator, reward_model):
        checkpoint = load_checkpoint(path)
        recorded = TokenizationManager.from_record(checkpoint["tokenization"])
        assert recorded.info() == info
        assert checkpoint["config"].vocab_size == info.vocab_size


def test_tokens_of_reward_data_are_text_again(corpus, reward_data):
    """What the generator read, the dataset holds and the tokenizer in the checkpoint decodes is the corpus."""
    tokenizer = TokenizationManager(data_path=corpus)
    text = (corpus / "input.txt").read_text()
    train_text, val_text = text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]
    for split, natural in (("train", train_text), ("val", val_text)):
        dataset = RewardDataset(reward_data, split)
        for row in range(0, len(dataset), 11):
            x, y = dataset[row]
            K, start_of_block = round(float(y[0]) * 16), row // 4 * 16
            decoded = tokenizer.decode(x.tolist())
            assert decoded[:K] == natural[start_of_block : start_of_block + K]
            assert np.array_equal(tokenizer.encode(decoded), x.numpy())


def test_text_mode_and_binary_mode_have_the_same_tokens(corpus):
    tokenizer = TokenizationManager(data_path=corpus)
    text = load_text(corpus, tokenizer)
    binary = load_binary(corpus / "train.bin", corpus / "val.bin", tokenizer.vocab_size)
    assert np.array_equal(text.train, binary.train)
    assert np.array_equal(text.val, binary.val)


def test_a_mismatch_is_refused_wherever_it_shows(tmp_path, corpus, generator, reward_data, reward_model):
    wrong = TokenizationInfo("bpe", 50257)
    with pytest.raises(UserError, match="Tokenization method mismatch: dataset uses 'char' but expected 'bpe'"):
        create_reward_dataloaders(str(reward_data), expected_tokenization_info=wrong)

    other = make_corpus(tmp_path / "other_char", make_text(700) + "Xyz")
    succeed("train", dataset=other, out_dir=tmp_path, **{**TINY_TRAIN, "max_iters": 1})
    foreign = tmp_path / "model_checkpoint.pt"
    options = {"base_model_path": foreign, "output_path": tmp_path / "out.pt", "device": "cpu"}
    assert "vocab" in refuse_in_one_line("train_reward_model", **options, head="last", data_dir=reward_data).lower()
    line = refuse_in_one_line("train_grpo", **options, reward_model_path=reward_model, dataset=corpus)
    assert re.search(r"vocab_size .*\b28 .*\b25 ", line)
    line = refuse_in_one_line("prepare_reward_data", **prepare_options(other, generator, tmp_path / "data"))
    assert re.search(r"Vocabulary .*\b28 .*\b25\b", line)
    assert not (tmp_path / "out.pt").exists() and not (tmp_path / "data").exists()


@pytest.mark.parametrize("batch", [13, 20])
def test_training_resumed_ends_in_the_same_weights(monkeypatch, tmp_path, corpus, generator, batch):
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path}
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "get_batch", batch, press_ctrl_c)
        assert call("train", **options).status == 130
    succeed("train", **options, init_from="resume")
    assert_same_weights(weights(tmp_path / "model_checkpoint.pt"), weights(generator))


# ---------------------------------------------------------------------------------------------------------------------
# the guides' examples, as printed but for the paths


@pytest.fixture
def guide_paths(monkeypatch, tmp_path, generator, reward_data):
    """The places that the guide names, in a folder of the test's own."""
    (tmp_path / "logs").mkdir()
    shutil.copy(generator, tmp_path / "logs" / "model_checkpoint.pt")
    shutil.copytree(reward_data, tmp_path / "data" / "reward_dataset")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAINING_EXAMPLE = """
# train_reward_model.py
import torch
import torch.nn.functional as F
from model import GPT, GPTConfig
from reward_dataset_loader import create_reward_dataloaders

def train_reward_model():
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    
    # Load base model and switch to reward mode
    checkpoint = torch.load('logs/model_checkpoint.pt', map_location=device)
    config = checkpoint['config']
    config.mode = 'reward'
    config.reward_head_hidden_dim = 256  # Configurable
    
    model = GPT(config)
    model.load_state_dict(checkpoint['model'], strict=False)
    model.to(device)
    
    # Freeze transformer trunk (recommended)
    for param in model.transformer.parameters():
        param.requires_grad = False
    
    # Create data loaders
    train_loader, val_loader = create_reward_dataloaders(
        'data/reward_dataset', 
        batch_size=32
    )
    
    # Setup training
    optimizer = torch.optim.Adam(model.reward_head.parameters(), lr=1e-4)
    
    # Training loop
    for epoch in range(10):
        model.train()
        total_loss = 0
        
        for batch_x, batch_y in train_loader:
            batch_x, batch_y = batch_x.to(device), batch_y.to(device)
            
            probs, _ = model(batch_x)
            loss = F.mse_loss(probs, batch_y)
            
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            
            total_loss += loss.item()
        
        # Validation
        model.eval()
        val_loss = 0
        with torch.no_grad():
            for batch_x, batch_y in val_loader:
                batch_x, batch_y = batch_x.to(device), batch_y.to(device)
                probs, _ = model(batch_x)
                val_loss += F.mse_loss(probs, batch_y).item()
        
        print(f"Epoch {epoch+1}: Train Loss: {total_loss/len(train_loader):.4f}, "
              f"Val Loss: {val_loss/len(val_loader):.4f}")
    
    # Save reward model
    torch.save({
        'model': model.state_dict(),
        'config': config,
    }, 'logs/reward_model.pt')

if __name__ == '__main__':
    train_reward_model()
"""  # noqa: W293, W291 (as printed)


def test_training_example_of_the_guide(guide_paths, corpus, capsys):
    exec(compile(TRAINING_EXAMPLE, "example", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"Epoch {epoch}" for epoch in range(1, 11)]
    losses = [float(line.split("Train Loss: ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0]
    # What it saves is a checkpoint like any other: train_grpo.py takes it for its reward model.
    options = {"base_model_path": "logs/model_checkpoint.pt", "reward_model_path": "logs/reward_model.pt"}
    succeed("train_grpo", **options, dataset=corpus, output_path="logs/grpo.pt", **TINY_GRPO, max_steps=1)


DATASET_EXAMPLE = """
from reward_dataset_loader import RewardDataset
from reward_data_config import TokenizationInfo

# Load dataset with tokenization validation
expected_tokenization = TokenizationInfo(method='char', vocab_size=25, meta_path='data/shakespeare_char/meta.pkl')
dataset = RewardDataset('data/reward_dataset', split='train', expected_tokenization_info=expected_tokenization)

# Access samples
x, y = dataset[0]  # x: LongTensor, y: FloatTensor

# Get statistics including tokenization info
stats = dataset.get_stats()
print(f"Dataset size: {len(dataset)}")
print(f"Tokenization: {stats['tokenization_method']} (vocab_size={stats['vocab_size']})")
print(f"Probability sums: {stats['prob_sum_mean']:.6f}")
"""  # the corpus of the test has 25 characters where the guide's has 65


def test_dataset_example_of_the_guide(guide_paths, capsys):
    names = {}
    exec(compile(DATASET_EXAMPLE, "example", "exec"), names)
    count = len(RewardDataset(guide_paths / "data" / "reward_dataset"))
    assert capsys.readouterr().out.splitlines() == [
        f"Dataset size: {count}",
        "Tokenization: char (vocab_size=25)",
        "Probability sums: 1.000000",
    ]
    assert isinstance(names["x"], torch.LongTensor)
    assert isinstance(names["y"], torch.FloatTensor)


def test_dataset_example_with_the_wrong_vocabulary(guide_paths):
    example = DATASET_EXAMPLE.replace("vocab_size=25", "vocab_size=65")
    with pytest.raises(ValueError, match=r"Vocabulary .*\b25 .*\b65\b"):
        exec(compile(example, "example", "exec"), {})


def test_loader_example_of_the_guide(guide_paths):
    expected_tokenization = TokenizationInfo(method="char", vocab_size=25)
    train_loader, val_loader = create_reward_dataloaders(
        data_dir="data/reward_dataset",
        batch_size=32,
        num_workers=1,
        expected_tokenization_info=expected_tokenization,
    )
    for loader in (train_loader, val_loader):
        batch_x, batch_y = next(iter(loader))
        assert (batch_x.shape, batch_x.dtype) == (torch.Size([32, 16]), torch.int64)
        assert (batch_y.shape, batch_y.dtype) == (torch.Size([32, 2]), torch.float32)


def test_grpo_fragment_of_the_guide(generator, reward_model, corpus):
    """Completions by `generate(prompts)` fill the block, and the reward is P(natural)."""
    base_model = build_model(load_checkpoint(generator), "generator", generator)
    scorer = build_model(load_checkpoint(reward_model), "reward", reward_model)
    prompts = torch.from_numpy(np.fromfile(corpus / "val.bin", np.uint16)[:20].astype(np.int64)).view(4, 5)
    completions = base_model.generate(prompts)
    assert completions.shape == (4, 16)
    assert torch.equal(completions[:, :5], prompts)
    with torch.no_grad():
        rewards, _ = scorer(completions)
        reward_scores = rewards[:, 0]
    assert reward_scores.shape == (4,)
    assert ((reward_scores > 0) & (reward_scores < 1)).all()


def test_legacy_function_of_the_guide(corpus):
    from prepare_reward_data import load_and_split_data

    train_tokens, val_tokens, tokenizer = load_and_split_data(corpus / "input.txt", train_split=0.9)
    assert len(train_tokens) + len(val_tokens) == len((corpus / "input.txt").read_text())
    assert tokenizer.vocab_size == 25


def test_scripts_import_without_doing_anything(monkeypatch):
    """Importing a script must not parse arguments or start work."""
    monkeypatch.setattr(sys, "argv", ["pytest", "--no-such-option"])
    code = "import sys; sys.argv.append('--nonsense')\n"
    code += "import train, prepare_reward_data, train_reward_model, train_grpo, evaluate, sample, run_cycles"
    process = start("-c", code)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_perplexity_restores_the_models_mode(generator, corpus):
    model = build_model(load_checkpoint(generator), "generator", generator)
    tokens = load_binary(corpus / "train.bin", corpus / "val.bin", 25).val
    batches = WholeSplitBatches(tokens, 16, 8)
    model.train()
    first = calculate_perplexity(model, batches, "cpu")
    assert model.training
    assert calculate_perplexity(model.eval(), batches, "cpu") == pytest.approx(first, rel=1e-5)
    assert not model.training
    assert calculate_perplexity(model, [], "cpu") == math.inf
