"""Which reader a Hugging Face model_type has: one table over the dense families and those with experts."""

from collections.abc import Callable

from armillary.spec.hf import dense, moe
from armillary.spec.hf.layers import Fields, Raw

READERS: dict[str, Callable[[Raw], Fields]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "ministral": dense.mistral,
    "mixtral": moe.mixtral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3_moe": moe.qwen3_moe,
    "phi": dense.phi,
    "phi3": dense.phi3,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma3": dense.gemma3,
    "olmo": dense.olmo,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo3,
    "olmoe": moe.olmoe,
    "gpt2": dense.gpt2,
    "gpt_neox": dense.gpt_neox,
    "falcon": dense.falcon,
    "mpt": dense.mpt,
    "glm4_moe": moe.glm4_moe,
    "deepseek_v2": moe.deepseek,
    "deepseek_v3": moe.deepseek,
    "kimi_k2": moe.deepseek,
    "gpt_oss": moe.gpt_oss,
    "llama4": moe.llama4,
    "llama4_text": moe.llama4,
    "smollm3": dense.smollm3,
    "granite": dense.granite,
    "dbrx": moe.dbrx,
}
