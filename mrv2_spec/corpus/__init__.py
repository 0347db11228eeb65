"""The memory of suffix decoding as a file: format, packing, building from texts.

Nothing here imports vLLM; only `packing` imports torch. See docs/corpus.md.
"""
