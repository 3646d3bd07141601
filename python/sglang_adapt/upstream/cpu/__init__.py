"""Stock sglang on a plain CPU: a platform whose devices are virtual GPUs, slots backed by host memory."""
