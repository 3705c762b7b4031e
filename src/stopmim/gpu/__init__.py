"""Computation on devices: attention and blocks, fused kernels, CUDA graphs, sharded tensors."""
