"""Files and messages are data: nothing in them is executed, and what they say of sizes is checked before it is used."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.draft_process.sweep import make_directory
from vllm_jetspecpp.models.calibration import load_calibrations
from vllm_jetspecpp.models.checkpoint import check_checkpoint, write_manifest
from vllm_jetspecpp.models.networks import load_networks
from vllm_jetspecpp.models.target_parts import TargetWeights, load_target_config

PACKAGE = Path(__file__).parents[2] / "vllm_jetspecpp"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"torch.load", "torch.jit.load", "torch.package", "torch.hub.load", "os.system", "os.popen", "runpy.run_path"}
KEYWORDS = {"trust_remote_code": False, "allow_pickle": False, "shell": False}
"""Arguments that may only be given with this value."""
WEIGHTS_FROM_HUGGING_FACE = "AutoModelForCausalLM.from_pretrained"


def dangers(path: Path) -> list[str]:
    """Lines that could execute what they read."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        for what in dangers_of(node):
            found.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {what}")
    return found


def dangers_of(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    yield from (name for name in names if name.partition(".")[0] in MODULES or name in METHODS)
    if isinstance(node, ast.Name) and node.id in BUILTINS:
        yield node.id
    if isinstance(node, ast.Attribute) and ast.unparse(node) in METHODS:
        yield ast.unparse(node)
    if isinstance(node, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        for name, allowed in KEYWORDS.items():
            if name in given and not (isinstance(given[name], ast.Constant) and given[name].value is allowed):
                yield name
        safe = given.get("use_safetensors", ast.Constant(False))
        weights = ast.unparse(node.func) == WEIGHTS_FROM_HUGGING_FACE and None not in given
        if weights and not (isinstance(safe, ast.Constant) and safe.value is True):
            yield f"{WEIGHTS_FROM_HUGGING_FACE} without use_safetensors=True"


def test_nothing_in_the_package_executes_what_it_reads() -> None:
    """No exception is made for any file. (Ray and vLLM pickle between their own processes; that is theirs.)"""
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert [line for path in files for line in dangers(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "import yaml",
        "eval(text)",
        "f = exec",
        "torch.load(path, weights_only=True)",
        "from torch import load, hub\nfrom torch.hub import load\n",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trust)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "AutoModelForCausalLM.from_pretrained(path)",
    ],
)
def test_the_scan_sees(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert dangers(tmp_path / "module.py")


def test_temporary_directories_are_the_users_alone() -> None:
    before = os.umask(0)
    try:
        directory, lock = make_directory()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert stat.S_IMODE(os.fstat(lock).st_mode) == 0o600
    os.close(lock)
    (Path(directory) / "owner").unlink()
    Path(directory).rmdir()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture
def checkpoint(target: Path, tmp_path: Path) -> Path:
    make_tiny_checkpoint(target, tmp_path / "checkpoint", draft_vocab_size=100)
    return tmp_path / "checkpoint"


def load(target: Path, checkpoint: Path) -> Any:
    return load_networks(EngineConfig(str(target), str(checkpoint), RoundConfig(3), 1, 64, dtype="float32"))


class Bait:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


opened: list[str] = []
"""Files that Python opened since it was last cleared."""


def note_open(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        opened.append(str(args[0]))


def test_other_files_of_a_checkpoint_are_never_opened(target: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Pickled weights and Python modules, and a config that names them, in both folders."""
    mark = tmp_path / "executed"
    own_target = make_tiny_llama(tmp_path / "target")
    baits = []
    for folder in (own_target, checkpoint, checkpoint / "adapter"):
        for name in ("pytorch_model.bin", "adapter_model.pt", "model.ckpt"):
            (folder / name).write_bytes(pickle.dumps(Bait(mark)))
            baits.append(folder / name)
        for name in ("modeling_tiny.py", "configuration_tiny.py", "__init__.py", "setup.py"):
            (folder / name).write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
            baits.append(folder / name)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["auto_map"] = {"AutoConfig": "configuration_tiny.Tiny", "AutoModelForCausalLM": "modeling_tiny.Tiny"}
        path.write_text(json.dumps(config))
    write_manifest(checkpoint, "tiny")
    sys.addaudithook(note_open)
    opened.clear()
    load(own_target, checkpoint)
    read = [path for path in opened if path.startswith(str(tmp_path))]
    assert str(checkpoint / "config.json") in read, "the hook works"
    assert not mark.exists() and not {str(bait) for bait in baits} & set(read)
    pickle.loads(baits[0].read_bytes())
    assert mark.exists(), "the bait works"


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file and make the manifest agree with it."""
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))
    write_manifest(folder, "tiny")


CONFIG, ADAPTER = "config.json", "adapter/config.json"
ABSURD: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "10^12 layers": (CONFIG, lambda c: c.update(num_hidden_layers=10**12), "num_hidden_layers must be an integer from"),
    "-1 layers": (CONFIG, lambda c: c.update(num_hidden_layers=-1), "num_hidden_layers must be an integer from 1 to"),
    "half a layer": (CONFIG, lambda c: c.update(num_hidden_layers=1.5), "num_hidden_layers must be an integer"),
    "a float": (CONFIG, lambda c: c.update(num_hidden_layers=1e12), "num_hidden_layers must be an integer"),
    "layers as text": (CONFIG, lambda c: c.update(num_hidden_layers="2"), "num_hidden_layers must be an integer"),
    "layers as a truth": (CONFIG, lambda c: c.update(num_hidden_layers=True), "num_hidden_layers must be an integer"),
    "block of 10^12": (CONFIG, lambda c: c.update(block_size=10**12), "block_size must be an integer from 2 to"),
    "block of 0": (CONFIG, lambda c: c.update(block_size=0), "block_size must be an integer from 2 to"),
    "10^12 tokens": (CONFIG, lambda c: c.update(draft_vocab_size=10**12), "draft_vocab_size must be an integer from 1"),
    "0 tokens": (CONFIG, lambda c: c.update(draft_vocab_size=0), "draft_vocab_size must be an integer from 1 to 128"),
    "-1 positions": (CONFIG, lambda c: c.update(max_position_embeddings=-1), "max_position_embeddings must be an int"),
    "hidden size": (CONFIG, lambda c: c.update(hidden_size=10**12), "hidden_size is 1000000000000, the target's is 64"),
    "tap 10^12": (
        CONFIG,
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 10**12]),
        "target_layer_ids must be",
    ),
    "taps as text": (CONFIG, lambda c: c["dflash_config"].update(target_layer_ids="135"), "must be a list of integers"),
    "taps as texts": (CONFIG, lambda c: c["dflash_config"].update(target_layer_ids=["1"]), "must be an integer from"),
    "no section": (CONFIG, lambda c: c.update(dflash_config=[1]), r"dflash_config must be an object, got \[1\]"),
    "our section": (CONFIG, lambda c: c.update(jetspecpp="x"), "jetspecpp must be an object, got 'x'"),
    "10^12 in a module": (
        ADAPTER,
        lambda c: c.update(layers_per_module=[1, 1, 10**12]),
        "layers_per_module must be an",
    ),
    "modules as a number": (ADAPTER, lambda c: c.update(layers_per_module=3), "layers_per_module must be a list"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_built(case: str, target: Path, checkpoint: Path) -> None:
    name, change, message = ABSURD[case]
    edit(checkpoint, name, change)
    with pytest.raises(ValueError, match=message) as error:
        check_checkpoint(checkpoint, load_target_config(target))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CONFIG, "[1, 2]", "must hold a JSON object"),
        (CONFIG, "[" * 200_000, "is not JSON"),
        (CONFIG, "{", "is not JSON"),
        ("manifest.json", "7", "must hold a JSON object"),
        ("manifest.json", '{"files": [1]}', "files must be an object"),
        ("manifest.json", '{"files": {}}', "does not list config.json"),
    ],
)
def test_broken_json_is_refused(name: str, text: str, message: str, target: Path, checkpoint: Path) -> None:
    (checkpoint / name).write_text(text)
    if name == CONFIG:
        write_manifest(checkpoint, "tiny")
    with pytest.raises(ValueError, match=message):
        check_checkpoint(checkpoint, load_target_config(target))


