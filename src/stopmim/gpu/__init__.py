"""How it is computed: attention and GELU kernels, CUDA graphs, devices, sharded tensors."""
