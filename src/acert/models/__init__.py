"""Small and paper-size classifiers: images in [0, 1] in, logits out.

Every factory returns a plain `nn.Module` with PyTorch's own initialisation; `print(model)` shows
all of it. Call `ibp_init_` on it before certified training.
"""

from acert.models.feedforward import cnn7, mlp, small_cnn
from acert.models.initialization import ibp_init_
from acert.models.normalize import Normalize
from acert.models.residual import Residual, small_resnet

__all__ = ["Normalize", "Residual", "cnn7", "ibp_init_", "mlp", "small_cnn", "small_resnet"]
