"""`LogitsPipe`: typed, legalized and fused chains of processors, under FlashInfer's names."""

from adapters.pipe.compiler import Compiler, compile_pipeline
from adapters.pipe.fusion_rules import FusionRule
from adapters.pipe.legalization import LegalizationError, legalize_processors
from adapters.pipe.op import Op, ParameterizedOp
from adapters.pipe.pipeline import LogitsPipe
from adapters.pipe.processors import LogitsProcessor, MinP, Sample, Softmax, Temperature, TopK, TopP
from adapters.pipe.shaping import Shaping
from adapters.pipe.types import TaggedTensor, TensorType
from adapters.pipe.validators import CompileError

__all__ = [
    "CompileError",
    "Compiler",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Shaping",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
    "compile_pipeline",
    "legalize_processors",
]
