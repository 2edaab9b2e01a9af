"""interop/trl_reward.py: train_grpo.py's figures, one-line errors, two real steps of TRL, and TRL's own losses."""

import pytest
import torch
from helpers import make_checkpoint, succeed

from common.process import UserError
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.policy_evaluation import draw_prompts, written_mask
from grpo.policy_loss import LOSS_TYPES, group_advantages, policy_loss
from interop.trl_reward import make_reward, score, set_special_tokens
from reward.frozen_scorer import RewardScorer
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint


@pytest.fixture(scope="module")
def position_model(tmp_path_factory, generator, reward_data):
    path = tmp_path_factory.mktemp("position") / "reward_model.pt"
    options = {"base_model_path": generator, "data_dir": reward_data, "output_path": path, "head": "position"}
    succeed("train_reward_model", **options, max_epochs=1, device="cpu")
    return path


@pytest.mark.parametrize("head", ["reward_model", "position_model", "predictive_reward_model"])
def test_the_figures_are_those_of_train_grpo(request, corpus, generator, head):
    path = request.getfixturevalue(head)
    policy = build_model(load_checkpoint(generator), "generator", generator)
    tokens = torch.randint(policy.config.vocab_size, (4000,)).numpy().astype("uint16")
    natural, lengths, uniforms = draw_prompts(tokens, 16, 5, 3, 1, "test")
    ids = Completer(policy, 16)(natural, lengths, uniforms, Sampling()).ids.flatten(0, 1)
    mask = written_mask(lengths, 16)
    model = build_model(load_checkpoint(path), "reward", path)
    scores = RewardScorer(model, policy)(ids)

    tokenizer = TokenizationManager.from_record(load_checkpoint(path)["tokenization"])
    rows = [(row[:k], row[k:]) for row, k in zip(ids.tolist(), lengths.flatten().tolist(), strict=True)]
    prompts, completions = ([tokenizer.decode(row[part]) for row in rows] for part in (0, 1))
    arguments = prompts, completions, [written for _, written in rows]
    assert make_reward(str(path), device="cpu")(*arguments, trainer_state=None) == pytest.approx(
        scores.natural.tolist(), abs=1e-5
    )
    if not model.knows_tokens:
        with pytest.raises(UserError, match="of a head that knows tokens"):
            make_reward(str(path), "evidence")
        return
    expected = (model.output(ids)[:, 1:] * mask).sum(1) / mask.sum(1)
    found = make_reward(str(path), "evidence", "cpu")(*arguments)
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert make_reward(str(path), "evidence").__name__ == "crossover_evidence"


def test_rows_of_several_lengths_are_read_each_by_itself(position_model):
    model = build_model(load_checkpoint(position_model), "reward", position_model)
    rows = [([1, 2, 3], [4]), ([5], [6, 7, 8, 1, 2]), ([2], []), ([3, 3], [1, 1]), ([1, 2, 3], [4])]
    for reward in ("natural", "evidence"):
        together = score(model, rows, reward)
        assert together == pytest.approx([score(model, [row], reward)[0] for row in rows], abs=1e-6)
        assert together[0] == together[4]
    assert score(model, [([2], [])], "evidence") == [0.0]


def test_what_cannot_be_scored_is_one_line(tmp_path, generator, reward_model):
    with pytest.raises(UserError, match="Model file not found"):
        make_reward(str(tmp_path / "none.pt"))
    with pytest.raises(UserError, match="holds a generator model, not a reward model"):
        make_reward(str(generator))
    unnamed = make_checkpoint(tmp_path / "unnamed.pt", 20, mode="reward")
    with pytest.raises(UserError, match="does not name its tokenizer"):
        make_reward(str(unnamed))
    with pytest.raises(UserError, match="must be 'natural'"):
        make_reward(str(reward_model), "share")
    reward = make_reward(str(reward_model), device="cpu")
    for arguments, expected in (
        (([[{"role": "user", "content": "A"}]], ["b"], [[1]]), "a prompt must be text, not list"),
        ((["A" * 9], ["b"], [[1] * 8]), "a sequence of 17 tokens: must be 1 to 16"),
        (([""], [""], [[]]), "a sequence of 0 tokens"),
        ((["A"], ["b"], [[200]]), "token ids span"),
        ((["%"], ["b"], [[1]]), "character '%'"),
    ):
        with pytest.raises(UserError, match=expected):
            reward(*arguments)