def test_manifest_entries_and_the_size_of_json_are_checked(target: Path, checkpoint: Path) -> None:
    config = load_target_config(target)
    for entry in (7, {"size": 3}, {"size": "x", "sha256": 1}, {"size": 1, "sha256": "", "more": 1}):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"][CONFIG] = entry
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=r"must have 'size' and 'sha256'|the manifest says x"):
            check_checkpoint(checkpoint, config)
        write_manifest(checkpoint, "tiny")
    with (checkpoint / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="1099511627776 bytes, allowed are"):
        check_checkpoint(checkpoint, config)


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (
        lambda t: t.update({"fc.weight": torch.zeros(64, 64)}),
        r"fc.weight has shape \[64, 64\], the config says",
    ),
    "dimensions": (lambda t: t.update({"norm.weight": torch.zeros(1, 64)}), r"norm.weight has shape \[1, 64\]"),
    "dtype": (lambda t: t.update({"norm.weight": torch.zeros(64, dtype=torch.int32)}), "norm.weight is of dtype I32"),
    "missing": (lambda t: t.pop("norm.weight"), r"missing tensors \['norm.weight'\]"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(1)), r"unexpected tensors \['extra'\]"),
    "scale": (
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8), "fc.weight_scale": torch.ones(3)}),
        r"fc.weight_scale has shape \[3\], the config says \[64\]",
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_tensors_are_compared_with_the_config_by_the_header(case: str, target: Path, checkpoint: Path) -> None:
    change, message = BAD_WEIGHTS[case]
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    write_manifest(checkpoint, "tiny")
    with pytest.raises(ValueError, match=message) as error:
        load(target, checkpoint)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 4,
        (1 << 62).to_bytes(8, "little") + b"{}",  # a header of 2^62 bytes
        (16).to_bytes(8, "little") + b"[" * 16,
        (68).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9999999999], "data_offsets": [0, 4]}}'[:68],
        (70).to_bytes(8, "little") + b'{"a": {"dtype":"F32","shape":[4294967296],"data_offsets":[0,16]}}     ',
        pickle.dumps({"fc.weight": 1}),
    ],
    ids=["empty", "four bytes", "huge header", "no JSON", "cut header", "shape beyond the file", "pickle"],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes, target: Path, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(data)
    write_manifest(checkpoint, "tiny")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(target, checkpoint)


