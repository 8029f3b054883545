"""Plain torch: what the fused kernels are tested against, and what runs where they cannot."""
