"""The model that is timed: the shape of Llama-3.1-8B, or a tiny one for a CPU."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape and the engine settings that all arms share."""

    name: str
    config: dict[str, Any]
    engine: dict[str, Any]
    environment: dict[str, str]
    # How much slower than the 8B shape on the GPU, for planning alone.
    slowness: float = 1.0

    def kv_gib(self, most: int | None, wanted: float) -> float:
        """Return the KV cache for so many requests of full length, at most as wanted.

        Args:
            most: requests at a time; None for any number.
            wanted: GiB.
        """
        if most is None or "num_hidden_layers" not in self.config:
            return wanted
        heads = self.config["num_key_value_heads"]
        width = self.config["hidden_size"] // self.config["num_attention_heads"]
        # Keys and values, two bytes each.
        token_bytes = 4 * self.config["num_hidden_layers"] * heads * width
        tokens = most * self.engine["max_model_len"]
        return min(wanted, tokens * token_bytes / 2**30)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens; trajectories are permuted within it."""
        size: int = self.config["vocab_size"]
        return size


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

LLAMA_8B = Shape(
    name="llama-8b",
    config={
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 131072,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    engine={
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        # Small: engines start side by side, and the KV cache is given in bytes.
        "gpu_memory_utilization": 0.05,
    },
    environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
)

TINY = Shape(
    name="tiny",
    config={
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # Small, for Triton's interpreter; the texts' tokens are folded into it.
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    },
    engine={
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
    },
    environment={"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    slowness=30.0,
)

# A real model, with its own weights.
SMOLLM2 = Shape(
    name="smollm2",
    config={"vocab_size": 49152},
    engine={
        "load_format": "auto",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.03,
    },
    environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
)

SMOLLM2_CPU = Shape(
    name="smollm2-cpu",
    config={"vocab_size": 49152},
    engine={
        "load_format": "auto",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
    },
    environment=TINY.environment,
    slowness=100.0,
)

# Collectives through NCCL's rings alone, no NVLink multicast: what is looked at is what
# the ranks decide, not how fast they add.
_NCCL_ALONE = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}


def _on_two_ranks(shape: Shape, layers: int, **engine: Any) -> Shape:
    return Shape(
        name=f"{shape.name}-tp2",
        config={**shape.config, "num_hidden_layers": layers},
        engine={
            **shape.engine,
            "worker_extension_cls": "grid.ranks_worker.RanksWorker",
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            **engine,
        },
        environment={**shape.environment, **_NCCL_ALONE},
        slowness=shape.slowness,
    )


# Fewer layers: steps are short, and delays weigh more.
LLAMA_8B_TP2 = _on_two_ranks(
    LLAMA_8B,
    4,
    max_num_seqs=32,
    disable_custom_all_reduce=True,
    compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
)
TINY_TP2 = _on_two_ranks(
    replace(
        TINY, environment={**TINY.environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ),
    2,
)

SHAPES = {
    shape.name: shape
    for shape in (LLAMA_8B, TINY, SMOLLM2, SMOLLM2_CPU, LLAMA_8B_TP2, TINY_TP2)
}


def write_model(shape: Shape, folder: Path) -> Path:
    """Write the configuration that vLLM fills with dummy weights; return its folder."""
    path = folder / shape.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape.config))
    return path


def engine_args(shape: Shape, model: Path, kv_gib: float) -> dict[str, Any]:
    """Return the engine arguments that are the same in every arm."""
    args: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # On: a repeat finds its prompts' cache, so that its requests decode together
        # from the first step on and no prefill falls between.
        "enable_prefix_caching": True,
        "worker_extension_cls": "grid.worker.GridWorker",
        "disable_log_stats": False,
        "seed": 0,
        **shape.engine,
    }
    if "VLLM_CPU_KVCACHE_SPACE" not in shape.environment:
        args["kv_cache_memory_bytes"] = int(kv_gib * 2**30)
    return args
