"""The switch: one public function per kernel. Callers import from here and nowhere else.

Today every function is the plain torch reference, on every device; a fused twin of the same name and signature under
`kernels/fused/` will be picked where it runs.
"""

from hf_dcut.kernels.reference.packed_attention import band, decode_attention, prefill_attention

__all__ = ["band", "decode_attention", "prefill_attention"]
