"""runtime/settings.py: what the fields of settings declare is checked.  `pytest tests/test_runtime_settings.py`"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from runtime.settings import Problems, Settings, setting


@dataclass
class Walk(Settings):
    """Take a walk."""

    model: str | None = setting(None, model_file="required")
    guide: str | None = setting(None, model_file="optional", changeable=True)
    maps: tuple[str, ...] | None = setting(None, model_file="optional")
    travel_mode: Literal["foot", "wheel"] = "foot"
    boots: str | None = setting(None, belongs_to={"travel_mode": ("foot",)})
    gears: int = setting(3, minimum=1, belongs_to={"travel_mode": ("wheel",)})
    speed: float = setting(1.5, above=0, below=9, unit="m/s", changeable=True)
    height: float = 0.0
    rests: int | None = setting(None, minimum=2, maximum=4)
    inns: tuple[str, ...] = setting(("Bell",), known=("Bell", "Crown"))
    diary: str | None = setting(None, output="file")
    folder: str | None = setting(None, output="folder")

    def check_further(self, problems: Problems) -> None:
        problems.require(self.height >= 0, "height is below the sea")


@pytest.fixture
def walk(tmp_path) -> Walk:
    (tmp_path / "model.pt").touch()
    return Walk(str(tmp_path / "model.pt"))


def errors(walk: Walk, **changes) -> list[str]:
    return replace(walk, **changes).problems().errors


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1, 9, 9.5])
def test_a_number_out_of_range_is_refused_with_its_unit(walk, value):
    problems = replace(walk, speed=value).problems()
    assert problems.errors == [f"speed={value}: must be > 0 and < 9 (m/s)"]
    assert problems.suggestions == ["Leave out speed for its default, 1.5"]


def test_the_edges_of_a_range(walk):
    assert errors(walk, speed=1e-9, rests=2) == errors(walk, speed=8.999, rests=4) == []
    assert errors(walk, travel_mode="wheel", gears=1) == []
    assert errors(walk, rests=1) == ["rests=1: must be >= 2 and <= 4"]


def test_a_number_without_a_range_is_finite(walk):
    for value in (math.nan, math.inf):
        assert errors(walk, height=value)[0].startswith(f"height={value}: ")
    assert errors(walk, height=10**400) == []  # an int is finite, however long


def test_names_are_of_those_known(walk):
    assert errors(walk, inns=("Crown", "Bell")) == []
    (error,) = errors(walk, inns=("Crown", "Star"))
    assert error.startswith("inns='Star'") and "'Bell', 'Crown'" in error
    error = errors(walk, travel_mode="sail")[0]
    assert error.startswith("travel_mode='sail'") and "'foot', 'wheel'" in error


def test_an_option_that_another_makes_void_is_refused(walk):
    assert errors(walk, boots="old") == errors(walk, boots="", travel_mode="wheel", gears=5) == []
    problems = replace(walk, boots="old", travel_mode="wheel").problems()
    assert problems.errors == ["boots is ignored in wheel mode"]
    assert problems.suggestions == ["Remove --boots, or use --travel_mode foot"]


def test_checkpoints_exist_and_outputs_can_be_written(walk, tmp_path):
    assert errors(walk, guide=walk.model) == errors(walk, maps=(walk.model,)) == []
    assert errors(walk, model=None) == ["model is required"]
    assert errors(walk, guide="no.pt") == ["Model file not found: no.pt (--guide)"]
    assert errors(walk, maps=(walk.model, "no.pt")) == ["Model file not found: no.pt (--maps)"]
    assert errors(walk, diary=str(tmp_path / "new/diary"), folder=str(tmp_path / "new")) == []
    assert errors(walk, diary=str(tmp_path)) == [f"{tmp_path} is a folder, not a file"]
    problems = replace(walk, folder=walk.model).problems()
    assert problems.errors == [f"{walk.model} is a file, not a folder"]
    assert problems.suggestions == ["Choose a folder you may write to with --folder"]


def test_what_is_declared_comes_before_what_is_special(walk):
    assert errors(walk, height=-1.0, gears=0) == [
        "gears=0: must be >= 1",
        "gears is ignored in foot mode",
        "height is below the sea",
    ]


def test_changeable_settings_are_named(walk):
    assert walk.changeable == {"guide", "speed"}


def test_a_declaration_that_does_not_exist_is_a_bug():
    with pytest.raises(TypeError, match="minimun"):
        setting(3, minimun=1)


def test_require_returns_what_holds_and_notes_a_suggestion_once():
    problems = Problems()
    assert problems.require(True, "no") is True
    assert problems.require(False, "first", "mend") is False and problems.require(False, "second", "mend") is False
    assert (problems.errors, problems.suggestions) == (["first", "second"], ["mend"])


def test_values_that_a_setting_cannot_have_are_named():
    good = {"model": None, "guide": "x", "gears": 3, "speed": 2, "rests": None, "inns": ("Bell",), "unknown": object()}
    assert Walk.misfit(good) == ""
    bad = {"model": 3, "gears": True, "speed": math.nan, "rests": 9, "inns": "Bell", "travel_mode": "rail"}
    for name, value in bad.items():
        assert Walk.misfit({**good, name: value}).startswith(f"{name} of type")
