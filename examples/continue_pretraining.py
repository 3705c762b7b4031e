"""Continue pretraining from an existing encoder, on your own images.

python examples/continue_pretraining.py [ENCODER]

ENCODER is anything that `stopmim inspect` recognises: I-JEPA, MAE, DINO, a Hugging Face folder. By
default a small one is trained first and exported to Hugging Face's format.
"""

import sys

import stopmim
from stopmim.weights.export import export
from stopmim.weights.inspect import identify

QUICK = {"epochs": 1, "batch_size": 32, "warmup_epochs": 0.5}


def main() -> None:
    if len(sys.argv) > 1:
        source = sys.argv[1]
    else:
        run = stopmim.pretrain("scenes:64:48", "runs/theirs", "tiny_cpu", optim=QUICK)
        source = f"{export(run.path, 'hf', 'theirs')}"
    print(identify(source))

    # The predictor is new and must not spoil the encoder: low learning rate, slow target encoder.
    gentle = QUICK | {"lr": 1e-4, "start_lr": 1e-5, "ema": (0.9995, 1.0)}
    run = stopmim.pretrain("scenes:64:48:1", "runs/ours", "tiny_cpu", init=source, optim=gentle)
    print(f"loss {run.metrics[-1]['loss']:.3f} after {run.metrics[-1]['step']} updates")


if __name__ == "__main__":
    main()
