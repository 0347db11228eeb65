"""Turn a llama-architecture GGUF file into a Hugging Face checkpoint folder.

transformers can read GGUF files, but keeps the quantised modules and cannot save them,
so everything is written here: weights, configuration and tokenizer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# GGUF tensor names to those of transformers' LlamaForCausalLM.
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# `tokenizer.ggml.token_type` of a token that text never produces.
CONTROL_TOKEN = 3


def convert(
    source: Path, target: Path, advance: Callable[[int, int], None] | None = None
) -> None:
    """Write the checkpoint of a GGUF file into an existing, empty folder.

    Args:
        source: a GGUF file of the llama architecture with tied embeddings and a
            byte-level BPE tokenizer that splits digits (`smollm`).
        target: the folder to fill.
        advance: called with (tensors done, tensors in all) as the weights go by.
    """
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if meta.get(key) != expected:
            raise ValueError(f"{source}: {key} is {meta.get(key)!r}, not {expected!r}")
    _write_json(target / "config.json", model_config(meta))
    _write_json(target / "generation_config.json", generation_config(meta))
    _write_json(target / "tokenizer_config.json", tokenizer_config(meta))
    build_tokenizer(meta).save(str(target / "tokenizer.json"))
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name, rows = _rename(tensor.name, rows, meta)
        weights[name] = torch.from_numpy(rows.copy()).to(torch.bfloat16)
        if advance is not None:
            advance(done, len(reader.tensors))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def undo_rotary_order(
    rows: npt.NDArray[np.float32], num_heads: int
) -> npt.NDArray[np.float32]:
    """Put the rows of a q or k projection back into transformers' order.

    GGUF interleaves the two halves that a rotary embedding pairs.

    Args:
        rows: [num_heads * head_dim, hidden] float32, in GGUF order.
        num_heads: query heads for q, key-value heads for k.

    Returns:
        [num_heads * head_dim, hidden] float32, in transformers' order.
    """
    paired = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _rename(
    name: str, rows: npt.NDArray[np.float32], meta: dict[str, Any]
) -> tuple[str, npt.NDArray[np.float32]]:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name], rows
    _, layer, part, _ = name.split(".")  # blk.<layer>.<part>.weight
    if part == "attn_q":
        rows = undo_rotary_order(rows, meta["llama.attention.head_count"])
    elif part == "attn_k":
        rows = undo_rotary_order(rows, meta["llama.attention.head_count_kv"])
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", rows


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json."""
    heads = meta["llama.attention.head_count"]
    # float32 in the file: 9.99999975e-06 stands for 1e-05.
    epsilon = float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": epsilon,
        "rope_theta": meta["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **_special_ids(meta),
    }


def generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the content of generation_config.json."""
    return _special_ids(meta)


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, chat template included."""
    tokens = meta["tokenizer.ggml.tokens"]
    ids = _special_ids(meta)
    return {
        # transformers' own GPT-2 class would replace the digit-splitting step.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer, each digit a token of its own."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
