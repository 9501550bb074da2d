"""The rows of the table by library."""

from tests.gauntlet.models import (
    from_diffusers,
    from_lightning,
    from_litgpt,
    from_peft,
    from_pytorch_forecasting,
    from_timm,
    from_torchvision,
    from_transformers,
    from_vit_pytorch,
    from_x_transformers,
)

TABLES = (
    from_timm.ROWS, from_torchvision.ROWS, from_x_transformers.ROWS, from_vit_pytorch.ROWS, from_litgpt.ROWS,
    from_diffusers.ROWS, from_peft.ROWS, from_pytorch_forecasting.ROWS, from_lightning.ROWS, from_transformers.ROWS,
)  # fmt: skip
