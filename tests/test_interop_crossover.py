"""The reward of two Hugging Face models beside our own head, and training in two processes.

pytest tests/test_interop_crossover.py
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT
from test_interop_trl_uses import make_trainer

from common.process import UserError
from interop.crossover_reward import CrossoverReward
from lm.causal import load_tokenizer
from lm.checkpoint import build_model, load_checkpoint
from reward.heads import LikelihoodRewardModel

pytestmark = pytest.mark.interop
WEIGHT, C, G = 0.8, 8, 4
PROMPTS = ["The ", "a ho", "mor\n", "hiel"]
# Two steps of two prompts.
SETTINGS = (
    f"--max_steps 2 --per_device_train_batch_size {2 * G} --num_generations {G} "
    f"--max_completion_length {C} --gradient_checkpointing False"
)


def make_reward(exported, weight=WEIGHT, **options):
    return CrossoverReward(exported[1], exported[0], weight=weight, **options)


def test_evidence_is_that_of_our_head(exported, generator, knowing):
    models = [build_model(load_checkpoint(path), path) for path in (knowing, generator)]
    head = LikelihoodRewardModel(*models).requires_grad_(False)
    head.mixture.data = torch.tensor(WEIGHT).logit()
    rows = torch.randint(20, (3, 16), generator=torch.Generator().manual_seed(3))
    found = make_reward(exported).head.output(rows)
    torch.testing.assert_close(found, head.output(rows), atol=1e-4, rtol=0)


def natural_blocks(corpus, count):
    tokens = np.fromfile(corpus / "train.bin", dtype=np.uint16).astype(np.int64)
    return torch.from_numpy(tokens[: count * 16]).view(count, 16)


def test_the_weight_is_fitted_and_the_gate_holds(exported, corpus, tmp_path):
    blocks = natural_blocks(corpus, 64)
    reward = make_reward(exported, weight=None)
    figures = reward.fit(blocks)
    assert figures["r2_low"] > 0 and reward.is_fitted and 0 < figures["mixture"] <= 1
    assert figures["num_blocks"] == 32
    weight = reward.head.mixture.sigmoid().item()
    assert weight == pytest.approx(figures["mixture"])
    again = make_reward(exported, weight=None)
    assert again.fit(blocks) == figures
    with pytest.raises(UserError, match=r"does not predict where .*train anyway with weight=\d"):
        reward.fit(blocks[:8])
    assert reward.head.mixture.sigmoid().item() == weight
    with pytest.raises(UserError, match="32 tokens: the generator reads at most 16"):
        reward.fit(blocks.view(32, 32))
    for wrong in (blocks.float(), blocks[0], blocks.tolist()):
        with pytest.raises(UserError, match=r"fit takes natural tokens: a tensor \(n, T\) int64"):
            reward.fit(wrong)
    for value in (-1, 25):
        with pytest.raises(UserError, match=f"from {value} to {value}: .* less than 25: "):
            reward.fit(torch.full((4, 16), value))


def test_models_without_special_tokens_need_no_tokenizer(exported, tmp_path):
    from transformers import AutoTokenizer

    dataset = prompts(["The ", "a ho"])
    trainer = make_trainer(exported, tmp_path, train_dataset=dataset)
    trainer.train()
    assert 0 < trainer.state.log_history[0]["crossover/natural"] < 1
    # A corpus may have this text between its documents.
    assert "<|endoftext|>" not in trainer.processing_class.get_vocab()
    bare = AutoTokenizer.from_pretrained(exported[0])
    with pytest.raises(UserError, match="the tokenizer has no eos_token"):
        make_trainer(exported, tmp_path, train_dataset=dataset, processing_class=bare)


def tiny_gpt2():
    import transformers

    sizes = {"n_positions": 16, "n_layer": 1, "n_head": 1, "n_embd": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=25, **sizes))


def prompts(texts):
    """Return a dataset of prompts."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": texts})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt": ["The ", ""]}, "the data have an empty prompt"),
        ({"text": ["The ", "a h"]}, "the data have no column prompt: they have text"),
    ],
)
def test_data_without_prompts_are_refused(exported, tmp_path, data, said):
    from datasets import Dataset

    rows = Dataset.from_dict(data)
    for dataset in (rows, rows.to_iterable_dataset()):
        with pytest.raises(UserError, match=f"^ERROR: [^\n]*{said}"):
            make_trainer(exported, tmp_path, train_dataset=dataset).train()


