"""Attention of a block in kernels, behind the contract of `blockwise_attention`: flash attention in Pallas for TPUs,
cuDNN for GPUs.
"""
