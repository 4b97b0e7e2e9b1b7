"""What a trained model can do."""

from meristem.evaluation.held_out import held_out_loss, held_out_windows

__all__ = ["held_out_loss", "held_out_windows"]
