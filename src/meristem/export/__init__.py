"""Taking a trained model elsewhere: Hugging Face transformers, stock Llama or Qwen3, ONNX, GGUF."""

from meristem.export.run import Export, export_run

__all__ = ["Export", "export_run"]
