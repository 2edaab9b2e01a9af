"""Whether the loop gives a generator anything that plain training does not: the experiment of docs/evidence.md.

    python benchmarks/evidence.py --phase exploratory
    python benchmarks/evidence.py

The exploratory phase trains every arm in both regimes with seed 0 and measures them on selection text (val.bin). The
confirmatory phase, by default, repeats the four arms of one regime with further seeds and measures them on test text.
A regime is a settings file, config/evidence_REGIME.py, and a choice of training documents. Nothing is made twice: run
the same command to go on. Seeds may run side by side once the exploratory phase has made the models that they share:
`--seeds 1 3 5` in one shell and `--seeds 2 4` in another; then the command without --seeds collects them.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from evidence_samples import Instrument, natural_loss, open_generator
from evidence_tables import MAX_SEEDS, missing_temperature, result_tables
from pipeline import ROOT, Pipeline
from torch import Tensor

from cycle_stages import CycleSettings
from data_loader import TokenSplits, dataset_folder, write_token_files
from runtime.cli import parse_settings, read_config
from runtime.device import select_device
from runtime.files import read_json, write_json
from runtime.process import UserError, run_main
from runtime.run_log import say
from runtime.settings import Problems, Settings, setting
from sample_eval import NaturalText
from tokenization_manager import TokenizationManager, save_meta
from training.checkpoint import build_model, load_checkpoint

# Training documents of the data-limited regime; of the others every second one is the capacity-limited regime's too,
# and the rest is the independent evaluator's, with evaluator.bin.
FEW = ("THE COMEDY OF ERRORS", "THE MERCHANT OF VENICE")
REGIMES = ("data_limited", "capacity_limited")
EVALUATOR = {"config": ROOT / "config/shakespeare_complete_cpu.py", "max_iters": 2000, "short_share": 0.3}
LITERAL = ROOT / "config/seeds_literal.py"
ATTEMPTS = 4  # of best-of-n
DIVERGENCES = {"reverse KL": 1.0, "forward KL": 0.0, "JSD": 0.5}  # divergence_beta: KL(pi || m), KL(m || pi), between
SAMPLED = {"credit": "sequence", "divergence_beta": 1.0, "prompts_per_step": 8, "group_size": 8}
# The arms of the exploratory phase that train_grpo.py trains: options beyond the regime's settings file.
EXPLORED: dict[str, dict[str, Any]] = {
    **{f"on-policy, {name}": {"divergence_beta": beta} for name, beta in DIVERGENCES.items()},
    **{f"off-policy, {name}": {"divergence_beta": beta, "states": "natural"} for name, beta in DIVERGENCES.items()},
    "on-policy, kl_in_reward 0.7": {"divergence_beta": 1.0, "kl_in_reward": 0.7},
    "placebo": {"exchange_scores": True},
    "GRPO by sequence, P(natural)": {**SAMPLED, "reward": "natural"},
}
SHARED_BY = 5  # seeds that share the natural models: the share of their seconds in plain's budget
PLAIN: dict[str, dict[str, Any]] = {  # beside section control_plain
    **{"plain": {}, "plain, rate x0.3": {"rate": 0.3}, "plain, rate x1": {"rate": 1.0}},
    **{"plain, from scratch": {"from_scratch": True}},
}
CONFIRMED = {"off-policy": {"states": "natural"}, "on-policy": dict[str, Any]()}
# Options by which --quick True runs all of it for a few steps.
QUICK: dict[str, dict[str, Any]] = {
    "train": {
        "max_iters": 4,
        "warmup_iters": 1,
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 16,
        "block_size": 48,
        "eval_tokens": 256,
    },
    "prepare_reward_data": {"max_blocks": 30, "samples_per_chunk": 2},
    "train_reward_model": {},
    "train_grpo": {
        "max_steps": 2,
        "prompts_per_step": 4,
        "gate_blocks": 12,
        "eval_prompts": 4,
        "allow_blind_reward": True,
    },
}


@dataclass
class EvidenceSettings(Settings):
    """Whether the loop gives a generator anything that plain training does not."""

    phase: Literal["exploratory", "confirmatory"] = "confirmatory"
    """exploratory: every arm in every regime, seed 0, selection text; confirmatory: four arms, one regime, test text"""
    regimes: tuple[str, ...] = setting(REGIMES, known=REGIMES)
    """of the exploratory phase"""
    regime: Literal["data_limited", "capacity_limited"] = "data_limited"
    """of the confirmatory phase"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """of the confirmatory phase"""
    explored_temperatures: tuple[float, ...] = (1.0,)
    """of the exploratory phase"""
    temperatures: tuple[float, ...] = (0.8, 0.9, 1.0, 1.1)
    """of the confirmatory phase; others are added where natural text's forward NLL does not lie between two points"""
    plain_from_scratch: bool = False
    """in the confirmatory phase plain is a new generator, for the steps of base and control; False: the base further"""
    plain_rate: float = setting(1.0, above=0)
    """in the confirmatory phase plain's learning rates over those of the generator; with plain_from_scratch: unused"""
    samples: int = setting(2000, minimum=40)
    """samples of a point"""
    prompt_length: int = setting(32, minimum=1, maximum=127, unit="characters")
    """natural characters before each sample"""
    ngram_order: int = setting(7, minimum=1, maximum=12)
    """order of the confirmatory phase's n-gram models; the exploratory phase chooses it on selection text"""
    ngram_smoothing: float = setting(16.0, above=0)
    """weight of shorter contexts in them, likewise"""
    dataset: str | None = None
    """folder of a corpus that is split by documents; None: the complete works of Shakespeare, made in out_dir"""
    quick: bool = False
    """train every model for a few steps: a look at the tables"""
    records: str | None = setting(None, output="file")
    """where the records are written (JSON); None: out_dir/PHASE.json, of a part
    also with its seeds or its regime in the name"""
    out_dir: str = setting("out/evidence", output="folder")
    """folder for everything that is made; what is there is not made again"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_further(self, problems: Problems) -> None:
        """Note seeds and temperatures that cannot be measured, before hours of training."""
        seeds, block_size = self.seeds, QUICK["train"]["block_size"]
        problems.require(
            0 < len(seeds) <= MAX_SEEDS and len(set(seeds)) == len(seeds) and min(seeds) > 0,
            f"seeds={', '.join(map(str, seeds))}: must be 1 to {MAX_SEEDS} different numbers above 0, the explored one",
            "Name some as in --seeds 1 2 3",
        )
        for name in ("temperatures", "explored_temperatures"):
            values = getattr(self, name)
            problems.require(
                len(values) > 0 and all(0 < each < math.inf for each in values),
                f"{name}={', '.join(map(str, values))}: must be finite and above 0",
                f"Name some as in --{name} 0.9 1.0",
            )
        problems.require(
            not self.quick or self.prompt_length < block_size,
            f"prompt_length={self.prompt_length}: must be below the {block_size} characters of --quick True",
        )


class Texts:
    """The corpus that is split by documents, and the corpora of the regimes and of the evaluator, made from it."""

    def __init__(self, settings: EvidenceSettings) -> None:
        self.pipeline = Pipeline(settings.out_dir)
        options = {"source": "complete", "split": "documents", "out_dir": self.pipeline.out / "texts"}
        self.is_own = settings.dataset is None
        made = self.pipeline.make("texts", "data/shakespeare_char/prepare", **options) if self.is_own else None
        self.folder = made or dataset_folder(str(settings.dataset))
        self.tokenizer = TokenizationManager(data_path=self.folder)
        if self.tokenizer.chars is None:
            raise UserError(f"ERROR: {self.folder} is a corpus by {self.tokenizer.method}: take one by characters")
        self.vocab_size = self.tokenizer.vocab_size
        self.select, self.test = (NaturalText.read(self.folder, part, self.vocab_size) for part in ("val", "test"))

    def corpus(self, name: str) -> Path:
        """The folder of a regime's corpus, or of the evaluator's: its train.bin, and val.bin."""
        train, held_out = (NaturalText.read(self.folder, part, self.vocab_size) for part in ("train", "evaluator"))
        documents = read_json(self.folder / "splits.json")["parts"]["train"]["documents"]
        chosen = assigned(documents, self.is_own)[name]
        tokens = [train.tokens[each["start"] : each["stop"]] for each in chosen]
        tokens += [held_out.tokens] if name == "evaluator" else []

        def write() -> None:
            write_token_files(self.pipeline.out / folder, TokenSplits(np.concatenate(tokens), self.select.tokens))
            save_meta(self.pipeline.out / folder / "meta.pkl", self.tokenizer.chars)

        folder = f"corpus_{name}"
        return self.pipeline.make_once(folder, write, {"texts": self.folder}, {"documents": chosen})


def assigned(documents: list[dict[str, Any]], is_own: bool) -> dict[str, list[dict[str, Any]]]:
    """The training documents of each corpus; the data-limited one has FEW, or of a user's own texts the first."""
    few = [each for each in documents if each["title"] in FEW] if is_own else documents[:1]
    others = [each for each in documents if each not in few]
    return {"data_limited": few, "capacity_limited": few + others[::2], "evaluator": others[1::2]}


