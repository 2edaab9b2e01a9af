"""train_trl.py, heal_pruned_model.py and heal_arms.py, from the command line to their results.

pytest tests/test_interop_train_trl.py
"""

import re
import shutil
import sys

import pytest
import torch
from helpers import refuse, refuse_in_one_line, succeed

from common.files import read_json, write_json
from common.process import UserError
from interop.crossover_reward import load_model, load_tokenizer
from interop.train_trl import TrlSettings, make_trainer, read_data

pytestmark = pytest.mark.interop
FUNCTIONS = """
def length(completions, **kwargs):
    return [len(text) for text in completions]

class Hit:
    def __call__(self, completions, answer):
        return [None if text[0]["content"] in answer else -1 for text in completions]

hit = Hit()
fails = lambda completions: completions[9]
short = lambda completions: [1]

async def late(completions):
    return [1.0] * len(completions)

infinite = lambda completions: [float("inf")] * len(completions)
"""


@pytest.fixture
def options(exported, corpus, tmp_path):
    """Options of a run of two steps."""
    return {
        "model": exported[0],
        "natural_model": exported[1],
        "text": corpus / "input.txt",
        "max_steps": 2,
        "prompts_per_step": 2,
        "group_size": 2,
        "prompt_length": 4,
        "max_completion_length": 8,
        "output_dir": tmp_path / "trained",
    }


@pytest.fixture
def functions(tmp_path):
    """A file of reward functions."""
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def test_train_trl_trains_and_goes_on(options, functions, tmp_path):
    options["lora_rank"] = 2
    options["reward_function"] = f"{functions}:length"
    assert "Weight of the natural model" in succeed("interop.train_trl", **options)
    assert (tmp_path / "trained/adapter_model.safetensors").is_file()
    record = read_json(tmp_path / "trained/settings.json")
    del record["refresh_every"]  # as in a run of an earlier version
    write_json(tmp_path / "trained/settings.json", record)
    options["max_steps"] = 3
    options["merge"] = True
    printed = succeed("interop.train_trl", **options)
    assert "Weight of the natural model" not in printed  # the fitted reward is read
    assert f"Resuming from {tmp_path / 'trained/checkpoint-2'}" in printed
    state = read_json(tmp_path / "trained/checkpoint-3/trainer_state.json")
    records = state["log_history"][:3]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert {record["rewards/length/mean"] for record in records} == {8}

    import peft

    ids = torch.arange(8)[None]
    start = load_model(str(options["model"]))
    expected = start(input_ids=ids).logits
    adapted = peft.PeftModel.from_pretrained(start, tmp_path / "trained")
    merged = load_model(str(tmp_path / "trained/merged"))(input_ids=ids).logits
    torch.testing.assert_close(merged, adapted(input_ids=ids).logits)
    assert not torch.equal(merged, expected)
    assert load_tokenizer(str(tmp_path / "trained/merged")).vocab_size == merged.size(-1)
    functions.write_text(f"{FUNCTIONS}# another")
    printed = refuse("interop.train_trl", **{**options, "seed": 1})
    assert re.search(r"run \(reward_function was .*; seed was 42, now 1\)", printed)


def test_train_trl_needs_no_natural_model(options, tmp_path, monkeypatch):
    del options["natural_model"]
    printed = refuse_in_one_line("interop.train_trl", **options)
    assert "does not predict where its text begins: small models' states do not" in printed
    monkeypatch.setattr("interop.crossover_reward.better_than_constant", bool)
    options["refresh_every"] = 1
    printed = succeed("interop.train_trl", **options)
    assert printed.count("selection loss, -log P(K), by layer: ") == 2  # of fit() and at step 1
    options["max_steps"] = 3
    printed = succeed("interop.train_trl", **options)
    assert printed.count("selection loss, -log P(K), by layer: ") == 1  # at step 2
    state = read_json(tmp_path / "trained/checkpoint-3/trainer_state.json")
    assert "crossover/refresh_r2" in state["log_history"][2]
    options["natural_model"] = options["model"]
    assert "but natural_model has none" in refuse("interop.train_trl", **options)


@pytest.fixture
def rows(options, corpus, tmp_path):
    """Options of the same rows in several forms, for models with a chat template."""
    from datasets import Dataset

    tokenizer = load_tokenizer(str(options["model"]))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for name in ("model", "natural_model"):
        options[name] = shutil.copytree(options[name], tmp_path / name)
        tokenizer.save_pretrained(options[name])
    texts = 4 * (corpus / "input.txt").read_text()
    lines = [texts[start : start + 30] for start in range(0, 9000, 30)]
    chats = []
    for line in lines:
        question = {"role": "user", "content": line[:10]}
        chats.append([question, {"role": "assistant", "content": line[10:]}])
    Dataset.from_dict({"line": lines}).to_json(tmp_path / "rows.jsonl")
    Dataset.from_dict({"messages": chats, "answer": lines}).to_parquet(tmp_path / "rows.parquet")
    questions = {"prompt": [chat[:1] for chat in chats], "answer": lines}
    Dataset.from_dict(questions).save_to_disk(tmp_path / "rows")
    return options


