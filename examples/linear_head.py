"""Train a linear classifier on frozen features, in plain PyTorch.

python examples/linear_head.py [ENCODER]

ENCODER is anything that `stopmim inspect` recognises. By default a small one is trained, in a few
seconds.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import stopmim
from stopmim.data.sources.open import open_images
from stopmim.evals.features import extract


def main() -> None:
    if len(sys.argv) > 1:
        encoder = stopmim.load_encoder(sys.argv[1])
    else:
        quick = {"epochs": 1, "batch_size": 32, "warmup_epochs": 0.5}
        run = stopmim.pretrain("scenes:128:48", "runs/linear_head", "tiny_cpu", optim=quick)
        encoder = run.encoder()

    scenes = open_images("scenes:512:48:1")  # labels: count, distance, shape, ...
    x = extract(encoder, scenes, size=48)  # (512, D)
    y = torch.from_numpy(scenes.labels["distance"])
    x = (x - x[:384].mean(dim=0)) / (x[:384].std(dim=0) + 1e-6)

    torch.manual_seed(0)
    head = nn.Linear(x.shape[1], int(y.max()) + 1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(200):
        loss = F.cross_entropy(head(x[:384]), y[:384])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct = (head(x[384:]).argmax(dim=1) == y[384:]).float().mean()
    print(f"distance of the nearest object: {correct:.1%} of 128 test scenes correct")


if __name__ == "__main__":
    main()