class Regime:
    """A regime's models that all seeds share: the natural models, the evaluator; and how the arms are trained."""

    def __init__(self, name: str, texts: Texts, settings: EvidenceSettings) -> None:
        self.name, self.texts, self.settings = name, texts, settings
        self.device = select_device(settings.device)
        self.config, self.corpus = ROOT / f"config/evidence_{name}.py", texts.corpus(name)
        self.pipeline = Pipeline(Path(settings.out_dir) / name)
        count = parse_settings(CycleSettings, "run_cycles", ["--config", str(self.config)], check=False).natural_models
        self.naturals = tuple(
            self.train(self.pipeline, f"natural_{number}.pt", self.corpus, section="natural_model", seed=1000 + number)
            for number in range(1, count + 1)
        )
        shared, corpus = texts.pipeline, texts.corpus("evaluator")
        self.evaluator = self.train(shared, "evaluator.pt", corpus, **EVALUATOR, seed=2000)

    def instrument(self, prompts: NaturalText, seed: int) -> Instrument:
        """The measurement of samples that continue prompts from a text."""
        evaluator, own = open_generator(self.evaluator, self.device), self.settings
        return Instrument(prompts, evaluator, self.texts.vocab_size, own.samples, own.prompt_length, seed)

    def run(self, pipeline: Pipeline, artefact: str, script: str, **options: Any) -> Path:
        """The artefact, made by a script with its section of the regime's settings file, or of another `config`."""
        # Not the file: a change of one section leaves what others have made.
        config, section = options.pop("config", self.config), options.pop("section", script)
        options = {**read_config(config).get(section, {}), "device": self.settings.device, **options}
        quick = QUICK[script] if self.settings.quick else {}
        if options.get("init_from", "scratch") != "scratch":  # the start has the shape
            quick = {name: value for name, value in quick.items() if not name.startswith(("n_", "block_"))}
        return pipeline.make(artefact, script, **{**options, **quick})

    def train(self, pipeline: Pipeline, artefact: str, corpus: Path, **options: Any) -> Path:
        """A generator as it is after the last step of train.py."""
        options |= {"dataset": corpus, "out_dir": pipeline.out, "checkpoint_name": artefact}
        return self.run(pipeline, artefact, "train", **options, always_save_checkpoint=True, patience=None)

    @property
    def divergence(self) -> str:
        """The name of the divergence that the settings file chooses."""
        beta = read_config(str(self.config))["train_grpo"]["divergence_beta"]
        return next(name for name, value in DIVERGENCES.items() if value == beta)

    @cached_property
    def target(self) -> float:
        """Forward NLL of natural selection text: of the continuations of as many prompts from it."""
        instrument = self.instrument(self.texts.select, 0)
        return instrument.forward_nll(instrument.natural)


