"""HuggingFace models: loading them, their RoPE, and the differences between versions of transformers."""
