"""Kernels for the attention of a block, with the contract of `blockwise_attention`: flash attention in Pallas for TPUs,
cuDNN for GPUs.
"""
