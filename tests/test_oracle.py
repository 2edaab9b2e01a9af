"""benchmarks/oracle.py: the exact posterior, token by token.  `pytest tests/test_oracle.py`"""

import numpy as np
import pytest
import torch
from helpers import succeed

from benchmarks import oracle
from data_loader import open_token_file
from reward_dataset_loader import RewardDataset, rows_by_part
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]

ORDER, N = 4, 16


def test_the_exact_posterior_knows_what_p_looked_at(tmp_path, corpus):
    """Of p's own text in the validation split, and of what q wrote: held against one pass for every token."""
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 16, "eval_interval": 2, "max_iters": 2, "device": "cpu"}
    for name, size in (("p", ORDER), ("q", N)):
        path = {"dataset": corpus, "out_dir": tmp_path, "checkpoint_name": f"{name}.pt"}
        succeed("train", **path, **shape, block_size=size, batch_size=2, seed=ord(name))
    p, q = (build_model(load_checkpoint(tmp_path / f"{name}.pt"), "generator", name) for name in "pq")
    settings = oracle.OracleSettings(num_tokens=20 * 64 * N, block_size=N, p_order=ORDER)
    oracle.write_text_of(p, corpus, tmp_path / "text", settings)
    natural = open_token_file(tmp_path / "text" / "val.bin", "val", p.config.num_real_tokens)
    assert len(natural) == 2 * 64 * N  # two streams of twenty
    options = {"train_bin": tmp_path / "text" / "train.bin", "val_bin": tmp_path / "text" / "val.bin"}
    options |= {"model_path": tmp_path / "q.pt", "input_mode": "binary", "allow_split_mismatch": True}
    options |= {"max_blocks": 32, "samples_per_chunk": 2, "output_dir": tmp_path / "data", "device": "cpu"}
    succeed("prepare_reward_data", **options)

    begun_with = np.load(tmp_path / "text" / "before.npy")
    assert begun_with.shape == (2, ORDER)
    blocks = np.array([0, 1, 63, 64, 127])
    before = oracle.tokens_before(tmp_path / "text", natural, blocks, N)
    assert np.array_equal(before[[0, 3]], begun_with)
    assert all(np.array_equal(before[i], natural[blocks[i] * N - ORDER : blocks[i] * N]) for i in (1, 2, 4))

    x = np.concatenate((before, natural[blocks[:, None] * N + np.arange(N)]), 1)
    ratios = oracle.log_ratios(p, q, x)
    assert ratios.shape == (5, N - 1)
    with torch.no_grad():
        for row, ids in enumerate(torch.from_numpy(x.astype(np.int64))):
            for t in range(1, N):
                token, at = ids[ORDER + t], ORDER + t
                log_p = p(ids[None, at - ORDER : at])[0][0, -1].log_softmax(-1)[token]
                log_q = q(ids[None, ORDER:at])[0][0, -1].log_softmax(-1)[token]
                assert ratios[row, t - 1] == pytest.approx(float(log_p - log_q), abs=1e-4)

    skill, divergence = oracle.exact_skill(p, q, tmp_path / "data", tmp_path / "text")
    dataset = RewardDataset(tmp_path / "data", "val")
    assert skill["num_sequences"] == len(rows_by_part(dataset)[1])
    reported = np.arange(16, 32) * 4  # every fourth of 128 blocks, the second half
    text = natural[reported[:, None] * N + np.arange(N)]
    whole = np.concatenate((oracle.tokens_before(tmp_path / "text", natural, reported, N), text), 1)
    assert divergence == pytest.approx(oracle.log_ratios(p, q, whole)[:, ORDER - 1 :].double().mean().item(), abs=1e-5)
