"""ONNX, written only: images (B, C, S, S) to features (B, D) and tokens (B, N, D) for any B."""

import json
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from stopmim.base.errors import CheckpointError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.method.encoder import VisionTransformer
from stopmim.weights import vit
from stopmim.weights.format import Contents, Format

AGREE = 1e-4  # difference allowed between the features of an ONNX file and ours
OPSET = 18


class Onnx(Format):
    name = "ONNX"
    word = "onnx"
    used_by = "ONNX"

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        """Writes model.onnx and compares its features with ours."""
        # Without it, importing onnxruntime starts a telemetry session, and leaves TMPDIR/.ses.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime
            import onnxscript  # noqa: F401 - the exporter needs it
        except ImportError as error:
            raise UserError(f'export: {error}; pip install "stopmim[onnx]"') from None
        file, size = folder / "model.onnx", encoder.side * encoder.patch
        generator = torch_generator("onnx")
        shape = (encoder.channels, size, size)
        images = [torch.randn(n, *shape, generator=generator) for n in (2, 3)]
        network = FeaturesAndTokens(encoder).eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own exporter
            program = torch.onnx.export(
                network,
                (images[0],),
                input_names=["images"],
                output_names=["features", "tokens"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            for name, tag in vit.pixels_tag(contents.stats).items():
                program.model.metadata_props[name] = json.dumps(tag)
            program.save(file, external_data=False)
            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            for batch in images:
                theirs = session.run(None, {"images": batch.numpy()})
                for found, want in zip(theirs, network(batch), strict=True):
                    worst = float((torch.from_numpy(found) - want).abs().max())
                    if not worst <= AGREE * max(1.0, float(want.abs().max())):
                        raise CheckpointError(f"{file}: its features are off by {worst:.1g}")


class FeaturesAndTokens(nn.Module):
    """One vector per image, and all tokens."""

    def __init__(self, encoder: VisionTransformer) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(images, all_tokens=True)
        tokens = x[:, self.encoder.prefix :]
        return (x[:, 0] if self.encoder.prefix else tokens.mean(dim=1)), tokens
