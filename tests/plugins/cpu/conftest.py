"""Sessions of one operator for each set of instructions that this machine has."""

import ctypes
from itertools import count, takewhile

import onnxruntime
import pytest
from onnx import helper

from specbuild.runtime.backends.kernels.library import OPERATORS, find_library


@pytest.fixture(scope="session")
def library():
    path = find_library(OPERATORS)
    if path is None:
        pytest.skip("specbuild was installed without its operators for CPUs")
    return path


@pytest.fixture(scope="session")
def instruction_sets(library):
    """The sets of instructions that this processor has, by index."""
    name_of = ctypes.CDLL(str(library)).specbuild_instructions
    name_of.restype = ctypes.c_char_p
    names = enumerate(takewhile(lambda name: name is not None, map(name_of, count())))
    return {index: name.decode() for index, name in names if name}


@pytest.fixture(scope="session")
def operator(library, instruction_sets):
    """`operator(name, inputs, threads=…, sets=…, **attributes)`: a session with an output for each set of instructions.

    Inputs are ONNX's element type and shape by name, in order; None for one that is left out.
    """

    def make(name, inputs, threads=2, sets=tuple(instruction_sets), **attributes):
        names = [each if kind else "" for each, kind in inputs.items()]
        nodes = [
            helper.make_node(name, names, [f"y{index}"], domain="specbuild", instructions=index, **attributes)
            for index in sets
        ]
        values = [helper.make_tensor_value_info(each, *kind) for each, kind in inputs.items() if kind]
        outputs = [helper.make_tensor_value_info(f"y{index}", 1, None) for index in sets]
        graph = helper.make_graph(nodes, name, values, outputs)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("specbuild", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        options.register_custom_ops_library(str(library))
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    return make