@pytest.mark.interop
def test_trl_takes_two_steps_on_an_exported_generator(tmp_path, generator, predictive_reward_model):
    trl = pytest.importorskip("trl")
    import transformers
    from datasets import Dataset

    folder = tmp_path / "hf"
    succeed("interop.export", checkpoint_path=generator, output_dir=folder)
    reward, calls = make_reward(str(predictive_reward_model), device="cpu"), []

    def noted(prompts, completions, completion_ids, **keywords):
        calls.append((prompts, completion_ids, reward(prompts, completions, completion_ids, **keywords)))
        return calls[-1][-1]

    options = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 10}
    options |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=[noted, make_reward(str(predictive_reward_model), "evidence", "cpu")],
        args=trl.GRPOConfig(output_dir=str(tmp_path / "trl"), learning_rate=1e-2, logging_steps=1, **options),
        train_dataset=Dataset.from_dict({"prompt": ["The ", "a", "mor\n", "hiel"] * 4}),
        processing_class=set_special_tokens(transformers.AutoTokenizer.from_pretrained(folder)),
    )
    trainer.train()
    assert len(calls) == 2 and all(len(rewards) == 8 for *_, rewards in calls)
    records = [record for record in trainer.state.log_history if "reward" in record]
    for record, (_, _, rewards) in zip(records, calls, strict=True):
        assert record["rewards/noted/mean"] == pytest.approx(sum(rewards) / 8, abs=1e-5)
        assert record["rewards/crossover_evidence/mean"] != 0
    # The very figures that train_grpo.py computes for these sequences.
    prompts, ids, rewards = calls[0]
    contents = load_checkpoint(predictive_reward_model)
    tokenizer = TokenizationManager.from_record(contents["tokenization"])
    policy = build_model(load_checkpoint(generator), "generator", generator)
    scorer = RewardScorer(build_model(contents, "reward", predictive_reward_model), policy)
    for prompt, written, value in zip(prompts, ids, rewards, strict=True):
        row = torch.tensor([[*tokenizer.encode(prompt).tolist(), *written]])
        assert scorer(row).natural.item() == pytest.approx(value, abs=1e-6)


@pytest.fixture(scope="module")
def trl_loss(tmp_path_factory, generator):
    """A function that gives TRL's own loss of log-probabilities of completions."""
    trl = pytest.importorskip("trl")
    import transformers
    from datasets import Dataset

    folder, plain_kl = tmp_path_factory.mktemp("trl"), {"use_bias_correction_kl": False}  # not times the ratio
    succeed("interop.export", checkpoint_path=generator, output_dir=folder / "hf")
    trainer = trl.GRPOTrainer(
        model=str(folder / "hf"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], **plain_kl),
        train_dataset=Dataset.from_dict({"prompt": ["The "]}),
        processing_class=set_special_tokens(transformers.AutoTokenizer.from_pretrained(folder / "hf")),
    )
    trainer.model.eval()  # then it divides by no number of accumulated batches

    def loss(log_probs, old, reference, advantages, mask, **attributes):
        for name, value in attributes.items():
            assert hasattr(trainer, name)
            setattr(trainer, name, value)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
        prompt = torch.ones(len(mask), 1, dtype=torch.int64)
        inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask}
        inputs |= {"old_per_token_logps": old, "ref_per_token_logps": reference, "advantages": advantages}
        return trainer._compute_loss(trainer.model, {**inputs, "num_items_in_batch": mask.sum()})

    return loss


@pytest.mark.interop
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_losses_and_gradients_are_those_of_trl(trl_loss, loss_type, beta, level):
    draw = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(6, 9, generator=draw) * 4
    old, reference = (log_probs + torch.randn(6, 9, generator=draw) * spread for spread in (0.3, 0.5))
    mask = (torch.arange(9) < torch.tensor([9, 4, 1, 7, 9, 2])[:, None]).long()
    advantages = group_advantages(torch.rand(6, generator=draw), 3)
    low, high = 0.2, 1.2 if loss_type == "cispo" else 0.28
    ours, theirs = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    options = {"epsilon_low": low, "epsilon_high": high, "beta": beta, "loss_type": loss_type}
    common = {**options, "importance_level": level, "max_completion_length": 12}
    loss, _ = policy_loss(ours, old, advantages, mask, reference_log_probs=reference, **common)
    options |= {"importance_sampling_level": level, "max_completion_length": 12}
    expected = trl_loss(theirs, old, reference, advantages, mask, **options)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert theirs.grad.abs().max() > 0.01