def test_token_ids_outside_the_vocabulary_are_refused(target: Path, checkpoint: Path) -> None:
    for wrong in (-1, 128):
        ids = torch.arange(100, dtype=torch.int32)
        ids[50] = wrong
        save_file({"token_ids": ids}, checkpoint / "adapter/head.safetensors")
        write_manifest(checkpoint, "tiny")
        with pytest.raises(ValueError, match=r"must lie in 0\.\.127, got"):
            load(target, checkpoint)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_an_index_names_files_of_its_folder(file: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="not a safetensors file of its folder"):
        TargetWeights(tmp_path)


@pytest.mark.parametrize(
    "fits",
    [7, [7], [{"num_draft_tokens": 10**12}], [{"weights": "abc"}], [{"beta": "1"}], [{"weights": [0.0] * 10**5}]],
)
def test_calibration_is_checked(fits: Any, tmp_path: Path) -> None:
    right = {"num_draft_tokens": 7, "weights": [0.0] * 6, "beta": 1.0, "threshold": -1.0, "coverage": 0.9}
    (tmp_path / "calibration").mkdir()
    path = tmp_path / "calibration/thresholds.json"
    path.write_text(json.dumps({"fits": [right]}))
    assert len(load_calibrations(tmp_path)) == 1
    changed = (
        [right | entry if isinstance(entry, dict) else entry for entry in fits] if isinstance(fits, list) else fits
    )
    path.write_text(json.dumps({"fits": changed}))
    with pytest.raises(ValueError, match=r"thresholds\.json"):
        load_calibrations(tmp_path)
