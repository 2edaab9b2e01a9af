"""provenance.py: which rows select and which report, and what metadata tell.  `pytest tests/test_provenance.py`

What refuses data is tested with the script that asks for it, in tests/test_train_reward_model.py.
"""

import numpy as np
import pytest
from helpers import prepare_options, succeed

from generation import Sampling
from provenance import first_reported_token, halves_by_block, sampling_of
from reward_dataset_loader import RewardDataset
from runtime import UserError

pytest_plugins = ["tiny_run"]


def test_text_that_reports_skill_chooses_no_trunk(tmp_path, corpus, generator, reward_data):
    """Of all blocks, and of some that are evenly spaced: the first that reports begins where the unseen text ends."""
    some = tmp_path / "some"
    succeed("prepare_reward_data", **prepare_options(corpus, generator, some, max_blocks=10))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    for folder in (reward_data, some):
        data = RewardDataset(folder, "val")
        _, reports, _ = halves_by_block(data)
        first = first_reported_token(data, len(tokens))
        assert first % 16 == 0 and 0 < first < len(tokens)
        for row in reports[:4]:
            x, y = data[int(row)]
            K = round(float(y[0]) * 16)
            assert np.array_equal(x[:K], tokens[first : first + K])
        K = round(float(data[int(reports[0]) - 1][1][0]) * 16)  # the block before lies before
        before = data[int(reports[0]) - 1][0][:K].numpy()
        assert any(np.array_equal(before, tokens[at : at + K]) for at in range(0, first, 16))


def test_sampling_in_metadata():
    assert sampling_of({}) == Sampling()
    assert sampling_of({"temperature": "0.5", "top_k": "7"}) == Sampling(0.5, 7)
    for wrong in ({"temperature": "warm"}, {"temperature": "-1"}, {"top_k": "0"}, {"top_k": "2.5"}):
        with pytest.raises(UserError, match="no such sampling is possible") as caught:
            sampling_of(wrong)
        assert all(f"{name}={value}" in str(caught.value) for name, value in wrong.items())
