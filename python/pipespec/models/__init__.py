"""HuggingFace models: loading, devices, GGUF files, weights in blocks, tokenizers, families, RoPE, and differences between versions of transformers."""
