"""GPU kernels of sglang_adapt, each with a plain PyTorch reference."""
