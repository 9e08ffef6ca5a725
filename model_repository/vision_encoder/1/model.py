"""Pixels to embeddings; the code is in quire_ensemble.triton_vision_encoder."""

import atexit
import gc
import locale
import sys

# Triton's interpreter looks for modules in the server's working directory first.
sys.path[:] = filter(None, sys.path)
# Triton runs Python models in the C locale, where files are read as ASCII.
locale.setlocale(locale.LC_ALL, "C.UTF-8")
# Collecting all of transformers when the stub ends would hold up the server's stop by a second.
atexit.register(gc.freeze)

import triton_python_backend_utils as pb_utils  # noqa: E402

from quire_ensemble.triton_vision_encoder import VisionEncoderModel  # noqa: E402


class TritonPythonModel(VisionEncoderModel):
    pb_utils = pb_utils