def note_gradients(trainer, note):
    """Call a function with the model before each update."""
    from transformers import TrainerCallback

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            note(model)

    trainer.add_callback(Note())


def test_positions_that_are_learned_have_their_limits(exported, tmp_path, corpus, monkeypatch):
    natural, start, policy = (tiny_gpt2() for _ in range(3))
    reward = CrossoverReward(natural, start, tokenizer=load_tokenizer(exported[0]))
    monkeypatch.setattr("interop.crossover_reward.better_than_constant", bool)  # random models
    assert reward.fit(natural_blocks(corpus, 32))["num_tokens"] == 16  # the whole context
    trainer = make_trainer(
        exported,
        tmp_path,
        model=policy,
        reward=reward,
        train_dataset=prompts(["The ", "a h"]),
        processing_class=reward.tokenizer,
    )
    with pytest.raises(UserError, match="no rotary positions: use prompts of equal length"):
        trainer.train()


def replay(generator: str, natural: str, out: str) -> None:
    """Take two steps on completions of several lengths, a function of their prompts; write the
    gradients of the second to `out`. With the variables of FSDP, shard the weights.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    processes = PartialState(cpu=True)
    is_sharded = bool(os.environ.get("ACCELERATE_USE_FSDP"))

    from interop.crossover_trainer import CrossoverTrainer

    class Replay(CrossoverTrainer):
        def create_accelerator_and_postprocess(self):
            if is_sharded:
                # accelerate itself shards on GPUs only: on CPUs it ignores these variables.
                PartialState().distributed_type = DistributedType.MULTI_GPU
            super().create_accelerator_and_postprocess()

        def _generate_single_turn(self, prompt_ids, *_):
            written = []
            for row, ids in enumerate(prompt_ids):
                draw = torch.Generator().manual_seed(sum(ids) + row % G)
                length = 3 + row % G + len(ids) % 3
                written.append(torch.randint(25, (length,), generator=draw).tolist())
            return written, None

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            assert not batch["advantages"][batch["completion_mask"] == 0].any()
            return batch

    def write(model):
        gradients = {}
        for name, weight in model.named_parameters():
            gradient = weight.grad
            assert hasattr(gradient, "full_tensor") == is_sharded
            if is_sharded:
                gradient = gradient.full_tensor()
            gradients[name.removeprefix("module.")] = gradient
        if processes.is_main_process:
            torch.save(gradients, out)

    assert processes.num_processes == int(os.environ.get("WORLD_SIZE", 1))
    rows = 2 * G // processes.num_processes
    trainer = make_trainer(
        (generator, natural),
        out + ".trainer",
        f"{SETTINGS} --optim sgd --per_device_train_batch_size {rows} --scale_rewards batch",
        Replay,
        reward=make_reward((generator, natural)),
        reward_funcs=[lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]],
        train_dataset=prompts(["The ", "a h"]),
        processing_class=load_tokenizer(generator),
    )
    note_gradients(trainer, write)
    trainer.train()


SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


@pytest.mark.parametrize("variables", [{}, SHARDED], ids=["DDP", "FSDP"])
def test_two_processes_have_the_gradient_of_one(exported, tmp_path, variables):
    one = tmp_path / "one.pt"
    two = tmp_path / "two.pt"
    replay(*exported, str(one))
    script = tmp_path / "replay.py"
    script.write_text(
        "import sys\nimport torch\nfrom test_interop_crossover import replay\n"
        "replay(*sys.argv[1:])\ntorch.distributed.destroy_process_group()\n"
    )
    launch = "-m torch.distributed.run --standalone --nproc_per_node=2"
    command = [sys.executable, *launch.split(), script, *exported, two]
    path = {**os.environ, **variables, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run(command, check=True, env=path, timeout=300)
    expected = torch.load(one)
    found = torch.load(two)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name
    assert sum(gradient.norm() > 0 for gradient in expected.values()) > 10
