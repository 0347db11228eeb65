"""Tokens that stand for embeddings: they say nothing about the text around them."""

# Where multimodal models name the token that stands for an embedding.
_PLACEHOLDER_FIELDS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


def find_placeholder_ids(hf_config: object) -> list[int]:
    """Return the ids of the tokens that stand for image, video or audio embeddings.

    Args:
        hf_config: the model's Hugging Face configuration.
    """
    ids = (getattr(hf_config, name, None) for name in _PLACEHOLDER_FIELDS)
    return sorted({token for token in ids if isinstance(token, int)})
