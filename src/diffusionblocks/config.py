"""A run as a value: frozen dataclasses, validated when they are made, printed and stored with every result."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from diffusionblocks.errors import InputError
from diffusionblocks.families.causal_lm import CausalLMSettings
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.partition import GRIDS
from diffusionblocks.sample import STARTS, solver
from diffusionblocks.train import TrainSettings

FAMILIES: dict[str, type] = {"vit": ViTSettings, "causal_lm": CausalLMSettings}
LAWS = ("log_normal", "equal_information")
ANSWERS = ("last", "average")
# They change where and how a run is done, not its result; so they may differ when a run is resumed or merged.
FREE_FIELDS = {
    "data": ("root",),
    "training": ("gradient_checkpointing", "checkpoint_every", "validate_every", "logger", "start_from"),
}


@dataclass(frozen=True)
class NoiseSettings:
    """Noise law and its cut into blocks.

    Attributes:
        law: "log_normal", or "equal_information" (computed from the codes and the class frequencies).
        p_mean, p_std: of the log-normal law; None takes 0.5 and 1.2 (the paper's -1.2 lets z give the class away).
        sigma_data: rms of the target's coordinates; None takes it from the codes.
        cut: "equal_mass" or "uniform" (equal steps of log sigma).
    """

    law: str = "log_normal"
    p_mean: float | None = None
    p_std: float | None = None
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float | None = None
    cut: str = "equal_mass"
    overlap: float = 0.05

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise InputError(f"unknown noise law '{self.law}': choose {' or '.join(LAWS)}")
        if self.law != "log_normal" and (self.p_mean is not None or self.p_std is not None):
            raise InputError(f"p_mean and p_std have no effect on the {self.law} law: leave them out")
        if self.sigma_data is not None and not self.sigma_data > 0:
            raise InputError(f"sigma_data {self.sigma_data} is out of range: choose a number above 0, or leave it out")


@dataclass(frozen=True)
class DataSettings:
    """The data set.

    Attributes:
        source: digits, mnist, fashion-mnist, cifar10, folder, or hf:NAME.
        root: the folder that holds its files.
        train_examples: how many training examples to use; None for all.
        augment: none, crop-flip, or randaugment (the paper's, with the extra `images`).
    """

    source: str = "digits"
    root: str | None = None
    train_examples: int | None = None
    augment: str = "none"

    def __post_init__(self) -> None:
        if self.root is not None and (self.source == "digits" or self.source.startswith("hf:")):
            raise InputError(f"data.root has no effect on {self.source}, which brings its own data: leave it out")


@dataclass(frozen=True)
class InferenceSettings:
    """The walk that answers.

    Attributes:
        steps: calls of the walk; None for one a block.
        start: "zero" (for prediction), or "random".
        starts: random starts to average over; with start "random" only, None for one.
        answer: "average" of the log-probabilities of all calls, or the "last" call's.
    """

    steps: int | None = None
    grid: str = "mass"
    solver: str = "euler"
    start: str = "zero"
    starts: int | None = None
    answer: str = "average"

    def __post_init__(self) -> None:
        solver(self.solver)
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps {self.steps} is out of range: choose 1 or more, or leave it out for one a block")
        if self.grid not in GRIDS:
            raise InputError(f"unknown grid '{self.grid}': choose {' or '.join(GRIDS)}")
        if self.start not in STARTS:
            raise InputError(f"unknown start '{self.start}': choose {' or '.join(STARTS)}")
        if self.answer not in ANSWERS:
            raise InputError(f"unknown answer '{self.answer}': choose {' or '.join(ANSWERS)}")
        if self.starts is not None and (self.start != "random" or self.starts < 1):
            raise InputError("starts averages over 1 or more random starts: it has no effect without --start random")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a result.

    Attributes:
        layer_split: layers of each block, e.g. 3,6,3; None for an even split.
        shell: "per_block" (independent blocks) or "joint" (stem, codes and head shared, as published).
        weight: of each example's cross-entropy: "none", "edm" or "edm_clamped".
    """

    name: str = "custom"
    family: str = "vit"
    seed: int = 0
    blocks: int = 3
    layer_split: tuple[int, ...] | None = None
    shell: str = "per_block"
    weight: str = "none"
    network: ViTSettings | CausalLMSettings = field(default_factory=ViTSettings)
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    inference: InferenceSettings = field(default_factory=InferenceSettings)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"unknown family '{self.family}': choose {', '.join(FAMILIES)}")
        if type(self.network) is not FAMILIES[self.family]:
            raise InputError(f"a network of family {self.family} has {FAMILIES[self.family].__name__}: give those")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """The fields that must agree when a run is resumed or its parts are merged. Inference may be chosen later."""
        fields = self.to_dict()
        del fields["inference"]
        for section, names in FREE_FIELDS.items():
            for name in names:
                del fields[section][name]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Recipe":
        """The inverse of `to_dict`; fields that `identity` leaves out take their defaults.

        Raises:
            InputError: a field that this version doesn't know.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in known:
                raise InputError(f"unknown recipe field '{name}': choose {', '.join(known)}")
            kinds = sections(fields.get("family", cls.family))
            values[name] = _section(name, kinds[name], value) if name in kinds else value
        if values.get("layer_split") is not None:
            values["layer_split"] = tuple(values["layer_split"])
        return cls(**values)


def sections(family: str) -> dict[str, type]:
    """The kind of each section of a family's recipe.

    Raises:
        InputError: an unknown family.
    """
    if family not in FAMILIES:
        raise InputError(f"unknown family '{family}': choose {', '.join(FAMILIES)}")
    return {
        "network": FAMILIES[family],
        "noise": NoiseSettings,
        "data": DataSettings,
        "training": TrainSettings,
        "inference": InferenceSettings,
    }


def _section(name: str, kind: type, values: dict[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise InputError(f"unknown recipe field '{name}.{key}': choose {', '.join(known)}")
    return kind(**values)
