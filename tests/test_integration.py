"""Test the stages together: one tokenization, and the examples of the first documents.

pytest tests/test_integration.py
"""

import re
import shutil

import pytest
import torch
from helpers import TINY_GRPO, make_checkpoint, refuse_in_one_line, succeed

from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationManager


def test_a_mismatch_is_refused(tmp_path, reward_data):
    record = TokenizationManager.from_text("abcdefghijklmnopqrstuvwxyz.\n").to_record()
    foreign = make_checkpoint(tmp_path / "foreign.pt", 28, record)
    options = {"base_model_path": foreign, "output_path": tmp_path / "out.pt", "device": "cpu"}
    line = refuse_in_one_line("train_reward_model", **options, head="last", data_dir=reward_data)
    assert re.search(r"Vocabulary .*\b25 .*\b28\b", line)
    assert not (tmp_path / "out.pt").exists()


@pytest.fixture
def guide_paths(monkeypatch, tmp_path, generator, reward_data):
    """Work in a folder with the files that the guide names."""
    (tmp_path / "logs").mkdir()
    shutil.copy(generator, tmp_path / "logs" / "model_checkpoint.pt")
    shutil.copytree(reward_data, tmp_path / "data" / "reward_dataset")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAINING_EXAMPLE = """
import torch
import torch.nn.functional as F
from model import GPT, GPTConfig
from reward_dataset_loader import create_reward_dataloaders
def train_reward_model():
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    checkpoint = torch.load('logs/model_checkpoint.pt', map_location=device)
    config = checkpoint['config']
    config.mode = 'reward'
    config.reward_head_hidden_dim = 256
    model = GPT(config)
    model.load_state_dict(checkpoint['model'], strict=False)
    model.to(device)
    for param in model.transformer.parameters():
        param.requires_grad = False
    train_loader, val_loader = create_reward_dataloaders('data/reward_dataset', batch_size=32)
    optimizer = torch.optim.Adam(model.reward_head.parameters(), lr=1e-4)
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
        model.eval()
        val_loss = 0
        with torch.no_grad():
            for batch_x, batch_y in val_loader:
                batch_x, batch_y = batch_x.to(device), batch_y.to(device)
                probs, _ = model(batch_x)
                val_loss += F.mse_loss(probs, batch_y).item()
        print(f"Epoch {epoch+1}: Train Loss: {total_loss/len(train_loader):.4f}, "
              f"Val Loss: {val_loss/len(val_loader):.4f}")
    torch.save({'model': model.state_dict(), 'config': config}, 'logs/reward_model.pt')
if __name__ == '__main__':
    train_reward_model()
"""  # without its comments and blank lines


def run_example(source: str) -> dict:
    names = {"__name__": "__main__"}
    exec(compile(source, "example", "exec"), names)
    return names


def test_training_example_of_the_guide(guide_paths, corpus, capsys):
    run_example(TRAINING_EXAMPLE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"Epoch {epoch}" for epoch in range(1, 11)]
    losses = [float(re.search(r"Train Loss: ([\d.]+)", line)[1]) for line in lines]
    assert losses[-1] < losses[0]
    # The example saves a checkpoint that train_grpo.py accepts as its reward model.
    options = {**TINY_GRPO, "dataset": corpus, "output_path": "logs/grpo.pt", "max_steps": 1}
    options["base_model_path"] = "logs/model_checkpoint.pt"
    options["reward_model_path"] = "logs/reward_model.pt"
    succeed("train_grpo", **options)


DATASET_EXAMPLE = """
from reward_dataset_loader import RewardDataset, create_reward_dataloaders
from reward_data_config import TokenizationInfo

expected_tokenization = TokenizationInfo(method='char', vocab_size=25, meta_path='data/shakespeare_char/meta.pkl')
dataset = RewardDataset('data/reward_dataset', split='train', expected_tokenization_info=expected_tokenization)
x, y = dataset[0]  # x: LongTensor, y: FloatTensor
stats = dataset.get_stats()
print(f"Dataset size: {len(dataset)}")
print(f"Tokenization: {stats['tokenization_method']} (vocab_size={stats['vocab_size']})")
print(f"Probability sums: {stats['prob_sum_mean']:.6f}")
train_loader, val_loader = create_reward_dataloaders(
    data_dir='data/reward_dataset', batch_size=32, num_workers=1, expected_tokenization_info=expected_tokenization
)
"""  # the corpus of the test has 25 characters where the guide's has 65


def test_dataset_example_of_the_guide(guide_paths, capsys):
    names = run_example(DATASET_EXAMPLE)
    count = len(RewardDataset(guide_paths / "data" / "reward_dataset"))
    assert capsys.readouterr().out.splitlines() == [
        f"Dataset size: {count}",
        "Tokenization: char (vocab_size=25)",
        "Probability sums: 1.000000",
    ]
    assert isinstance(names["x"], torch.LongTensor) and isinstance(names["y"], torch.FloatTensor)
    for loader in (names["train_loader"], names["val_loader"]):
        batch_x, batch_y = next(iter(loader))
        assert batch_x.shape == (32, 16) and batch_x.dtype == torch.int64
        assert batch_y.shape == (32, 2) and batch_y.dtype == torch.float32
    with pytest.raises(ValueError, match=r"Vocabulary .*\b25 .*\b65\b"):
        run_example(DATASET_EXAMPLE.replace("vocab_size=25", "vocab_size=65"))