@pytest.mark.parametrize(
    ("name", "column"),
    [("rows.jsonl", "line"), ("rows.parquet", "messages"), ("rows", "prompt")],
)
def test_train_trl_reads_rows(rows, tmp_path, name, column):
    rows["text"] = (str(tmp_path / name),)
    settings = TrlSettings(**rows, text_column=column)
    prompts, blocks = read_data(settings, load_tokenizer(str(rows["model"])))
    assert len(blocks) >= 16
    assert blocks.size(1) == 12
    if column == "line":
        assert len(prompts["prompt"][0]) == 4
    else:
        assert len(prompts) == 270  # the other tenth is in the blocks
        assert [message["role"] for message in prompts[0]["prompt"]] == ["user"]
        assert prompts[0]["prompt"][0]["content"] == prompts[0]["answer"][:10]


def test_rows_that_it_cannot_use_are_named(rows, tmp_path):
    from datasets import Dataset, DatasetDict, load_from_disk

    questions = load_from_disk(tmp_path / "rows").rename_column("prompt", "text")
    for data, said in (
        (Dataset.from_dict({"text": [None, "The"]}), "column 'text' has empty or other values"),
        (questions, "a chat in column 'text' has no prompt before its answer"),
        (DatasetDict({"train": questions}), "holds several splits"),
    ):
        folder = tmp_path / said
        data.save_to_disk(folder)
        settings = TrlSettings(**{**rows, "text": (str(folder),)})
        with pytest.raises(UserError, match=said):
            read_data(settings, load_tokenizer(str(rows["model"])))


def test_train_trl_takes_chats_and_functions(rows, functions, tmp_path):
    rows["text"] = tmp_path / "rows.parquet"
    assert "rows.parquet has no column 'text': choose one of messages, answer with" in (
        refuse_in_one_line("interop.train_trl", **rows)
    )
    rows["text_column"] = "messages"
    rows["reward_function"] = [f"{functions}:{name}" for name in ("length", "hit")]
    rows["function_weight"] = [1, 0.5]
    succeed("interop.train_trl", **rows)
    state = read_json(tmp_path / "trained/checkpoint-2/trainer_state.json")
    assert state["log_history"][0]["rewards/hit/mean"] == -1
    rows["function_weight"] = 2
    printed = refuse("interop.train_trl", **rows)
    assert "a finite number for each of the 2 reward functions" in printed


def test_train_trl_refuses_what_it_cannot_use(options, functions, corpus, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1")
    short = tmp_path / "short.txt"
    short.write_text((corpus / "input.txt").read_text()[:200])
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("\u0416" * 9999)
    for name, value, said in (
        ("text", short, "tokens, but 192 are needed"),
        ("text", damaged, "damaged.parquet cannot be read"),
        ("merge", True, "merge=True needs LoRA"),
        ("reward_function", f"{functions}:absent", "has no function 'absent'"),
        ("reward_function", f"{functions}:fails", "IndexError"),
        ("reward_function", f"{functions}:short", "returned [1], no list of 4 rewards"),
        ("reward_function", f"{functions}:infinite", "return a finite number"),
        ("reward_function", f"{functions}:late", "is an async def"),
        ("reward_function", [f"{functions}:short", "b.py:short"], "after the colon must differ"),
        ("function_weight", "nan", "pass a finite number"),
        ("text_column", "line", "input.txt has no columns: leave it out"),
        ("text", foreign, "tokenizer cannot read the text"),
        ("natural_model", tmp_path, "cannot be read"),
    ):
        changed = {**options, name: value, "output_dir": tmp_path / said}
        assert said in refuse("interop.train_trl", **changed)
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "interop.crossover_trainer", raising=False)
    with pytest.raises(UserError, match=r"needs trl: pip install -r requirements-interop\.txt"):
        make_trainer(TrlSettings(**options))


def test_a_pruned_model_is_healed(exported, corpus, tmp_path, monkeypatch):
    """The example, then all arms, on a random model of Llama's form."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=26,
        num_hidden_layers=3,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    whole = transformers.LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path / "whole")
    load_tokenizer(exported[0]).save_pretrained(tmp_path / "whole")
    monkeypatch.setattr("interop.crossover_reward.better_than_constant", bool)
    options = {
        "whole": tmp_path / "whole",
        "text": corpus / "input.txt",
        "out_dir": tmp_path / "healed",
        "drop": 1,
        "floor_steps": 1,
        "steps": 1,
        "num_blocks": 32,
        "prompts": 2,
    }
    assert "\nchange " in succeed("examples.heal_pruned_model", **options)
    layers = load_model(str(options["out_dir"])).model.layers
    difference = layers[-1].mlp.up_proj.weight - whole.model.layers[2].mlp.up_proj.weight
    assert len(layers) == 2
    assert 0 < difference.abs().max() < 1e-3
    assert "of the 3 Llama" in refuse("examples.heal_pruned_model", **{**options, "drop": 3})

    monkeypatch.setattr("benchmarks.heal_arms.RATE", 1e-2)
    arms = ("supervised", "exact", "token", "sequence", "constant", "distillation")
    printed = succeed("benchmarks.heal_arms", **options, arms=arms, seeds=(1, 2))
    changes = re.findall(r"^(\w+) - floor +(\S+) ", printed, re.MULTILINE)
    assert {arm for arm, change in changes if float(change)} == {*arms} - {"constant"}
