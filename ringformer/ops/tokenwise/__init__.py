"""Operations that compute each token on its own: embedding, RoPE, blockwise feed-forward, cross-entropy."""
