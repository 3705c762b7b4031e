"""The real transformers and timm: their models become ours with the same features, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stopmim
from helpers import seeded
from stopmim.base.errors import CheckpointError
from stopmim.method.encoder import VisionTransformer
from stopmim.method.positions import sincos_2d

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 192,
    "image_size": 32,
    "patch_size": 8,
}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_intermediate_size": 8,
}


def pictures() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=seeded())


def hub_model(transformers: Any, name: str, **options: Any) -> Any:
    """A small model with random values where an untrained one has zeros and ones."""
    torch.manual_seed(0)
    config = name.replace("Model", "").partition("For")[0] + "Config"
    extra = DECODER if "MAE" in name else {}
    model = getattr(transformers, name)(getattr(transformers, config)(**SMALL | extra | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(1))
    return model.eval()


@torch.no_grad()
def hub_tokens(model: Any) -> Tensor:
    """Tokens of all patches, in their order."""
    model = getattr(model, "ijepa", getattr(model, "vit", model))
    if "MAE" in type(model).__name__:  # it hides patches in evaluation too, and shuffles the rest
        model.config.mask_ratio = 0.0
        noise = torch.arange(16.0).expand(2, -1)
        return model(pictures(), noise=noise).last_hidden_state[:, 1:]
    tokens: Tensor = model(pictures()).last_hidden_state
    return tokens[:, -16:]


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
@pytest.mark.parametrize(
    "name",
    [
        "IJepaModel",
        "IJepaForImageClassification",
        "ViTModel",
        "ViTForImageClassification",
        "ViTMAEModel",
        "ViTMAEForPreTraining",
    ],
)
def test_a_model_of_transformers_gives_the_same_features_here(
    name: str, eps: float, transformers: Any, tmp_path: Path
) -> None:
    model = hub_model(transformers, name, layer_norm_eps=eps)
    model.save_pretrained(tmp_path)
    encoder = stopmim.load_encoder(tmp_path)
    assert isinstance(encoder, VisionTransformer)
    assert {m.eps for m in encoder.modules() if isinstance(m, nn.LayerNorm)} == {eps}
    with torch.no_grad():
        torch.testing.assert_close(encoder(pictures()), hub_tokens(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["IJepaModel", "ViTModel"])
def test_several_layers_are_the_hidden_states_of_transformers_after_the_final_norm(
    name: str, transformers: Any, tmp_path: Path
) -> None:
    """Theirs are not normed; the papers' are, each by the norm of the last block."""
    model = hub_model(transformers, name, layer_norm_eps=1e-6)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        states = model(pictures(), output_hidden_states=True).hidden_states[-2:]
        normed = torch.cat([model.layernorm(x)[:, -16:].mean(dim=1) for x in states], dim=1)
        found = stopmim.load_encoder(tmp_path).features(pictures(), layers=2)
    torch.testing.assert_close(found, normed, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["IJepaModel", "ViTModel"])
@pytest.mark.parametrize("size", [(48, 48), (24, 40)])
def test_other_image_sizes_are_what_transformers_makes_of_them_when_it_is_told_to(
    name: str, size: tuple[int, int], transformers: Any, tmp_path: Path
) -> None:
    model = hub_model(transformers, name, layer_norm_eps=1e-6)
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, *size, generator=seeded())
    with torch.no_grad():
        theirs = model(images, interpolate_pos_encoding=True).last_hidden_state
        found = stopmim.load_encoder(tmp_path)(images)
    torch.testing.assert_close(found, theirs[:, -found.shape[1] :], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["IJepaModel", "ViTModel"])
def test_the_names_models_have_in_memory_are_read_as_well(
    name: str, transformers: Any, tmp_path: Path
) -> None:
    model = hub_model(transformers, name)
    model.save_pretrained(tmp_path, save_original_format=False)
    with torch.no_grad():
        found = stopmim.load_encoder(tmp_path)(pictures())
    torch.testing.assert_close(found, hub_tokens(model), atol=1e-5, rtol=0)


def test_an_old_folder_with_a_pickle_is_read(transformers: Any, tmp_path: Path) -> None:
    model = hub_model(transformers, "ViTModel")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with torch.no_grad():
        found = stopmim.load_encoder(tmp_path)(pictures())
    torch.testing.assert_close(found, hub_tokens(model), atol=1e-5, rtol=0)


def test_a_table_with_rows_and_columns_swapped_is_refused(
    transformers: Any, tmp_path: Path
) -> None:
    model = hub_model(transformers, "ViTMAEModel")
    table = model.embeddings.position_embeddings.data
    table[0, 1:] = sincos_2d(4, 48).view(4, 4, 48).transpose(0, 1).reshape(16, 48)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="rows and columns swapped") as caught:
        stopmim.load_encoder(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
