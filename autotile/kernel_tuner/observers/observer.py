"""The base classes under the name of the module that Kernel Tuner keeps them in."""

from autotile.kernel_tuner.observers import BenchmarkObserver as BenchmarkObserver
from autotile.kernel_tuner.observers import ContinuousObserver as ContinuousObserver
from autotile.kernel_tuner.observers import IterationObserver as IterationObserver
from autotile.kernel_tuner.observers import OutputObserver as OutputObserver
from autotile.kernel_tuner.observers import PrologueObserver as PrologueObserver
