"""Is one encoder better than another? Compares two by a paired test on the same images.

python examples/compare_encoders.py [A [B]]

A and B are anything that `stopmim inspect` recognises. A defaults to an untrained network, the
baseline that every encoder should beat; B defaults to one that is trained here, in a few seconds.
"""

import sys

import stopmim
from stopmim.data.sources.open import open_images
from stopmim.evals.compare import compare
from stopmim.evals.inputs import Inputs, open_encoder
from stopmim.evals.protocols import Knn
from stopmim.evals.request import ImageRequest


def main() -> None:
    a, b = [*sys.argv[1:], "random:vit_micro6@48", ""][:2]
    if not b:
        quick = {"epochs": 1, "batch_size": 32, "warmup_epochs": 0.5}
        b = str(stopmim.pretrain("scenes:64:48", "runs/compared", "tiny_cpu", optim=quick).path)
    print(f"A is {a}, B is {b}")
    train, test = open_images("scenes:128:48:1"), open_images("scenes:256:48:2")
    asked = ImageRequest(label=("distance", "count"))
    ours, theirs = (Inputs(open_encoder(name), train, test, asked) for name in (a, b))
    for one in compare(ours, theirs, [Knn()]):
        low, high = (100 * edge for edge in one.interval)
        verdict = "no clear difference" if low <= 0 <= high else "they differ"
        print(
            f"{one.label} by k-NN: A {one.a:.1%}, B {one.b:.1%} of {one.n} scenes correct; "
            f"B - A is {100 * one.difference:+.1f} points (95 %: {low:+.1f} to {high:+.1f}, "
            f"p = {one.p:.2g}): {verdict}"
        )


if __name__ == "__main__":
    main()
