"""Groups of operators whose outputs may be kept where the rest is recomputed, by name. Torch-free."""

from __future__ import annotations

SAVE_GROUPS: dict[str, tuple[str, ...]] = {
    "mm": ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
    ),
}
"""What the names in `recompute_save` stand for: aten operators (and ours for attention)."""
