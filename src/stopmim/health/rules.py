"""The rules behind a verdict: a table, read from top to bottom; the first match is the verdict.

Losses of rank and spread are relative to the untrained network: half of the rank and half of the
spread is a partial collapse, three quarters of the rank a full one. The thresholds were set on the
planted runs of tests/plant.py.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from stopmim.health.log import Logged

Verdict = Literal[
    "healthy", "too early to say", "partial collapse", "collapse", "shortcut", "over-training"
]
EXIT_CODES: dict[str, int] = dict(zip(get_args(Verdict), (0, 0, 10, 11, 12, 13), strict=True))


class Signs(NamedTuple):
    """The measurements that the rules look at."""

    now: Logged
    half: Logged  # halfway through the run so far
    start: Logged  # of the untrained network
    lines: Sequence[Logged]  # all since the start, oldest first

    def relative(self, key: str) -> float:
        """`key` now, relative to the untrained network."""
        return self.now[key] / max(1e-12, self.start[key])

    def of_best(self, key: str) -> float:
        """`key` now, relative to its maximum so far."""
        return self.now[key] / max(1e-12, *(line[key] for line in self.lines), self.start[key])

    def risen(self, key: str) -> float:
        """`key` now, relative to its minimum so far; 1 if it was not logged."""
        known = [line[key] for line in self.lines if key in line]
        return known[-1] / max(1e-12, min(known)) if known else 1.0

    def lately(self, key: str) -> float:
        """The lower of the last two values: a single one may be chance."""
        return min(line[key] for line in self.lines[-2:])

    @property
    def learned(self) -> bool:
        """Whether predictions depend on the image, and usefully so."""
        return self.lately("skill") > 0 and self.lately("predicted_image_share") > 0.05


class Rule(NamedTuple):
    verdict: Verdict
    holds: Callable[[Signs], bool]
    because: str
    advice: tuple[str, ...]


CHECK_DATA = "look at the data: are all images alike, or decoded wrongly?"
COLLAPSED = (
    "raise --optim.ema towards 0.999, lower --optim.lr by a factor of 3 to 10",
    "make the predictor wider and deeper (--predictor.width, --predictor.depth)",
)
POOR_FROM_THE_START = (f"if it was so from the start, {CHECK_DATA}", *COLLAPSED)
REPEATED = 10  # epochs; images seen only a few times are not memorised

RULES = (
    Rule(
        "collapse",
        lambda s: s.now["target_image_share"] < 0.02,
        "the targets are the same for all images",
        POOR_FROM_THE_START,
    ),
    Rule(
        "collapse",
        lambda s: s.now["target_spread"] < 0.05 or s.now["target_rank"] < 1.6,
        "the targets are the same everywhere",
        POOR_FROM_THE_START,
    ),
    Rule(
        "collapse",
        lambda s: s.relative("target_rank") < 0.25,
        "the targets have lost most of the rank of the untrained network",
        COLLAPSED,
    ),
    Rule(
        "collapse",
        lambda s: (
            s.start["neighbours"] > 0.6
            and s.now["neighbours"] - 0.5 < 0.25 * (s.start["neighbours"] - 0.5)
        ),
        "two crops of an image match each other hardly better than by chance",
        COLLAPSED,
    ),
    Rule(
        "over-training",
        lambda s: (
            s.now.get("epoch", 0) > REPEATED
            and s.of_best("target_rank") < 0.6
            and s.risen("target_rank") < 1.1
            and s.relative("target_spread") > 0.7
            and s.risen("loss") > 2
        ),
        "the loss has been rising while the targets lose rank and keep their spread",
        (
            "stop earlier: fewer --optim.epochs, or more images",
            "lower --optim.lr and --optim.final_lr, or raise --optim.ema",
        ),
    ),
    Rule(
        "partial collapse",
        lambda s: s.relative("target_rank") < 0.4,
        "the targets have a far lower rank than those of the untrained network",
        COLLAPSED,
    ),
    Rule(
        "partial collapse",
        lambda s: (
            s.relative("target_rank") < 0.5
            and s.relative("target_spread") < 0.5
            and s.now["skill"] < 0.02
        ),
        "half of the spread and half of the rank of the targets are gone, and nothing was learned",
        COLLAPSED,
    ),
    Rule(
        "healthy",
        lambda s: s.learned and s.relative("target_rank") > 0.5,
        "the predictor tells images apart, and the targets are rich",
        (),
    ),
    Rule(
        "shortcut",
        lambda s: (
            max(s.now["skill"], s.half["skill"]) < 0.03
            and max(s.now["predicted_image_share"], s.half["predicted_image_share"]) < 0.02
            and min(s.now["skill"], s.half["skill"]) > -0.3
            and s.now["target_image_share"] < 1.05 * s.half["target_image_share"]
        ),
        "the predictor knows the position of a patch and nothing about the image",
        (
            "show more of the image: raise --masking.context_length, lower --masking.target_scale"
            " (random masks: lower --masking.ratio)",
            "look at `stopmim analyse masks` and the images: can the hidden part be guessed?",
        ),
    ),
)
# Fixed targets, such as pixels, cannot collapse: if they are poor, so are the images.
RULES_FOR_FIXED_TARGETS = (
    Rule(
        "collapse",
        lambda s: s.now["target_image_share"] < 0.02 or s.now["target_spread"] < 0.05,
        "the fixed targets, such as pixels, are the same for all images",
        (CHECK_DATA,),
    ),
    *(rule for rule in RULES if rule.verdict in ("healthy", "shortcut")),
)
TOO_EARLY = "the predictor does not tell images apart yet, and nothing has settled"
TOO_CLOSE = "the predictor tells images apart, but the targets are poorer than they may become"


def fixed_targets(now: Logged) -> bool:
    """Whether the targets of a run are not learned, and so say nothing about the encoder."""
    return "feature_rank" in now
