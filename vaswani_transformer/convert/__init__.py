"""Conversion of models from and to other tools, and the command `vaswani-convert`."""

from .ctranslate2_exporter import to_ctranslate2
from .fairseq import from_fairseq
from .foreign import ImportResult, from_fsmt, from_marian
from .onnx_exporter import OnnxExport, to_onnx

__all__ = ["ImportResult", "OnnxExport", "from_fairseq", "from_fsmt", "from_marian", "to_ctranslate2", "to_onnx"]
