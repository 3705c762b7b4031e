"""StoP in your own predictor: the three lines marked <- are all it takes.

python examples/custom_positions.py
"""

import torch
from torch import Tensor, nn

from stopmim import StochasticPositions


class MyPredictor(nn.Module):
    """A predictor in plain PyTorch, except for its positions."""

    def __init__(self, side: int, encoder_width: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(encoder_width, width)  # A of the paper
        self.positions = StochasticPositions(side, width, sigma=0.25)  # <- psi and m~
        layer = nn.TransformerEncoderLayer(width, nhead=4, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, encoder_width)

    def forward(self, context: Tensor, context_index: Tensor, masked_index: Tensor) -> Tensor:
        seen = self.embed(context) + self.positions.mean(context_index, "context")  # <- A s + psi
        masked = self.positions(masked_index, self.embed)  # <- A n + psi + m~: the same A
        tokens = self.layers(torch.cat([seen, masked], dim=1))
        return self.head(tokens[:, seen.shape[1] :])


def main() -> None:
    torch.manual_seed(0)
    predictor = MyPredictor(side=14, encoder_width=192, width=96)
    features = torch.randn(8, 50, 192)  # from an encoder, of 50 visible patches
    context_index = torch.stack([torch.randperm(196)[:50] for _ in range(8)])
    masked_index = torch.randint(0, 196, (8, 30))

    first, second = (predictor(features, context_index, masked_index) for _ in range(2))
    print(f"training: two passes differ by {(first - second).abs().mean():.4f} on average")
    predictor.eval()
    first, second = (predictor(features, context_index, masked_index) for _ in range(2))
    print(f"evaluation: two passes differ by {(first - second).abs().max():.4f}")


if __name__ == "__main__":
    main()
