"""A stand-in for TensorRT-RTX: plans are ONNX models, which ONNX Runtime's CPU provider runs on the stand-in card.

Of its Python API what specbuild uses, and as strict as it is documented to be.
"""

from .building import (
    Builder,
    IBuilderConfig,
    INetworkDefinition,
    IOptimizationProfile,
    IProgressMonitor,
    OnnxParser,
)
from .context import IExecutionContext, IRuntimeCache, IRuntimeConfig, compilations
from .engine import EngineInspector, ICudaEngine, Runtime
from .names import (
    BuilderFlag,
    ComputeCapability,
    CudaGraphStrategy,
    DataType,
    DynamicShapesKernelSpecializationStrategy,
    ElementWiseOperation,
    EngineInvalidityDiagnostics,
    EngineValidity,
    ExecutionContextAllocationStrategy,
    HardwareCompatibilityLevel,
    ILogger,
    LayerInformationFormat,
    LayerType,
    Logger,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    ProfilingVerbosity,
    TensorIOMode,
    float32,
)
from .network import IAttentionInputLayer, ILayer, ITensor
from .plan import VERSION

__version__ = VERSION
__all__ = [
    "Builder",
    "BuilderFlag",
    "ComputeCapability",
    "CudaGraphStrategy",
    "DataType",
    "DynamicShapesKernelSpecializationStrategy",
    "ElementWiseOperation",
    "EngineInspector",
    "EngineInvalidityDiagnostics",
    "EngineValidity",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "IAttentionInputLayer",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "ILayer",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IProgressMonitor",
    "IRuntimeCache",
    "IRuntimeConfig",
    "ITensor",
    "LayerInformationFormat",
    "LayerType",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "ProfilingVerbosity",
    "Runtime",
    "TensorIOMode",
    "compilations",
    "float32",
]
