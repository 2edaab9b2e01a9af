"""export_hf.py: what it writes, what it refuses; transformers loads it, and nothing is lost on the way back."""

import errno
import json
import os
import resource

import pytest
import torch
from helpers import assert_same_weights, call, folder_bytes, make_checkpoint, refuse_in_one_line, succeed
from test_tokenizer_json import SMALL_BPE

import export_hf
from tokenization_manager import TokenizationManager, save_meta
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]


def test_an_export_read_again_is_the_same_checkpoint(tmp_path, generator):
    out = succeed("export_hf", checkpoint_path=generator, output_dir=tmp_path / "hf")
    assert "in GPT-NeoX's form" in out and "Saved config.json" in out
    ours, again = load_checkpoint(generator), load_checkpoint(tmp_path / "hf")
    assert (again["config"], again["data"]) == (ours["config"], ours["data"])
    assert_same_weights(again["model"], ours["model"])
    assert again["tokenization"]["chars"] == ours["tokenization"]["chars"]
    card = (tmp_path / "hf" / "README.md").read_text()
    for expected in ("val_loss", ours["data"]["train_sha256"], "| layers, heads, width | 1, 2, 16 |", "learning_rate"):
        assert expected in card
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == sorted(export_hf.FILES)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["hf"]


def test_every_script_takes_the_folder(tmp_path, corpus, generator, reward_data):
    folder = tmp_path / "hf"
    succeed("export_hf", checkpoint_path=generator, output_dir=folder)
    further = {"dataset": corpus, "max_iters": 2, "eval_interval": 2, "device": "cpu", "warmup_iters": 0}
    succeed("train", init_from=folder, out_dir=tmp_path / "further", **further)
    text, same = (
        succeed("sample", checkpoint_path=path, num_samples=1, max_new_tokens=9, device="cpu")
        for path in (folder, generator)
    )
    assert text == same
    assert "perplexity" in succeed("evaluate", checkpoints=folder, dataset=corpus, device="cpu")
    data = {"data_path": corpus / "input.txt", "samples_per_chunk": 2, "max_blocks": 30, "device": "cpu"}
    succeed("prepare_reward_data", model_path=folder, output_dir=tmp_path / "data", **data)
    model = {"base_model_path": folder, "data_dir": tmp_path / "data", "device": "cpu"}
    natural = {"trunk": tmp_path / "further" / "model_checkpoint.pt", "output_path": tmp_path / "reward.pt"}
    succeed("train_reward_model", **model, **natural)
    error = refuse_in_one_line("train_reward_model", **model, trunk=folder, output_path=tmp_path / "r.pt")
    assert "is the generator itself" in error
    policy = {"prompts_per_step": 2, "group_size": 2, "max_steps": 1, "eval_interval": 1, "gate_blocks": 10}
    policy |= {"reward_model_path": tmp_path / "reward.pt", "allow_blind_reward": True, "dataset": corpus}
    succeed("train_grpo", base_model_path=folder, output_path=tmp_path / "policy.pt", device="cpu", **policy)
    error = refuse_in_one_line(
        "train_grpo", base_model_path=generator, output_path=tmp_path / "p.pt", device="cpu", **policy
    )
    assert "trained against another generator" in error


