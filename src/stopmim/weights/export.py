"""Encoders in the formats others load: timm, Hugging Face, ONNX, I-JEPA, MAE, safetensors.

An export is a folder with the weights and a README.md, written whole or not at all.
"""

from pathlib import Path

from stopmim.base.console import say
from stopmim.base.errors import (
    CheckpointError,
    NonFiniteError,
    UserError,
    did_you_mean,
)
from stopmim.base.files import replaced
from stopmim.method.encoder import VisionTransformer
from stopmim.runs.checkpoint import first_not_finite
from stopmim.weights import load
from stopmim.weights.card import card
from stopmim.weights.inspect import identify
from stopmim.weights.push import connect, push
from stopmim.weights.vit import Branch


def export(
    path: str | Path,
    to: str,
    out: str | Path,
    *,
    branch: Branch = "target",
    heads: int | None = None,
    repo: str | None = None,
) -> Path:
    """Writes the encoder in `path`, or for "ijepa" and "mae" the whole model, to the folder `out`.

    Args:
        path: anything `load_encoder` reads.
        to: timm, hf (a folder for ``from_pretrained``), onnx, ijepa, mae, or safetensors.
        branch: "target" is the EMA encoder, which the papers evaluate. I-JEPA's layout has both.
        repo: USER/NAME of a repository on the Hugging Face hub to upload the folder to.
    """
    known, out = {x.word: x for x in load.FORMATS if x.word}, Path(out)
    if to not in known:
        near = did_you_mean(to, known)
        what = f"--to: no format {to!r}; {near}formats are {', '.join(known)}"
        raise UserError(f"{what}; see stopmim export --help")
    target = known[to]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another --out")
    hub = connect(repo) if repo else None  # fails before any work
    contents = identify(path, heads)
    if target.whole_model and branch != "target" and contents.branches:
        what = f"--to {to} writes the whole model with both encoders"
        raise UserError(f"--branch: {what}; leave it out")
    encoder = contents.encoder
    if branch != "target":
        # Not from a run's newest checkpoint: the card is about the one that was identified.
        model = contents.model
        encoder = model.branch(branch) if model else load.load_encoder(path, branch, heads)
    if not isinstance(encoder, VisionTransformer):
        what = f"{contents.project}; only plain ViTs can be exported"
        raise CheckpointError(f"{path}: an encoder of {what}")
    whole = contents.model if target.whole_model and contents.model else encoder
    if key := first_not_finite(whole.state_dict()):
        raise NonFiniteError(f"{path}: {key} has values that are not finite; nothing was written")
    text = card(target, contents, encoder, branch)
    with replaced(out, folder=True) as temporary:
        target.write(contents, encoder, temporary)
        # A path in the card need not be valid text.
        (temporary / "README.md").write_text(text, "utf-8", "backslashreplace")
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors makes its files 0600
    if repo:
        say(f"pushed to {push(hub, out, repo)}")
    return out