class Seed:
    """One seed of a regime: its generator (base), the reward model of it, and the arms, each trained once."""

    def __init__(self, regime: Regime, seed: int) -> None:
        self.regime, self.seed = regime, seed
        self.pipeline = Pipeline(regime.pipeline.out / f"seed_{seed}")
        self.texts, self.settings = regime.texts, regime.settings
        self.arms: dict[str, Path] = {}

        def write() -> None:
            write_json(self.pipeline.out / "began.json", {"began": datetime.now(UTC).isoformat("T", "seconds")})

        self.began = read_json(self.pipeline.make_once("began.json", write, {}, {"seed": seed}))["began"]

    def base(self) -> Path:
        """The generator from which every other arm starts."""
        self.arms["base"] = self.regime.train(self.pipeline, "base.pt", self.regime.corpus, seed=self.seed)
        return self.arms["base"]

    def plain(self, arm: str = "plain", rate: float | None = None, from_scratch: bool = False) -> None:
        """The control by natural text: the base trained further, by section control_plain.

        With `rate` at that share of the generator's own learning rates. `from_scratch`: a new generator by the base's
        recipe with the control's dropout, for the steps of both.
        """
        sections = read_config(str(self.regime.config))
        own, control = sections["train"], sections["control_plain"]
        names = ("learning_rate", "muon_learning_rate")
        rates = {} if rate is None else {name: rate * own[name] for name in names}
        options: dict[str, Any] = {"section": "control_plain", "init_from": self.arms["base"], **rates}
        if from_scratch:
            steps, dropout = own["max_iters"] + control["max_iters"], control.get("dropout", 0.0)
            options = {"max_iters": steps, "dropout": dropout}
        path = self.regime.train(self.pipeline, file_name(arm), self.regime.corpus, seed=self.seed, **options)
        self.arms[arm] = path

    def reward_model(self, prefix: str = "", config: Path | None = None) -> Path:
        """The reward model of the base, on the regime's natural models if its settings file is the regime's."""
        base, corpus, out = self.arms["base"], self.regime.corpus, self.pipeline.out
        options: dict[str, Any] = {"seed": self.seed} | ({"config": config} if config else {})
        text = {"train_bin": corpus / "train.bin", "val_bin": corpus / "val.bin", "input_mode": "binary"}
        name = f"{prefix}reward_data"
        data = self.regime.run(
            self.pipeline, name, "prepare_reward_data", model_path=base, **text, output_dir=out / name, **options
        )
        name = f"{prefix}reward_model.pt"
        trunk = {} if config else {"trunk": self.regime.naturals}
        read = {"base_model_path": base, "data_dir": data, **trunk}
        return self.regime.run(self.pipeline, name, "train_reward_model", **read, output_path=out / name, **options)

    def policy(self, arm: str, reward_model: Path, **options: Any) -> None:
        """An arm that train_grpo.py trains from the base."""
        name = file_name(arm)
        paths = {"base_model_path": self.arms["base"], "reward_model_path": reward_model, "dataset": self.regime.corpus}
        out = {"output_path": self.pipeline.out / name}
        self.arms[arm] = self.regime.run(self.pipeline, name, "train_grpo", **paths, **out, seed=self.seed, **options)

    def measure(
        self, artefact: str, models: tuple[Path, ...], settings: Mapping[str, Any], work: Callable[[], dict[str, Any]]
    ) -> Any:
        """A record of measurement of models, kept beside them; `settings`: all that it depends on besides."""
        path, maker = self.pipeline.out / artefact, Path(__file__).with_name("evidence_samples.py")
        inputs = {"evaluator": self.regime.evaluator, "texts": self.texts.folder}
        inputs |= {f"model {number}": model for number, model in enumerate(models, 1)}
        self.pipeline.make_once(artefact, lambda: write_json(path, work()), inputs, dict(settings), maker)
        return read_json(path)

    def of_samples(self, **further: Any) -> dict[str, Any]:
        """Settings of a measurement of samples."""
        return {"samples": self.settings.samples, "prompt_length": self.settings.prompt_length, **further}

    def loss(self, arm: str, text: NaturalText) -> float:
        """An arm's loss on a natural text."""
        model, device = self.arms[arm], self.regime.device

        def work() -> dict[str, Any]:
            return {"loss": natural_loss(open_generator(model, device), text, device)}

        name = f"{model.stem}_loss_{text.name.removesuffix('.bin')}.json"
        return self.measure(name, (model,), {"text": text.name}, work)["loss"]

    def seconds(self) -> dict[str, float | None]:
        """Seconds that each arm took, and by name those of the reward data, the reward model and all natural models.

        Also plain's budget: of the on-policy arm, its reward data and reward model, and a fifth of the natural models.
        None where a training was interrupted.
        """
        found = {arm: self.pipeline.seconds(path.name) for arm, path in self.arms.items()}
        found |= {name: self.pipeline.seconds(name) for name in ("reward_data", "reward_model.pt")}
        found["natural models"] = sum(self.regime.pipeline.seconds(path.name) for path in self.regime.naturals)
        policy = found.get("on-policy", found.get(f"on-policy, {self.regime.divergence}", math.nan))
        budget = policy + found["reward_data"] + found["reward_model.pt"] + found["natural models"] / SHARED_BY
        found["budget of plain"] = round(budget, 1)
        return {name: None if math.isnan(seconds) else seconds for name, seconds in found.items()}