def test_places_that_are_not_the_exports_are_refused(tmp_path, generator):
    folder = tmp_path / "hf"
    succeed("export_hf", checkpoint_path=generator, output_dir=folder)
    before = folder_bytes(folder)
    options = {"checkpoint_path": generator, "output_dir": folder}
    assert "use --overwrite True" in refuse_in_one_line("export_hf", **options)
    succeed("export_hf", **options, overwrite=True)
    assert folder_bytes(folder) == before
    (folder / "notes.txt").write_text("mine")
    assert "holds other files (notes.txt)" in refuse_in_one_line("export_hf", **options, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("largest", [100, 4000])  # bytes of a file: of none, or of all but the weights
def test_a_full_disk_leaves_nothing_and_the_earlier_export(tmp_path, generator, monkeypatch, largest):
    options = {"checkpoint_path": generator, "output_dir": tmp_path / "hf"}
    succeed("export_hf", **options)
    before, limits = folder_bytes(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        error = refuse_in_one_line("export_hf", **options, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in error
    with monkeypatch.context() as patch:  # the weights are there, what follows fails
        patch.setattr(export_hf, "write_text", lambda *_: os.stat(tmp_path / "absent"))
        refuse_in_one_line("export_hf", **options, overwrite=True)
    assert folder_bytes(tmp_path) == before
    succeed("export_hf", **options, overwrite=True)


def test_folders_of_others_links_and_dots(tmp_path, generator, monkeypatch):
    """What lies beside the export is left alone, a link keeps its place, and `.` is a folder as any other."""
    partial, real = tmp_path / "hf.partial", tmp_path / "real"
    partial.mkdir(), real.mkdir()
    (partial / "thesis.txt").write_text("mine")
    succeed("export_hf", checkpoint_path=generator, output_dir=tmp_path / "hf")
    assert (partial / "thesis.txt").read_text() == "mine"
    (tmp_path / "link").symlink_to(real)
    succeed("export_hf", checkpoint_path=generator, output_dir=tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (real / "config.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    succeed("export_hf", checkpoint_path=generator, output_dir=".")
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "here" / "config.json").is_file()
    names = {path.name for path in tmp_path.iterdir() if path.name != ".here.lock"}
    assert names <= {"hf", "hf.partial", "link", "real", "here", ".hf.lock", ".link.lock", ".real.lock"}


def test_models_that_cannot_be_exported_are_refused(tmp_path, reward_model, generator):
    options = {"output_dir": tmp_path / "hf"}
    assert "a generator is needed" in refuse_in_one_line("export_hf", checkpoint_path=reward_model, **options)
    unnamed = make_checkpoint(tmp_path / "unnamed.pt", 65)
    assert "does not say how its text is tokenized" in refuse_in_one_line(
        "export_hf", checkpoint_path=unnamed, **options
    )
    more = make_checkpoint(tmp_path / "more.pt", 70, TokenizationManager.from_text("abc").to_record())
    assert "70 token ids and its tokenizer 3" in refuse_in_one_line("export_hf", checkpoint_path=more, **options)
    parallel = TokenizationManager.from_text("abc").to_record()
    parallel = make_checkpoint(tmp_path / "parallel.pt", 3, parallel, position="learned", parallel_residual=True)
    assert "has no form" in refuse_in_one_line("export_hf", checkpoint_path=parallel, **options)
    assert not (tmp_path / "hf").exists()


def test_half_a_surrogate_pair_in_a_vocabulary_is_exported_as_json(tmp_path):
    """A checkpoint's record may hold one, which UTF-8 cannot."""
    record = TokenizationManager.from_text("abc\ud800").to_record()
    path = make_checkpoint(tmp_path / "model.pt", 4, record)
    succeed("export_hf", checkpoint_path=path, output_dir=tmp_path / "hf")
    assert load_checkpoint(tmp_path / "hf")["tokenization"]["chars"] == "abc\ud800"


def test_a_card_repeats_a_record_as_text():
    assert export_hf.cell("a|b\n<script>`x`") == "a\\|b \\<script\\>\\`x\\`"
    assert len(export_hf.cell("x" * 9999)) == export_hf.RECORD_LIMIT


@pytest.mark.interop
@pytest.mark.parametrize("form", ["char", "bpe", "tokenizer", "nanoGPT"])
def test_transformers_load_it_and_nothing_is_lost(tmp_path, form, request):
    transformers = pytest.importorskip("transformers", reason="transformers is in requirements-bench.txt")
    options, shape = {}, {"position": "learned", "bias": True}
    manager = TokenizationManager.from_text("\n !',.:;?ABCDEabcdefghijklmnopqrstuvwxyz")
    if form == "bpe":
        manager, shape = request.getfixturevalue("bpe"), {"num_tokens": 50257}
    elif form == "tokenizer":
        manager = TokenizationManager.from_tokenizer_json(json.dumps(SMALL_BPE), "x.json")
    size = 50304 if form == "bpe" else manager.vocab_size
    path = make_checkpoint(tmp_path / "model.pt", size, manager.to_record(), **shape)
    if form == "nanoGPT":
        contents = torch.load(path, weights_only=True)
        config = contents["config"]
        names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
        arguments = {name: getattr(config, name) for name in names}
        torch.save({"model_args": arguments, "model": contents["model"], "iter_num": 3}, path)
        save_meta(tmp_path / "meta.pkl", manager.chars)
        options = {"meta_path": tmp_path / "meta.pkl"}
    folder = tmp_path / "hf"
    finished = call("export_hf", checkpoint_path=path, output_dir=folder, **options)
    assert finished.status == 0, finished.err

    contents, again = load_checkpoint(path), load_checkpoint(folder)
    real = contents["config"].num_real_tokens
    for name, tensor in contents["model"].items():
        is_vocabulary = name in ("lm_head.weight", "transformer.wte.weight")
        assert torch.equal(
            again["model"][name][:real] if is_vocabulary else again["model"][name],
            tensor[:real] if is_vocabulary else tensor,
        )
    assert again["tokenization"] == {**manager.to_record(), "meta_path": again["tokenization"]["meta_path"]}

    ours = build_model(contents, "generator", path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "ab ba\nab  a" if form == "tokenizer" else "Ab. def's,\n\n  ghi  jk !\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == manager.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    idx = torch.tensor([(ids * 9)[:16]])
    with torch.no_grad():
        assert (theirs(idx).logits - ours.logits(ours.trunk(idx))[..., :real]).abs().max() < 1e-5
    assert theirs.generation_config.top_k in (0, None) and theirs.generation_config.do_sample
    write = transformers.pipeline("text-generation", model=str(folder))
    written = write("ab", min_new_tokens=4, max_new_tokens=8)[0]["generated_text"]
    assert written.startswith("ab") and len(written) > 2
