"""Inference of DeepSeek-V4, DeepSeek-V3.2 and GLM-5 in JAX."""