def file_name(arm: str) -> str:
    """Of the arm's checkpoint."""
    return re.sub(r"[^\w.-]+", "_", arm).strip("_") + ".pt"


def explore(regime: Regime) -> dict[str, Any]:
    """The exploratory record of a regime: every arm with seed 0, on selection text."""
    seed, select = Seed(regime, 0), regime.texts.select
    base = seed.base()
    reward_model = seed.reward_model()
    for arm, options in EXPLORED.items():
        seed.policy(arm, reward_model, **options)
    for arm, ways in PLAIN.items():
        seed.plain(arm, **ways)
    literal = seed.reward_model("literal_", LITERAL)
    seed.policy("the seeds' loop to the letter", literal, config=LITERAL, allow_blind_reward=True)
    instrument = regime.instrument(select, 0)

    def choose() -> dict[str, Any]:
        ids = instrument.sample(open_generator(base, regime.device), 1.0)
        order, smoothing = instrument.best_ngram(ids, select)
        return {"order": order, "smoothing": smoothing}

    ngram = seed.measure("ngram.json", (base,), seed.of_samples(text=select.name), choose)

    def points(arm: str, models: tuple[Path, ...], sample: Callable[[float], Tensor]) -> list[dict[str, Any]]:
        def work(temperature: float) -> dict[str, Any]:
            ids = sample(temperature)
            scored, fitted = {"reverse_nll_select": select}, (ngram["order"], ngram["smoothing"])
            return instrument.point(ids, temperature, scored, fitted) | {"auc": instrument.auc(ids)}

        found, settings = [], seed.of_samples(text=select.name, **ngram)
        for temperature in regime.settings.explored_temperatures:
            name = f"{file_name(arm).removesuffix('.pt')}_select_T{temperature:g}.json"
            found.append(seed.measure(name, models, settings, partial(work, temperature)))
        return found

    def sample(path: Path, temperature: float) -> Tensor:
        return instrument.sample(open_generator(path, regime.device), temperature)

    arms: dict[str, dict[str, Any]] = {}
    for arm, path in seed.arms.items():
        arms[arm] = {"loss": seed.loss(arm, select), "points": points(arm, (path,), partial(sample, path))}

    def best(temperature: float) -> Tensor:
        contents = load_checkpoint(reward_model)
        model = build_model(contents, "reward", reward_model, regime.device)
        return instrument.best_of(open_generator(base, regime.device), model, ATTEMPTS, temperature)

    best_points = points(f"best of {ATTEMPTS}", (base, reward_model), best)
    arms[f"base, best of {ATTEMPTS}"] = {"loss": None, "points": best_points}
    return {"natural": {"forward_nll": regime.target}, "ngram": ngram, "arms": arms, "seconds": seed.seconds()}


