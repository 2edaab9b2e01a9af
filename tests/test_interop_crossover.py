"""The reward of two Hugging Face models beside our own head, and CrossoverTrainer beside
train_grpo.py.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, refuse, succeed

import grpo.policy_loss as formulas
from common.files import read_json
from common.process import UserError
from grpo.rewards import token_rewards
from interop.crossover_reward import CrossoverReward, load_model, load_tokenizer
from interop.train_trl import TrlSettings
from interop.train_trl import make_trainer as make_trl_trainer
from reward.heads import LikelihoodRewardModel
from reward.posterior import natural_probabilities
from reward.scorer import RewardScorer
from training.checkpoint import build_model, load_checkpoint

pytestmark = pytest.mark.interop
WEIGHT, C, G = 0.8, 8, 4
PROMPTS = ["The ", "a ho", "mor\n", "hiel"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, generator, knowing):
    """Folders of the generator and of a natural model, and the head of both."""
    folder, models = tmp_path_factory.mktemp("exported"), []
    for name, path in (("generator", generator), ("natural", knowing)):
        succeed("interop.export", checkpoint_path=path, output_dir=folder / name)
        models.append(build_model(load_checkpoint(path), path).eval())
    head = LikelihoodRewardModel(models[1], models[0]).requires_grad_(False)
    head.mixture.data = torch.tensor(WEIGHT).logit()
    return str(folder / "generator"), str(folder / "natural"), head


def make_reward(exported, **options):
    return CrossoverReward(exported[1], exported[0], **{"weight": WEIGHT, **options})


def random_rows(*lengths):
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(20, (length,), generator=draw).tolist() for length in lengths]


def test_evidence_and_probabilities_are_those_of_our_head(exported):
    reward, head, rows = (
        make_reward(exported, max_completion_length=4),
        exported[2],
        random_rows(16, 9, 16, 2),
    )
    evidence, probabilities = reward.evidence(rows), reward.token_probabilities(rows)
    for number, row in enumerate(rows):
        own = head.output(torch.tensor([row]))
        torch.testing.assert_close(evidence[number, : len(row)][None], own, atol=1e-4, rtol=0)
        expected = natural_probabilities(own)
        torch.testing.assert_close(
            probabilities[number, : len(row)][None], expected, atol=1e-4, rtol=0
        )
        assert (
            not evidence[number, len(row) :].any() and not probabilities[number, len(row) :].any()
        )
    prompts, written = PROMPTS, [row[:4] for row in random_rows(4, 4, 4, 4)]
    ids = reward.tokenizer(prompts)["input_ids"]
    shares = head.share(
        head.output(torch.tensor([[*a, *b] for a, b in zip(ids, written, strict=True)]))
    )
    assert reward(prompts, completion_ids=written, completions=[]) == pytest.approx(
        shares.tolist(), abs=1e-4
    )


def natural_blocks(corpus, count):
    tokens = np.fromfile(corpus / "train.bin", dtype=np.uint16).astype(np.int64)
    return torch.from_numpy(tokens[: count * 16]).view(count, 16)


def test_stopping_early_is_no_gain(exported, corpus):
    reward = make_reward(exported, max_completion_length=12)
    end, gains = reward.tokenizer.convert_tokens_to_ids("\n"), []
    for block in natural_blocks(corpus, 20).tolist():
        prompt = [reward.tokenizer.decode(block[:4])]
        (whole,), (random,) = reward(prompt, [block[4:]]), reward(prompt, random_rows(12))
        stopped = [reward(prompt, [[*block[4 : 4 + stop], end]])[0] for stop in range(11)]
        assert stopped[0] <= random + 1e-6  # bad text to the end is no worse than none
        assert max(stopped) <= whole + 1e-6
        gains.append(whole - stopped[0])
    assert np.mean(gains) > 0.3


def test_the_weight_is_fitted_and_the_gate_holds(exported, corpus):
    blocks = natural_blocks(corpus, 64)
    reward = make_reward(exported, weight=None)
    with pytest.raises(UserError, match="no weight yet"):
        reward(["The "], [[1]])
    figures = reward.fit(blocks)
    assert figures["r2_low"] > 0 and reward.has_weight and 0 < figures["mixture"] <= 1
    assert figures["num_blocks"] == 32 and figures["natural_loss"] < figures["generator_loss"]
    again = make_reward(exported, weight=None).fit(blocks)
    assert again == figures
    with pytest.raises(UserError, match="does not predict where"):
        make_reward(exported, weight=None).fit(blocks[:8])
    with pytest.raises(UserError, match="at least two of at least two tokens"):
        make_reward(exported, weight=None).fit(blocks[:1])
    with pytest.raises(UserError, match="32 tokens: the generator reads at most 16"):
        make_reward(exported, weight=None).fit(blocks.view(32, 32))


def test_what_cannot_be_used_is_one_line(exported, tmp_path):
    import transformers

    for options, said in (
        ({"weight": 1.5}, r"weight must be in \(0, 1\], got 1\.5"),
        ({"weight": float("nan")}, "got nan"),
    ):
        with pytest.raises(UserError, match=said):
            make_reward(exported, **options)
    with pytest.raises(UserError, match="cannot be read"):
        CrossoverReward(str(tmp_path), exported[0])
    other = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=7, n_layer=1, n_head=1, n_embd=4)
    )
    with pytest.raises(
        UserError,
        match=r"natural model \(7 token ids\) differs in vocabulary .* use a model of the same family",
    ):
        CrossoverReward(other, exported[0])


def make_trainer(exported, folder, model=None, kind=None, reward=None, prompts=PROMPTS, **options):
    """A CrossoverTrainer of the tiny generator that takes two steps of two prompts."""
    from datasets import Dataset
    from trl import GRPOConfig

    from interop.crossover_trainer import CrossoverTrainer

    reward, lora = reward or make_reward(exported), options.pop("peft_config", None)
    config = {
        "max_steps": 2,
        "per_device_train_batch_size": 2 * G,
        "num_generations": G,
        "max_completion_length": C,
    }
    config |= {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 1e-2,
    }
    config |= {"gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 1}
    return (kind or CrossoverTrainer)(
        model or load_model(exported[0]),
        reward,
        args=GRPOConfig(str(folder), **{**config, **options}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=reward.tokenizer,
        peft_config=lora,
    )


def test_two_steps_have_the_gradients_of_train_grpo(exported, generator, tmp_path):
    from transformers import TrainerCallback

    from interop.huggingface import our_name, permute_weights

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            gradients = {
                n: weight.grad.clone()
                for n, weight in model.named_parameters()
                if weight.requires_grad
            }
            noted.append((batches[-1], weights[-1], gradients))

    noted, batches, weights, model = [], [], [], load_model(exported[0])
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.endswith("bias"))  # which ours has not
    trainer = make_trainer(exported, tmp_path, model, max_grad_norm=1e9)
    compute = trainer._compute_loss

    def spied(model, inputs):
        batches.append(
            {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
        )
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        return compute(model, inputs)

    trainer._compute_loss = spied
    trainer.add_callback(Note())
    trainer.train()
    assert len(noted) == 2
    contents = load_checkpoint(generator)
    config = contents["config"]
    scorer = RewardScorer(exported[2], build_model(contents, generator))
    for number, (batch, state, gradients) in enumerate(noted):
        policy = build_model(contents, generator)
        own = {
            our_name(name): permute_weights(value, our_name(name), config)
            for name, value in state.items()
        }
        policy.load_state_dict(
            {name: own[name] for name in policy.state_dict() if name in own}, strict=False
        )
        ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
        order = ids[:, :4].tolist()  # TRL shuffles a batch: the groups side by side again
        rows = sorted(range(len(ids)), key=lambda row: order[row])
        ids, mask = ids[rows], torch.ones(len(ids), ids.size(1) - 1, dtype=torch.bool)
        mask[:, : batch["prompt_ids"].size(1) - 1] = False
        log_probs = token_log_probs_of(policy, ids)
        rewards = token_rewards(scorer(ids, mask), log_probs.detach(), mask)
        advantages = formulas.token_advantages(rewards, mask, G)
        torch.testing.assert_close(
            advantages[:, -C:], batch["advantages"][rows], atol=1e-3, rtol=1e-3
        )
        loss, _ = formulas.policy_loss(log_probs, None, advantages, mask.float(), loss_type="dapo")
        loss.backward()
        expected = {name: weight.grad for name, weight in policy.named_parameters()}
        assert len(gradients) == len(expected)
        for name, gradient in gradients.items():
            ours = expected[our_name(name)]
            theirs = permute_weights(gradient, our_name(name), config)
            assert (ours[: len(theirs)] - theirs).norm() <= 1e-3 * ours.norm(), (number, name)
    metrics = [record for record in trainer.state.log_history if "crossover/kl_start" in record]
    assert abs(metrics[0]["crossover/kl_start"]) < 1e-4 < abs(metrics[1]["crossover/kl_start"])


def token_log_probs_of(policy, ids):
    logits = policy.logits(policy.trunk(ids[:, :-1]))
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def test_lora_reads_its_start_from_the_same_weights(exported, tmp_path):
    from peft import LoraConfig

    model = load_model(exported[0])
    reward = CrossoverReward(
        exported[1], model, weight=WEIGHT, tokenizer=load_tokenizer(exported[0])
    )
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(exported, tmp_path, model, reward=reward, peft_config=lora)
    rows = random_rows(9, 12)
    before = reward.evidence(rows)
    trainer.train()
    torch.testing.assert_close(reward.evidence(rows), before)
    first, second = [
        each["crossover/kl_start"]
        for each in trainer.state.log_history
        if "crossover/kl_start" in each
    ]
    assert abs(first) < 1e-5 < abs(second)


def test_what_the_formulas_do_not_score_is_refused(exported, tmp_path):
    from datasets import Dataset
    from peft import LoraConfig

    with pytest.raises(UserError, match=r"temperature=0\.7: must be 1"):
        make_trainer(exported, tmp_path, temperature=0.7)
    same = load_model(exported[0])
    reward = CrossoverReward(
        exported[1], same, weight=WEIGHT, tokenizer=load_tokenizer(exported[0])
    )
    with pytest.raises(UserError, match="the same loaded model"):
        make_trainer(
            exported,
            tmp_path,
            reward=reward,
            peft_config=LoraConfig(r=2, target_modules="all-linear"),
        )
    with pytest.raises(UserError, match="generation_kwargs="):
        make_trainer(exported, tmp_path, generation_kwargs={"temperature": 0.7})
    with pytest.raises(UserError, match="holds the model that is trained"):
        make_trainer(exported, tmp_path, same, reward=reward)
    with pytest.raises(UserError, match=r"differs from the reward's generator by \d\.\d\d nats"):
        make_trainer(exported, tmp_path, load_model(exported[1])).train()
    trainer = make_trainer(exported, tmp_path)
    trainer.train_dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer.reward.tokenizer = lambda text: {"input_ids": [[1, 2] for _ in text]}
    with pytest.raises(UserError, match="must tokenize prompts as the reward"):
        trainer.train()


def test_positions_that_are_learned_have_their_limits(exported, tmp_path, corpus):
    import transformers

    config = transformers.GPT2Config(vocab_size=25, n_positions=16, n_layer=1, n_head=1, n_embd=8)
    for name in ("p", "q"):
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    natural, start = (load_model(str(tmp_path / name)) for name in ("p", "q"))
    reward = CrossoverReward(natural, start, tokenizer=load_tokenizer(exported[0]))
    # the whole context
    assert reward.fit(natural_blocks(corpus, 32), allow_unpredictive=True)["num_tokens"] == 16
    trainer = make_trainer(
        exported, tmp_path, load_model(str(tmp_path / "q")), reward=reward, prompts=["The ", "a h"]
    )
    with pytest.raises(UserError, match="no rotary positions: use prompts of equal length"):
        trainer.train()


def replay(generator: str, natural: str, out: str) -> None:
    """One step on completions of several lengths, a function of their prompts; writes its gradients
    to `out`.
    """
    from accelerate import PartialState
    from transformers import TrainerCallback

    from interop.crossover_trainer import CrossoverTrainer

    class Replay(CrossoverTrainer):
        def _generate_single_turn(self, prompt_ids, *_):
            written = []
            for row, ids in enumerate(prompt_ids):
                draw = torch.Generator().manual_seed(sum(ids) + row % G)
                written.append(
                    torch.randint(25, (3 + row % G + len(ids) % 3,), generator=draw).tolist()
                )
            return written, None

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            assert not batch["advantages"][batch["completion_mask"] == 0].any()
            return batch

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            if PartialState().is_main_process:
                named = model.named_parameters()
                torch.save(
                    {name.removeprefix("module."): weight.grad for name, weight in named}, out
                )

    options = {"per_device_train_batch_size": 2 * G // PartialState().num_processes, "max_steps": 1}
    trainer = make_trainer(
        (generator, natural), out + ".trainer", kind=Replay, prompts=["The ", "a h"], **options
    )
    trainer.add_callback(Note())
    trainer.train()


def test_two_processes_have_the_gradient_of_one(exported, tmp_path):
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    replay(*exported[:2], str(one))
    script = tmp_path / "replay.py"
    script.write_text(
        "import sys\nfrom test_interop_crossover import replay\nreplay(*sys.argv[1:])\n"
    )
    launch = "-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1"
    launch += " --mixed_precision no --dynamo_backend no --main_process_port 0"
    command = [sys.executable, *launch.split(), script, *exported[:2], two]
    path = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run(command, check=True, env=path, timeout=300)
    expected = torch.load(one)
    found = torch.load(two)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name
    assert sum(gradient.norm() > 0 for gradient in expected.values()) > 10


def trl_options(exported, corpus, tmp_path, **more):
    options = {
        "model": exported[0],
        "natural_model": exported[1],
        "text": corpus / "input.txt",
        "max_steps": 2,
    }
    options |= {
        "prompts_per_step": 2,
        "group_size": 2,
        "prompt_length": 4,
        "max_completion_length": 8,
    }
    return {**options, "output_dir": tmp_path / "trained", **more}


def test_train_trl_trains_goes_on_and_refuses(exported, corpus, tmp_path, monkeypatch, knowing):
    printed = succeed("interop.train_trl", **trl_options(exported, corpus, tmp_path, lora_rank=2))
    assert (
        "Weight of the natural model" in printed
        and (tmp_path / "trained/adapter_model.safetensors").is_file()
    )
    again = succeed(
        "interop.train_trl", **trl_options(exported, corpus, tmp_path, lora_rank=2, max_steps=3)
    )
    assert f"Resuming from {tmp_path / 'trained/checkpoint-2'}" in again
    steps = [
        each["step"]
        for each in read_json(tmp_path / "trained/checkpoint-3/trainer_state.json")["log_history"]
    ]
    assert steps[:3] == [1, 2, 3]
    (tmp_path / "short.txt").write_text((corpus / "input.txt").read_text()[:200])
    (tmp_path / "foreign.txt").write_text("\u0416" * 9999)
    for options, said in (
        ({"text": tmp_path / "short.txt"}, "tokens, but at least 1,920 are needed"),
        ({"text": tmp_path / "foreign.txt"}, "tokenizer cannot read the text"),
        ({"natural_model": tmp_path}, "cannot be read"),
        (
            {"output_dir": tmp_path / "trained", "lora_rank": 2, "seed": 1},
            "run (seed was 42, now 1)",
        ),
        ({"prompts_per_step": 0}, "prompts_per_step=0: must be >= 1"),
    ):
        more = {"output_dir": tmp_path / "other", **options}
        assert said in refuse(
            "interop.train_trl", **trl_options(exported, corpus, tmp_path, **more)
        )
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "interop.crossover_trainer", raising=False)
    with pytest.raises(UserError, match=r"needs trl: pip install -r requirements-interop\.txt"):
        make_trl_trainer(TrlSettings(**trl_options(exported, corpus, tmp_path)))


def test_a_pruned_model_is_healed(exported, tmp_path, corpus):
    """The example's whole way, on a random model of Llama's form."""
    import transformers

    config = {
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=26, num_key_value_heads=2, max_position_embeddings=64, **config
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "whole")
    load_tokenizer(exported[0]).save_pretrained(tmp_path / "whole")
    options = {
        "whole": tmp_path / "whole",
        "text": corpus / "input.txt",
        "out_dir": tmp_path / "out",
        "drop": 1,
    }
    options |= {
        "floor_steps": 1,
        "steps": 1,
        "num_blocks": 32,
        "prompts": 2,
        "allow_unpredictive": True,
    }
    for arm in ("supervised", "crossover", "sequence", "distillation", "constant"):
        printed = succeed("examples.heal_pruned_model", **options, arm=arm)
        assert f"\n{arm} " in printed
        trained, floor = (
            load_model(str(tmp_path / "out" / name)).state_dict() for name in (arm, "floor")
        )
        assert all(torch.equal(trained[name], floor[name]) for name in floor) == (arm == "constant")
    assert "of another experiment" in refuse(
        "examples.heal_pruned_model", **options, arm=arm, seed=1
    )
    results = read_json(tmp_path / "out/results.json")
    assert (
        results["whole"]["kl"] < 1e-5 < results["floor"]["kl"]
        and (tmp_path / "out/crossover.png").is_file()
    )
    assert load_model(str(tmp_path / "out/pruned")).config.num_hidden_layers == 2


@pytest.fixture(scope="module")
def trl_loss(tmp_path_factory, exported):
    """A function that gives TRL's own loss of log-probabilities of completions."""
    import trl
    from datasets import Dataset

    # not times the ratio
    folder, plain_kl = tmp_path_factory.mktemp("trl"), {"use_bias_correction_kl": False}
    trainer = trl.GRPOTrainer(
        model=exported[0],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], **plain_kl
        ),
        train_dataset=Dataset.from_dict({"prompt": ["The "]}),
        processing_class=load_tokenizer(exported[0]),
    )
    trainer.model.eval()  # then it divides by no number of accumulated batches

    def loss(log_probs, old, reference, advantages, mask, **attributes):
        for name, value in attributes.items():
            assert hasattr(trainer, name)
            setattr(trainer, name, value)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        )
        prompt = torch.ones(len(mask), 1, dtype=torch.int64)
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": mask,
            "completion_mask": mask,
        }
        inputs |= {
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "advantages": advantages,
        }
        return trainer._compute_loss(trainer.model, {**inputs, "num_items_in_batch": mask.sum()})

    return loss


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", formulas.LOSS_TYPES)
def test_policy_losses_and_gradients_are_those_of_trl(trl_loss, loss_type, beta):
    draw = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(6, 9, generator=draw) * 4
    old, reference = (
        log_probs + torch.randn(6, 9, generator=draw) * spread for spread in (0.3, 0.5)
    )
    mask = (torch.arange(9) < torch.tensor([9, 4, 1, 7, 9, 2])[:, None]).long()
    advantages = formulas.group_advantages(torch.rand(6, generator=draw), 3)
    ours, theirs = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    options = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": beta, "loss_type": loss_type}
    options["max_completion_length"] = 12
    loss, _ = formulas.policy_loss(
        ours, old, advantages, mask, reference_log_probs=reference, **options
    )
    expected = trl_loss(theirs, old, reference, advantages, mask, **options)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert theirs.grad.abs().max() > 0.01
