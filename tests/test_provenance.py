"""provenance.py: which rows select and which report, and what metadata tell.  `pytest tests/test_provenance.py`

What refuses data is tested with the script that asks for it, in tests/test_train_reward_model.py.
"""

import numpy as np
import pytest
from helpers import prepare_options, succeed

from data_loader import ValidationParts
from generation import Sampling
from provenance import rows_by_part, sampling_of
from reward_dataset_loader import RewardDataset
from runtime import UserError

pytest_plugins = ["tiny_run"]


def test_text_that_reports_skill_chooses_no_trunk(tmp_path, corpus, generator, reward_data):
    """Of all blocks, and of evenly spaced ones: selecting rows end before the gate's text, reporting ones follow it.

    Of 32 blocks the first 6 select, the next 10 are the gate's.
    """
    some = tmp_path / "some"
    succeed("prepare_reward_data", **prepare_options(corpus, generator, some, max_blocks=10))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    parts = ValidationParts.of(len(tokens) // 16)
    assert (parts.select, parts.gate) == (range(6), range(6, 16))
    for folder, per_part in ((reward_data, (6, 16)), (some, (2, 5))):
        data = RewardDataset(folder, "val")
        selects, reports, _ = rows_by_part(data)
        for rows, part, blocks in zip((selects, reports), (parts.select, parts.report), per_part, strict=True):
            assert len(rows) == blocks * data.samples_per_chunk
            for row in rows:
                x, y = data[int(row)]
                K = round(float(y[0]) * 16)
                starts = [
                    block for block in range(len(tokens) // 16) if np.array_equal(x[:K], tokens[block * 16 :][:K])
                ]
                assert any(block in part for block in starts)


def test_parts_without_a_record_of_the_corpus(reward_data):
    """Where the metadata do not hold the split's size, the dataset's own blocks are its blocks."""
    data = RewardDataset(reward_data, "val")
    with_record = rows_by_part(data)
    del data.metadata["val_tokens"]
    for ours, theirs in zip(rows_by_part(data)[:2], with_record[:2], strict=True):
        assert np.array_equal(ours, theirs)


def test_sampling_in_metadata():
    assert sampling_of({}) == Sampling()
    assert sampling_of({"temperature": "0.5", "top_k": "7"}) == Sampling(0.5, 7)
    for wrong in ({"temperature": "warm"}, {"temperature": "-1"}, {"top_k": "0"}, {"top_k": "2.5"}):
        with pytest.raises(UserError, match="no such sampling is possible") as caught:
            sampling_of(wrong)
        assert all(f"{name}={value}" in str(caught.value) for name, value in wrong.items())
