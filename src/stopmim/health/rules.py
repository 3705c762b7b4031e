"""The rules behind a verdict, read from top to bottom; the first that holds is the verdict.

Losses of rank and spread are relative to the untrained network: half of the rank and half of the
spread is a partial collapse, three quarters of the rank a full one. The thresholds were set on the
planted runs of tests/plant.py. A good run on photographs may lose as much of the rank before it
regains it; what tells it apart is that its predictor has learned and its crops match better. How
much better decides: among recorded runs that had lost half of the rank, those with half of the
mismatches between crops gone (53 % or more) were above random init by k-NN; of those with fewer
gone (39 % or less) all but one were below.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from stopmim.health.log import Logged

Verdict = Literal[
    "not collapsed", "too early to say", "partial collapse", "collapse", "shortcut", "over-training"
]  # whether an encoder is useful is for evaluations to say
COLLAPSES: tuple[Verdict, ...] = ("partial collapse", "collapse")
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

    @property
    def matched(self) -> float:
        """Share of the untrained network's mismatches between crops of an image that are gone."""
        begun = self.start.get("neighbours", 1)
        return (self.now.get("neighbours", 0) - begun) / max(1e-12, 1 - begun)

    @property
    def gained(self) -> bool:
        """Whether it has learned, with crops of an image matching better than before training."""
        return self.learned and self.matched > 0


class Finding(NamedTuple):
    verdict: Verdict
    because: str
    advice: tuple[str, ...] = ()


CHECK_DATA = "look at the data: are all images alike, or decoded wrongly?"
COLLAPSED = (
    "lower --optim.lr by a factor of 3 to 10, raise --optim.ema towards 0.999 if it is lower",
    "make the predictor wider and deeper (--predictor.width, --predictor.depth)",
)
POOR_FROM_THE_START = (f"if it was so from the start, {CHECK_DATA}", *COLLAPSED)
STOP_EARLIER = (
    "stop earlier: fewer --optim.epochs, or more images",
    "lower --optim.lr and --optim.final_lr, or raise --optim.ema",
)
SHOW_MORE = (
    "show more of the image: raise --masking.context_length, lower --masking.target_scale"
    " (random masks: lower --masking.ratio)",
    "look at `stopmim analyse masks` and the images: can the hidden part be guessed?",
)
REPEATED = 10  # epochs; images seen only a few times are not memorised


def judge(s: Signs) -> Finding:
    """The first rule that holds, from the worst state of a run to the best."""
    now, half = s.now, s.half
    if not fixed_targets(now):
        if poor := _poor_features(s):
            return poor
    elif now["target_image_share"] < 0.02 or now["target_spread"] < 0.05:  # as poor as the images
        why = "the fixed targets, such as pixels, are the same for all images"
        return Finding("collapse", why, (CHECK_DATA,))
    kept = s.relative("target_rank")
    if s.learned and (kept > 0.5 or s.matched > 0.5):
        rank = "gained rank" if kept > 1 else f"kept {kept:.0%} of their rank".replace("%", " %")
        why, matched = "the predictor tells images apart", ""
        if kept <= 0.5:  # it falls at first, and may rise again
            matched = "the crops of an image mismatch half as often as before training, "
        if not fixed_targets(now):
            why += f", {matched}and the targets have {rank}"
        return Finding("not collapsed", why)
    if (
        half is not now
        and max(now["skill"], half["skill"]) < 0.03
        and max(now["predicted_image_share"], half["predicted_image_share"]) < 0.02
        and min(now["skill"], half["skill"]) > -0.3
        and now["target_image_share"] < 1.05 * half["target_image_share"]
    ):
        why = "the predictor knows the position of a patch and nothing about the image"
        return Finding("shortcut", why, SHOW_MORE)
    early = "the predictor does not tell images apart yet, and nothing has settled"
    close = "the predictor tells images apart, but the targets are poorer than they may become"
    return Finding("too early to say", close if s.learned else early)


def _poor_features(s: Signs) -> Finding | None:
    """The rules for targets that are learned: fixed ones, such as pixels, cannot collapse."""
    now, rank, spread = s.now, s.relative("target_rank"), s.relative("target_spread")
    if now["target_image_share"] < 0.02:
        return Finding("collapse", "the targets are the same for all images", POOR_FROM_THE_START)
    if now["target_spread"] < 0.05 or now["target_rank"] < 1.6:
        return Finding("collapse", "the targets are the same everywhere", POOR_FROM_THE_START)
    if rank < (0.1 if s.gained else 0.25):
        why = "the targets have lost most of the rank of the untrained network"
        return Finding("collapse", why, COLLAPSED)
    begun = s.start.get("neighbours", 0.5)  # which is chance
    if begun > 0.6 and now.get("neighbours", begun) - 0.5 < 0.25 * (begun - 0.5):
        why = "two crops of an image match each other hardly better than by chance"
        return Finding("collapse", why, COLLAPSED)
    repeated, lost = now.get("epoch", 0) > REPEATED, s.of_best("target_rank") < 0.6
    if repeated and lost and spread > 0.7 and s.risen("target_rank") < 1.1 and s.risen("loss") > 2:
        why = "the loss has been rising while the targets lose rank and keep their spread"
        return Finding("over-training", why, STOP_EARLIER)
    if rank < 0.4 and not s.gained:
        why = "the targets have a far lower rank than those of the untrained network"
        return Finding("partial collapse", why, COLLAPSED)
    if rank < 0.5 and spread < 0.5 and now["skill"] < 0.02:
        why = "half of the spread and half of the rank of the targets are gone, "
        why += "and nothing was learned"
        return Finding("partial collapse", why, COLLAPSED)
    return None


def fixed_targets(now: Logged) -> bool:
    """Whether the targets of a run are not learned, and so say nothing about the encoder."""
    return "feature_rank" in now