def confirm(regime: Regime, number: int) -> dict[str, Any]:
    """The confirmatory record of a seed: four arms, several temperatures, on test text."""
    seed, texts, own = Seed(regime, number), regime.texts, regime.settings
    seed.base()
    reward_model = seed.reward_model()
    for arm, options in CONFIRMED.items():
        seed.policy(arm, reward_model, **options)
    seed.plain(rate=own.plain_rate, from_scratch=own.plain_from_scratch)
    instrument, ngram = regime.instrument(texts.test, number), (own.ngram_order, own.ngram_smoothing)
    scored = {"reverse_nll_select": texts.select, "reverse_nll": texts.test}

    @cache  # a point's samples are the detector's too
    def sample(path: Path, temperature: float) -> Tensor:
        return instrument.sample(open_generator(path, regime.device), temperature)

    def point(path: Path, temperature: float) -> dict[str, Any]:
        settings = seed.of_samples(text=texts.test.name, ngram=ngram)
        name = f"{path.stem}_T{temperature:g}.json"
        work = partial(instrument.point, temperature=temperature, texts=scored, ngram=ngram)
        return seed.measure(name, (path,), settings, lambda: work(sample(path, temperature)))

    def area(path: Path, temperature: float) -> dict[str, Any]:
        settings, name = seed.of_samples(text=texts.test.name), f"{path.stem}_auc_T{temperature:g}.json"
        return seed.measure(name, (path,), settings, lambda: {"auc": instrument.auc(sample(path, temperature))})

    arms = {}
    for arm, path in seed.arms.items():
        points = [point(path, temperature) for temperature in own.temperatures]
        while (further := missing_temperature(points, regime.target)) is not None:
            points.append(point(path, further))
        best = min(points, key=lambda each: each["reverse_nll_select"])["temperature"]
        points.sort(key=lambda each: each["temperature"])
        arms[arm] = {"loss": seed.loss(arm, texts.test), "points": points, "auc_temperature": best, **area(path, best)}
    commit = read_json(seed.pipeline.out / "began.json.made.json")["commit"]
    return {"seed": number, "began": seed.began, "commit": commit, "seconds": seed.seconds(), "arms": arms}


