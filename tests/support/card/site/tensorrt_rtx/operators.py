"""The operators that the stand-in's parser takes, and the layers that each becomes: its name's end, and its type."""

_ELEMENTWISE = "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul Or Pow Sub Xor"
_UNARY = "Abs Ceil Cos Erf Exp Floor Log Neg Not Reciprocal Round Sign Sin Sqrt"
_ACTIVATION = "Clip Elu Gelu LeakyRelu Relu Sigmoid Softplus Tanh"
_SHUFFLE = "Flatten Reshape Squeeze Transpose Unsqueeze Identity"
_OTHERS = {
    "Cast": "CAST",
    "Concat": "CONCATENATION",
    "Constant": "CONSTANT",
    "ConstantOfShape": "FILL",
    "CumSum": "CUMULATIVE",
    "DequantizeLinear": "DEQUANTIZE",
    "Expand": "SLICE",
    "Gather": "GATHER",
    "GatherElements": "GATHER",
    "GatherND": "GATHER",
    "Gemm": "MATRIX_MULTIPLY",
    "LayerNormalization": "NORMALIZATION",
    "MatMul": "MATRIX_MULTIPLY",
    "QuantizeLinear": "QUANTIZE",
    "RMSNormalization": "NORMALIZATION",
    "Range": "FILL",
    "ReduceMax": "REDUCE",
    "ReduceMean": "REDUCE",
    "ReduceSum": "REDUCE",
    "RotaryEmbedding": "ROTARY_EMBEDDING",
    "Shape": "SHAPE",
    "Slice": "SLICE",
    "Softmax": "SOFTMAX",
    "Split": "SLICE",
    "TensorScatter": "KV_CACHE_UPDATE",
    "TopK": "TOPK",
    "Where": "SELECT",
}
_KINDS = {_ELEMENTWISE: "ELEMENTWISE", _UNARY: "UNARY", _ACTIVATION: "ACTIVATION", _SHUFFLE: "SHUFFLE"}
LAYERS = {
    "Attention": [("_AttentionInput", "ATTENTION_INPUT"), ("_AttentionOutput", "ATTENTION_OUTPUT")],
    **{operator: [("", kind)] for operators, kind in _KINDS.items() for operator in operators.split()},
    **{operator: [("", kind)] for operator, kind in _OTHERS.items()},
}
