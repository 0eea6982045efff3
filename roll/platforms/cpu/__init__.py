"""The engines on a CPU: C++ operators of SGLang and Megatron, memory that processes share, gloo."""
