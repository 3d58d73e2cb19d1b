"""PyTorch: a model, or single products, by what is the fastest on the GPU, and the same choices in all ranks of a job.

    import autotile

    print(autotile.torch.accelerate(model))

    y = autotile.torch.linear(x, weight, bias)
    c = autotile.torch.matmul(a, b)
    autotile.torch.sync_choices()

Where a kernel is known or expected to be faster than PyTorch's library by enough to pay for its launch, it is launched,
without PyTorch's dispatcher; else PyTorch's own function is called. Autograd differentiates either. In graphs of
``torch.compile``, products are PyTorch's own operators, for which `join_inductor` lets Inductor choose kernels, too.

Modules, each using those before it only: products, inductor, models; and ranks.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":  # PyTorch is there, and broken
        raise
    raise ModuleNotFoundError(
        "autotile.torch needs PyTorch, which is not installed: pip install torch, or as pytorch.org says; "
        "autotile.matmul takes the arrays of other libraries",
        name="torch",
    ) from None

from autotile.torch.inductor import join_inductor
from autotile.torch.models import Acceleration, accelerate
from autotile.torch.products import Linear, linear, matmul
from autotile.torch.ranks import sync_choices

__all__ = ["Acceleration", "Linear", "accelerate", "join_inductor", "linear", "matmul", "sync_choices"]
