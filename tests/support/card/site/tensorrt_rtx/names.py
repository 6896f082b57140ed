"""TensorRT-RTX's enumerations, and its log."""

import sys
from enum import Enum, IntEnum, IntFlag

from card_backends import listed

from .operators import LAYERS


class Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    """To be derived from."""

    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def log(self, severity, message):
        raise NotImplementedError


class Logger(ILogger):
    """Writes warnings and errors to standard error."""

    def __init__(self, least=Severity.WARNING):
        self._least = least

    def log(self, severity, message):
        if severity <= self._least:
            print(severity.name, message, file=sys.stderr)


DataType = Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4 FP4")
float32 = DataType.FLOAT
BY_ONNX = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 16: "BF16", 17: "FP8"}
TensorIOMode = Enum("TensorIOMode", "NONE INPUT OUTPUT")
LayerInformationFormat = Enum("LayerInformationFormat", "ONELINE JSON")
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1})
ProfilingVerbosity = Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED")
BuilderFlag = Enum("BuilderFlag", "TF32 REQUIRE_USER_ALLOCATION WEIGHT_STREAMING REFIT STRIP_PLAN")
MemoryPoolType = Enum("MemoryPoolType", "WORKSPACE")
HardwareCompatibilityLevel = Enum("HardwareCompatibilityLevel", "NONE")
ComputeCapability = Enum("ComputeCapability", ["NONE", "CURRENT", *(f"SM{name}" for name in listed())])
LayerType = Enum("LayerType", sorted({kind for layers in LAYERS.values() for _, kind in layers}))
ElementWiseOperation = Enum("ElementWiseOperation", {"SUM": "Add", "PROD": "Mul"})
CudaGraphStrategy = Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")
DynamicShapesKernelSpecializationStrategy = Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE")
ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
EngineValidity = Enum("EngineValidity", "VALID SUBOPTIMAL INVALID")


class EngineInvalidityDiagnostics(IntFlag):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64
