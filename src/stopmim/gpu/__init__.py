"""How it is computed: the way through blocks, kernels, CUDA graphs, devices, sharded tensors."""
