"""The house itself: which module may know which, and what must never be called."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stopmim"
FILES = sorted(SOURCE.rglob("*.py"))

# What a module may import of ours. Anything not named here may import everything.
ALLOWED = {
    "errors": set[str](),
    "arch": {"errors"},
    "keys": set[str](),
    "faults": set[str](),
    "schedules": set[str](),
    "config": {"arch", "errors"},
    "presets": {"config"},
    "positions": set[str](),
    "masking": set[str](),
    "kernels": set[str](),
    "attention": {"kernels"},
    "vit": {"arch", "attention", "positions"},
    "data2vec": {"vit"},
    "untrusted": {"errors"},
    "predictor": {"positions", "vit"},
    "mim": {"arch", "config", "keys", "positions", "predictor", "vit"},
    "optim": {"config", "mim", "schedules"},
    "recorded": {"console"},
    "checkpoint": {"_version", "config", "console", "distributed", "errors", "faults"},
    "distributed": {"console", "errors", "mim"},
    "health": {"config", "data", "distributed", "keys", "masking", "mim", "plan", "positions"}
    | {"predictor"},
    "mirror": {"errors", "run"},
    "console": set[str](),
    "data": {"config", "data", "errors", "keys"},
}


def imports(path: Path) -> set[str]:
    """First components below `stopmim` that the file at `path` imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "stopmim":
            names = [f"stopmim.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found |= {n.split(".")[1] for n in names if n.startswith("stopmim.")}
    return found


@pytest.mark.parametrize("module", ALLOWED)
def test_imports_point_one_way(module: str) -> None:
    own = [
        path for path in FILES if path.relative_to(SOURCE).parts[0].removesuffix(".py") == module
    ]
    assert own
    for path in own:
        assert imports(path) <= ALLOWED[module], path


def test_training_does_not_need_evaluation_analysis_or_report() -> None:
    names = ["train", "update", "run", "plan", "interop", "foreign", "health", "doctor", "mirror"]
    for name in [*names, "identify", "export", "card"]:
        assert not imports(SOURCE / f"{name}.py") & {"evals", "analysis", "report", "demo", "cli"}


def test_the_base_package_never_imports_torchvision_or_an_extra() -> None:
    extras = {"torchvision", "timm", "transformers", "wandb", "tensorboard", "webdataset"}
    extras |= {"onnx", "onnxruntime", "onnxscript", "pyarrow"}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names}
                names.add((getattr(node, "module", None) or "").split(".")[0])
                assert not names & extras, path


def test_nothing_that_executes_a_file_is_called() -> None:
    """No pickle, no unsafe torch.load, no YAML loader but ours, no tar extraction, no eval."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load"}, path
            assert not name.endswith((".extractall", ".full_load", ".unsafe_load")), path
            if name == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("weights_only") == "True", path
            assert name != "pickle.dump", path
            # I-JEPA's layout is a pickle: `export --to ijepa` is the one place that writes one.
            assert name != "torch.save" or path.name == "stop_ijepa.py", path


def test_a_pickle_is_written_for_the_code_of_ijepa_alone() -> None:
    tree = ast.parse((SOURCE / "weights" / "formats" / "stop_ijepa.py").read_text())
    places = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and "torch.save(" in ast.unparse(function)
    ]
    assert places == ["write"]


def test_every_file_is_ascii() -> None:
    for path in FILES:
        assert path.read_bytes().isascii(), path
