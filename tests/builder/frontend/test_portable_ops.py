"""What PyTorch's exporter has no translation of is computed alike in ONNX."""

import io

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from specbuild.builder.frontend.portable_ops import OPSET, TRANSLATIONS


class Inverse(nn.Module):
    """The inverse of the error function."""

    def forward(self, x):
        return torch.erfinv(x)


@pytest.mark.slow
def test_the_inverse_of_the_error_function():
    x, file = torch.linspace(-0.99999, 0.99999, 2001), io.BytesIO()
    options = {"dynamo": True, "opset_version": OPSET, "custom_translation_table": TRANSLATIONS, "verbose": False}
    torch.onnx.export(Inverse().eval(), (x,), **options).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, torch.erfinv(x).numpy(), rtol=1e-4, atol=1e-6)