def main() -> None:
    settings = parse_settings(EvidenceSettings, "evidence")
    texts = Texts(settings)
    contents: dict[str, Any] = {"phase": settings.phase}
    contents |= {name: getattr(settings, name) for name in ("samples", "prompt_length")}
    some = ""
    if settings.phase == "exploratory":
        contents["regimes"] = {name: explore(Regime(name, texts, settings)) for name in settings.regimes}
        some = "" if settings.regimes == EvidenceSettings.regimes else f"_{'_'.join(settings.regimes)}"
    else:
        regime = Regime(settings.regime, texts, settings)
        contents |= {"regime": regime.name, "natural": {"forward_nll": regime.target}}
        contents |= {name: getattr(settings, name) for name in ("ngram_order", "ngram_smoothing")}
        contents["divergence_beta"] = read_config(str(regime.config))["train_grpo"]["divergence_beta"]
        contents["seeds"] = [confirm(regime, number) for number in settings.seeds]
        some = "" if settings.seeds == EvidenceSettings.seeds else f"_seeds_{'_'.join(map(str, settings.seeds))}"
    path = settings.records or Path(settings.out_dir) / f"{settings.phase}{some}.json"
    write_json(path, contents)
    say(result_tables(contents))
    say(f"\nRecords: {path}")


if __name__ == "__main__":
    run_main(main)
